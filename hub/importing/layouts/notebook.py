"""Notebook 'Build your own Transformer from scratch using PyTorch': post-norm, unscaled embeddings."""

from hub.importing.layout import DECODER, ENCODER, UNTIED, Layout, attention, feed_forward
from hub.importing.weight_folding import sinusoids

W = ("W_q", "W_k", "W_v", "W_o")
FC = ("feed_forward.fc1", "feed_forward.fc2")

LAYOUT = Layout(
    name="notebook",
    title="'Build your own Transformer from scratch using PyTorch' (notebook)",
    keys={
        "encoder_embedding.weight": "model.encoder.embed_tokens.weight",
        "decoder_embedding.weight": "model.decoder.embed_tokens.weight",
        "positional_encoding.pe": sinusoids(),
        **attention("encoder_layers.{i}.self_attn", W, f"{ENCODER}.self_attn"),
        **attention("decoder_layers.{i}.self_attn", W, f"{DECODER}.self_attn"),
        **attention("decoder_layers.{i}.cross_attn", W, f"{DECODER}.cross_attn"),
        **feed_forward("encoder_layers.{i}.", FC, ENCODER),
        **feed_forward("decoder_layers.{i}.", FC, DECODER),
        "encoder_layers.{i}.norm1.{p}": f"{ENCODER}.self_attn_layer_norm.{{p}}",
        "encoder_layers.{i}.norm2.{p}": f"{ENCODER}.feed_forward_layer_norm.{{p}}",
        "decoder_layers.{i}.norm1.{p}": f"{DECODER}.self_attn_layer_norm.{{p}}",
        "decoder_layers.{i}.norm2.{p}": f"{DECODER}.cross_attn_layer_norm.{{p}}",
        "decoder_layers.{i}.norm3.{p}": f"{DECODER}.feed_forward_layer_norm.{{p}}",
        "fc.{p}": "lm_head.{p}",
    },
    config=UNTIED | {"lm_head_bias": True, "scale_embedding": False},
    special_ids={"pad_token_id": 0},
    user_notes=("The original code does not mask target padding. With padding on the right, the results are equal.",),
)
