"""User errors: one clear message, status 2, and no lost files."""

import json

import pytest

from training.run.output_dir import lock_output_dir

pytestmark = pytest.mark.slow

DATA = {
    "missing directory": (["--data-dir", "nowhere"], {}, "cannot read nowhere/train.en"),
    "no test file": (["--test-file", "nothing"], {}, "nothing.en: No such file"),
    "different line counts": ([], {"train.de": "eins\n"}, "has 120: line i of one must translate"),
    "blank lines": ([], {"train.de": "\n" * 120}, "120 lines blank, at lines 1, 2, 3 and 117 more"),
    "not UTF-8": ([], {"val.en": b"\xff\n" * 10}, "10 lines not UTF-8"),
    "empty files": ([], {"train.en": "", "train.de": ""}, "the train set has no pairs"),
    "all lines dropped": (["--on-bad-lines", "drop"], {"train.de": "\n" * 120}, "the train set has no pairs"),
    "everything too long": (["--max-length", "2"], {}, "Increase max_length"),
    "overlap": (
        ["--on-eval-overlap", "error", "--test-file", "train"],
        {},
        "120 of 120 sources are also in the training data",
    ),
    "table without tabs": (["--train-file", "t.tsv"], {"t.tsv": "one eins\n"}, "no tab"),
    "table of references": (["--train-file", "t.tsv"], {"t.tsv": "a\tb\tc\n"}, "more than two columns"),
    "no JSON": (["--train-file", "t.jsonl"], {"t.jsonl": "{\n"}, "line 1: expected a JSON object"),
    "JSON of another language": (
        ["--train-file", "t.jsonl"],
        {"t.jsonl": '{"en": "a", "fr": "b"}\n'},
        "no column 'de'",
    ),
    "no parquet": (["--train-file", "t.parquet"], {"t.parquet": "x"}, "is not a parquet file"),
    "too large a validation set": (
        ["--validation-file", "None", "--validation-size", "500"],
        {},
        "less than the number of training pairs, 120",
    ),
    "test line beyond the positions": (
        ["--position-embedding-type", "learned", "--max-position-embeddings", "60"],
        {"test.en": "a\n" * 4 + "a " * 181 + "\n" + "a\n" * 5, "test.de": "a\n" * 10},
        "the test set has sentences of more than 60 tokens, at line 5: shorten them, or use a model with more "
        "positions than max_position_embeddings=60",
    ),
    "validation line beyond the positions": (
        ["--position-embedding-type", "learned", "--max-position-embeddings", "60"],
        {"val.en": "a\n" * 10, "val.de": "a " * 181 + "\n" + "a\n" * 9},
        "the validation set has sentences of more than 60 tokens, at line 1",
    ),
    "references of no table": (["--test-references", "test.de"], {}, "must be a .tsv file"),
    "references of another length": (["--test-references", "r.tsv"], {"r.tsv": "a\tb\n"}, "but the test data have 10"),
    "stream of blank lines": (["--streaming", "true"], {"train.en": "\n" * 120}, "blank"),
    "stream of another length": (["--streaming", "true"], {"train.en": "one\n" * 7}, "has 7 lines"),
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
    assert_user_error(process, message)
    assert not list((tmp_path / "out").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-stepz", "4"], "did you mean --max-steps?"),
        (["--attn-implementation", "magic"], "magic"),
        (["--tokenizer-path", "nowhere"], "tokenizer_path=nowhere: cannot be loaded"),
    ],
)
def test_bad_settings(programs, recipe, arguments, message):
    """`tests/training/recipe` tests the checks of the other settings."""
    assert_user_error(programs.run("training.train", recipe, *arguments, status=2), message)


@pytest.mark.parametrize(("content", "message"), [("", "contains no keys"), (None, "cannot read the recipe")])
def test_bad_recipes(programs, tmp_path, content, message):
    path = tmp_path / "mine.yaml"
    if content is not None:
        path.write_text(content)
    assert_user_error(programs.run("training.train", path, status=2), message)


