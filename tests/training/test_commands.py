"""Common behavior of the commands that use a checkpoint: light parsers, options, and their Python functions."""

import importlib.util
import inspect
import json
import logging
import subprocess
import sys
from collections import defaultdict

import pytest

from hub.exporting.exporter import export
from hub.importing.importer import import_checkpoint
from hub.publishing.card import make_card
from hub.publishing.upload import push
from training import distill, score
from training.distillation import distilling
from training.inference import scoring, translation
from training.run import checkpoints
from vanilla_transformer.shared.command_line import shows_progress

FUNCTIONS = {  # functions with the options of a command
    "training.translate": [translation.translate, translation.TranslationSettings],
    "training.score": [scoring.score, scoring.compute_likelihood],
    "training.average": [checkpoints.average],
    "training.distill": [distilling.distill],
    "training.diversify": [distilling.diversify],
    "hub.import_checkpoint": [import_checkpoint],
    "hub.export": [export],
    "hub.push": [push],
    "hub.model_card": [make_card],
}
COMMANDS = [*FUNCTIONS, "training.benchmark", "hub.space.__main__"]
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
WITHOUT_TORCH = [(name, ["--help"], 0, "usage: ") for name in VALID]
WITHOUT_TORCH += [(name, [*VALID[name], "--quite"], 2, "did you mean --quiet?") for name in VALID]
WITHOUT_TORCH += [(name, each, 2, "missing does not exist") for name, cases in MISSING.items() for each in cases]
WITHOUT_TORCH += [("average", ["new", ".", "--last", "2"], 2, "vanilla-transformer average . --last 2 --output new")]


@pytest.mark.parametrize(("name", "arguments", "status", "message"), WITHOUT_TORCH)
def test_answers_without_torch(repository, name, arguments, status, message):
    command = [sys.executable, "-c", SCRIPT, name, *arguments]
    process = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert process.returncode == status, process.stderr
    assert message in process.stderr + process.stdout
    assert len(process.stderr.splitlines()) == (status > 0)


@pytest.fixture(scope="module")
def parsers(repository):
    specification = importlib.util.spec_from_file_location("commands", repository / "docs" / "commands.py")
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    return {name: script.find_parser(name, name) for name in COMMANDS}


def test_common_options_are_the_same_in_all_commands(parsers):
    found = defaultdict(set)
    for command, parser in parsers.items():
        for action in parser._actions:
            if action.option_strings:
                found[action.option_strings[0]].add(str((action.dest, action.type, action.default, action.help)))
        assert {"--json", "--quiet"} <= found.keys(), command
    for name in ("--num-beams", "--length-penalty", "--max-new-tokens", "--engine", "--device", "--license", "--quiet"):
        assert len(found[name]) == 1, name
    assert len(found["--json"]) == 2  # `translate` prints JSON lines
    assert len(found["--batch-size"]) == 2  # `benchmark` has the size that its figures depend on


def test_functions_have_the_options_of_the_commands(parsers):
    for command, functions in FUNCTIONS.items():
        actions = {action.dest: action for action in parsers[command]._actions}
        for function in functions:
            parameters = inspect.signature(function).parameters.values()
            for parameter in parameters:
                assert parameter.kind is not parameter.VAR_KEYWORD, function
                if parameter.kind is parameter.KEYWORD_ONLY:
                    action = actions[parameter.name]
                    assert action.required or action.default == parameter.default, (command, parameter)
                    if function is not checkpoints.average and inspect.isfunction(function):
                        text = action.help.replace("%(default)s", str(action.default))
                        assert f"        {parameter.name}: {text}\n" in function.__doc__


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


def test_nbest_has_no_duplicate_texts(checkpoint, monkeypatch):
    """Token sequences that differ can have the same text."""
    candidates = [{"translation_text": text, "score": -i} for i, text in enumerate(["a", "b", "a", "c", "d"])]
    monkeypatch.setattr(translation.TranslationPipeline, "postprocess", lambda self, outputs: [candidates])
    found = translation.translate(checkpoint, ["the dog runs"], nbest=3, num_beams=5, device="cpu")
    assert found == [[candidates[0], candidates[1], candidates[3]]]
    assert len(translation.translate(checkpoint, ["the dog runs"], num_beams=5, nbest=5, device="cpu")[0]) == 4


def test_translate_warns_about_unknown_characters(checkpoint, caplog):
    lines = ["the dog runs", "the Ж dog", "dog\ud800", "", "a Ж"]
    assert len(translation.translate(checkpoint, lines, device="cpu")) == 5
    message = "3 lines contain characters or words that the tokenizer does not know, such as 'Ж'."
    assert [record.message[: len(message)] for record in caplog.records if "not know" in record.message] == [message]
    caplog.clear()
    translation.translate(checkpoint, ["the dog runs"], device="cpu")
    assert "not know" not in caplog.text


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
        ({"rerank_weight": 2}, "rerank_weight=2 requires rerank"),
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
    texts = [scoring.read_test_set(files[0], references, {}) for references in (str(files[1]), files[1:])]
    assert texts[0].targets == texts[1].targets


def test_header_of_a_test_table_names_the_languages_of_the_recipe(tmp_path):
    table = tmp_path / "test.tsv"
    table.write_text("de\ten\nEin Hund.\tA dog.\n")
    text = scoring.read_test_set(table, [], {"source_lang": "en", "target_lang": "de"})
    assert (text.sources, text.targets) == (["A dog."], ["Ein Hund."])


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
