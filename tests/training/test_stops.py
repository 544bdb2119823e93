"""Stopped and resumed runs: files, scores and weights equal those of an uninterrupted run."""

import gc
import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import yaml

from training.run.trainer import TokenBatchTrainer
from training.run.training import train as train_recipe

UPDATES = 40
RECIPE = """
tokenizer_vocab_size: 120
d_model: 8
encoder_layers: 1
decoder_layers: 1
encoder_attention_heads: 2
decoder_attention_heads: 2
encoder_ffn_dim: 8
decoder_ffn_dim: 8
tokens_per_update: 96
max_steps: 40
learning_rate: 0.05
warmup_steps: 3
logging_steps: 3
per_device_eval_batch_size: 8
precision: fp32
attn_implementation: sdpa
use_cpu: true
num_beams: 1
max_new_tokens: 6
disable_tqdm: true
report_to: none
"""
STEPS = {"eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 10}
EPOCHS = {"eval_strategy": "epoch", "save_strategy": "epoch"}
BEST = {"average_by": "best", "average_checkpoints": 2}
STRATEGIES = {
    "steps, the mean of the last": {**STEPS, "average_checkpoints": 3, "save_total_limit": 1},
    "steps, the mean of the best": {**STEPS, **BEST, "save_steps": 5, "metric_for_best_model": "loss"},
    "epochs, the mean of the last": {**EPOCHS, "average_checkpoints": 2, "save_total_limit": 3},
    "epochs, the mean of the best": {**EPOCHS, **BEST},
    "saved at steps, evaluated at epochs": {**STEPS, "eval_strategy": "epoch", "save_steps": 3, "ema_decay": 0.9},
    "saved at epochs, evaluated at steps": {**EPOCHS, "eval_strategy": "steps", "eval_steps": 4},
    "never saved, evaluated at steps": {"save_strategy": "no", "eval_strategy": "steps", "eval_steps": 7},
    "never saved, evaluated at epochs": {
        "save_strategy": "no",
        "eval_strategy": "epoch",
        "gradient_accumulation_steps": 2,
    },
    "plateau": {**STEPS, "lr_scheduler_type": "reduce_lr_on_plateau", "eval_steps": 2, "save_steps": 4},
    "early stopping": {**STEPS, "early_stopping_patience": 2, "eval_steps": 3, "save_strategy": "epoch"},
}


TIMED = {"files.json", "progress.json", "trainer_state.json", "recipe.yaml"}  # files that contain times or paths


class Kill(BaseException):
    """Simulated kill: ends a run without saving."""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    from training.demo.corpus import generate

    folder = tmp_path_factory.mktemp("data")
    for split, pairs in generate(train=60, validation=4, test=1).items():
        for side, language in enumerate(("en", "de")):
            path = folder / f"{'val' if split == 'validation' else split}.{language}"
            path.write_text("".join(pair[side] + "\n" for pair in pairs))
    return folder


@pytest.fixture
def _fast(monkeypatch):
    """Skip fsync, freeze the garbage collector, which Accelerate runs at each start, and parse recipes with libyaml."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(yaml, "SafeLoader", yaml.CSafeLoader)
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def train(_fast, data, tmp_path, monkeypatch):
    """Return a function that runs `action` in an update and returns the exit status and output directory."""
    step = TokenBatchTrainer.training_step

    def start(settings: dict, name: str, action=None, update: int = 0) -> tuple[int, Path]:
        actions = [action] if action else []

        def training_step(self, *args, **kwargs):
            if actions and self.state.global_step + 1 == update:
                actions.pop()()
            return step(self, *args, **kwargs)

        monkeypatch.setattr(TokenBatchTrainer, "training_step", training_step)
        path = tmp_path / "tiny.yaml"
        path.write_text(RECIPE)
        keys = {"data_dir": data, **settings, "output_dir": tmp_path / name}
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        try:
            result = train_recipe(path, **keys)
            status = 128 + result.stop_signal if result.stop_signal else 0
        except Kill:
            status = -9
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
        return status, tmp_path / name

    return start


def terminate() -> None:
    signal.raise_signal(signal.SIGTERM)


def kill() -> None:
    raise Kill


def result(folder: Path) -> dict:
    """Return the files and scores of a run, without times."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    results = json.loads(files.pop("all_results.json"))
    for name in [name for name in files if Path(name).suffix in (".pt", ".pth") or Path(name).name in TIMED]:
        files[name] = b""
    timed = ("runtime", "per_second", "seconds")
    files["scores"] = {key: value for key, value in results.items() if not key.endswith(timed)}
    return files


@pytest.mark.slow
@pytest.mark.parametrize("action", [terminate, kill])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_run_stopped_in_each_update_equals_uninterrupted_run(train, read_messages, strategy, action):
    """A signal or a kill stops the run in each of its updates, and it is resumed each time."""
    settings = STRATEGIES[strategy]
    status, folder = train(settings, "expected")
    assert status == 0
    expected = result(folder)
    for update in range(1, UPDATES + 1):
        read_messages()
        status, folder = train(settings, "stopped", action, update)
        if status == 0:  # early stopping
            break
        assert status == (-9 if action is kill else 128 + signal.SIGTERM)
        if action is terminate:
            done = f"stopped at update {update} of {UPDATES}. The same command resumes from checkpoint-{update}."
            assert done in read_messages()
    assert update == UPDATES or "early" in strategy
    assert train(settings, "stopped")[0] == 0
    found = result(folder)
    assert found["scores"] == expected["scores"]
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_run_stopped_once_equals_uninterrupted_run(train, strategy):
    """The resumed run trains for many updates, unlike above."""
    settings = STRATEGIES[strategy]
    expected = result(train(settings, "expected")[1])
    for update, action in ((4, terminate), (10, kill), (13, terminate), (21, kill), (29, terminate)):
        if train(settings, "stopped", action, update)[0] == 0:  # early stopping
            break
        status, folder = train(settings, "stopped")
        assert status == 0
        assert result(folder) == expected, update
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_signal_during_each_evaluation(train, read_messages, monkeypatch, strategy):
    settings = STRATEGIES[strategy]
    evaluate, interrupted = TokenBatchTrainer.evaluate, []

    def observed(self, *args, **kwargs):
        evaluated.append(self.state.global_step)
        return evaluate(self, *args, **kwargs)

    def interrupt(self, *args, **kwargs):
        if self.state.global_step not in interrupted:
            interrupted.append(self.state.global_step)
            terminate()
        return evaluate(self, *args, **kwargs)

    evaluated: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(TokenBatchTrainer, "evaluate", observed)
        expected = result(train(settings, "expected")[1])
        patched.setattr(TokenBatchTrainer, "evaluate", interrupt)
        while (status := train(settings, "stopped")[0]) != 0:
            assert status == 128 + signal.SIGTERM
            stopped = re.search(
                r"stopped at update (\d+) of 40. The same command resumes from checkpoint-\1\.", read_messages()
            )
            assert int(stopped[1]) - interrupted[-1] in (0, 1)  # the update that follows is completed
    assert interrupted == evaluated
    assert result(train(settings, "stopped")[1]) == expected


@pytest.mark.parametrize(
    ("strategy", "start"), [("no", "the start, because nothing was saved"), ("steps", f"checkpoint-{UPDATES}")]
)
def test_signal_after_last_save_reports_correct_checkpoint(train, read_messages, monkeypatch, strategy, start):
    log = TokenBatchTrainer.log

    def interrupted(self, logs, *args, **kwargs):
        if "train_runtime" in logs:
            terminate()
        log(self, logs, *args, **kwargs)

    monkeypatch.setattr(TokenBatchTrainer, "log", interrupted)
    status, folder = train({"save_strategy": strategy, "save_steps": 40}, "stopped")
    assert status == 128 + signal.SIGTERM
    assert f"stopped at update 40 of 40. The same command resumes from {start}." in read_messages()
    assert len(list(folder.glob("checkpoint-*"))) == (strategy == "steps")
    assert not (folder / "all_results.json").exists()


def test_rejects_damaged_run_info(train):
    _, folder = train({}, "stopped", terminate, 3)
    for content in ("{", None):
        (folder / "run.json").unlink()
        if content:
            (folder / "run.json").write_text(content)
        with pytest.raises(ValueError, match="run.json is damaged"):
            train({}, "stopped")
        (folder / "run.json").touch()


def test_rejects_interrupted_run_of_an_earlier_version(train):
    """Its recipe has `max_tokens` for `tokens_per_update`. Unsupported keys without an effect are ignored."""
    _, folder = train({}, "stopped", terminate, 39)
    recipe = (folder / "recipe.yaml").read_text()
    kept = "hub_strategy: end\nlogging_nan_inf_filter: false\nper_device_train_batch_size: 16\nlocal_rank: 0\n"
    (folder / "recipe.yaml").write_text(recipe.replace("tokens_per_update:", "max_tokens:") + kept)
    with pytest.raises(ValueError, match="contains an interrupted run of an earlier version"):
        train({}, "stopped")
    (folder / "recipe.yaml").write_text(recipe + kept)
    assert train({}, "stopped")[0] == 0


@pytest.mark.parametrize("split", ["test", "val"])
def test_resumes_with_another_test_set(train, data, tmp_path, split):
    """Training does not depend on it, and it may need a correction."""
    mine = tmp_path / "mine"
    shutil.copytree(data, mine)
    settings = {"data_dir": mine, "test_file": "test"}
    train(settings, "stopped", terminate, 39)
    (mine / f"{split}.de").write_text("Ein Hund.\n" * (1 if split == "test" else 4))
    if split == "test":
        status, folder = train(settings, "stopped")
        assert status == 0
        assert "test_bleu" in json.loads((folder / "all_results.json").read_text())
    else:
        with pytest.raises(ValueError, match="contains a run on different data: sha256 of the validation data"):
            train(settings, "stopped")


def test_start_without_checkpoint_does_not_keep_the_tokenizer(train, data, tmp_path):
    mine = tmp_path / "mine"
    shutil.copytree(data, mine)
    for path in mine.glob("train.*"):
        path.write_text("".join(line[::-1] for line in path.read_text().splitlines(keepends=True)).strip() + "\n")
    settings = {"data_dir": mine, "max_steps": 2}
    assert train(settings, "stopped", kill, 1)[0] == -9
    shutil.copytree(data, mine, dirs_exist_ok=True)
    for name in ("stopped", "expected"):
        assert train(settings, name)[0] == 0
    assert result(tmp_path / "stopped") == result(tmp_path / "expected")


def test_run_resumed_after_last_epoch_has_the_same_results(train):
    """This happens after a kill while the test set is scored."""
    settings = {**EPOCHS, "max_steps": -1, "num_train_epochs": 2}
    _, folder = train(settings, "out")
    expected = result(folder)
    (folder / "all_results.json").unlink()
    train(settings, "out")
    assert result(folder) == expected


@pytest.mark.parametrize("keys", [{"metric_for_best_model": "loss", **BEST}, {"lr_scheduler_type": "greedy"}])
def test_save_total_limit_keeps_checkpoints_to_average(train, read_messages, keys):
    settings = {**STEPS, "save_steps": 5, "max_steps": 20, "average_checkpoints": 2, **keys}
    for limit in (1, 5):
        train({**settings, "save_total_limit": limit}, f"limit_{limit}")
    means = [line for line in read_messages().splitlines() if line.startswith("the final model is the mean")]
    assert means[0] == means[1]
    assert means[0].count("checkpoint-") == 2


def test_signal_during_early_stopping_keeps_the_checkpoint(train, monkeypatch):
    """`save_strategy` requested the checkpoint, so it is averaged."""
    settings = {**STEPS, "eval_steps": 3, "save_steps": 3, "early_stopping_patience": 2, "average_checkpoints": 2}
    settings |= {"save_total_limit": 5, "learning_rate": 1e-9}
    _, folder = train(settings, "expected")
    expected, last = result(folder), max(int(each.name[11:]) for each in folder.glob("checkpoint-*"))
    evaluate = TokenBatchTrainer.evaluate

    def interrupted(self, *args, **kwargs):
        if self.state.global_step == last:
            terminate()
        return evaluate(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(TokenBatchTrainer, "evaluate", interrupted)
        assert train(settings, "stopped")[0] == 128 + signal.SIGTERM
    status, folder = train(settings, "stopped")
    assert status == 0
    assert result(folder) == expected
