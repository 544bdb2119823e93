"""Selection of checkpoints, and invalid checkpoints."""

import errno
import json
import os
import re
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from training.recipe.reading import read_recipe
from training.run.checkpoints import (
    MANIFEST,
    average,
    checkpoint_error,
    keep_only,
    last_valid_checkpoint,
    select_checkpoints,
    select_run_checkpoints,
    write_manifest,
)
from training.run.trainer import TokenBatchTrainer


@pytest.fixture
def make_run(tmp_path):
    """Output directory with three complete checkpoints whose losses are 3, 2 and 1."""

    def make(settings: str = "") -> Path:
        for step in (1, 2, 3):
            folder = tmp_path / f"checkpoint-{step}"
            folder.mkdir()
            history = [{"step": step, "eval_loss": 4.0 - step}]
            state = {"global_step": step, "log_history": history, "stateful_callbacks": {}}
            (folder / "trainer_state.json").write_text(json.dumps(state))
            write_manifest(folder)
        (tmp_path / "recipe.yaml").write_text(f"metric_for_best_model: loss\n{settings}")
        return tmp_path

    return make


def test_manifest_on_windows(tmp_path, monkeypatch):
    """There, fsync requires a file that is open for writing, and the names of a path are separated by backslashes."""

    class WindowsFile(type(tmp_path)):
        def open(self, mode="r", *args, **kwargs):
            file = super().open(mode, *args, **kwargs)
            writable[file.fileno()] = file.writable()
            return file

        def __str__(self):
            return super().__str__().replace("/ema", "\\ema").replace("ema/", "ema\\")

        def __fspath__(self):
            return super().__str__()

        as_posix = __fspath__

    def fsync(number):
        if not writable[number]:
            raise OSError(errno.EBADF, "Bad file descriptor")

    writable = {}
    monkeypatch.setattr(os, "fsync", fsync)
    (tmp_path / "ema").mkdir()
    (tmp_path / "ema" / "model.safetensors").write_bytes(b"1")
    write_manifest(WindowsFile(tmp_path))
    assert list(json.loads((tmp_path / MANIFEST).read_text())) == ["ema/model.safetensors"]
    assert checkpoint_error(tmp_path) is None


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("metric_for_best_model: loss", False),
        ("metric_for_best_model: bleu", True),
        ("metric_for_best_model: eval_ter", False),
        ("metric_for_best_model: loss\ngreater_is_better: true", True),
        ("metric_for_best_model: bleu\ngreater_is_better: false", False),
        ("metric_for_best_model: ter\ngreater_is_better: null", False),
    ],
)
def test_greater_is_better(tmp_path, lines, expected):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"corpus: demo\noutput_dir: out\n{lines}\n")
    assert read_recipe([str(path)]).training.greater_is_better is expected


@pytest.mark.parametrize(("settings", "best"), [("greater_is_better: false", 3), ("greater_is_better: true", 1)])
def test_best_checkpoint_follows_greater_is_better(make_run, settings, best):
    run = make_run(settings)
    assert select_run_checkpoints(run, 1, "best") == [run / f"checkpoint-{best}"]


@pytest.mark.parametrize(
    ("settings", "name", "best"),
    [
        ("metric: sequence", "exact_match", 1),
        ("metric: translation", "bleu", 1),
        ("metric: translation\npredict_with_generate: false", "loss", 3),
    ],
)
def test_best_checkpoint_by_default_metric(make_run, settings, name, best):
    run = make_run()
    for path in run.glob("*/trainer_state.json"):
        path.write_text(path.read_text().replace("eval_loss", f"eval_{name}"))
        write_manifest(path.parent)
    (run / "recipe.yaml").write_text(settings)
    assert select_run_checkpoints(run, 1, "best") == [run / f"checkpoint-{best}"]


def test_copies_of_the_user_are_not_checkpoints_of_the_run(make_run):
    run = make_run()
    copies = [run / "checkpoint-6-backup", run / "checkpoint-4.keep", run / "my-checkpoint-5"]
    for copy in copies:
        shutil.copytree(run / "checkpoint-3", copy)
    assert last_valid_checkpoint(run) == run / "checkpoint-3"
    assert select_checkpoints(run, 9, "last") == [run / f"checkpoint-{number}" for number in (1, 2, 3)]
    keep_only(run, [])
    assert sorted(path for path in run.iterdir() if path.is_dir()) == sorted(copies)


@pytest.mark.parametrize("selection", [{"last": 0}, {"best": 0}, {"last": 1, "best": 1}])
def test_rejects_wrong_selection(make_run, tmp_path, selection):
    with pytest.raises(ValueError, match="--last and --best require one run directory and a number of at least 1"):
        average(make_run(), tmp_path / "mean", **selection)


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ("save_total_limit: 3", "The run kept save_total_limit=3. Train with --save-total-limit 5, or average 3."),
        ("save_total_limit: null", ""),
    ],
)
def test_too_few_checkpoints_name_the_setting(make_run, settings, advice):
    message = f"has only 3 complete checkpoints, expected 5. {advice}".rstrip()
    with pytest.raises(ValueError, match=re.escape(message) + "$"):
        select_run_checkpoints(make_run(settings), 5, "last")


def test_averages_last_checkpoints_if_none_has_the_metric(make_run):
    run = make_run()
    args = SimpleNamespace(output_dir=str(run), average_by="best", average_checkpoints=2)
    trainer = SimpleNamespace(args=args, save_total_limit=1)
    trainer.checkpoints_to_average = partial(TokenBatchTrainer.checkpoints_to_average, trainer)
    for metric, chosen in (("chrf", [2, 3]), ("loss", [3, 2])):
        vars(args).update(metric_for_best_model=metric, greater_is_better=False)
        assert trainer.checkpoints_to_average() == [run / f"checkpoint-{number}" for number in chosen]
        assert set(TokenBatchTrainer.checkpoints_to_keep(trainer)) == {run / "checkpoint-2", run / "checkpoint-3"}
    (run / "recipe.yaml").write_text("metric_for_best_model: bleu\n")
    with pytest.raises(ValueError, match="only 0 complete checkpoints with bleu, expected 2"):
        select_run_checkpoints(run, 2, "best")


@pytest.mark.parametrize(
    "content", ["", "[]", "3", "{", '{"log_history": 3}', '{"log_history": [{"step": "x"}], "x": 1}']
)
def test_rejects_unreadable_trainer_state(make_run, content):
    run = make_run()
    (run / "checkpoint-2" / "trainer_state.json").write_text(content)
    with pytest.raises(ValueError, match=r"checkpoint-2/trainer_state\.json"):
        select_checkpoints(run, 1, "best", "loss", False)


@pytest.mark.parametrize("content", ["[]", "null", "3", '"x"', '{"trainer_state.json": 3}', '{"../x": [1, "x"]}'])
def test_checkpoint_with_damaged_manifest_is_invalid(make_run, content):
    folder = make_run() / "checkpoint-1"
    assert checkpoint_error(folder) is None
    (folder / MANIFEST).write_text(content)
    assert checkpoint_error(folder)
