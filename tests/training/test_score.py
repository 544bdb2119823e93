"""The command `training.score`."""

import json
import math
import re
import shutil

import pytest
import torch
from sacrebleu.metrics import BLEU
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MarianConfig, MarianMTModel

from training.inference.scoring import bootstrap_scores, compute_likelihood, read_test_set
from training.score import main

pytestmark = pytest.mark.slow


def test_equal_scores_are_not_significant():
    outputs, references = ["a b c d e", "f g h i j"] * 4, [["a b c d x", "f g h i j"] * 4]
    results = bootstrap_scores({"one": outputs, "two": list(outputs)}, {"bleu": BLEU()}, references, 100)
    assert results["bleu"]["two"]["p_value"] == 1
    other = bootstrap_scores({"one": outputs, "two": ["z"] * 8}, {"bleu": BLEU()}, references, 100)
    assert other["bleu"]["two"]["p_value"] < 0.05


def test_scores_equal_the_run_and_have_intervals(programs, finished, test_files):
    source, reference = test_files
    process = programs.run(
        *("training.score", finished, "--source", source, "--reference", reference),
        *("--num-bootstrap-samples", "50", "--json"),
    )
    scores = json.loads(process.stdout)
    results = json.loads((finished / "all_results.json").read_text())
    for name in ("bleu", "chrf", "ter", "bleu_tokenized_lc"):
        assert scores[name]["score"] == pytest.approx(results[f"test_{name}"], rel=1e-6)
        assert scores[name]["interval_95"] >= 0
    assert "bs:50" in scores["bleu_signature"]


