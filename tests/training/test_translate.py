"""The command `training.translate`."""

import itertools
import json
import math
import re

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from training.inference.file_translation import format_json
from training.inference.translation import TranslationSettings, rerank_translations, translate_lines
from training.inference.translators import load_translator
from vanilla_transformer import TranslationPipeline

pytestmark = pytest.mark.slow


def test_keeps_order_and_skips_invalid_lines(programs, finished, tmp_path):
    lines = [b"The old man sleeps.", b"", b"no \xff text", b"A very long sentence " + b"and so on " * 30, b"A dog."]
    source = tmp_path / "source"
    source.write_bytes(b"\n".join(lines) + b"\n")
    piped = programs.run("training.translate", finished, stdin=source)
    outputs = piped.stdout.split("\n")
    assert len(outputs) == 6
    assert outputs[1] == outputs[2] == outputs[5] == ""
    assert "line 3 is not translated: not UTF-8" in piped.stderr
    programs.run("training.translate", finished, "--input", source, "--output", tmp_path / "target")
    assert (tmp_path / "target").read_text() == piped.stdout
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(finished), AutoTokenizer.from_pretrained(finished)
    ids = model.generate(**tokenizer("A dog.", return_tensors="pt"))
    assert outputs[4] == tokenizer.decode(ids[0], skip_special_tokens=True)


def test_prints_n_best_with_scores(programs, finished, tmp_path):
    (tmp_path / "source").write_text("A dog.\nThe cat sleeps.\n")
    process = programs.run("training.translate", finished, "--input", tmp_path / "source", "--nbest", "3")
    rows = [line.split("\t") for line in process.stdout.splitlines()]
    assert [row[0] for row in rows] == ["1"] * 3 + ["2"] * 3
    scores = [float(row[1]) for row in rows]
    assert scores[:3] == sorted(scores[:3], reverse=True)


def test_applies_glossary(programs, finished, tmp_path):
    (tmp_path / "source").write_text("A dog.\nThe cat sleeps.\n")
    (tmp_path / "terms").write_text("dog\tHund\tHundes\n\ncat\tKatze\n")
    options = ["--input", tmp_path / "source", "--max-new-tokens", "12", "--glossary", tmp_path / "terms"]
    translated = programs.run("training.translate", finished, *options)
    assert "glossary: 2 of 2 terms are used" in translated.stderr
    first, second = translated.stdout.splitlines()
    assert {"Hund", "Hundes"} & set(re.findall(r"\w+", first))
    assert "Katze" in re.findall(r"\w+", second)


@pytest.mark.parametrize(
    ("lines", "what"),
    [("dog\n", "line 1: 'dog': expected a term, a tab"), ("a\tb\na\tc\n", "line 2: 'a' is a duplicate")],
)
def test_rejects_malformed_glossary(programs, finished, tmp_path, lines, what):
    (tmp_path / "terms").write_text(lines)
    broken = programs.run("training.translate", finished, "--glossary", tmp_path / "terms", status=2)
    assert what in broken.stderr


def test_prints_json(programs, finished, tmp_path):
    (tmp_path / "source").write_text("The dog sleeps.\n\nThe cat is old.\r\n")
    process = programs.run("training.translate", finished, "--input", tmp_path / "source", "--nbest", "2", "--json")
    rows = [json.loads(line) for line in process.stdout.splitlines()]
    assert [row["source"] for row in rows] == ["The dog sleeps.", "", "The cat is old."]
    assert rows[1]["translations"] == [""]
    for row in (rows[0], rows[2]):
        assert row["scores"] == sorted(row["scores"], reverse=True)
        for i, text in enumerate(row["translations"]):
            assert len(row["tokens"][i]) == len(row["token_scores"][i])
            assert row["log_probabilities"][i] == pytest.approx(sum(row["token_scores"][i]), abs=1e-3)
            assert all(row["source"][a:b] and text[c:d] for (a, b), (c, d) in row["alignments"][i])


def test_json_has_no_infinity():
    """RFC 8259 defines none: other programs could not read the object."""
    candidate = {"translation_text": "", "score": -math.inf, "log_probability": -math.inf, "error": "too long"}
    row = json.loads(format_json("source", [candidate]), parse_constant=pytest.fail)
    assert (row["translations"], row["scores"], row["log_probabilities"]) == ([""], [None], [None])
    assert row["error"] == "too long"


