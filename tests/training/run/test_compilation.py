"""The compiled step on a CPU: loss, gradients, batch shapes, and unsupported settings."""

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters

from training.data.parallel_text import ParallelText
from training.data.tokenization import tokenize_corpus
from training.recipe.arguments import UNKNOWN_UPDATES, DataArguments
from training.run import compilation
from training.run.compilation import make_compiled_loss, masked_training_loss, resolve_step_mode
from training.run.losses import training_loss


@pytest.fixture(autouse=True)
def _trace_only(monkeypatch):
    """Trace and differentiate as for a GPU, but without generating machine code, which takes minutes."""
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)  # pytest would format each line
    torch._dynamo.reset()
    counters.clear()


def count_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def assert_equal_losses(trainer, one, other):
    """Compare value and gradients on two batches."""
    model, args = trainer.model.train(), trainer.args
    for batch in map(trainer._prepare_inputs, list(trainer.get_train_dataloader())[:2]):
        results = []
        for loss in (one, other):
            model.zero_grad()
            value = loss(model, dict(batch), args.label_smoothing_factor, args.rdrop_alpha)
            value.backward()
            results.append([value.detach(), *(p.grad.clone() for p in model.parameters())])
        for first, second in zip(*results, strict=True):
            torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rdrop_alpha", [0.0, 2.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_masked_loss_equals_eager_loss(make_trainer, smoothing, rdrop_alpha):
    trainer = make_trainer(step_mode="compiled", label_smoothing_factor=smoothing, rdrop_alpha=rdrop_alpha)
    assert_equal_losses(trainer, masked_training_loss, lambda *args: training_loss(*args, use_fused_loss=True)[0])


@pytest.mark.slow
def test_compiled_loss_with_rdrop_equals_eager_loss(make_trainer):
    trainer = make_trainer(layers=1, step_mode="compiled", rdrop_alpha=2.0)
    assert_equal_losses(trainer, trainer.compiled_loss, masked_training_loss)


@pytest.mark.slow
def test_dropout_differs_between_steps(make_trainer):
    trainer = make_trainer(dropout=0.3, layers=1, step_mode="compiled")
    model, batch = trainer.model.train(), trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    losses = {float(trainer.compiled_loss(model, batch, 0.0, 0.0).detach()) for _ in range(3)}
    assert len(losses) == 3


@pytest.mark.slow
def test_each_of_many_runs_in_a_process_is_compiled(make_trainer, monkeypatch):
    """torch stops compiling a function after a number of variants, without an error."""
    monkeypatch.setattr(compilation, "BACKEND", "eager")
    trainer = make_trainer(layers=1, step_mode="compiled")
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    for number in range(1, 11):
        compilation.CompiledLoss()(trainer.model, batch, number / 100, 0.0)
        assert count_graphs() == number


