"""The compiled step on a CPU: the plain loss and gradients, few shapes, one program, and what cannot be compiled."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters

from training.run import compiled
from training.run.compiled import choose_step, whole_loss
from training.run.losses import training_loss


@pytest.fixture(autouse=True)
def _traced_alone(monkeypatch):
    """Traced and differentiated as for a GPU; what then makes machine code of it is a matter of minutes."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    counters.clear()


def programs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("rdrop_alpha", [0.0, 2.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_value_and_gradients_are_the_plain_ones(make_trainer, smoothing, rdrop_alpha):
    trainer = make_trainer(step="compiled", label_smoothing_factor=smoothing, rdrop_alpha=rdrop_alpha)
    model = trainer.model.train()
    results = []
    for batch in list(trainer.get_train_dataloader())[:2]:
        for loss in (
            lambda batch: trainer.compiled_loss(model, batch, smoothing, rdrop_alpha),
            lambda batch: whole_loss(model, batch, smoothing, rdrop_alpha),
            lambda batch: training_loss(model, dict(batch), smoothing, rdrop_alpha, True)[0],
        ):
            model.zero_grad()
            value = loss(batch)
            value.backward()
            results.append([value.detach(), *(p.grad.clone() for p in model.parameters())])
        for found in results[-3:-1]:
            for one, other in zip(found, results[-1], strict=True):
                torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_dropout_differs_from_step_to_step_and_between_the_passes_of_rdrop(make_trainer):
    trainer = make_trainer(dropout=0.3, step="compiled")
    model, batch = trainer.model.train(), next(iter(trainer.get_train_dataloader()))
    losses = [float(trainer.compiled_loss(model, batch, 0.0, alpha)) for alpha in (0.0, 0.0, 5.0)]
    assert len(set(losses)) == 3
    assert losses[2] > max(losses[:2])


def test_a_training_has_at_most_twelve_shapes_and_nothing_is_compiled_after_its_first_epoch(make_trainer):
    trainer = make_trainer(step="compiled", max_tokens=24, num_train_epochs=4, max_steps=-1)
    seen, after_epoch = set(), []
    plain = trainer.training_step

    def step(model, inputs, *args):
        seen.add(tuple(inputs["input_ids"].shape + inputs["labels"].shape))
        loss = plain(model, inputs, *args)
        after_epoch.append(programs())
        return loss

    trainer.training_step = step
    trainer.train()
    updates = trainer.state.max_steps // 4
    assert 1 < len(seen) <= 12
    assert after_epoch[updates - 1] == after_epoch[-1] <= 12


def test_training_is_the_same_as_plain_on_the_same_batches(make_trainer):
    weights = []
    for step in ("compiled", "compiled", "plain"):
        torch.manual_seed(0)
        trainer = make_trainer(step=step, max_tokens=24, max_steps=6, ema_decay=0.9, gradient_accumulation_steps=2)
        if step == "plain":
            trainer.compiled_loss = whole_loss
        trainer.train()
        weights.append([*trainer.model.parameters(), *trainer.average_model.parameters()])
    for one, again, other in zip(*weights, strict=True):
        assert one.equal(again)
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_a_run_resumed_in_mid_epoch_ends_bit_for_bit(make_trainer, tmp_path):
    keys = {"step": "compiled", "max_tokens": 24, "dropout": 0.1, "save_strategy": "steps", "save_steps": 2}
    for name, steps in (("whole", 5), ("resumed", 2)):
        torch.manual_seed(0)
        trainer = make_trainer(**keys, max_steps=steps, output_dir=str(tmp_path / name))
        trainer.train()
    assert trainer.state.epoch % 1
    resumed = make_trainer(**keys, max_steps=5, output_dir=str(tmp_path / "resumed"))
    resumed.train(resume_from_checkpoint=str(tmp_path / "resumed" / "checkpoint-2"))
    ends = [tmp_path / name / "checkpoint-5" for name in ("whole", "resumed")]
    first, second = (load_file(end / "model.safetensors") for end in ends)
    assert all(first[name].equal(second[name]) for name in first)
    assert len({json.loads((end / "progress.json").read_text())["target_tokens"] for end in ends}) == 1


def test_what_the_compiler_refuses_is_done_plainly_and_told(make_trainer, monkeypatch, capsys):
    def broken(graph, inputs):
        raise NotImplementedError("no such machine")

    monkeypatch.setattr(compiled, "BACKEND", broken)
    trainer = make_trainer(step="compiled", max_steps=2)
    trainer.train()
    told = capsys.readouterr().out
    assert "the training step is not compiled, and goes on without" in told
    assert "no such machine" in told
    assert trainer.compiled_loss is None
    assert trainer.state.global_step == 2


def test_a_loss_that_is_not_finite_ends_the_run(make_trainer):
    trainer = make_trainer(step="compiled", learning_rate=1e30, max_steps=6, max_grad_norm=0)
    with pytest.raises(FloatingPointError, match="lower the learning rate"):
        trainer.train()


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"fsdp": True}, "FSDP"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing"),
    ],
)
def test_what_cannot_be_compiled_is_told_before(make_model, capsys, keys, reason):
    defaults = {"fsdp": False, "gradient_checkpointing": False, "device": torch.device("cuda")}
    assert choose_step("compiled", make_model(), SimpleNamespace(**(defaults | keys))) == "plain"
    assert reason in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "device", "found"),
    [
        ("auto", "cpu", "plain"),
        ("auto", "cuda", "recorded"),
        ("compiled", "cuda", "compiled"),
        ("recorded", "cpu", "compiled"),
        ("plain", "cuda", "plain"),
    ],
)
def test_what_auto_and_the_others_are(make_model, asked, device, found):
    args = SimpleNamespace(fsdp=False, gradient_checkpointing=False, device=torch.device(device))
    assert choose_step(asked, make_model(), args) == found


def test_a_large_model_is_compiled_alone(make_model, monkeypatch):
    monkeypatch.setattr(compiled, "RECORDED", 10)
    args = SimpleNamespace(fsdp=False, gradient_checkpointing=False, device=torch.device("cuda"))
    assert choose_step("auto", make_model(), args) == "compiled"
