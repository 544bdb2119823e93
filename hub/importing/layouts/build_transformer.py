"""A well-read article that rebuilds hkproj with slips of the pen: `src_emded`, `cross_attention_Block`, and a decoder
that runs its cross-attention through the block of its self-attention. Two layouts have these very keys: the published
decoder, and one that somebody has repaired."""

from dataclasses import replace

from hub.importing.layout import DECODER, ENCODER, Layout, attention, left_out
from hub.importing.layouts.hkproj import BODY, CONFIG, DEC, ENC, W, norm, run
from hub.importing.layouts.hkproj import LAYOUT as HKPROJ

COMMON = {
    "src_emded.embedding.weight": "model.encoder.embed_tokens.weight",
    **BODY,
    **norm(f"{ENC}.residual_connection.0.norm", f"{ENCODER}.self_attn_layer_norm"),
    **norm(f"{ENC}.residual_connection.1.norm", f"{ENCODER}.feed_forward_layer_norm"),
}
UNUSED = left_out("the published decoder never uses it: its cross-attention runs through self_attention_block")

LAYOUT = Layout(
    name="build_transformer",
    title="'Building the Transformer from Scratch', decoder as published",
    keys={
        **COMMON,
        **attention(f"{DEC}.self_attention_block", W, f"{DECODER}.self_attn", f"{DECODER}.cross_attn"),
        f"{DEC}.cross_attention_Block.{{w_q|w_k|w_v|w_o}}.{{p}}": UNUSED,
    },
    config=CONFIG,
    norm_eps=HKPROJ.norm_eps,
    run=run,
    check=(
        "The published decoder uses one attention for itself and across; if you repaired that, take the other layout.",
    ),
)

REPAIRED = replace(
    LAYOUT,
    name="build_transformer_repaired",
    title="'Building the Transformer from Scratch', decoder repaired to use cross_attention_Block",
    keys={
        **COMMON,
        **attention(f"{DEC}.self_attention_block", W, f"{DECODER}.self_attn"),
        **attention(f"{DEC}.cross_attention_Block", W, f"{DECODER}.cross_attn"),
    },
    check=("The decoder as published does not use cross_attention_Block; this layout is for code that does.",),
)
