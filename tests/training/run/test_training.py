"""The Python function `train`: same results as the command, Python values as settings, messages, notebooks."""

import json
import logging
import signal
import subprocess
import sys

import pytest
import yaml
from transformers import trainer as transformers_trainer
from transformers.utils.notebook import NotebookProgressCallback

from training import train as command
from training.recipe.reading import read_recipe
from training.run import hardware
from training.run.callbacks import LogMessages, StopOnSignal, TokenProgress, format_logs
from training.run.training import train
from vanilla_transformer.shared.command_line import logger

TIMES = ("runtime", "seconds", "per_second")


def without_times(results: dict) -> dict:
    return {name: value for name, value in results.items() if not name.endswith(TIMES) and name != "folder"}


def test_function_and_command_have_the_same_results(recipe, tmp_path, monkeypatch, capsys, read_messages):
    result = train(recipe, output_dir=tmp_path / "function", num_processes=2)
    assert "Training in 1 process. To use 2, run `vanilla-transformer train`" in read_messages()
    assert capsys.readouterr().out == ""
    assert result.finished
    assert result.scores == json.loads((tmp_path / "function" / "all_results.json").read_text())
    assert result.model.num_parameters() == result.scores["parameters"]
    assert result.tokenizer("a dog").input_ids

    monkeypatch.setattr(hardware, "configure_malloc", lambda: None)
    out = tmp_path / "command"
    monkeypatch.setattr(sys, "argv", ["training.train", str(recipe), "--output-dir", str(out), "--json", "--quiet"])
    command.main()
    output = capsys.readouterr()
    assert output.err == ""
    assert json.loads(output.out) == {"folder": str(out), **json.loads((out / "all_results.json").read_text())}
    assert without_times(json.loads(output.out)) == without_times(result.scores)

    again = train(recipe, output_dir=tmp_path / "function")
    assert again.scores == result.scores


def test_settings_have_python_values(recipe, tmp_path):
    settings = {
        "output_dir": tmp_path,
        "test_file": None,
        "lowercase": True,
        "shared_vocabulary": False,
        "attention_plot_lines": [2, 3],
        "report_to": ["tensorboard"],
        "lr_scheduler_kwargs": {"timescale": 9},
        "learning_rate": 1e-5,
    }
    resolved = read_recipe([str(recipe)], settings)
    values = {**vars(resolved.data), **vars(resolved.tokenizer), **vars(resolved.decoding), **vars(resolved.training)}
    assert {name: values[name] for name in settings} == settings | {"output_dir": str(tmp_path)}
    assert settings.keys() - {"test_file"} <= resolved.explicit_keys


def test_lists_may_be_empty_or_have_several_values(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("training.recipe.validation.get_reporting_integration_callbacks", lambda names: [])
    for text in ("attention_plot_lines: []\nreport_to: []", "attention_plot_lines: [1, 2]\nreport_to: [wandb, mlflow]"):
        changed = tmp_path / "lists.yaml"
        changed.write_text(f"{recipe.read_text()}\n{text}\n")
        lists = yaml.safe_load(text)
        read = [read_recipe([str(changed)]), read_recipe([str(recipe)], lists)]
        read += [read_recipe([str(recipe)], {name: tuple(values) for name, values in lists.items()})]
        for resolved in read:
            values = {**vars(resolved.decoding), **vars(resolved.training)}
            assert {name: values[name] for name in lists} == lists


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_stepz": 4}, "unknown key 'max_stepz'; did you mean 'max_steps'"),
        ({"max_steps": None}, "max_steps must not be null"),
        ({"max_steps": "many"}, "invalid int value: 'many'"),
        ({"max_steps": 0}, "max_steps=0 is invalid"),
        ({"num_train_epochs": 2}, "num_train_epochs has no effect with max_steps=6"),
    ],
)
def test_invalid_settings_raise_value_error(recipe, settings, message):
    with pytest.raises(ValueError, match=message):
        train(recipe, **settings)


