"""Comparison of the model with other implementations of the same formulas, with the same weights."""

import math

import pytest
import torch
from torch import nn
from transformers import MarianConfig, MarianMTModel

from vanilla_transformer.modeling_vanilla_transformer import (
    MultiHeadAttention,
    PositionWiseFeedForward,
    sinusoidal_encoding,
)

D, HEADS, LAYERS, FFN = 32, 4, 2, 48


def copy_attention(source, target: nn.MultiheadAttention) -> None:
    target.in_proj_weight.copy_(torch.cat([source.q_proj.weight, source.k_proj.weight, source.v_proj.weight]))
    target.in_proj_bias.copy_(torch.cat([source.q_proj.bias, source.k_proj.bias, source.v_proj.bias]))
    target.out_proj.load_state_dict(source.out_proj.state_dict())


@torch.no_grad()
def make_torch_transformer(model) -> nn.Transformer:
    """Return a `torch.nn.Transformer` with the weights of `model`."""
    config = model.config
    reference = nn.Transformer(
        D, HEADS, LAYERS, LAYERS, FFN, dropout=0.0, batch_first=True, norm_first=config.norm_position == "pre"
    )
    for layer, reference_layer in zip(model.model.encoder.layers, reference.encoder.layers, strict=True):
        copy_attention(layer.self_attn, reference_layer.self_attn)
        reference_layer.norm1.load_state_dict(layer.self_attn_layer_norm.state_dict())
        reference_layer.norm2.load_state_dict(layer.feed_forward_layer_norm.state_dict())
    for layer, reference_layer in zip(model.model.decoder.layers, reference.decoder.layers, strict=True):
        copy_attention(layer.self_attn, reference_layer.self_attn)
        copy_attention(layer.cross_attn, reference_layer.multihead_attn)
        reference_layer.norm1.load_state_dict(layer.self_attn_layer_norm.state_dict())
        reference_layer.norm2.load_state_dict(layer.cross_attn_layer_norm.state_dict())
        reference_layer.norm3.load_state_dict(layer.feed_forward_layer_norm.state_dict())
    for stack, reference_stack in ((model.model.encoder, reference.encoder), (model.model.decoder, reference.decoder)):
        for layer, reference_layer in zip(stack.layers, reference_stack.layers, strict=True):
            reference_layer.linear1.load_state_dict(layer.feed_forward.fc1.state_dict())
            reference_layer.linear2.load_state_dict(layer.feed_forward.fc2.state_dict())
        reference_stack.norm.load_state_dict(stack.norm.state_dict())
    return reference


def embed(model, stack, ids):
    positions = torch.arange(ids.shape[1])
    return stack.embed_tokens(ids) * math.sqrt(D) + sinusoidal_encoding(positions, D)


@pytest.mark.parametrize("norm_position", ["post", "pre"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_equals_torch_nn_transformer(make_model, batch, norm_position, attention):
    """Logits agree within 1e-5 and gradients within 1e-4, with padding, post-norm and pre-norm."""
    model = make_model(norm_position=norm_position, final_norm=True, lm_head_bias=True, tie_word_embeddings=False)
    model.set_attn_implementation(attention)
    reference = make_torch_transformer(model)
    padding = batch["attention_mask"] == 0
    states = reference(
        embed(model, model.model.encoder, batch["input_ids"]),
        embed(model, model.model.decoder, batch["decoder_input_ids"]),
        tgt_mask=nn.Transformer.generate_square_subsequent_mask(batch["decoder_input_ids"].shape[1]),
        src_key_padding_mask=padding,
        memory_key_padding_mask=padding,
    )
    expected = model.lm_head(states)
    logits = model(**batch).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)

    weight = torch.randn_like(logits)
    (expected * weight).sum().backward()
    expected_gradients = {
        "embedding": model.model.encoder.embed_tokens.weight.grad.clone(),
        "head": model.lm_head.weight.grad.clone(),
    }
    reference_layer = reference.decoder.layers[0]
    expected_gradients["cross_query"] = reference_layer.multihead_attn.in_proj_weight.grad[:D]
    expected_gradients["encoder_ffn"] = reference.encoder.layers[1].linear1.weight.grad
    expected_gradients["decoder_norm"] = reference_layer.norm2.weight.grad
    model.zero_grad()
    (logits * weight).sum().backward()
    decoder_layer = model.model.decoder.layers[0]
    gradients = {
        "embedding": model.model.encoder.embed_tokens.weight.grad,
        "head": model.lm_head.weight.grad,
        "cross_query": decoder_layer.cross_attn.q_proj.weight.grad,
        "encoder_ffn": model.model.encoder.layers[1].feed_forward.fc1.weight.grad,
        "decoder_norm": decoder_layer.cross_attn_layer_norm.weight.grad,
    }
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, expected_gradients[name], atol=1e-4, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
        )