def test_separators_within_sentences_are_valid(programs, recipe, tmp_path):
    """Form feeds, U+2028 and newlines in JSON strings are valid, also when the finished run is shown again."""
    marks = ["\n", "\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029", "\t"]
    rows = [{"en": f"the dog{mark}runs", "de": f"der Hund{mark}rennt"} for mark in marks]
    (tmp_path / "data" / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--test-file", "t.jsonl", "--max-steps", "1"]
    programs.run("training.train", recipe, *arguments)
    process = programs.run("training.train", recipe, *arguments)
    assert "finished" in process.stderr
    assert len((tmp_path / "out" / "samples.tsv").read_bytes().decode().split("\n")) == 1 + len(rows) + 1


def assert_user_error(process, message: str) -> None:
    assert message in process.stderr
    assert "Traceback" not in process.stderr
    errors = [line for line in process.stderr.splitlines() if line.startswith("training.")]
    assert len(errors) == 1


@pytest.mark.parametrize("processes", [1, 2])
def test_rejects_a_second_run_in_the_output_directory(programs, recipe, tmp_path, processes):
    with lock_output_dir(tmp_path / "out"):
        process = programs.run("training.train", recipe, "--num-processes", processes, status=2)
    assert_user_error(process, "another command trains in")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["run.lock"]


@pytest.mark.parametrize("other", ["model", "run", "data"])
def test_does_not_overwrite_another_run(programs, recipe, tmp_path, other):
    out = tmp_path / "out"
    if other == "model":
        out.mkdir()
        (out / "model.safetensors").write_bytes(b"precious")
    else:
        programs.run("training.train", recipe, "--max-steps", "3")
        if other == "data":
            (out / "all_results.json").unlink()
            (tmp_path / "data" / "train.en").write_text("something else\n" * 120)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    change = ["--max-steps", "3"] + (["--learning-rate", "0.5"] if other == "run" else [])
    process = programs.run("training.train", recipe, *change, status=2)
    messages = {
        "model": "already contains model.safetensors",
        "run": "contains a different run: learning_rate was 0.001, now it is 0.5",
        "data": "contains a run on different data",
    }
    assert_user_error(process, messages[other])
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        ("translate", ["nowhere"], "nowhere does not exist"),
        ("translate", ["DATA"], "is not a checkpoint directory: config.json is missing"),
        ("translate", ["RUN", "--input", "nowhere"], "nowhere does not exist"),
        ("translate", ["RUN", "--output", "SOURCE"], "already exists"),
        ("translate", ["RUN", "--nbest", "3", "--num-beams", "2"], "nbest=3 must be at most num_beams=2"),
        ("translate", ["RUN", "--batch-size", "0"], "at least 1"),
        ("translate", ["RUN", "--device", "meta"], "'meta' is not a usable device"),
        ("translate", ["RUN", "--device", "cuda:99"], "'cuda:99' is not a usable device"),
        ("translate", ["RUN", "--length-penalty", "nan"], "nan is not a finite number"),
        (
            "score",
            ["RUN", "--source", "SOURCE", "--reference", "REFERENCE", "--num-bootstrap-samples", "9" * 20],
            "is not between",
        ),
        ("demo.corpus", ["DATA"], "train.en already exists"),
        ("translate", ["RUN", "--rerank", "RUN", "--num-beams", "1"], "rerank requires num_beams of at least 2"),
        ("score", ["RUN", "--source", "SOURCE"], "Set --reference"),
        ("score", ["RUN", "--source", "TABLE.tsv", "--reference", "REFERENCE"], "or use a table with references"),
        ("score", ["RUN", "--source", "SOURCE", "--reference", "LONGER"], "line i of one must translate line i"),
        ("score", ["RUN", "--source", "SOURCE", "--reference", "REFERENCE", "--output", "SOURCE"], "already exists"),
        (
            "score",
            ["RUN", "--source", "SOURCE", "--reference", "REFERENCE", "--compare", "RUN"],
            "must differ from the scored checkpoint",
        ),
        ("average", ["RUN", "--last", "2", "--output", "RUN"], "already exists"),
        ("average", ["RUN", "--last", "9", "--output", "NEW"], "has only 3 complete checkpoints"),
        ("average", ["DATA", "--output", "NEW"], "is not a checkpoint"),
        ("average", ["DATA", "--last", "1", "--output", "NEW"], "has no checkpoint-N directories"),
        (
            "diversify",
            ["RUN", "RUN", "--source", "SOURCE", "--target", "LONGER", "--output", "NEW.tsv"],
            "line i of one",
        ),
        (
            "diversify",
            ["RUN", "DATA", "--source", "SOURCE", "--target", "REFERENCE", "--output", "SOURCE"],
            "already exists",
        ),
        (
            "diversify",
            ["RUN", "DATA", "--source", "SOURCE", "--target", "REFERENCE", "--output", "NEW.tsv"],
            "config.json is missing",
        ),
        ("distill", ["RUN", "--source", "REFERENCE", "--output", "NEW.tsv"], "from en to de, but --source is"),
        ("distill", ["RUN", "--source", "DATA", "--output", "NEW.tsv"], "Is a directory"),
        ("distill", ["RUN", "--source", "SOURCE", "--target", "LONGER", "--output", "NEW.tsv"], "line i of one"),
        ("distill", ["RUN", "--source", "SOURCE", "--output", "NEW.tsv", "--with-references"], "requires --target"),
        ("distill", ["RUN", "--source", "SOURCE", "--output", "SOURCE"], "already exists"),
        ("distill", ["RUN", "--source", "SOURCE", "--output", "NEW"], "must end with .tsv"),
        (
            "distill",
            ["RUN", "--source", "SOURCE", "--output", "NEW.tsv", "--nbest", "3", "--num-beams", "2"],
            "nbest=3 must be at most num_beams=2",
        ),
        ("distill", ["RUN", "DATA", "--source", "SOURCE", "--output", "NEW.tsv"], "is not a checkpoint"),
    ],
)
def test_bad_arguments(programs, finished, test_files, tmp_path, program, arguments, message):
    (tmp_path / "longer").write_text("x\n" * 12)
    (tmp_path / "train.en").write_text("mine\n")
    (tmp_path / "table.tsv").touch()
    paths = {"RUN": finished, "DATA": tmp_path, "NEW": tmp_path / "new", "LONGER": tmp_path / "longer"}
    paths["TABLE.tsv"] = tmp_path / "table.tsv"
    paths["NEW.tsv"] = tmp_path / "new" / "diverse.tsv"
    paths |= dict(zip(("SOURCE", "REFERENCE"), test_files, strict=True))
    before = test_files[0].read_bytes()
    process = programs.run(f"training.{program}", *(paths.get(word, word) for word in arguments), status=2)
    assert_user_error(process, message)
    assert test_files[0].read_bytes() == before
    assert (tmp_path / "train.en").read_text() == "mine\n"
    assert not (tmp_path / "new").exists()