def test_second_signal_has_the_handler_of_the_caller(monkeypatch):
    """In a notebook, the second Ctrl-C raises KeyboardInterrupt, and the interpreter does not end."""
    stop = StopOnSignal()
    before = signal.getsignal(signal.SIGINT)
    stop.on_train_begin(type("args", (), {"ddp_timeout": 9, "world_size": 1}), None, None)
    assert signal.getsignal(signal.SIGINT) == stop._receive
    signal.raise_signal(signal.SIGINT)
    assert stop.signal_number == signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_handlers_are_restored_after_an_error(make_trainer, monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    trainer = make_trainer()
    monkeypatch.setattr(trainer, "training_step", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert signal.getsignal(signal.SIGINT) is before


def test_logs_have_four_digits_without_exponents():
    logs = {"loss": 1.23456, "tokens_per_second": 12494.6, "learning_rate": 1.5e-05, "epoch": 2, "total_flos": 9.0}
    expected = {"loss": "1.235", "tokens_per_second": "12495", "learning_rate": "1.5e-05", "epoch": 2}
    assert format_logs(logs) == str(expected)


def progress_callbacks(trainer) -> set[type]:
    own = {
        NotebookProgressCallback,
        TokenProgress,
        LogMessages,
        *transformers_trainer.ProgressCallback.__subclasses__(),
    }
    own |= {transformers_trainer.ProgressCallback, transformers_trainer.PrinterCallback}
    return own & {type(callback) for callback in trainer.callback_handler.callbacks}


def test_progress_callbacks(make_trainer, monkeypatch):
    assert progress_callbacks(make_trainer(disable_tqdm=False)) == {LogMessages}
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert progress_callbacks(make_trainer(disable_tqdm=False)) == {TokenProgress}
    assert progress_callbacks(make_trainer(disable_tqdm=True)) == {LogMessages}
    with monkeypatch.context() as patch:
        patch.setattr(transformers_trainer, "DEFAULT_PROGRESS_CALLBACK", NotebookProgressCallback)
        assert progress_callbacks(make_trainer(disable_tqdm=False)) == {NotebookProgressCallback}
    monkeypatch.setattr(logger, "isEnabledFor", lambda level: False)
    assert progress_callbacks(make_trainer(disable_tqdm=False)) == set()


@pytest.mark.parametrize("module", ["training.train", "vanilla_transformer.training.train"])
def test_missing_recipe_is_reported_before_torch_is_imported(repository, module):
    program = [sys.executable, "-X", "importtime", "-m", module, "missing.yaml"]
    process = subprocess.run(program, cwd=repository, capture_output=True, text=True, check=False)
    assert process.returncode == 2
    lines = [line for line in process.stderr.splitlines() if not line.startswith("import time:")]
    assert len(lines) == 1
    assert lines[0].startswith("training.train: cannot read the recipe missing.yaml: no such file. Packaged recipes: ")
    assert not {"torch", "transformers"} & {line.split()[-1] for line in process.stderr.splitlines()}


@pytest.mark.slow
def test_torchao_prints_no_warnings(repository):
    pytest.importorskip("torchao")
    code = "import logging, vanilla_transformer; print(logging.getLogger('torchao').getEffectiveLevel(), '--json')"
    for program in (["-m", "training.train", "--help"], ["-c", code]):
        process = subprocess.run([sys.executable, *program], cwd=repository, capture_output=True, text=True, check=True)
        assert "--json" in process.stdout
        assert process.stderr == ""
    assert process.stdout.startswith(f"{logging.WARNING} ")  # later warnings are shown


LAUNCHER = """
import sys
from accelerate import debug_launcher
from functools import partial
from training.run.training import train
debug_launcher(partial(train, sys.argv[1], output_dir=sys.argv[2]), num_processes=2)
"""


@pytest.mark.slow
def test_launcher_of_notebooks(recipe, repository, tmp_path):
    """`debug_launcher` forks processes on a CPU, as `notebook_launcher` does with GPUs."""
    program = [sys.executable, "-c", LAUNCHER, str(recipe), str(tmp_path / "two")]
    subprocess.run(program, cwd=repository, capture_output=True, check=True)
    results = json.loads((tmp_path / "two" / "all_results.json").read_text())
    assert results["processes"] == 2