@pytest.mark.slow
def test_at_most_twelve_shapes_and_no_compilation_after_first_epoch(make_trainer):
    trainer = make_trainer(layers=1, step_mode="compiled", tokens_per_update=24, num_train_epochs=4, max_steps=-1)
    seen, after_epoch = set(), []
    original = trainer.training_step

    def step(model, inputs, *args):
        seen.add(tuple(inputs["input_ids"].shape + inputs["labels"].shape))
        loss = original(model, inputs, *args)
        after_epoch.append(count_graphs())
        return loss

    trainer.training_step = step
    trainer.train()
    assert 1 < len(seen) <= 12
    assert set(after_epoch) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_training_equals_eager_training(make_trainer, monkeypatch, tmp_path, read_messages, backend):
    monkeypatch.setattr(compilation, "BACKEND", backend)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    weights = []
    for step in ("compiled", "eager"):
        torch.manual_seed(0)
        trainer = make_trainer(
            layers=1,
            step_mode="compiled",
            tokens_per_update=24,
            max_steps=6,
            ema_decay=0.9,
            gradient_accumulation_steps=2,
            adam_epsilon=1e-3,
        )
        if step == "eager":
            trainer.compiled_loss.compiled = masked_training_loss
        trainer.train()
        assert trainer.compiled_loss is not None, read_messages()
        weights.append([*trainer.model.parameters(), *trainer.ema_model.parameters()])
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_resumes_bit_for_bit_within_an_epoch(make_trainer, tmp_path):
    keys = {
        "layers": 1,
        "step_mode": "compiled",
        "tokens_per_update": 24,
        "dropout": 0.1,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    keys["save_total_limit"] = 9
    torch.manual_seed(0)
    make_trainer(**keys, max_steps=5, output_dir=str(tmp_path / "uninterrupted")).train()
    assert json.loads((tmp_path / "uninterrupted" / "checkpoint-2" / "trainer_state.json").read_text())["epoch"] % 1
    shutil.copytree(tmp_path / "uninterrupted" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    resumed = make_trainer(**keys, max_steps=5, output_dir=str(tmp_path / "resumed"))
    resumed.train(resume_from_checkpoint=str(tmp_path / "resumed" / "checkpoint-2"))
    ends = [tmp_path / name / "checkpoint-5" for name in ("uninterrupted", "resumed")]
    first, second = (load_file(end / "model.safetensors") for end in ends)
    assert all(first[name].equal(second[name]) for name in first)
    assert len({json.loads((end / "progress.json").read_text())["target_tokens"] for end in ends}) == 1


@pytest.mark.slow
def test_falls_back_to_eager_if_compilation_fails(make_trainer, monkeypatch, read_messages):
    def broken(graph, inputs):
        raise NotImplementedError("no such machine")

    monkeypatch.setattr(compilation, "BACKEND", broken)
    trainer = make_trainer(layers=1, step_mode="compiled", max_steps=2)
    trainer.train()
    output = read_messages()
    assert "the compiled training step failed, training continues with eager steps" in output
    assert "no such machine" in output
    assert trainer.compiled_loss is None
    assert trainer.state.global_step == 2


@pytest.mark.slow
def test_graph_has_no_scalar_inputs(make_trainer, monkeypatch):
    """Smoothing and weight of R-Drop are constants. Inputs would be traced twice, and be float64 tensors on the CPU."""
    scalars = []

    def backend(graph, inputs):
        scalars.append([value for value in inputs if isinstance(value, torch.Tensor) and value.ndim == 0])
        return graph

    monkeypatch.setattr(compilation, "BACKEND", backend)
    make_trainer(layers=1, step_mode="compiled", max_steps=1, label_smoothing_factor=0.1).train()
    assert scalars == [[]]


def wrong_loss(*args):
    return 1.01 * masked_training_loss(*args)


def wrong_gradient(*args):
    loss = masked_training_loss(*args)
    return 1.01 * loss - 0.01 * loss.detach()


class FailingLoss:
    """Loss that fails like a GPU, from the first batch of the second shape on."""

    def __init__(self):
        self.first = None

    def __call__(self, model, inputs, *settings):
        shape = inputs["input_ids"].shape, inputs["labels"].shape
        self.first = self.first or shape
        if shape != self.first:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return masked_training_loss(model, inputs, *settings)


def train_with_loss(make_trainer, loss):
    torch.manual_seed(0)
    keys = {"tokens_per_update": 24, "max_steps": 6, "gradient_accumulation_steps": 2, "adam_epsilon": 1e-4}
    trainer = make_trainer(dropout=0.1, layers=1, step_mode="compiled", **keys)
    trainer.compiled_loss.compiled = loss
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (wrong_loss, "the loss is"),
        (wrong_gradient, "the gradient norm is"),
        (FailingLoss(), "OutOfMemoryError: CUDA out of memory"),
    ],
)
def test_falls_back_to_eager_if_compiled_loss_is_wrong(make_trainer, monkeypatch, read_messages, loss, reason):
    """The weights become those of a run that is eager from the start."""
    trainer = train_with_loss(make_trainer, loss)
    output = read_messages()
    assert output.count("training continues with eager steps") == 1
    assert reason in output
    assert trainer.compiled_loss is None
    monkeypatch.setattr(compilation.CompiledLoss, "find_error", lambda *args: "not tried")
    eager = train_with_loss(make_trainer, None)
    for one, other in zip(trainer.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_verification_changes_neither_gradients_nor_random_numbers(make_trainer, monkeypatch):
    trainer = train_with_loss(make_trainer, masked_training_loss)
    assert trainer.compiled_loss is not None
    monkeypatch.setattr(compilation.CompiledLoss, "is_new_shape", lambda *args: False)
    other = train_with_loss(make_trainer, masked_training_loss)
    assert all(a.equal(b) for a, b in zip(trainer.model.parameters(), other.model.parameters(), strict=True))


@pytest.mark.slow
def test_two_processes_train_the_same_model_as_eager_steps(tmp_path):
    """A compiled step does not call `DistributedDataParallel`, and averages the gradients of the processes itself.

    The step is a single graph. `DistributedDataParallel` would split it.
    """
    program = Path(__file__).with_name("train_in_processes.py")
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, program, tmp_path], check=True, env=os.environ | {"PYTHONPATH": str(root)})
    weights = [torch.load(tmp_path / f"{mode}_{rank}.pt") for mode in ("compiled", "eager") for rank in (0, 1)]
    for tensors in zip(*weights, strict=True):
        assert tensors[0].equal(tensors[1])
        assert tensors[2].equal(tensors[3])
        torch.testing.assert_close(tensors[0], tensors[2], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_nonfinite_loss_ends_the_run(make_trainer):
    trainer = make_trainer(layers=1, step_mode="compiled", learning_rate=1e30, max_steps=6, max_grad_norm=0)
    with pytest.raises(FloatingPointError, match="Lower learning_rate"):
        trainer.train()


def make_args(device="cuda", **keys):
    defaults = {"fsdp": False, "activation_checkpointing": False, "simcut_alpha": 0.0}
    defaults |= {"device": torch.device(device), "minutes": None}
    defaults |= {"max_steps": UNKNOWN_UPDATES, "bf16": False, "fp16": False}
    return SimpleNamespace(**(defaults | keys))


def test_bpe_dropout_trains_with_step_mode_compiled(make_trainer, tokenizer, sentences):
    text = ParallelText(sentences["en"] * 3, sentences["de"] * 3)
    data = tokenize_corpus(text, tokenizer, DataArguments(), dropout=0.9)
    trainer = make_trainer(layers=1, step_mode="compiled")
    trainer = type(trainer)(
        model=trainer.model, args=trainer.args, train_dataset=data, processing_class=tokenizer,
        data_collator=trainer.data_collator,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 3


@pytest.mark.parametrize(
    ("requested", "keys", "expected", "reason"),
    [
        ("auto", {"device": "cpu"}, "eager", ""),
        ("auto", {}, "compiled", ""),
        ("auto", {"max_steps": 1600}, "eager", "too short"),
        ("compiled", {"max_steps": 1600}, "compiled", ""),
        ("compiled", {}, "compiled", ""),
        ("compiled", {"fsdp": True}, "eager", "FSDP"),
        ("compiled", {"activation_checkpointing": True}, "eager", "activation_checkpointing"),
        ("compiled", {"simcut_alpha": 3.0}, "eager", "SimCut"),
        ("compiled", {"columns": ["lengths"]}, "eager", "BPE-dropout"),
        ("compiled", {"device": "cpu"}, "compiled", ""),
        ("eager", {}, "eager", ""),
    ],
)
def test_resolve_step_mode(make_model, read_messages, requested, keys, expected, reason):
    dataset = SimpleNamespace(column_names=keys.get("columns", []))
    assert resolve_step_mode(make_model(), make_args(step_mode=requested, **keys), dataset) == expected
    assert reason in (output := read_messages())
    assert bool(output) == bool(reason)


@pytest.mark.parametrize(("minutes", "is_compiled"), [(9, False), (10, True)])
def test_minutes_determine_whether_a_run_is_compiled(make_model, minutes, is_compiled):
    args = make_args(step_mode="auto", minutes=minutes)
    assert (make_compiled_loss(make_model(), args, None) is not None) == is_compiled
