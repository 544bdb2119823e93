"""Comparison of the chunked loss with cross_entropy: values, gradients, autocast and computation."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from vanilla_transformer import loss_vanilla_transformer
from vanilla_transformer.loss_vanilla_transformer import fused_linear_cross_entropy


def reference_loss(states, projection, labels, smoothing):
    logits = projection(states)[labels != -100].float()
    return nn.functional.cross_entropy(logits, labels[labels != -100], reduction="sum", label_smoothing=smoothing)


@pytest.fixture
def case():
    """Factory of states (4, 9, 16), labels with padding, and a projection to 50 tokens."""

    def make(bias: bool):
        states = torch.randn(4, 9, 16, requires_grad=True)
        labels = torch.randint(0, 50, (4, 9))
        labels[1, 5:] = labels[3] = -100
        return states, nn.Linear(16, 50, bias=bias), labels

    return make


def gradients(loss, states, projection, labels, smoothing):
    states.grad = None
    projection.zero_grad()
    value = loss(states, projection, labels, smoothing)
    (0.37 * value).backward()
    return [value.detach(), states.grad.clone(), *(p.grad.clone() for p in projection.parameters())]


@pytest.mark.parametrize("device", ["CPU", "GPU"])
@pytest.mark.parametrize("num_chunks", ["one", "many"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [True, False])
def test_value_and_gradients_match_reference(case, monkeypatch, bias, smoothing, num_chunks, device):
    """The CPU skips padding. A GPU also computes the loss of padding, and masks it."""
    if device == "GPU":
        monkeypatch.setattr(loss_vanilla_transformer, "is_eager_on_cpu", lambda tensor: False)
    if num_chunks == "many":
        monkeypatch.setattr(loss_vanilla_transformer, "CPU_CHUNK_SIZE", 4 * 50)
    states, projection, labels = case(bias)
    expected = gradients(reference_loss, states, projection, labels, smoothing)
    actual = gradients(fused_linear_cross_entropy, states, projection, labels, smoothing)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_has_no_second_derivatives(case):
    states, projection, labels = case(True)
    loss = fused_linear_cross_entropy(states, projection, labels, 0.1)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(loss, states, create_graph=True)


def test_autocast_keeps_gradients_in_float32(case):
    states, projection, labels = case(True)
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(reference_loss, states, projection, labels, 0.1)
        actual = gradients(fused_linear_cross_entropy, states, projection, labels, 0.1)
    assert projection.weight.grad.dtype == torch.float32
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


def test_batch_without_labels_has_zero_loss(case):
    states, projection, labels = case(True)
    actual = gradients(fused_linear_cross_entropy, states, projection, torch.full_like(labels, -100), 0.1)
    assert [float(each.abs().sum()) for each in actual] == [0.0] * 4


@pytest.mark.parametrize("variant", [{}, {"tie_word_embeddings": False, "lm_head_bias": True}])
def test_smoothed_model_loss_matches_reference(make_model, batch, variant):
    """Loss and gradients match, with and without tied weights. `num_items_in_batch` divides the summed loss."""
    model = make_model(**variant)
    labels = batch["decoder_input_ids"].clone()
    labels[0, 4:] = -100
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    logits = model(**inputs, labels=labels).logits
    expected_loss = nn.functional.cross_entropy(
        logits[labels != -100], labels[labels != -100], reduction="sum", label_smoothing=0.1
    )
    (expected_loss / 40).backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    outputs = model(**inputs, labels=labels, smoothing=0.1, num_items_in_batch=40)
    assert outputs.logits is None
    torch.testing.assert_close(outputs.loss, expected_loss / 40)
    outputs.loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-5, rtol=1e-4, msg=name)
    mean = model(**inputs, labels=labels, smoothing=0.1).loss
    torch.testing.assert_close(mean, expected_loss / (labels != -100).sum())


def test_loss_without_gradients(case):
    states, projection, labels = case(False)
    with torch.no_grad():
        actual = fused_linear_cross_entropy(states, projection, labels, 0.1)
        torch.testing.assert_close(actual, reference_loss(states, projection, labels, 0.1))


class MatmulCounter(TorchDispatchMode):
    """Counter of matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def test_only_required_gradients_are_computed(case):
    """One matrix product computes the logits, one the gradient of the states, and one the gradient of the weight."""
    states, projection, labels = case(True)
    expected = gradients(fused_linear_cross_entropy, states, projection, labels, 0.1)
    for frozen, leaf, grad, products in (
        (False, True, True, 3),
        (True, True, True, 2),
        (False, False, True, 2),
        (True, False, True, 1),
        (False, True, False, 1),
    ):
        projection.requires_grad_(not frozen)
        projection.zero_grad()
        leaf_states = states.detach().requires_grad_(leaf)
        with MatmulCounter() as counter, torch.set_grad_enabled(grad):
            loss = fused_linear_cross_entropy(leaf_states, projection, labels, 0.1)
        assert counter.count == products, (frozen, leaf, grad)
        torch.testing.assert_close(loss.detach(), expected[0])
        if not grad or (frozen and not leaf):
            assert not loss.requires_grad
            continue
        (0.37 * loss).backward()
        actual = [leaf_states.grad, projection.weight.grad, projection.bias.grad]
        required = [expected[1] if leaf else None, *([None, None] if frozen else expected[2:])]
        for one, other in zip(actual, required, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other)


def test_supports_fake_tensors(case):
    """Fake tensors have no values: code that reads values, or that selects by values, raises an error."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        states, projection, labels = case(True)
        assert fused_linear_cross_entropy(states, projection, labels, 0.1).shape == ()
