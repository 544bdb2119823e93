import os
from pathlib import Path

import pytest
import sacrebleu

from training.data.parallel_text import ParallelText
from training.inference.metrics import SequenceMetric, TranslationMetric, compute_pair_nll, make_corpus_metrics
from training.inference.scoring import score_translations
from training.score import format_scores

PREDICTIONS = ["Ein Hund rennt durch den Park.", "Zwei Männer spielen Karten."]
REFERENCES = ["Ein Hund läuft durch den Park.", "Zwei Männer spielen Karten."]


def test_scores_equal_sacrebleu():
    scores = TranslationMetric("de").compute(predictions=PREDICTIONS, references=REFERENCES)
    assert scores["bleu"] == sacrebleu.corpus_bleu(PREDICTIONS, [REFERENCES]).score
    assert scores["chrf"] == sacrebleu.corpus_chrf(PREDICTIONS, [REFERENCES]).score
    assert "tok:13a" in scores["bleu_signature"]
    assert "case:mixed" in scores["bleu_signature"]


def test_metric_supports_add_batch():
    metric = TranslationMetric("de")
    for prediction, reference in zip(PREDICTIONS, REFERENCES, strict=True):
        metric.add_batch(predictions=[prediction], references=[reference])
    assert (
        metric.compute()["bleu"]
        == TranslationMetric("de").compute(predictions=PREDICTIONS, references=REFERENCES)["bleu"]
    )


def test_tokenized_bleu_ignores_case_and_quotation_marks():
    metric = TranslationMetric("de")
    scores = metric.compute(predictions=["EIN „Hund“ , hier und da ."], references=['Ein "Hund", hier und da.'])
    assert scores["bleu_tokenized_lc"] == pytest.approx(100)
    assert scores["bleu"] < 50


def test_error_rates_are_edits_per_reference_length():
    """Edits and lengths are summed over the corpus, as in `wer` of `evaluate`. The closest reference counts."""
    predictions = ["K AE T", "D AO G Z", ""]
    references = [["K AE T", "K AE D"], ["D AA G", "D AO G"], ["AH"]]
    assert SequenceMetric().compute(predictions=predictions, references=references) == {
        "token_error_rate": pytest.approx(100 * 2 / 7),  # "Z" is inserted and "AH" is deleted
        "exact_match": pytest.approx(100 / 3),
        "character_error_rate": pytest.approx(100 * 4 / 14),
    }
    spaces = SequenceMetric().compute(predictions=[" K  AE T "], references=["K AE T"])
    assert spaces == {"token_error_rate": 0, "exact_match": 100, "character_error_rate": pytest.approx(100 / 6)}


def test_scores_of_sequences_have_intervals_and_p_values():
    """The closest of two references counts, of which one sentence has only one."""
    references = [["K AE T", "K AE D"], ["D AO G"]] * 20
    systems = {"one": ["K AE D", "D AO"] * 20, "two": ["K AE D", "D AO G"] * 20}
    found = score_translations(systems, references, "sequence", "en", 100)
    scores = {name: [row["score"] for row in found[name].values()] for name in make_corpus_metrics("sequence")}
    assert scores["exact_match"] == [50, 100]
    assert scores["token_error_rate"] == [pytest.approx(100 / 6), 0]
    assert scores["character_error_rate"] == [pytest.approx(100 * 2 / 12), 0]
    assert 10 < found["exact_match"]["one"]["interval_95"] < 20
    assert found["exact_match"]["two"]["interval_95"] == 0
    assert all(found[name]["two"]["p_value"] < 0.05 for name in scores)
    single = score_translations({"one": systems["one"]}, references, "sequence", "en", 100)
    assert single["exact_match"] == found["exact_match"]["one"]
    rows = [line.split()[0] for line in format_scores(found).splitlines() if "±" in line]
    assert rows == ["exact"] * 2 + ["token"] * 2 + ["character"] * 2 + ["±:"]


@pytest.mark.skipif("VT_DATA" not in os.environ, reason="VT_DATA is not set to the directory of the real corpora")
def test_moses_tokens_of_multi30k():
    """Papers count 12,103 tokens in the German reference of test_2016_flickr."""
    path = Path(os.environ["VT_DATA"]) / "multi30k" / "test_2016_flickr.de"
    lines = path.read_text(encoding="utf-8").splitlines()
    assert sum(len(line.split()) for line in TranslationMetric("de").tokenize_with_moses(lines)) == 12103


def test_pair_nll_limits_tokens_per_batch(make_model, make_tokenizer, monkeypatch):
    """The logits of 64 long sentences would take gigabytes. The result is the same for single pairs."""
    tokenizer, sizes = make_tokenizer(True)
    model, shapes = make_model(**sizes), []
    text = ParallelText([f"A dog {'runs ' * i}." for i in range(12)], [f"Ein {'Hund ' * (12 - i)}." for i in range(12)])
    expected = compute_pair_nll(model, tokenizer, text, 1, show=False)
    monkeypatch.setattr("training.inference.metrics.MAX_TOKENS", 90)
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda **batch: shapes.append(batch["input_ids"].shape) or forward(**batch))
    found = compute_pair_nll(model, tokenizer, text, 3, show=False)
    assert sum(rows for rows, _ in shapes) == 12
    assert max(rows for rows, _ in shapes) == 3
    assert max(rows * length for rows, length in shapes) <= 90
    for (nats, tokens), (other, count) in zip(found, expected, strict=True):
        assert (nats, tokens) == (pytest.approx(other, rel=1e-5), count)
    assert compute_pair_nll(model, tokenizer, text.select([]), 3) == []
