"""Choice of precision and attention by timing, with a simulated clock."""

from types import SimpleNamespace

import pytest
import torch

from training.recipe.arguments import TrainingArguments
from training.run import factories, hardware
from training.run.factories import resolve_precision_and_attention
from training.run.hardware import choose_precision_and_attention, fit_micro_batches, has_bf16

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
        empty_batches = [{}] * batches
        return choose_precision_and_attention(
            self.model, empty_batches, precision, attention, self.loss_of, steps=steps, clock=self.clock
        )


@pytest.fixture
def machine(make_model, monkeypatch):
    monkeypatch.setattr(hardware, "has_bf16", lambda: True)
    return lambda **seconds: Machine(make_model(encoder_layers=1, decoder_layers=1), **seconds)


def test_chooses_fastest_without_first_step(machine):
    simulated = machine(fp32_sdpa=1.0, fp32_eager=1.25, bf16_eager=[50.0, 0.875])
    assert simulated.choose() == ("bf16", "eager", {"fp32 sdpa": 1.0, "fp32 eager": 1.25, "bf16 eager": 0.875})
    assert len(simulated.steps) == 36


def test_drops_slow_candidates_after_two_batches(machine):
    simulated = machine(fp32_sdpa=1.0, fp32_eager=1.2, bf16_eager=15.0)
    assert simulated.choose()[:2] == ("fp32", "sdpa")
    assert [simulated.steps.count(name) for name in simulated.seconds] == [12, 12, 2]


def test_stops_timing_if_one_candidate_remains(machine):
    simulated = machine(fp32_sdpa=1.0, fp32_eager=2.1, bf16_eager=15.0)
    assert simulated.choose()[:2] == ("fp32", "sdpa")
    assert len(simulated.steps) == 6


@pytest.mark.parametrize("steps", [1, 100, 199, 200, 300, 500, 1000, 5000])
@pytest.mark.parametrize("eager", [0.5, 0.9, 1.1])
def test_timing_takes_at_most_three_percent_of_the_run(machine, steps, eager):
    """One additional step is allowed, because its time is unknown before."""
    simulated = machine(fp32_sdpa=1.0, fp32_eager=eager, bf16_eager=0.95)
    simulated.choose(steps=steps)
    assert simulated.now <= 0.03 * steps * min(eager, 0.95) + 1.1
    assert bool(simulated.steps) == (steps >= 200)


def test_short_run_uses_the_default(machine):
    simulated = machine(fp32_sdpa=1.0, fp32_eager=0.1, bf16_eager=0.1)
    assert simulated.choose(steps=100) == ("fp32", "sdpa", {})
    assert simulated.choose(steps=100, precision="bf16") == ("bf16", "eager", {})
    assert simulated.choose(steps=100, attention="eager") == ("fp32", "eager", {})


def test_does_not_time_bf16_without_instructions(machine, monkeypatch):
    monkeypatch.setattr(hardware, "has_bf16", lambda: False)
    simulated = machine(fp32_sdpa=1.0, fp32_eager=0.9)
    assert simulated.choose()[:2] == ("fp32", "eager")
    assert simulated.choose(precision="bf16") == ("bf16", "eager", {})  # as requested


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
def test_has_bf16_from_torch(monkeypatch, flags, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags, raising=False)
    assert has_bf16() is expected


@pytest.mark.parametrize(("flags", "expected"), [("fpu sse avx2", False), ("avx2 avx512_bf16 x", True), (None, False)])
def test_has_bf16_from_proc_cpuinfo(monkeypatch, tmp_path, flags, expected):
    path = tmp_path / "cpuinfo"
    if flags is not None:
        path.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(hardware, "Path", lambda name: path)
    assert has_bf16() is expected


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        ({"max_steps": 7, "gradient_accumulation_steps": 4}, 28),
        ({"max_steps": -1, "num_train_epochs": 2.5}, 2.5 * 4),  # four batches of one sentence
    ],
)
def test_timing_runs_once_per_output_dir(make_trainer, monkeypatch, tmp_path, keys, steps):
    """The `recipe.yaml` of an earlier start contains the choice, even without a checkpoint."""
    trainer = make_trainer(tokens_per_update=9, **keys)
    calls = []

    def choose(model, batches, precision, attention, loss_of, steps):
        calls.append((precision, attention, steps, len(batches)))
        return "fp32", "eager", {}

    monkeypatch.setattr(factories, "choose_precision_and_attention", choose)
    recipe = SimpleNamespace(training=trainer.args)
    inputs = (trainer.model, trainer.train_dataset, trainer.data_collator, tmp_path)
    (tmp_path / "recipe.yaml").write_text("precision: auto\nattn_implementation: auto\n")
    resolve_precision_and_attention(recipe, *inputs)
    assert calls == [(*AUTO, steps, 2)]  # of two updates
    (tmp_path / "recipe.yaml").write_text(
        f"precision: {trainer.args.precision}\nattn_implementation: {trainer.args.attn_implementation}\n"
        "step_mode: compiled\n"  # on another machine
    )
    trainer.args.precision = trainer.args.attn_implementation = trainer.args.step_mode = "auto"
    resolve_precision_and_attention(recipe, *inputs)
    assert len(calls) == 1
    assert (trainer.args.precision, trainer.args.attn_implementation) == ("fp32", "eager")
    assert trainer.args.step_mode == "compiled"
    assert trainer.model.config._attn_implementation == "eager"


@pytest.mark.parametrize(("requested", "launcher"), [("fp32", "bf16"), ("bf16", "no")])
def test_requested_precision_replaces_that_of_the_launcher(
    make_trainer, accelerate_environment, monkeypatch, tmp_path, requested, launcher
):
    trainer = make_trainer()
    for name, value in accelerate_environment("--mixed_precision", launcher).items():
        monkeypatch.setenv(name, value)
    keys = {"precision": requested, "attn_implementation": "eager", "max_steps": 3, "report_to": "none"}
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **keys)
    assert args.mixed_precision == launcher
    inputs = (trainer.model, trainer.train_dataset, trainer.data_collator, tmp_path)
    resolve_precision_and_attention(SimpleNamespace(training=args), *inputs)
    trainer = type(trainer)(
        model=trainer.model, args=args, train_dataset=trainer.train_dataset, data_collator=trainer.data_collator,
        processing_class=trainer.processing_class,
    )  # fmt: skip
    with trainer.accelerator.autocast():
        assert torch.is_autocast_enabled("cpu") == (requested == "bf16")


@pytest.mark.parametrize(("recomputes", "steps"), [(False, 4), (True, 1)])
def test_activation_checkpointing_saves_memory_for_larger_micro_batches(
    make_trainer, monkeypatch, read_messages, recomputes, steps
):
    trainer = make_trainer()
    args = SimpleNamespace(
        device=torch.device("meta"), fsdp=False, world_size=1, tokens_per_update=160, max_tokens="auto",
        gradient_accumulation_steps=1, activation_checkpointing=recomputes, activation_checkpointing_kwargs=None,
    )  # fmt: skip
    rows = hardware.largest_update(args, trainer.train_dataset).rows

    def fits_memory(args, model, shape):
        return model.get_encoder().gradient_checkpointing or shape.rows <= rows // 4

    monkeypatch.setattr(hardware, "fits_memory", fits_memory)
    fit_micro_batches(args, trainer.model, trainer.train_dataset)
    assert args.gradient_accumulation_steps == steps
    assert ("do not fit into memory" in read_messages()) == (steps > 1)
