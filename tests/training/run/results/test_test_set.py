import json
from types import SimpleNamespace

import pytest

from training.data.parallel_text import ParallelText
from training.inference.metrics import TranslationMetric
from training.inference.translators import read_run_recipe
from training.recipe.arguments import DataArguments, DecodingArguments
from training.run.results.baselines import compare_with_baselines
from training.run.results.evaluation import describe_results, find_failure, save_alignment_heads, score_test_set
from vanilla_transformer.shared.text_lines import sanitize_tsv_cell


@pytest.mark.parametrize("mark", ["\n", "\r", "\x0b", "\x0c", "\x85", "\u2028", "\u2029", "\t"])
def test_describes_samples_with_separators(tmp_path, mark):
    row = "\t".join(map(sanitize_tsv_cell, [f"one{mark}two", "eins", f"zwei{mark}"]))
    (tmp_path / "samples.tsv").write_bytes(f"source\treference\ttranslation\n{row}\n".encode())
    text = describe_results(tmp_path, {"train_runtime": 60, "train_target_tokens": 7})
    assert f"source: {sanitize_tsv_cell(f'one{mark}two')}\n" in text


@pytest.mark.parametrize("content", [b"[", b"5", b"\xff", b"a: b: c", b"[" * 5000])
def test_rejects_damaged_recipe_of_a_run(tmp_path, content):
    assert read_run_recipe(tmp_path) == {}
    (tmp_path / "recipe.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=r"recipe\.yaml (cannot be read|contains no settings)"):
        read_run_recipe(tmp_path)


@pytest.fixture
def short_run(make_model, make_tokenizer, tmp_path):
    """Directory of a model with eight positions."""
    tokenizer, sizes = make_tokenizer(shared=True)
    make_model(position_embedding_type="learned", max_position_embeddings=8, **sizes).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_alignment_heads_ignore_pairs_beyond_the_positions(short_run):
    """Without validation data, the pairs are training pairs, including overlong ones."""
    text = ParallelText(["the dog runs " * 5, "the dog", "a"], ["der Hund", "der Hund", "eine " * 20])
    save_alignment_heads(short_run, text, "cpu")
    assert json.loads((short_run / "generation_config.json").read_text())["alignment_heads"]


def test_no_attention_plot_beyond_the_positions(short_run, monkeypatch):
    """A translation may have more tokens when it is tokenized again."""
    text = ParallelText(["the dog", "the dog"], ["der Hund", "der Hund"])
    outputs = {"exact_match": 50.0}, ["der Hund " * 5, "der Hund"]
    monkeypatch.setattr("training.run.results.evaluation.translate_and_score", lambda *args: outputs)
    decoding = DecodingArguments(metric="sequence", attention_plot_lines=[1, 2])
    recipe = SimpleNamespace(decoding=decoding, data=DataArguments())
    trainer = SimpleNamespace(args=SimpleNamespace(device="cpu", process_index=0))
    score_test_set(recipe, short_run, text, trainer)
    assert [path.name for path in short_run.glob("*.png")] == ["attention_2.png"]


@pytest.mark.parametrize(
    ("gain", "translations", "message"),
    [
        (2.0, ["eins", "zwei", "drei", "vier"], None),
        (0.05, ["eins", "zwei", "drei", "vier"], "ignores the source: other sources raise the loss by only 0.050 nats"),
        (2.0, ["eins", "eins", "eins", "vier"], "3 of 4 test translations are 'eins'"),
        (2.0, ["eins", "eins", "drei", "vier"], None),
        (None, ["eins"], None),
    ],
)
def test_failed_training_is_recognized(gain, translations, message):
    targets = ["ja", "nein", "vielleicht", "nie"][: len(translations)]
    scores = {} if gain is None else {"source_gain": gain}
    problem = find_failure(scores, ParallelText(targets, targets), translations)
    assert problem is None if message is None else message in problem
    if message and gain > 1:  # the references also have few different targets
        assert find_failure(scores, ParallelText(targets, ["ja"] * len(targets)), translations) is None


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_failed_training_ends_with_a_warning_that_names_two_keys(short_run, monkeypatch, read_messages, norm):
    text, outputs = ParallelText(["a", "b"], ["c", "d"]), ({"source_gain": 0.01}, ["e", "f"])
    monkeypatch.setattr("training.run.results.evaluation.translate_and_score", lambda *args: outputs)
    recipe = SimpleNamespace(
        decoding=DecodingArguments(attention_plot_lines=[]),
        data=DataArguments(),
        model=SimpleNamespace(norm_position=norm),
    )
    args = SimpleNamespace(device="cpu", process_index=0, base_model=None, learning_rate=0.005)
    score_test_set(recipe, short_run, text, SimpleNamespace(args=args))
    advice = {"pre": "a lower dropout", "post": "norm_position: pre"}[norm]
    assert f"Set {advice} and a lower learning_rate (now 0.005)" in read_messages()


TRAIN = ParallelText(["a b c", "d e f", "g h i"], ["Aa Bb Cc Dd", "Ee Ff Gg Hh", "Ii Jj Kk Ll"])
TEST = ParallelText(["A b x", "g h i", "z"], ["Aa Bb Cc Dd", "Ii Jj Kk Ll", "z"])


def test_scores_are_compared_with_baselines():
    found = compare_with_baselines(TEST.targets, TEST, TRAIN, "sequence")
    assert found["exact_match_interval_95"] == found["token_error_rate_interval_95"] == 0
    assert found["copied_source_exact_match"] == pytest.approx(100 / 3)
    assert found["translation_memory_exact_match"] == pytest.approx(200 / 3)
    assert found["copied_source_token_error_rate"] == pytest.approx(100 * 8 / 9)  # only "z" is correct
    assert compare_with_baselines(TEST.sources, TEST, None, "sequence")["exact_match_interval_95"] > 20
    found = compare_with_baselines(TEST.targets[::-1], TEST, TRAIN, "translation")
    memory = ["Aa Bb Cc Dd", "Ii Jj Kk Ll", "Aa Bb Cc Dd"]
    for name, outputs in (("copied_source", TEST.sources), ("translation_memory", memory)):
        scores = TranslationMetric("de").compute(predictions=outputs, references=TEST.targets)
        for key in ("bleu", "chrf", "ter"):
            assert found[f"{name}_{key}"] == pytest.approx(scores[key])
    assert found["bleu_interval_95"] > 0
    assert "translation_memory_bleu" not in compare_with_baselines(TEST.targets, TEST, None, "translation")


@pytest.mark.parametrize(("bleu", "message"), [(8.0, "BLEU 8.0, compared with 9.5"), (9.6, None)])
def test_model_below_a_baseline_has_failed(bleu, message):
    scores = {"bleu": bleu, "copied_source_bleu": 1.0, "translation_memory_bleu": 9.5}
    problem = find_failure(scores, TEST, TEST.targets)
    assert problem is None if message is None else message in problem


def test_report_contains_intervals_and_baselines(tmp_path):
    results = {"train_runtime": 60, "train_target_tokens": 7, "test_exact_match": 71.234, "test_wer": 1}
    results |= {"test_exact_match_interval_95": 1.5, "test_copied_source_exact_match": 3}
    report = describe_results(tmp_path, results)
    assert "exact match 71.23 ± 1.50 %" in report
    assert "error rate" not in report  # a run of an earlier version
    assert "token error rate 4.50 %" in describe_results(tmp_path, results | {"test_token_error_rate": 4.5})
    assert "3.0   exact match of the copied source" in report


def test_report_contains_the_source_gain(tmp_path):
    results = {"train_runtime": 60, "train_target_tokens": 7, "test_source_gain": 1.234}
    assert "source gain 1.23 nats per token\n" in describe_results(tmp_path, results)


def test_checkpoint_has_the_recipe_of_its_run(tmp_path):
    (tmp_path / "recipe.yaml").write_text("target_lang: fr")
    assert read_run_recipe(tmp_path / "checkpoint-6") == {"target_lang": "fr"}
    assert read_run_recipe(tmp_path / "checkpoint-6-backup") == {}
