"""Umar Jamil's pytorch-transformer (hkproj) in three versions: biases are optional, norm weights scalars or vectors.

The article 'Building the Transformer from Scratch' is a variant with typos such as `src_emded`. Its decoder uses the
self-attention block also as cross-attention. The published and the repaired decoder have the same keys, so there are
two layouts.
"""

from dataclasses import replace

from ..layout import DECODER, ENCODER, PROJECTIONS, UNTIED, Keys, Layout, TensorRule, attention, layers
from ..weight_folding import sinusoids, std_norm


def norm(key: str, target: str) -> Keys:
    note = "scalar bias expanded to d_model"
    bias = TensorRule((f"{target}.bias",), lambda tensor, info: (tensor.expand(info.d_model),), note)
    return {f"{key}.alpha": std_norm(f"{target}.weight"), f"{key}.bias": bias}


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
    config=UNTIED | {"norm_position": "pre", "lm_head_bias": True, "layer_norm_eps": 1e-12},
    zero_biases=PROJECTIONS,
    forward=forward,
    user_notes=(
        "The original code puts [SOS] and [EOS] around each source. The tokenizer must add both.",
        "Early versions of the original code return log-probabilities. This model returns logits.",
    ),
)

ARTICLE_KEYS = {
    "src_emded.embedding.weight": "model.encoder.embed_tokens.weight",
    **BODY,
    **encoder_layers("residual_connection"),
}
UNUSED = TensorRule((), note="unused: the published decoder uses self_attention_block as cross-attention")

ARTICLE = replace(
    LAYOUT,
    name="build_transformer",
    title="'Building the Transformer from Scratch', decoder as published",
    keys={
        **ARTICLE_KEYS,
        **attention(f"{DEC}.self_attention_block", W, f"{DECODER}.self_attn", f"{DECODER}.cross_attn"),
        f"{DEC}.cross_attention_Block.{{w_q|w_k|w_v|w_o}}.{{p}}": UNUSED,
    },
    zero_biases=(),
    user_notes=("This layout is for the published decoder. For repaired code, use build_transformer_repaired.",),
)

REPAIRED_ARTICLE = replace(
    ARTICLE,
    name="build_transformer_repaired",
    title="'Building the Transformer from Scratch', decoder repaired to use cross_attention_Block",
    keys={
        **ARTICLE_KEYS,
        **attention(f"{DEC}.self_attention_block", W, f"{DECODER}.self_attn"),
        **attention(f"{DEC}.cross_attention_Block", W, f"{DECODER}.cross_attn"),
    },
    user_notes=("This layout is for repaired code. The published decoder does not use cross_attention_Block.",),
)
