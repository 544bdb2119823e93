"""`translate`, `score`, `average` and `diversify` as a user runs them, and what each program says to bad input."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(programs, make_recipe, tmp_path_factory) -> Path:
    """The folder of a finished run, its data beside it; checkpoints 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("finished")
    arguments = ("--save_steps", "2", "--eval_steps", "2", "--save_total_limit", "9", "--learning_rate", "0.01")
    programs.run("training.train", make_recipe(folder), *arguments)
    return folder / "out"


@pytest.fixture(scope="module")
def test_files(finished) -> tuple[Path, Path]:
    return finished.parent / "data" / "test.en", finished.parent / "data" / "test.de"


# --- translate ---


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


# --- score ---


def test_score_agrees_with_the_run_and_has_intervals(programs, finished, test_files):
    source, reference = test_files
    process = programs.run("training.score", finished, "--source", source, "--reference", reference, "--samples", "50")
    scores = json.loads(process.stdout)
    results = json.loads((finished / "all_results.json").read_text())
    for name in ("bleu", "chrf", "ter", "bleu_tokenized_lc"):
        assert scores[name]["score"] == pytest.approx(results[f"test_{name}"], rel=1e-6)
        assert scores[name]["interval_95"] >= 0
    assert "bs:50" in scores["bleu_signature"]


