"""The Annotated Transformer (Harvard NLP, 2022)."""

from ..layout import DECODER, ENCODER, UNTIED, Keys, Layout, layers
from ..weight_folding import sinusoids, std_norm

LINEARS = ("linears.0", "linears.1", "linears.2", "linears.3")
NORMS = ("sublayer.0.norm", "sublayer.1.norm", "sublayer.2.norm")
FFN = ("feed_forward.w_1", "feed_forward.w_2")


def norm(key: str, target: str) -> Keys:
    return {f"{key}.a_2": std_norm(f"{target}.weight"), f"{key}.b_2": f"{target}.bias"}


LAYOUT = Layout(
    name="annotated",
    title="The Annotated Transformer (Harvard NLP, 2022)",
    keys={
        "src_embed.0.lut.weight": "model.encoder.embed_tokens.weight",
        "tgt_embed.0.lut.weight": "model.decoder.embed_tokens.weight",
        "src_embed.1.pe": sinusoids(),
        "tgt_embed.1.pe": sinusoids(),
        **layers(ENCODER, "encoder.layers.{i}", ("self_attn",), FFN, NORMS[:2], LINEARS, map_norm=norm),
        **layers(DECODER, "decoder.layers.{i}", ("self_attn", "src_attn"), FFN, NORMS, LINEARS, map_norm=norm),
        **norm("encoder.norm", "model.encoder.norm"),
        **norm("decoder.norm", "model.decoder.norm"),
        "generator.proj.{p}": "lm_head.{p}",
    },
    config=UNTIED | {"norm_position": "pre", "lm_head_bias": True, "layer_norm_eps": 1e-12},
    forward=lambda model, source, source_mask, target, target_mask: model.generator(
        model(source, target, source_mask[:, 0], target_mask[:, 0])
    ),
    user_notes=("The original generator returns log-probabilities. This model returns logits.",),
)
