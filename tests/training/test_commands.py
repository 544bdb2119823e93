"""Common behavior of the commands that use a checkpoint: light parsers, options, and their Python functions."""

import inspect
import json
import logging
import subprocess
import sys

import pytest

from training import average, benchmark, distill, diversify, score, translate
from training.distillation import distilling
from training.inference import scoring, translation
from training.run import checkpoints
from vanilla_transformer.shared.command_line import OPTIONS, option_name, shows_progress

MODULES = {"translate": translate, "score": score, "average": average, "distill": distill, "diversify": diversify}
MODULES |= {"benchmark": benchmark}
# `vanilla_transformer` imports torch lazily in the console program
SCRIPT = """
import importlib, sys
sys.argv[0] = "bin/vanilla-transformer"
import vanilla_transformer
sys.argv = [f"vanilla-transformer {sys.argv[1]}", *sys.argv[2:]]
try:
    importlib.import_module("training." + sys.argv[0].split()[1]).main()
finally:
    slow = {"torch", "transformers", "datasets", "numpy"} & sys.modules.keys()
    assert not slow, slow
"""
VALID = {  # the current directory passes as a checkpoint and as a text until the libraries are imported
    "translate": ["."],
    "score": [".", "--source", "."],
    "average": [".", "--output", "new"],
    "distill": [".", "--source", ".", "--output", "new"],
    "diversify": [".", ".", "--source", ".", "--target", ".", "--output", "new"],
    "benchmark": [],
}
MISSING = {
    "translate": [["missing"], ["user/name", "--input", "missing"], [".", "--rerank", "missing"]],
    "score": [["missing", "--source", "."], [".", "--source", "missing"], [*VALID["score"], "--compare", "missing"]],
    "average": [["missing", "--output", "new"]],
    "distill": [["missing", "--source", ".", "--output", "new"], [".", "--source", "missing", "--output", "new"]],
    "diversify": [[".", "missing", *VALID["diversify"][2:]]],
    "benchmark": [["--model", "missing"], ["--model", ".", "--source", "missing"]],
}
WITHOUT_TORCH = [(name, ["--help"], 0, "usage: ") for name in MODULES]
WITHOUT_TORCH += [(name, [*VALID[name], "--quite"], 2, "did you mean --quiet?") for name in MODULES]
WITHOUT_TORCH += [(name, each, 2, "missing does not exist") for name, cases in MISSING.items() for each in cases]
WITHOUT_TORCH += [("average", ["new", ".", "--last", "2"], 2, "vanilla-transformer average . --last 2 --output new")]


@pytest.mark.parametrize(("name", "arguments", "status", "message"), WITHOUT_TORCH)
def test_answers_without_torch(repository, name, arguments, status, message):
    command = [sys.executable, "-c", SCRIPT, name, *arguments]
    process = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert process.returncode == status, process.stderr
    assert message in process.stderr + process.stdout
    assert len(process.stderr.splitlines()) == (status > 0)


@pytest.mark.parametrize("name", MODULES)
def test_common_options_are_defined_once(name):
    actions = {action.dest: action for action in MODULES[name].make_parser()._actions}
    assert {"json", "quiet"} <= actions.keys()
    exceptions = {("translate", "json"), ("benchmark", "batch_size")}  # JSON lines; the size that figures depend on
    for key in actions.keys() & OPTIONS.keys():
        if (name, key) not in exceptions:
            assert actions[key].option_strings == [option_name(key)]
            assert actions[key].help == OPTIONS[key]["help"]
            assert actions[key].default == OPTIONS[key].get("default", False if actions[key].nargs == 0 else None)


@pytest.mark.parametrize(
    ("name", "functions"),
    [
        ("translate", [translation.translate, translation.TranslationSettings]),
        ("score", [scoring.score, scoring.compute_likelihood]),
        ("average", [checkpoints.average]),
        ("distill", [distilling.distill]),
        ("diversify", [distilling.diversify]),
    ],
)
def test_functions_have_the_defaults_of_the_commands(name, functions):
    parser = MODULES[name].make_parser()
    for function in functions:
        for key, parameter in inspect.signature(function).parameters.items():
            if parameter.kind == parameter.KEYWORD_ONLY and key not in ("details",):
                assert parser.get_default(key) == parameter.default, key


@pytest.mark.parametrize(("level", "shown"), [(logging.ERROR, False), (logging.INFO, True), (logging.NOTSET, True)])
def test_progress_is_shown_on_a_terminal_without_quiet(monkeypatch, level, shown):
    logger = logging.getLogger("vanilla_transformer")
    monkeypatch.setattr(logger, "level", level)
    logger.manager._clear_cache()
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert shows_progress() is shown
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    assert not shows_progress()


