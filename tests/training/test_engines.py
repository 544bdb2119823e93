"""The options --engine and --quantization of the commands that translate."""

import logging
import sys

import pytest

from training import distill, diversify, score, translate
from training.data.parallel_text import ParallelText
from training.inference import translation, translators
from training.inference.metrics import SequenceMetric, translate_and_score
from training.inference.translators import load_translator, select_engine
from training.recipe.arguments import TrainingArguments


@pytest.fixture
def checkpoint(make_model, make_tokenizer, tmp_path):
    tokenizer, sizes = make_tokenizer(shared=True)
    model = make_model(**sizes)
    model.generation_config.update(num_beams=2, early_stopping=True, max_new_tokens=8)
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def text(sentences, tmp_path):
    for side, lines in sentences.items():
        (tmp_path / f"text.{side}").write_text("".join(f"{line}\n" for line in lines))
    return [str(tmp_path / f"text.{side}") for side in ("en", "de")]


@pytest.fixture
def run_command(checkpoint, text, monkeypatch, tmp_path):
    """Function that runs a command in a new directory and returns its output."""
    (source, target), runs = text, iter(range(9))

    def run(module, *options: str) -> str:
        folder = tmp_path / f"run{next(runs)}"
        folder.mkdir()
        output, pairs = ["--output", str(folder / "out.tsv")], ["--source", source, "--target", target]
        arguments = {
            translate: [checkpoint, "--input", source, "--nbest", "2", *output],
            score: [checkpoint, *pairs[:2], "--reference", target, "--num-bootstrap-samples", "2", *output],
            distill: [checkpoint, "--source", source, "--keep-copies", "--min-score", "-99", *output],
            diversify: [checkpoint, checkpoint, *pairs, *output],
        }
        monkeypatch.setattr(sys, "argv", ["program", *arguments[module], "--device", "cpu", *options])
        module.main()
        return (folder / "out.tsv").read_text()

    return run


@pytest.mark.parametrize("module", [translate, score, distill, diversify])
def test_commands_give_the_same_results_with_both_engines(run_command, monkeypatch, capsys, module):
    pytest.importorskip("ctranslate2")
    monkeypatch.setattr(translators, "MIN_CTRANSLATE2_SENTENCES", 2)
    monkeypatch.setattr(translation, "MIN_CTRANSLATE2_SENTENCES", 2)
    expected = run_command(module, "--engine", "transformers")
    assert "engine: " not in capsys.readouterr().err
    assert run_command(module) == expected
    assert "engine: ctranslate2" in capsys.readouterr().err
    run_command(module, "--engine", "ctranslate2", "--quantization", "int8")


def test_the_engine_of_the_final_test_does_not_change_scores(checkpoint, sentences, monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.INFO, "vanilla_transformer")
    pytest.importorskip("ctranslate2")
    monkeypatch.setattr(translators, "MIN_CTRANSLATE2_SENTENCES", 2)
    translator, text = load_translator(checkpoint, "cpu"), ParallelText(sentences["en"], sentences["de"])
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, per_device_eval_batch_size=3)
    scores = []
    for engine in ("transformers", "auto"):
        assert "engine: ctranslate2" not in caplog.text
        compute = SequenceMetric().compute
        scores.append(translate_and_score(translator.model, translator.tokenizer, text, compute, args, engine))
    assert "engine: ctranslate2" in caplog.text
    assert scores[0] == scores[1]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 3, "early_stopping": False}, "CTranslate2 does not support early_stopping=False with beam"),
        ({"glossary": {"dog": "Hund"}}, "CTranslate2 does not support glossary."),
        ({"return_alignments": True, "min_length": 3}, "CTranslate2 does not support return_alignments, min_length."),
    ],
)
def test_transformers_decodes_what_ctranslate2_does_not(checkpoint, caplog, options, reason):
    caplog.set_level(logging.INFO, "vanilla_transformer")
    pytest.importorskip("ctranslate2")
    translator = load_translator(checkpoint, "cpu")
    assert select_engine(translator, "auto", 9999, options) is translator
    assert f"engine: transformers, because: {reason}" in caplog.text
    with pytest.raises(ValueError, match=f"--engine ctranslate2: {reason}.* Use --engine transformers."):
        select_engine(translator, "ctranslate2", 4, options)


def test_transformers_decodes_few_sentences(checkpoint, caplog):
    caplog.set_level(logging.INFO, "vanilla_transformer")
    pytest.importorskip("ctranslate2")
    translator = load_translator(checkpoint, "cpu")
    assert select_engine(translator, "auto", 4) is translator
    assert caplog.text == ""
    assert select_engine(translator, "ctranslate2", 4) is not translator


def test_transformers_decodes_without_ctranslate2_and_ensembles(checkpoint, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "vanilla_transformer")
    ensemble = load_translator([checkpoint, checkpoint], "cpu")
    with pytest.raises(ValueError, match="CTranslate2 does not support ensemble"):
        select_engine(ensemble, "ctranslate2", 4)
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    translator = load_translator(checkpoint, "cpu")
    assert select_engine(translator, "auto", 9999) is translator
    assert "ctranslate2 is not installed" in caplog.text
    with pytest.raises(ValueError, match="--engine ctranslate2: ctranslate2 is not installed"):
        select_engine(translator, "ctranslate2", 4)


@pytest.mark.parametrize("engine", ["auto", "transformers"])
def test_quantization_requires_ctranslate2(checkpoint, engine):
    with pytest.raises(ValueError, match=f"--quantization int8 requires --engine ctranslate2, got --engine {engine}"):
        select_engine(load_translator(checkpoint, "cpu"), engine, 9999, quantization="int8")
