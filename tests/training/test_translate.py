"""`training.translate` as a user runs it."""

import re

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

pytestmark = pytest.mark.slow


def test_translate_keeps_the_order_and_goes_on_behind_broken_lines(programs, finished, tmp_path):
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


def test_translate_lists_the_n_best_with_scores(programs, finished, tmp_path):
    (tmp_path / "source").write_text("A dog.\nThe cat sleeps.\n")
    process = programs.run("training.translate", finished, "--input", tmp_path / "source", "--nbest", "3")
    rows = [line.split("\t") for line in process.stdout.splitlines()]
    assert [row[0] for row in rows] == ["1"] * 3 + ["2"] * 3
    scores = [float(row[1]) for row in rows]
    assert scores[:3] == sorted(scores[:3], reverse=True)


def test_translate_forces_the_terms_of_a_glossary(programs, finished, tmp_path):
    (tmp_path / "source").write_text("A dog.\nThe cat sleeps.\n")
    (tmp_path / "terms").write_text("dog\tHund\tHundes\n\ncat\tKatze\n")
    options = ["--input", tmp_path / "source", "--max_new_tokens", "12", "--glossary", tmp_path / "terms"]
    translated = programs.run("training.translate", finished, *options)
    assert "glossary: 2 of 2 terms met" in translated.stderr
    first, second = translated.stdout.splitlines()
    assert {"Hund", "Hundes"} & set(re.findall(r"\w+", first))
    assert "Katze" in re.findall(r"\w+", second)


@pytest.mark.parametrize(
    ("lines", "what"), [("dog\n", "line 1: 'dog': give a term, a tab"), ("a\tb\na\tc\n", "line 2: 'a' a second time")]
)
def test_a_broken_glossary_is_told(programs, finished, tmp_path, lines, what):
    (tmp_path / "terms").write_text(lines)
    broken = programs.run("training.translate", finished, "--glossary", tmp_path / "terms", status=2)
    assert what in broken.stderr