@pytest.fixture
def checkpoint(make_model, make_tokenizer, tmp_path) -> str:
    tokenizer, sizes = make_tokenizer(True)
    model = make_model(**sizes)
    model.generation_config.update(num_beams=3, max_new_tokens=8)
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_translate_returns_texts_or_details(checkpoint, sentences):
    texts = translation.translate(checkpoint, sentences["en"], device="cpu")
    details = translation.translate([checkpoint], iter(sentences["en"]), nbest=2, details=True, device="cpu")
    assert texts == [candidates[0]["translation_text"] for candidates in details]
    assert all(len(candidates) == 2 for candidates in details)
    assert {"score", "tokens", "token_scores", "alignments"} <= details[0][0].keys()
    scores = translation.translate(checkpoint, sentences["en"], scores=True, device="cpu")
    assert [each.keys() for (each,) in scores] == [{"translation_text", "score"}] * len(texts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nbest": 0}, "nbest=0 must be at least 1"),
        ({"nbest": 3, "num_beams": 2}, "nbest=3 must be at most num_beams=2"),
        ({"device": "nowhere"}, "'nowhere' is not a usable device"),
        ({"device": "meta"}, "'meta' is not a usable device"),
        ({"checkpoints": []}, "the list of checkpoints is empty"),
        ({"sentences": "the dog runs"}, "'the dog runs' is a string: pass a list of sentences"),
        ({"engine": "Transformers"}, "engine='Transformers' must be one of auto, transformers, ctranslate2"),
        ({"length_penalty": 101}, "length_penalty=101 must be from -100 to 100"),
        ({"length_penalty": float("nan")}, "length_penalty=nan must be a finite number"),
        ({"rerank_weight": float("inf")}, "rerank_weight=inf must be a finite number"),
    ],
)
def test_translate_rejects_wrong_options(checkpoint, options, message):
    with pytest.raises(ValueError, match=message):
        translation.translate(**{"checkpoints": checkpoint, "sentences": ["the dog runs"]} | options)


@pytest.fixture
def files(sentences, tmp_path):
    for side, lines in sentences.items():
        (tmp_path / f"test.{side}").write_text("".join(f"{line}\n" for line in lines))
    return [tmp_path / "test.en", tmp_path / "test.de"]


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (scoring.score, {"metric": "sequnce"}, "metric='sequnce' must be one of translation, sequence"),
        (scoring.score, {"checkpoints": []}, "the list of checkpoints is empty"),
        (scoring.compute_likelihood, {"batch_size": -1}, "batch_size=-1 must be at least 1"),
        (scoring.compute_likelihood, {"per_pair_output": "test.de"}, "test.de already exists"),
    ],
)
def test_score_rejects_wrong_options(checkpoint, files, monkeypatch, function, options, message):
    monkeypatch.chdir(files[0].parent)
    before = files[1].read_text()
    with pytest.raises(ValueError, match=message):
        function(**{"checkpoints": checkpoint, "source": files[0], "references": [files[1]], "device": "cpu"} | options)
    assert files[1].read_text() == before


def test_references_can_be_one_path(files):
    assert (
        scoring.read_test_set(files[0], str(files[1])).targets == scoring.read_test_set(*files[:1], files[1:]).targets
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"teachers": []}, "the list of checkpoints is empty"),
        ({"nbest": -1}, "nbest=-1 must be at least 1"),
        ({"min_score": float("nan")}, "min_score=nan must be a finite number"),
        ({"max_length_ratio": float("inf")}, "max_length_ratio=inf must be a finite number"),
    ],
)
def test_distill_rejects_wrong_options(checkpoint, files, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        distilling.distill(**{"teachers": checkpoint, "source": files[0], "output": tmp_path / "new.tsv"} | options)


def test_score_prints_a_table(checkpoint, files, monkeypatch, capsys):
    source, reference = map(str, files)
    options = ["--source", source, "--reference", reference, "--num-bootstrap-samples", "2", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["score", checkpoint, *options, "--compare", checkpoint, checkpoint])
    score.main()
    output = capsys.readouterr()
    assert "4 sentences" in output.err
    lines = output.out.splitlines()
    assert lines[0].startswith("BLEU    ")
    assert lines[0].endswith(checkpoint)
    assert lines[1].endswith(f"{checkpoint} + {checkpoint}  p = 1.000")
    assert lines[9] == "±: half of the 95 % confidence interval"
    assert [line.split(":")[0] for line in lines[10:]] == ["BLEU", "chrF", "TER", "BLEU, Moses tokens, lowercase"]


def test_score_table_of_sequences():
    assert score.format_scores({"exact_match": 55.238, "wer": 44.762}).splitlines() == [
        "exact match                      55.24",
        "word error rate                  44.76",
    ]
    lines = score.format_scores({"one": {"wer": 44.762}, "two": {"wer": 100.0}}).splitlines()
    rows = [" ".join(line.split()) for line in lines]
    assert rows == ["one", "word error rate 44.76", "two", "word error rate 100.00"]


def test_quiet_prints_only_the_result(checkpoint, files, monkeypatch, capsys):
    source, reference = map(str, files)
    arguments = ["--source", source, "--reference", reference, "--likelihood", "--quiet", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["score", checkpoint, *arguments])
    score.main()
    output = capsys.readouterr()
    assert output.err == ""
    assert output.out.splitlines()[-1].split() == ["pairs", "4"]


def test_distill_counts(checkpoint, files, tmp_path, monkeypatch, capsys):
    output = tmp_path / "new.tsv"
    table = distilling.distill(checkpoint, files[0], output, nbest=2, keep_copies=True, device="cpu")
    assert table.output == output
    assert table.pairs == len(output.read_text().splitlines())
    assert (table.lines, sum(table.dropped.values())) == (4, 8 - table.pairs)
    arguments = ["--source", str(files[0]), "--nbest", "2", "--keep-copies", "--device", "cpu", "--json"]
    monkeypatch.setattr(sys, "argv", ["distill", checkpoint, *arguments, "--output", str(tmp_path / "same.tsv")])
    distill.main()
    expected = {"output": str(tmp_path / "same.tsv"), "pairs": table.pairs, "lines": 4, "dropped": table.dropped}
    assert json.loads(capsys.readouterr().out) == expected
