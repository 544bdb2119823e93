"""The Annotated Transformer (Harvard NLP, 2022)."""

from hub.importing.layout import DECODER, ENCODER, UNTIED, Keys, Layout, attention, feed_forward
from hub.importing.weight_folding import sinusoids, std_norm

LINEARS = ("0", "1", "2", "3")
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
        **attention("encoder.layers.{i}.self_attn.linears", LINEARS, f"{ENCODER}.self_attn"),
        **attention("decoder.layers.{i}.self_attn.linears", LINEARS, f"{DECODER}.self_attn"),
        **attention("decoder.layers.{i}.src_attn.linears", LINEARS, f"{DECODER}.cross_attn"),
        **feed_forward("encoder.layers.{i}.", FFN, ENCODER),
        **feed_forward("decoder.layers.{i}.", FFN, DECODER),
        **norm("encoder.layers.{i}.sublayer.0.norm", f"{ENCODER}.self_attn_layer_norm"),
        **norm("encoder.layers.{i}.sublayer.1.norm", f"{ENCODER}.feed_forward_layer_norm"),
        **norm("decoder.layers.{i}.sublayer.0.norm", f"{DECODER}.self_attn_layer_norm"),
        **norm("decoder.layers.{i}.sublayer.1.norm", f"{DECODER}.cross_attn_layer_norm"),
        **norm("decoder.layers.{i}.sublayer.2.norm", f"{DECODER}.feed_forward_layer_norm"),
        **norm("encoder.norm", "model.encoder.norm"),
        **norm("decoder.norm", "model.decoder.norm"),
        "generator.proj.{p}": "lm_head.{p}",
    },
    config=UNTIED | {"norm_position": "pre", "lm_head_bias": True},
    norm_eps=lambda d_model: 1e-12,
    forward=lambda model, source, source_mask, target, target_mask: model.generator(
        model(source, target, source_mask[:, 0], target_mask[:, 0])
    ),
    user_notes=("The original generator returns log-probabilities. This model returns logits.",),
)
