"""The loss in pieces beside the plain one: values, gradients, autocast, and what it does not keep."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from vanilla_transformer import loss_vanilla_transformer
from vanilla_transformer.loss_vanilla_transformer import fused_linear_cross_entropy


def plain(states, projection, labels, smoothing):
    logits = projection(states)[labels != -100].float()
    return nn.functional.cross_entropy(logits, labels[labels != -100], reduction="sum", label_smoothing=smoothing)


@pytest.fixture
def case():
    """States (4, 9, 16), labels with padding, and a projection to 50 tokens, with a bias or without."""

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


@pytest.mark.parametrize("place", ["CPU", "GPU"])
@pytest.mark.parametrize("pieces", ["one", "many"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [True, False])
def test_value_and_gradients_are_the_plain_ones(case, monkeypatch, bias, smoothing, pieces, place):
    """On a GPU, whose values are not to be looked at, padding goes along and counts nothing."""
    if place == "GPU":
        monkeypatch.setattr(loss_vanilla_transformer, "is_eager_on_cpu", lambda tensor: False)
    if pieces == "many":
        monkeypatch.setattr(loss_vanilla_transformer, "CPU_CHUNK_SIZE", 4 * 50)
    states, projection, labels = case(bias)
    expected = gradients(plain, states, projection, labels, smoothing)
    found = gradients(fused_linear_cross_entropy, states, projection, labels, smoothing)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_under_autocast_the_products_are_in_bfloat16_and_gradients_in_float32(case):
    states, projection, labels = case(True)
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(plain, states, projection, labels, 0.1)
        found = gradients(fused_linear_cross_entropy, states, projection, labels, 0.1)
    assert projection.weight.grad.dtype == torch.float32
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


def test_a_batch_without_labels_costs_nothing(case):
    states, projection, labels = case(True)
    found = gradients(fused_linear_cross_entropy, states, projection, torch.full_like(labels, -100), 0.1)
    assert [float(each.abs().sum()) for each in found] == [0.0] * 4


@pytest.mark.parametrize("variant", [{}, {"tie_word_embeddings": False, "lm_head_bias": True}])
def test_the_models_own_smoothing_is_the_plain_one(make_model, batch, variant):
    """Loss and every gradient, tied or not; a share of a larger batch is a share of its loss."""
    model = make_model(**variant)
    labels = batch["decoder_input_ids"].clone()
    labels[0, 4:] = -100
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    logits = model(**inputs, labels=labels).logits
    plain_loss = nn.functional.cross_entropy(
        logits[labels != -100], labels[labels != -100], reduction="sum", label_smoothing=0.1
    )
    (plain_loss / 40).backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    outputs = model(**inputs, labels=labels, smoothing=0.1, num_items_in_batch=40)
    assert outputs.logits is None
    torch.testing.assert_close(outputs.loss, plain_loss / 40)
    outputs.loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-5, rtol=1e-4, msg=name)
    mean = model(**inputs, labels=labels, smoothing=0.1).loss
    torch.testing.assert_close(mean, plain_loss / (labels != -100).sum())


def test_it_can_be_had_without_gradients(case):
    states, projection, labels = case(False)
    with torch.no_grad():
        found = fused_linear_cross_entropy(states, projection, labels, 0.1)
        torch.testing.assert_close(found, plain(states, projection, labels, 0.1))


class Products(TorchDispatchMode):
    """Counts the matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def test_only_the_gradients_that_are_wanted_are_computed(case):
    """One product for the logits, one for the states' gradient, one for the weight's; a frozen head's may be left out
    though the states have one, and the other way round."""
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
        own = states.detach().requires_grad_(leaf)
        with Products() as counted, torch.set_grad_enabled(grad):
            loss = fused_linear_cross_entropy(own, projection, labels, 0.1)
        assert counted.count == products, (frozen, leaf, grad)
        torch.testing.assert_close(loss.detach(), expected[0])
        if not grad or (frozen and not leaf):
            assert not loss.requires_grad
            continue
        (0.37 * loss).backward()
        found = [own.grad, projection.weight.grad, projection.bias.grad]
        wanted = [expected[1] if leaf else None, *([None, None] if frozen else expected[2:])]
        for one, other in zip(found, wanted, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other)


def test_where_values_cannot_be_looked_at_no_size_depends_on_them(case):
    """Fake tensors have none: whoever selects by value, or asks for one, fails."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        states, projection, labels = case(True)
        assert fused_linear_cross_entropy(states, projection, labels, 0.1).shape == ()
