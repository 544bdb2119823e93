"""Training on a simulated CUDA device: complete runs, few synchronizations, precision.

`test_simulated_devices.py` runs these tests in a process with simulated devices.
"""

import json
import math
import signal
from functools import partial
from pathlib import Path

import pytest
import simulated_cuda
import torch
from transformers import TrainerCallback

from training.run import compilation, distributed
from training.run.compilation import masked_training_loss


class UpdateCounter(TrainerCallback):
    """Counts the synchronizations of all updates from the third on. The run must not log, evaluate or save."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            self.start = simulated_cuda.synchronizations.copy()
        self.synchronizations = simulated_cuda.synchronizations - self.start if state.global_step > 2 else None


@pytest.fixture
def run_train(run_train):
    """Function (setup, keys) as for other devices, but with one process."""
    return partial(run_train, num_processes=1)


@pytest.fixture
def configure():
    """Function (settings): change the settings of the simulated devices, until the end of the test."""
    yield lambda **settings: simulated_cuda.install(devices=2, **settings)
    simulated_cuda.install(devices=2)


@pytest.mark.parametrize(
    "keys",
    [
        {"eval_strategy": "steps", "eval_steps": 5, "num_beams": 2},
        {"ema_decay": 0.9, "gradient_accumulation_steps": 2},
        {"rdrop_alpha": 1},
        {"simcut_alpha": 1},
    ],
)
def test_run_is_complete(run_train, losses, keys):
    trainer, results = run_train(max_steps=10, logging_steps=5, **keys)
    assert trainer.args.device == torch.device("cuda:0")
    assert trainer.args.precision == "bf16"
    assert trainer.state.global_step == 10
    assert math.isfinite(results["test_bleu"])
    assert losses(trainer)[-1] < losses(trainer)[0]


@pytest.mark.parametrize("step_mode", ["eager", "compiled"])
def test_updates_do_not_synchronize(run_train, step_mode):
    """Only logging does. The loss is not compiled here, which would take minutes."""
    counter = UpdateCounter()

    def setup(trainer):
        trainer.add_callback(counter)
        if trainer.compiled_loss is not None:
            trainer.compiled_loss.compiled = masked_training_loss
            trainer.compiled_loss.is_new_shape = lambda inputs: False

    keys = {"max_steps": 8, "logging_steps": 1000, "gradient_accumulation_steps": 2, "ema_decay": 0.9}
    trainer, _ = run_train(setup, step_mode=step_mode, **keys)
    assert (trainer.compiled_loss is not None) == (step_mode == "compiled")
    assert counter.synchronizations == {}


def test_compiled_updates_equal_eager_ones_and_do_not_synchronize(run_train, monkeypatch):
    """The graphs are traced and differentiated, but not compiled to machine code, which Triton does on a GPU.

    Only the verification of the first batch of each shape synchronizes.
    """
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")
    counter, verified = UpdateCounter(), []
    keys = {"max_steps": 8, "logging_steps": 1000, "dropout": 0, "precision": "fp32", "tokens_per_update": 128}
    keys |= {"gradient_accumulation_steps": 2, "ema_decay": 0.9, "adam_epsilon": 1e-3}

    def setup(trainer):
        find_error = trainer.compiled_loss.find_error

        def verify(*arguments):
            before = simulated_cuda.synchronizations.copy()
            error = find_error(*arguments)
            simulated_cuda.synchronizations.subtract(simulated_cuda.synchronizations - before)
            assert error is None, error
            verified.append(arguments)
            return error

        trainer.compiled_loss.find_error = verify
        trainer.add_callback(counter)

    trainer, _ = run_train(setup, step_mode="compiled", **keys)
    assert trainer.compiled_loss is not None
    assert len(trainer.compiled_loss.shapes) == len(verified) > 1
    assert counter.synchronizations == {}

    def eager(trainer):
        trainer.compiled_loss.find_error = lambda *args: "not tried"

    expected, _ = run_train(eager, step_mode="compiled", **keys)  # with the same batches
    assert expected.compiled_loss is None
    for one, other in zip(trainer.model.parameters(), expected.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_two_devices_share_the_pairs_of_each_update(run_train, monkeypatch, tmp_path, capfd):
    """The command starts one process per device. Each records its batches of the first epoch, instead of training."""
    handlers = {number: signal.getsignal(number) for number in distributed.STOP_SIGNALS}
    monkeypatch.setattr(distributed, "COMMAND", (str(Path(__file__).with_name("record_batches.py")),))
    keys = {"corpus": "random", "tokens_per_update": 4096, "max_length": 1000, "max_steps": 1}
    folder = tmp_path / "two"
    try:
        with pytest.raises(SystemExit) as end:
            run_train(num_processes="auto", output_dir=str(folder), **keys)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    output = capfd.readouterr()
    assert end.value.code == 0, output.err
    assert "2 processes x 1 batch of 2,048 tokens = 4,096 tokens per update (CUDA, bf16)" in output.err
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert [(rank["device"], rank["processes"]) for rank in ranks] == [("cuda:0", 2), ("cuda:1", 2)]
    single = list(run_train(**keys)[0].get_train_dataloader())  # two micro-batches per update
    assert len(single) > 3
    shares = [share for pair in zip(*(rank["labels"] for rank in ranks), strict=True) for share in pair]
    for batch, share in zip(single, shares, strict=True):
        assert [[each for each in row if each != -100] for row in batch["labels"].tolist()] == share


def test_fp16_reaches_the_loss_of_bf16(run_train, losses, configure):
    keys = {"max_steps": 100, "logging_steps": 20, "tokens_per_update": 256, "seed": 1}
    expected = losses(run_train(**keys)[0])[-1]
    configure(capability=(7, 5))
    trainer, _ = run_train(**keys)
    assert trainer.args.precision == "fp16"
    assert losses(trainer)[-1] == pytest.approx(expected, rel=0.02)


def test_skipped_updates_are_logged(run_train, configure):
    configure(capability=(7, 5))
    initial = []

    def overflow(trainer):
        trainer.accelerator.scaler.load_state_dict(trainer.accelerator.scaler.state_dict() | {"scale": 2.0**100})
        initial.extend(parameter.clone() for parameter in trainer.model.parameters())

    trainer, _ = run_train(overflow, max_steps=4, logging_steps=2, tokens_per_update=64)
    logged = [entry["skipped_updates"] for entry in trainer.state.log_history if "skipped_updates" in entry]
    assert logged == [2, 4]
    assert all(a.equal(b) for a, b in zip(trainer.model.parameters(), initial, strict=True))


def test_micro_batches_are_halved_if_memory_is_too_small(run_train, losses, configure, read_messages):
    """The updates remain the same."""
    keys = {"max_steps": 6, "logging_steps": 1, "dropout": 0, "tokens_per_update": 512, "precision": "fp32"}
    expected = run_train(**keys)[0]
    assert expected.args.gradient_accumulation_steps == 2
    configure(max_tokens=150)
    trainer = run_train(lambda trainer: configure(), **keys)[0]  # the limit ends before the evaluation
    assert trainer.args.gradient_accumulation_steps == 4
    assert "larger batches do not fit into memory: 4 accumulation steps, not 2" in read_messages()
    assert losses(trainer) == pytest.approx(losses(expected), rel=1e-3)


def test_requested_max_tokens_that_does_not_fit_is_an_error(run_train, configure, capsys):
    configure(max_tokens=150)
    with pytest.raises(SystemExit):
        run_train(max_steps=6, max_tokens=512, tokens_per_update=512)
    assert "max_tokens=512 does not fit into the memory of the device, but 128 does" in capsys.readouterr().err
