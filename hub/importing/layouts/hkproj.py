"""Umar Jamil's pytorch-transformer (hkproj) in three versions: biases are optional, norm weights scalars or vectors."""

from hub.importing.layout import DECODER, ENCODER, PROJECTIONS, UNTIED, Keys, Layout, attention, feed_forward
from hub.importing.weight_folding import expand_scalar_bias, sinusoids, std_norm


def norm(key: str, target: str) -> Keys:
    return {f"{key}.alpha": std_norm(f"{target}.weight"), f"{key}.bias": expand_scalar_bias(f"{target}.bias")}


W = ("w_q", "w_k", "w_v", "w_o")
ENC, DEC = "encoder.layers.{i}", "decoder.layers.{i}"
FFN = ("feed_forward_block.linear_1", "feed_forward_block.linear_2")

BODY = {
    **attention(f"{ENC}.self_attention_block", W, f"{ENCODER}.self_attn"),
    **feed_forward(f"{ENC}.", FFN, ENCODER),
    **feed_forward(f"{DEC}.", FFN, DECODER),
    **norm(f"{DEC}.residual_connections.0.norm", f"{DECODER}.self_attn_layer_norm"),
    **norm(f"{DEC}.residual_connections.1.norm", f"{DECODER}.cross_attn_layer_norm"),
    **norm(f"{DEC}.residual_connections.2.norm", f"{DECODER}.feed_forward_layer_norm"),
    **norm("encoder.norm", "model.encoder.norm"),
    **norm("decoder.norm", "model.decoder.norm"),
    "tgt_embed.embedding.weight": "model.decoder.embed_tokens.weight",
    "src_pos.pe": sinusoids(),
    "tgt_pos.pe": sinusoids(),
    "projection_layer.proj.{p}": "lm_head.{p}",
}
CONFIG = UNTIED | {"norm_position": "pre", "lm_head_bias": True}


def forward(model, source, source_mask, target, target_mask):
    return model.project(model.decode(model.encode(source, source_mask), source_mask, target, target_mask))


LAYOUT = Layout(
    name="hkproj",
    title="Umar Jamil, pytorch-transformer (hkproj)",
    keys={
        "src_embed.embedding.weight": "model.encoder.embed_tokens.weight",
        **BODY,
        **attention(f"{DEC}.self_attention_block", W, f"{DECODER}.self_attn"),
        **attention(f"{DEC}.cross_attention_block", W, f"{DECODER}.cross_attn"),
        **norm(f"{ENC}.residual_connections.0.norm", f"{ENCODER}.self_attn_layer_norm"),
        **norm(f"{ENC}.residual_connections.1.norm", f"{ENCODER}.feed_forward_layer_norm"),
    },
    config=CONFIG,
    norm_eps=lambda d_model: 1e-12,
    zero_biases=PROJECTIONS,
    forward=forward,
    user_notes=(
        "The original code puts [SOS] and [EOS] around each source. The tokenizer must add both.",
        "Early versions of the original code return log-probabilities. This model returns logits.",
    ),
)
