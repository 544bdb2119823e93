"""Notebook 'Build your own Transformer from scratch using PyTorch': post-norm, unscaled embeddings."""

from ..layout import DECODER, ENCODER, UNTIED, Layout, layers
from ..weight_folding import sinusoids

W = ("W_q", "W_k", "W_v", "W_o")
FC = ("feed_forward.fc1", "feed_forward.fc2")

LAYOUT = Layout(
    name="notebook",
    title="'Build your own Transformer from scratch using PyTorch' (notebook)",
    keys={
        "encoder_embedding.weight": "model.encoder.embed_tokens.weight",
        "decoder_embedding.weight": "model.decoder.embed_tokens.weight",
        "positional_encoding.pe": sinusoids(),
        **layers(ENCODER, "encoder_layers.{i}", ("self_attn",), FC, ("norm1", "norm2"), W),
        **layers(DECODER, "decoder_layers.{i}", ("self_attn", "cross_attn"), FC, ("norm1", "norm2", "norm3"), W),
        "fc.{p}": "lm_head.{p}",
    },
    config=UNTIED | {"lm_head_bias": True, "scale_embedding": False, "pad_token_id": 0},
    user_notes=("The original code does not mask target padding. With padding on the right, the results are equal.",),
)