@torch.no_grad()
def make_marian(model) -> MarianMTModel:
    """Return a `MarianMTModel` with the weights of `model`. Marian has all sines before all cosines."""
    config = model.config
    order = torch.cat([torch.arange(0, D, 2), torch.arange(1, D, 2)])  # index of each dimension of Marian in `model`
    reference = MarianMTModel(
        MarianConfig(
            vocab_size=config.vocab_size, decoder_vocab_size=config.decoder_vocab_size, d_model=D,
            encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS,
            encoder_ffn_dim=FFN, decoder_ffn_dim=FFN, activation_function="relu", dropout=0.0, scale_embedding=True,
            pad_token_id=0, eos_token_id=2, bos_token_id=1, decoder_start_token_id=1, forced_eos_token_id=None,
        )
    )  # fmt: skip
    state = {}
    for name, tensor in model.state_dict().items():
        into_residual = any(part in name for part in ("out_proj", "fc2", "layer_norm"))
        if "embed_tokens" in name or (
            name.endswith("weight") and any(p in name for p in ("_proj.weight", "fc1")) and not into_residual
        ):
            tensor = tensor[:, order]
        elif into_residual:
            tensor = tensor[order]
        name = name.replace("feed_forward_layer_norm", "final_layer_norm").replace("feed_forward.", "")
        name = name.replace("cross_attn", "encoder_attn")
        state[name] = tensor
    state["model.shared.weight"] = state["model.encoder.embed_tokens.weight"]
    state["lm_head.weight"] = state["model.shared.weight"]
    missing, unexpected = reference.load_state_dict(state, strict=False)
    assert not unexpected
    assert all("embed_positions" in name or name == "final_logits_bias" for name in missing)
    return reference.eval()


def test_equals_marian(make_model, batch):
    """Logits agree within 1e-5 on right-padded batches, and translations are equal."""
    model = make_model()
    reference = make_marian(model)
    with torch.no_grad():
        logits = model(**batch).logits
        torch.testing.assert_close(logits, reference(**batch).logits, atol=1e-5, rtol=0)
    source = {name: batch[name] for name in ("input_ids", "attention_mask")}
    for settings in ({"num_beams": 1}, {"num_beams": 4}):
        ids = model.generate(**source, max_new_tokens=12, **settings)
        assert torch.equal(ids, reference.generate(**source, max_new_tokens=12, **settings))


def test_attention_matches_formula(make_config):
    """The reference computes equation 1 and section 3.2.2 head by head."""
    attention = MultiHeadAttention(make_config(), HEADS)
    attention.config._attn_implementation = "eager"
    x, memory = torch.randn(2, 5, D), torch.randn(2, 7, D)
    output, weights = attention(x, memory)
    heads = []
    d_k = D // HEADS
    for head in range(HEADS):
        rows = slice(head * d_k, (head + 1) * d_k)
        q = x @ attention.q_proj.weight[rows].T + attention.q_proj.bias[rows]
        k = memory @ attention.k_proj.weight[rows].T + attention.k_proj.bias[rows]
        v = memory @ attention.v_proj.weight[rows].T + attention.v_proj.bias[rows]
        heads.append(torch.softmax(q @ k.transpose(1, 2) / math.sqrt(d_k), dim=-1) @ v)
    expected = torch.cat(heads, dim=-1) @ attention.out_proj.weight.T + attention.out_proj.bias
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, HEADS, 5))


def test_feed_forward_matches_formula(make_config):
    """Equation 2: max(0, x W_1 + b_1) W_2 + b_2."""
    network = PositionWiseFeedForward(make_config(), FFN)
    x = torch.randn(2, 5, D)
    hidden = (x @ network.fc1.weight.T + network.fc1.bias).clamp(min=0)
    torch.testing.assert_close(network(x), hidden @ network.fc2.weight.T + network.fc2.bias)


def test_positions_match_formula():
    """Section 3.5, in double precision."""
    encoding = sinusoidal_encoding(torch.arange(300), 16)
    for position in (0, 1, 7, 299):
        for i in range(8):
            angle = position / 10000 ** (2 * i / 16)
            assert encoding[position, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-4)
            assert encoding[position, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-4)


def test_positions_are_exact_under_bfloat16(make_model):
    """A table built in bfloat16 would give positions 256 and 257 the same encoding."""
    model = make_model().to(torch.bfloat16)
    torch.set_default_dtype(torch.bfloat16)
    try:
        encoding = sinusoidal_encoding(torch.tensor([256, 257]), model.config.d_model)
    finally:
        torch.set_default_dtype(torch.float32)
    assert encoding.dtype == torch.float32
    assert (encoding[0] - encoding[1]).abs().max() > 0.1


def test_embeddings_are_scaled_by_sqrt_d_model(make_model):
    """Section 3.4."""
    model = make_model()
    ids = torch.tensor([[5, 6]])
    actual = model.model.encoder.embed(model.model.encoder.embed_tokens(ids), torch.arange(2)[None])
    torch.testing.assert_close(actual, embed(model, model.model.encoder, ids))


def test_post_norm_layer_matches_formula(make_model, batch):
    """Section 3.1: LayerNorm(x + Sublayer(x)), without dropout."""
    layer = make_model().model.encoder.layers[0]
    x = torch.randn(3, 7, D)
    attended = layer.self_attn_layer_norm(x + layer.self_attn(x)[0])
    expected = layer.feed_forward_layer_norm(attended + layer.feed_forward(attended))
    torch.testing.assert_close(layer(x, None), expected)
