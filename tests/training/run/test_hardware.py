"""Choosing precision and attention by measurement, with a clock of the test's own."""

from types import SimpleNamespace

import pytest
import torch

from training.run import factories, hardware
from training.run.factories import resolve_precision_and_attention
from training.run.hardware import choose_precision_and_attention, has_bf16

AUTO = ("auto", "auto")


class Machine:
    """A processor on which a training step takes a given number of seconds.

    Args:
        model: model whose attention is measured.
        seconds: seconds per step by precision and attention; a list has one number per step, the last one for all
            further steps.
    """

    def __init__(self, model, **seconds):
        self.model, self.seconds = model, seconds
        self.now, self.steps = 0.0, []

    def clock(self):
        return self.now

    def loss_of(self, batch):
        precision = "bf16" if torch.is_autocast_enabled("cpu") else "fp32"
        name = f"{precision}_{self.model.config._attn_implementation}"
        times = self.seconds[name]
        if isinstance(times, list):
            times = times[min(self.steps.count(name), len(times) - 1)]
        self.steps.append(name)
        self.now += times
        return next(self.model.parameters()).sum()

    def choose(self, precision="auto", attention="auto", steps=10_000, batches=12):
        given = [{}] * batches
        return choose_precision_and_attention(
            self.model, given, precision, attention, self.loss_of, steps=steps, clock=self.clock
        )


@pytest.fixture
def machine(make_model, monkeypatch):
    monkeypatch.setattr(hardware, "has_bf16", lambda: True)
    return lambda **seconds: Machine(make_model(encoder_layers=1, decoder_layers=1), **seconds)


def test_the_fastest_is_chosen_without_its_first_step(machine):
    found = machine(fp32_sdpa=1.0, fp32_eager=1.25, bf16_eager=[50.0, 0.875])
    assert found.choose() == ("bf16", "eager", {"fp32 sdpa": 1.0, "fp32 eager": 1.25, "bf16 eager": 0.875})
    assert len(found.steps) == 36


def test_a_candidate_that_is_clearly_slower_is_dropped_after_two_batches(machine):
    found = machine(fp32_sdpa=1.0, fp32_eager=1.2, bf16_eager=15.0)
    assert found.choose()[:2] == ("fp32", "sdpa")
    assert [found.steps.count(name) for name in found.seconds] == [12, 12, 2]


def test_nothing_more_is_measured_where_one_candidate_is_left(machine):
    found = machine(fp32_sdpa=1.0, fp32_eager=2.1, bf16_eager=15.0)
    assert found.choose()[:2] == ("fp32", "sdpa")
    assert len(found.steps) == 6


@pytest.mark.parametrize("steps", [1, 100, 199, 200, 300, 500, 1000, 5000])
@pytest.mark.parametrize("eager", [0.5, 0.9, 1.1])
def test_the_measurement_takes_at_most_three_percent_of_the_run(machine, steps, eager):
    """Or a step more, since it cannot be known before how long a step takes."""
    found = machine(fp32_sdpa=1.0, fp32_eager=eager, bf16_eager=0.95)
    found.choose(steps=steps)
    assert found.now <= 0.03 * steps * min(eager, 0.95) + 1.1
    assert bool(found.steps) == (steps >= 200)


def test_a_run_that_is_too_short_to_measure_takes_the_default(machine):
    found = machine(fp32_sdpa=1.0, fp32_eager=0.1, bf16_eager=0.1)
    assert found.choose(steps=100) == ("fp32", "sdpa", {})
    assert found.choose(steps=100, precision="bf16") == ("bf16", "eager", {})
    assert found.choose(steps=100, attention="eager") == ("fp32", "eager", {})


def test_bf16_is_not_tried_on_a_processor_without_it(machine, monkeypatch):
    monkeypatch.setattr(hardware, "has_bf16", lambda: False)
    found = machine(fp32_sdpa=1.0, fp32_eager=0.9)
    assert found.choose()[:2] == ("fp32", "eager")
    assert found.choose(precision="bf16") == ("bf16", "eager", {})  # it was asked for


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"avx2": True, "avx512_f": True, "avx512_bf16": False}, False),
        ({"avx512_bf16": True}, True),
        ({"amx_bf16": True}, True),
        ({"neon": True, "bf16": True}, True),
        ({"neon": True}, False),
    ],
)
def test_bf16_is_found_among_the_instructions_of_the_processor(monkeypatch, flags, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags, raising=False)
    assert has_bf16() is expected


@pytest.mark.parametrize(("flags", "expected"), [("fpu sse avx2", False), ("avx2 avx512_bf16 x", True), (None, False)])
def test_without_the_list_of_torch_the_one_of_linux_is_read(monkeypatch, tmp_path, flags, expected):
    path = tmp_path / "cpuinfo"
    if flags is not None:
        path.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(hardware, "Path", lambda name: path)
    assert has_bf16() is expected


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        ({"max_steps": 7, "gradient_accumulation_steps": 3}, 21),
        ({"max_steps": -1, "num_train_epochs": 2.5}, 2.5 * 4),  # four batches of a sentence
    ],
)
def test_it_is_measured_once_for_a_folder(make_trainer, monkeypatch, tmp_path, keys, steps):
    """A start that died before its first checkpoint has left its `recipe.yaml`."""
    trainer = make_trainer(max_tokens=9, **keys)
    calls = []

    def choose(model, batches, precision, attention, loss_of, steps):
        calls.append((precision, attention, steps, len(batches)))
        return "fp32", "eager", {}

    monkeypatch.setattr(factories, "choose_precision_and_attention", choose)
    recipe = SimpleNamespace(training=trainer.args)
    given = (trainer.model, trainer.train_dataset, trainer.data_collator, tmp_path)
    (tmp_path / "recipe.yaml").write_text("precision: auto\nattn_implementation: auto\n")
    resolve_precision_and_attention(recipe, *given)
    assert calls == [(*AUTO, steps, 4)]
    (tmp_path / "recipe.yaml").write_text(
        f"precision: {trainer.args.precision}\nattn_implementation: {trainer.args.attn_implementation}\n"
    )
    trainer.args.precision = trainer.args.attn_implementation = "auto"
    resolve_precision_and_attention(recipe, *given)
    assert len(calls) == 1
    assert (trainer.args.precision, trainer.args.attn_implementation) == ("fp32", "eager")
    assert trainer.model.config._attn_implementation == "eager"
