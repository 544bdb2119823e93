"""The benchmark compares equal work, and detects differences."""

import time

import pytest
import torch

from training.benchmarks.forward_backward import compute_loss, peak_flops, validate_models
from training.benchmarks.models import make_batch
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.shared.transformers_conversion import to_marian


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    config = VanillaTransformerConfig(
        vocab_size=60, encoder_attention_heads=4, decoder_attention_heads=4, dropout=0.0, **sizes
    )
    return VanillaTransformerForConditionalGeneration(config)


@pytest.fixture
def batch():
    return make_batch(6, 60, torch.device("cpu"))


def test_marian_has_equal_loss_and_gradients(model, batch):
    marian = to_marian(model).train()
    expected = compute_loss("Vanilla", model.train(), batch)
    actual = compute_loss("Marian", marian, batch)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    expected.backward()
    actual.backward()
    order = torch.cat([torch.arange(0, 32, 2), torch.arange(1, 32, 2)])
    expected_grad = model.get_input_embeddings().weight.grad[1:, order]  # the padding row has no gradient in Marian
    torch.testing.assert_close(marian.get_input_embeddings().weight.grad[1:], expected_grad, atol=1e-5, rtol=1e-4)


def test_rejects_different_work(model, batch):
    models = {"Vanilla": model, "Marian": to_marian(model)}
    validate_models(models, batch)
    with torch.no_grad():
        models["Marian"].get_input_embeddings().weight.mul_(1.01)
    with pytest.raises(AssertionError, match="losses of the models differ"):
        validate_models(models, batch)


def test_peak_flops_are_plausible():
    assert 1e8 < peak_flops(torch.device("cpu"), torch.float32, time.perf_counter) < 1e14
