"""Article 'Building the Transformer from Scratch', a variant of hkproj with typos such as `src_emded`.

Its decoder uses the self-attention block also as cross-attention. The published and the repaired decoder have the same
keys, so there are two layouts.
"""

from dataclasses import replace

from ..layout import DECODER, Layout, TensorRule, attention
from .hkproj import BODY, CONFIG, DEC, W, encoder_layers, forward

COMMON = {
    "src_emded.embedding.weight": "model.encoder.embed_tokens.weight",
    **BODY,
    **encoder_layers("residual_connection"),
}
UNUSED = TensorRule((), note="unused: the published decoder uses self_attention_block as cross-attention")

LAYOUT = Layout(
    name="build_transformer",
    title="'Building the Transformer from Scratch', decoder as published",
    keys={
        **COMMON,
        **attention(f"{DEC}.self_attention_block", W, f"{DECODER}.self_attn", f"{DECODER}.cross_attn"),
        f"{DEC}.cross_attention_Block.{{w_q|w_k|w_v|w_o}}.{{p}}": UNUSED,
    },
    config=CONFIG,
    forward=forward,
    user_notes=("This layout is for the published decoder. For repaired code, use build_transformer_repaired.",),
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
    user_notes=("This layout is for repaired code. The published decoder does not use cross_attention_Block.",),
)
