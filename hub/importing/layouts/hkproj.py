"""Umar Jamil's pytorch-transformer (hkproj) in three versions: biases are optional, norm weights scalars or vectors."""

from ..layout import DECODER, ENCODER, PROJECTIONS, UNTIED, Keys, Layout, attention, layers
from ..weight_folding import expand_scalar_bias, sinusoids, std_norm


def norm(key: str, target: str) -> Keys:
    return {f"{key}.alpha": std_norm(f"{target}.weight"), f"{key}.bias": expand_scalar_bias(f"{target}.bias")}


W = ("w_q", "w_k", "w_v", "w_o")
DEC = "decoder.layers.{i}"
FFN = ("feed_forward_block.linear_1", "feed_forward_block.linear_2")


def encoder_layers(residuals: str) -> Keys:
    """Map the encoder, whose residual connections have one of two spellings."""
    norms = [f"{residuals}.{i}.norm" for i in range(2)]
    return layers(ENCODER, "encoder.layers.{i}", ("self_attention_block",), FFN, norms, W, map_norm=norm)


BODY = {
    **layers(DECODER, DEC, (), FFN, [f"residual_connections.{i}.norm" for i in range(3)], map_norm=norm),
    **norm("encoder.norm", "model.encoder.norm"),
    **norm("decoder.norm", "model.decoder.norm"),
    "tgt_embed.embedding.weight": "model.decoder.embed_tokens.weight",
    "src_pos.pe": sinusoids(),
    "tgt_pos.pe": sinusoids(),
    "projection_layer.proj.{p}": "lm_head.{p}",
}
CONFIG = UNTIED | {"norm_position": "pre", "lm_head_bias": True, "layer_norm_eps": 1e-12}


def forward(model, source, source_mask, target, target_mask):
    return model.project(model.decode(model.encode(source, source_mask), source_mask, target, target_mask))


LAYOUT = Layout(
    name="hkproj",
    title="Umar Jamil, pytorch-transformer (hkproj)",
    keys={
        "src_embed.embedding.weight": "model.encoder.embed_tokens.weight",
        **BODY,
        **encoder_layers("residual_connections"),
        **attention(f"{DEC}.self_attention_block", W, f"{DECODER}.self_attn"),
        **attention(f"{DEC}.cross_attention_block", W, f"{DECODER}.cross_attn"),
    },
    config=CONFIG,
    zero_biases=PROJECTIONS,
    forward=forward,
    user_notes=(
        "The original code puts [SOS] and [EOS] around each source. The tokenizer must add both.",
        "Early versions of the original code return log-probabilities. This model returns logits.",
    ),
)