def test_score_takes_several_references_and_compares(programs, finished, test_files, tmp_path):
    sources, references = (path.read_text().splitlines() for path in test_files)
    outputs = tmp_path / "outputs"
    programs.run("training.translate", finished, "--input", test_files[0], "--output", outputs)
    rows = zip(sources, references, outputs.read_text().splitlines(), strict=True)
    (tmp_path / "test.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    shutil.copytree(finished / "checkpoint-2", tmp_path / "early")
    process = programs.run(
        *("training.score", finished, "--source", tmp_path / "test.tsv", "--compare", tmp_path / "early"),
        *("--samples", "50"),
    )
    scores = json.loads(process.stdout)
    assert scores["chrf"][str(finished)]["score"] == pytest.approx(100)  # its own outputs are among the references
    other = scores["chrf"][str(tmp_path / "early")]
    assert 0 <= other["p_value"] <= 1
    assert "nrefs:2" in scores["bleu_signature"]


def test_score_gives_the_models_own_likelihood(programs, finished, test_files, tmp_path):
    source, reference = test_files
    arguments = ("--source", source, "--reference", reference, "--nll", "--per_line", tmp_path / "lines.tsv")
    result = json.loads(programs.run("training.score", finished, *arguments).stdout)
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(finished), AutoTokenizer.from_pretrained(finished)
    rows = [line.split("\t") for line in (tmp_path / "lines.tsv").read_text().splitlines()[1:]]
    for row, s, t in zip(rows, *(path.read_text().splitlines() for path in test_files), strict=True):
        with torch.no_grad():
            loss = model(**tokenizer(s, text_target=t, return_tensors="pt")).loss
        assert float(row[2]) == pytest.approx(float(loss), abs=1e-3)
    total, tokens = (sum(float(row[i]) for row in rows) for i in (0, 1))
    assert result["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-3)


# --- average ---


def test_average_is_the_plain_mean(programs, finished, tmp_path):
    programs.run("training.average", tmp_path / "mean", finished, "--last", "2")
    folders = (tmp_path / "mean", finished / "checkpoint-4", finished / "checkpoint-6")
    mean, first, second = (load_file(folder / "model.safetensors") for folder in folders)
    for name, tensor in mean.items():
        torch.testing.assert_close(tensor, (first[name] + second[name]) / 2)
    AutoTokenizer.from_pretrained(tmp_path / "mean")
    listed = ("training.average", tmp_path / "same", finished / "checkpoint-4", finished / "checkpoint-6")
    programs.run(*listed)
    assert (tmp_path / "same" / "model.safetensors").read_bytes() == (folders[0] / "model.safetensors").read_bytes()
    assert "checkpoint-" in programs.run("training.average", tmp_path / "best", finished, "--best", "2").stdout


# --- diversify ---


def test_diversify_adds_what_both_models_translate(programs, finished, test_files, tmp_path):
    output = tmp_path / "new" / "diverse.tsv"
    arguments = ("--source", test_files[0], "--target", test_files[1], "--output", output)
    programs.run("training.diversify", finished, finished / "checkpoint-4", *arguments)
    pairs = [tuple(line.split("\t")) for line in output.read_text().splitlines()]
    expected = []
    originals = list(zip(*(path.read_text().splitlines() for path in test_files), strict=True))
    for pair in originals:
        expected += [pair, pair]
    for side, folder, count in ((0, finished, "2"), (1, finished / "checkpoint-4", "3")):
        process = programs.run("training.translate", folder, "--input", test_files[side], "--nbest", count)
        for number, _, text in (line.split("\t") for line in process.stdout.splitlines()):
            pair = (originals[int(number) - 1][side], text)
            expected += [pair if side == 0 else pair[::-1]] if text else []
    assert pairs == expected
    assert list(output.parent.iterdir()) == [output]


# --- Bad input: one clear message, status 2, nothing lost ---

DATA = {
    "no such folder": (["--data_dir", "nowhere"], {}, "cannot read nowhere/train.en"),
    "no test file": (["--test_file", "nothing"], {}, "nothing.en: No such file"),
    "sides of different length": ([], {"train.de": "eins\n"}, "has 120: line i of one must translate"),
    "blank lines": ([], {"train.de": "\n" * 120}, "120 lines blank, at lines 1, 2, 3 and 117 more"),
    "not UTF-8": ([], {"val.en": b"\xff\n" * 10}, "10 lines not UTF-8"),
    "empty files": ([], {"train.en": "", "train.de": ""}, "the train set has no pairs"),
    "all lines dropped": (["--bad_lines", "drop"], {"train.de": "\n" * 120}, "the train set has no pairs"),
    "everything too long": (["--max_length", "2"], {}, "raise max_length"),
    "overlap refused": (["--overlap", "refuse", "--test_file", "train"], {}, "have a source of the test set"),
    "table without tabs": (["--train_file", "t.tsv"], {"t.tsv": "one eins\n"}, "no tab"),
    "table of references": (["--train_file", "t.tsv"], {"t.tsv": "a\tb\tc\n"}, "more than two columns"),
    "no JSON": (["--train_file", "t.jsonl"], {"t.jsonl": "{\n"}, "line 1: not a JSON object"),
    "JSON of another language": (["--train_file", "t.jsonl"], {"t.jsonl": '{"en": "a", "fr": "b"}\n'}, "no text named"),
    "no parquet": (["--train_file", "t.parquet"], {"t.parquet": "x"}, "is not a parquet file"),
    "too large a validation set": (["--validation_file", "None", "--validation_size", "500"], {}, "only 120"),
    "references of no table": (["--test_references", "test.de"], {}, "give a .tsv file"),
    "references of another length": (["--test_references", "r.tsv"], {"r.tsv": "a\tb\n"}, "the test data 10: line i"),
    "stream of blank lines": (["--streaming", "true"], {"train.en": "\n" * 120}, "blank"),
    "stream of another length": (["--streaming", "true"], {"train.en": "one\n" * 7}, "has 7 lines"),
}
SETTINGS = {
    "unknown argument": (["--max_stepz", "4"], "did you mean --max_steps?"),
    "no number": (["--max_steps", "many"], "invalid int value: 'many'"),
    "no such choice": (["--norm_position", "middle"], "invalid choice: 'middle'"),
    "no such schedule": (["--lr_scheduler_type", "fast"], "fast is not a valid SchedulerType"),
    "heads that do not divide": (["--d_model", "30", "--encoder_attention_heads", "4"], "d_model"),
    "dropout of 1": (["--dropout", "1.0"], "dropout=1.0: give a number from 0"),
    "no tokens": (["--max_tokens", "0"], "max_tokens=0: give a number of at least 1"),
    "no vocabulary": (["--tokenizer_size", "3"], "four are special tokens"),
    "dropout of words": (["--tokenizer_type", "word", "--bpe_dropout", "0.1"], "needs tokenizer_type=bpe"),
    "endless stream": (["--streaming", "true", "--max_steps", "-1"], "streaming needs max_steps"),
    "average of nothing": (["--average_checkpoints", "3", "--save_strategy", "no"], "needs save_strategy"),
    "best without evaluation": (["--average_by", "best", "--eval_strategy", "no"], "need eval_strategy"),
    "no learning rate": (["--learning_rate", "None", "--lr_scheduler_type", "linear"], "learning_rate is needed"),
    "no such tokenizer": (["--tokenizer_path", "nowhere"], "tokenizer_path=nowhere: cannot be loaded"),
    "no such attention": (["--attention", "magic"], "magic"),
}


@pytest.mark.parametrize("name", DATA)
def test_bad_data(programs, recipe, tmp_path, name):
    arguments, files, message = DATA[name]
    for path, content in files.items():
        (tmp_path / "data" / path).write_bytes(content if isinstance(content, bytes) else content.encode())
    if "None" in arguments:
        recipe.write_text(recipe.read_text() + "validation_file: null\n")
        arguments = arguments[2:]
    process = programs.run("training.train", recipe, *arguments, status=2)
    refused(process, message)
    assert not list((tmp_path / "out").glob("*.safetensors"))


@pytest.mark.parametrize("name", SETTINGS)
def test_bad_settings(programs, recipe, name):
    arguments, message = SETTINGS[name]
    if "None" in arguments:
        lines = recipe.read_text().splitlines()
        recipe.write_text("\n".join(line for line in lines if not line.startswith("learning_rate")))
        arguments = arguments[2:]
    refused(programs.run("training.train", recipe, *arguments, status=2), message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max_stepz: 4", "unknown key 'max_stepz'; did you mean 'max_steps'?"),
        ("max_steps: [", "is not YAML"),
        ("", "holds no keys"),
        (None, "cannot read the recipe"),
    ],
)
def test_bad_recipes(programs, tmp_path, content, message):
    path = tmp_path / "mine.yaml"
    if content is not None:
        path.write_text(content)
    refused(programs.run("training.train", path, status=2), message)


def refused(process, message: str) -> None:
    assert message in process.stderr
    assert "Traceback" not in process.stderr
    told = [line for line in process.stderr.splitlines() if line.startswith("training.")]
    assert len(told) == 1


@pytest.mark.parametrize("other", ["model", "run", "data"])
def test_a_folder_that_holds_something_else_is_left_alone(programs, recipe, tmp_path, other):
    out = tmp_path / "out"
    if other == "model":
        out.mkdir()
        (out / "model.safetensors").write_bytes(b"precious")
    else:
        programs.run("training.train", recipe, "--max_steps", "3")
        if other == "data":
            (out / "all_results.json").unlink()
            (tmp_path / "data" / "train.en").write_text("something else\n" * 120)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    change = ["--max_steps", "3"] + (["--learning_rate", "0.5"] if other == "run" else [])
    process = programs.run("training.train", recipe, *change, status=2)
    words = {
        "model": "already holds a model",
        "run": "holds another run: its learning_rate is 0.001, here it is 0.5",
        "data": "holds a run on other data",
    }
    refused(process, words[other])
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        ("translate", ["nowhere"], "cannot be loaded"),
        ("translate", ["DATA"], "is no checkpoint: it has no config.json"),
        ("translate", ["RUN", "--input", "nowhere"], "No such file"),
        ("translate", ["RUN", "--output", "SOURCE"], "exists already"),
        ("translate", ["RUN", "--nbest", "3", "--num_beams", "2"], "needs as many beams"),
        ("translate", ["RUN", "--batch_size", "0"], "at least 1"),
        ("score", ["RUN", "--source", "SOURCE"], "give --reference"),
        ("score", ["RUN", "--source", "SOURCE", "--reference", "LONGER"], "line i of one must translate line i"),
        ("score", ["RUN", "--source", "SOURCE", "--reference", "REFERENCE", "--output", "SOURCE"], "exists already"),
        ("score", ["RUN", "--source", "SOURCE", "--reference", "REFERENCE", "--compare", "RUN"], "the same checkpoint"),
        ("average", ["RUN", "RUN", "--last", "2"], "exists already"),
        ("average", ["NEW", "RUN", "--last", "9"], "has 3 whole checkpoints"),
        ("average", ["NEW", "DATA"], "is no checkpoint"),
        ("average", ["NEW", "DATA", "--last", "1"], "has no checkpoint-N folders"),
        (
            "diversify",
            ["RUN", "RUN", "--source", "SOURCE", "--target", "LONGER", "--output", "NEW.tsv"],
            "line i of one",
        ),
        (
            "diversify",
            ["RUN", "RUN", "--source", "SOURCE", "--target", "REFERENCE", "--output", "SOURCE"],
            "does not exist",
        ),
        (
            "diversify",
            ["RUN", "DATA", "--source", "SOURCE", "--target", "REFERENCE", "--output", "NEW.tsv"],
            "no config",
        ),
    ],
)
def test_bad_arguments(programs, finished, test_files, tmp_path, program, arguments, message):
    (tmp_path / "longer").write_text("x\n" * 12)
    places = {"RUN": finished, "DATA": tmp_path, "NEW": tmp_path / "new", "LONGER": tmp_path / "longer"}
    places["NEW.tsv"] = tmp_path / "new" / "diverse.tsv"
    places |= dict(zip(("SOURCE", "REFERENCE"), test_files, strict=True))
    before = test_files[0].read_bytes()
    process = programs.run(f"training.{program}", *(places.get(word, word) for word in arguments), status=2)
    refused(process, message)
    assert test_files[0].read_bytes() == before
    assert not (tmp_path / "new").exists()