def test_scores_several_references_and_compares(programs, finished, test_files, tmp_path):
    sources, references = (path.read_text().splitlines() for path in test_files)
    outputs = tmp_path / "outputs"
    programs.run("training.translate", finished, "--input", test_files[0], "--output", outputs)
    rows = zip(sources, references, outputs.read_text().splitlines(), strict=True)
    (tmp_path / "test.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    shutil.copytree(finished / "checkpoint-2", tmp_path / "early")
    process = programs.run(
        *("training.score", finished, "--source", tmp_path / "test.tsv", "--compare", tmp_path / "early"),
        *("--num-bootstrap-samples", "50", "--json"),
    )
    scores = json.loads(process.stdout)
    assert scores["chrf"][str(finished)]["score"] == pytest.approx(100)  # its own outputs are among the references
    other = scores["chrf"][str(tmp_path / "early")]
    assert 0 <= other["p_value"] <= 1
    assert "nrefs:2" in scores["bleu_signature"]


@pytest.mark.parametrize("suffix", [".tsv", ".csv", ".jsonl"])
def test_reads_tables_like_training(tmp_path, suffix):
    rows = [("de", "en"), ("zwei, drei", "two, three"), ("ein Hund", "a dog")]
    lines = {
        ".tsv": ["\t".join(row) for row in rows],
        ".csv": [",".join(f'"{cell}"' for cell in row) for row in rows],
        ".jsonl": [json.dumps(dict(zip(rows[0], row, strict=True))) for row in rows[1:]],
    }[suffix]
    path = tmp_path / f"test{suffix}"
    path.write_text("\n".join(lines) + "\n")
    text = read_test_set(path, [], {"source_lang": "en", "target_lang": "de"})
    assert (text.sources, text.targets) == (["two, three", "a dog"], ["zwei, drei", "ein Hund"])
    with pytest.raises(ValueError, match=r"de, en|src"):  # not a sentence of the test set
        read_test_set(path, [], {})


def test_computes_likelihood(programs, finished, test_files, tmp_path):
    source, reference = test_files
    arguments = (
        "--source",
        source,
        "--reference",
        reference,
        "--likelihood",
        "--per-pair-output",
        tmp_path / "lines.tsv",
    )
    result = json.loads(programs.run("training.score", finished, *arguments, "--json").stdout)
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(finished), AutoTokenizer.from_pretrained(finished)
    rows = [line.split("\t") for line in (tmp_path / "lines.tsv").read_text().splitlines()[1:]]
    for row, s, t in zip(rows, *(path.read_text().splitlines() for path in test_files), strict=True):
        with torch.no_grad():
            loss = model(**tokenizer(s, text_target=t, return_tensors="pt")).loss
        assert float(row[2]) == pytest.approx(float(loss), abs=1e-3)
    total, tokens = (sum(float(row[i]) for row in rows) for i in (0, 1))
    assert result["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-3)


def test_likelihood_of_overlong_pairs_is_an_error(make_tokenizer, tmp_path):
    """Marian has a fixed table of positions, which would raise IndexError."""
    tokenizer, size = make_tokenizer(True)
    sizes = {"d_model": 8, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "encoder_layers": 1, "decoder_layers": 1}
    ids = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0, "max_position_embeddings": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = MarianMTModel(MarianConfig(**sizes, **ids, **heads, **size))
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path / "marian")
    (tmp_path / "pairs.tsv").write_text("the dog runs\tder Hund rennt\n" + "two birds " * 9 + "\tzwei\n")
    with pytest.raises(ValueError, match="pairs.tsv, line 2: the sentence has .* accepts at most 16"):
        compute_likelihood(tmp_path / "marian", tmp_path / "pairs.tsv")


def test_likelihood_of_ensemble_averages_probabilities(programs, finished, test_files, tmp_path):
    source, reference = test_files
    shutil.copytree(finished / "checkpoint-2", tmp_path / "early")
    arguments = (
        "--source",
        source,
        "--reference",
        reference,
        "--likelihood",
        "--per-pair-output",
        tmp_path / "lines.tsv",
    )
    programs.run("training.score", finished, tmp_path / "early", *arguments)
    names = (finished, tmp_path / "early")
    models, tokenizer = (
        [AutoModelForSeq2SeqLM.from_pretrained(name) for name in names],
        AutoTokenizer.from_pretrained(finished),
    )
    rows = [line.split("\t") for line in (tmp_path / "lines.tsv").read_text().splitlines()[1:]]
    for row, s, t in zip(rows, *(path.read_text().splitlines() for path in test_files), strict=True):
        batch = tokenizer(s, text_target=t, return_tensors="pt")
        with torch.no_grad():
            mean = sum(model(**batch).logits.softmax(-1) for model in models) / 2
        expected = -mean[0, range(batch["labels"].shape[1]), batch["labels"][0]].log().sum()
        assert float(row[0]) == pytest.approx(float(expected), abs=1e-3)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_rejects_empty_test_set(tmp_path, monkeypatch, capsys, content):
    (tmp_path / "test.en").write_text(content)
    (tmp_path / "test.de").write_text(content)
    arguments = ["--source", str(tmp_path / "test.en"), "--reference", str(tmp_path / "test.de")]
    monkeypatch.setattr("sys.argv", ["score", str(tmp_path), *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert re.match(r"training\.score: .*(contains no sentences|blank)", capsys.readouterr().err)


@pytest.mark.parametrize("option", [["--compare", "."], ["--metric", "sequence"], ["--num-beams", "2"]])
def test_likelihood_rejects_translation_options(monkeypatch, capsys, option):
    arguments = ["--source", ".", "--reference", ".", "--likelihood", *option]
    monkeypatch.setattr("sys.argv", ["score", ".", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert f"--likelihood does not translate. Remove {option[0]} or" in capsys.readouterr().err


def test_scores_ensemble(programs, finished, test_files, tmp_path):
    """An ensemble is one system. One checkpoint twice equals one checkpoint."""
    source, reference = test_files
    pair = (finished, finished / "checkpoint-4")
    process = programs.run(
        *("training.score", *pair, "--source", source, "--reference", reference, "--num-bootstrap-samples", "20"),
        *("--compare", finished, finished, "--json"),
    )
    chrf = json.loads(process.stdout)["chrf"]
    assert list(chrf) == [f"{pair[0]} + {pair[1]}", f"{finished} + {finished}"]
    results = json.loads((finished / "all_results.json").read_text())
    assert chrf[f"{finished} + {finished}"]["score"] == pytest.approx(results["test_chrf"])
    options = ("--input", source, "--nbest", "2", "--num-beams", "3")
    rows = programs.run("training.translate", *pair, *options).stdout.splitlines()
    assert len(rows) == 20
    assert rows != programs.run("training.translate", finished, *options).stdout.splitlines()


def test_error_of_invalid_pairs_has_no_unsupported_option(tmp_path, monkeypatch, capsys):
    (tmp_path / "test.en").write_text("one\n\n")
    (tmp_path / "test.de").write_text("eins\nzwei\n")
    arguments = ["--source", str(tmp_path / "test.en"), "--reference", str(tmp_path / "test.de")]
    monkeypatch.setattr("sys.argv", ["score", str(tmp_path), *arguments])
    with pytest.raises(SystemExit):
        main()
    message = capsys.readouterr().err
    assert "1 lines blank, at line 2. Correct the file." in message
    assert "--on-bad-lines" not in message
