"""What the benchmark compares does the same work, and a difference is noticed."""

import time

import pytest
import torch

from training.benchmarks.forward_backward import bart, check_same_loss, loss_of, make_batch, matrix_speed
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.shared.transformers_conversion import to_marian


@pytest.fixture
def ours():
    torch.manual_seed(0)
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    config = VanillaTransformerConfig(
        vocab_size=60, encoder_attention_heads=4, decoder_attention_heads=4, dropout=0.0, **sizes
    )
    return VanillaTransformerForConditionalGeneration(config)


@pytest.fixture
def batch():
    return make_batch(6, 60, torch.device("cpu"))


def test_marian_has_our_loss_and_gradients(ours, batch):
    marian = to_marian(ours).train()
    expected = loss_of("ours", ours.train(), batch)
    found = loss_of("Marian", marian, batch)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    expected.backward()
    found.backward()
    order = torch.cat([torch.arange(0, 32, 2), torch.arange(1, 32, 2)])
    wanted = ours.get_input_embeddings().weight.grad[1:, order]  # Marian keeps its padding's row from learning
    torch.testing.assert_close(marian.get_input_embeddings().weight.grad[1:], wanted, atol=1e-5, rtol=1e-4)


def test_another_work_is_noticed(ours, batch):
    models = {"ours": ours, "Marian": to_marian(ours), "Bart": bart(ours.config)}
    check_same_loss(models, batch)
    with torch.no_grad():
        models["Marian"].get_input_embeddings().weight.mul_(1.01)
    with pytest.raises(AssertionError, match="not the same work: losses"):
        check_same_loss(models, batch)
    other = VanillaTransformerConfig.from_dict(ours.config.to_dict() | {"encoder_layers": 3})
    with pytest.raises(AssertionError, match="not the same work: weights"):
        check_same_loss({"ours": ours, "Bart": bart(other)}, batch)


def test_the_speed_of_a_matrix_product_is_plausible():
    assert 1e8 < matrix_speed(torch.device("cpu"), torch.float32, time.perf_counter) < 1e14