def test_translates_document(programs, finished, tmp_path):
    pytest.importorskip("sentencex")
    source, short = tmp_path / "source", ("--max-new-tokens", "12")
    source.write_bytes(b"The dog sleeps. The cat waits.\r\n\r\n  Where is she?")
    piped = programs.run("training.translate", finished, *short, "--document", stdin=source)
    programs.run(
        "training.translate", finished, *short, "--document", "--input", source, "--output", tmp_path / "target"
    )
    text = (tmp_path / "target").read_bytes().decode()
    assert piped.stdout == text.replace("\r\n", "\n")
    first, second = text.split("\r\n\r\n")
    assert second.startswith("  ")
    lines = tmp_path / "lines"
    lines.write_text("The dog sleeps.\nThe cat waits.\nWhere is she?\n")
    one_by_one = programs.run("training.translate", finished, *short, "--input", lines).stdout.splitlines()
    assert text == f"{one_by_one[0]} {one_by_one[1]}\r\n\r\n  {one_by_one[2]}"
    rows = programs.run("training.translate", finished, "--document", "--json", "--input", source).stdout.splitlines()
    assert [json.loads(row)["span"] for row in rows] == [[0, 15], [16, 30], [36, 49]]
    for encoding, options in itertools.product(("utf-16", "utf-16-le"), ((), ("--document",))):
        source.write_bytes("The dog sleeps.\n".encode(encoding))
        process = programs.run("training.translate", finished, *options, "--input", source, status=2)
        assert "is in UTF-16 or UTF-32. Convert it to UTF-8." in process.stderr
    source.write_bytes(b"\xff")
    process = programs.run("training.translate", finished, "--document", "--input", source, status=2)
    assert process.stderr == "training.translate: byte 0 is not UTF-8 text: convert the document to UTF-8.\n"


def test_reranks(programs, finished, tmp_path):
    """Compare with the weighted sum of both scores. The same model serves as the reverse-direction model."""
    lines = ["The dog sleeps.", "", "The old man sees a cat."]
    (tmp_path / "source").write_text("".join(line + "\n" for line in lines))
    options = ("--input", tmp_path / "source", "--nbest", "3")
    plain = programs.run("training.translate", finished, *options).stdout.splitlines()
    chosen = programs.run("training.translate", finished, *options, "--rerank", finished, "--rerank-weight", "2")
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(finished), AutoTokenizer.from_pretrained(finished)
    expected = []
    for number, score, text in (row.split("\t") for row in plain):
        source = lines[int(number) - 1]
        if source:
            with torch.no_grad():
                loss = model(**tokenizer(text, text_target=source, return_tensors="pt")).loss
            score = float(score) - 2 * float(loss)
        expected.append((int(number), -float(score), text))
    rows = [row.split("\t") for row in chosen.stdout.splitlines()]
    assert [(int(number), text) for number, _, text in rows] == [(n, text) for n, _, text in sorted(expected)]
    assert [float(score) for _, score, _ in rows] == pytest.approx([-s for _, s, _ in sorted(expected)], abs=1e-3)


def test_does_not_rerank_overlong_lines(make_model, make_tokenizer, caplog):
    """The other lines are reranked. The line can be too long for one model or for both."""
    tokenizer, sizes = make_tokenizer(True)
    keys = {"position_embedding_type": "learned", "max_position_embeddings": 16} | sizes
    forward = TranslationPipeline(model=make_model(**sizes), tokenizer=tokenizer)
    short, backward = (TranslationPipeline(model=make_model(**keys), tokenizer=tokenizer) for _ in range(2))
    settings = TranslationSettings(nbest=2, batch_size=2)
    options = {"num_beams": 2, "max_new_tokens": 6}
    lines = ["the dog runs\n", "two birds sing " * 9 + "\n", "\n", "a cat sleeps\n"]

    def rows(translator, lines):
        nbest = {"num_return_sequences": 2, "return_scores": True}
        found = rerank_translations(translator, backward, lines, options | nbest | {"batch_size": 2}, settings)
        return [[(each["translation_text"], each.get("score")) for each in candidates] for candidates in found]

    plain = forward([lines[1]], num_return_sequences=2, return_scores=True, **options)[0]
    found = rows(forward, lines)
    assert "line 2 is not reranked: the sentence has" in caplog.text
    assert [text for text, _ in found[1]] == [each["translation_text"] for each in plain]
    for i in (0, 3):
        for (text, score), (single_text, single_score) in zip(found[i], rows(forward, [lines[i]])[0], strict=True):
            assert (text, score) == (single_text, pytest.approx(single_score, abs=1e-4))
    assert len(rows(short, lines)) == 4


def test_reranks_each_line_of_a_terminal_at_once(finished):
    translator, lines = load_translator(finished), iter(["A dog runs.", "A cat sleeps."])
    results = translate_lines(translator, lines, TranslationSettings(rerank=finished), one_by_one=True)
    assert next(results)[0]["translation_text"]
    assert next(lines) == "A cat sleeps."
