"""JoeyNMT 2: pre-norm or post-norm, and embeddings that may be scaled and tied."""

from typing import Any

from ..layout import ACTIVATIONS, DECODER, ENCODER, UNTIED, CheckpointInfo, Layout, layers
from ..weight_folding import sinusoids

QKVO = ("q_layer", "k_layer", "v_layer", "output_layer")
DECODER_NORMS = ("x_layer_norm", "dec_layer_norm", "feed_forward.layer_norm")
FFN = ("feed_forward.pwff_layer.0", "feed_forward.pwff_layer.3")


def variant_config(info: CheckpointInfo) -> dict[str, Any]:
    """Infer pre-norm from the final LayerNorm. The other settings are only in the configuration of JoeyNMT."""
    if "scale_embedding" not in info.metadata:
        setting = "Use --set scale_embedding=true or false, as `scale` in the configuration of JoeyNMT."
        raise ValueError(f"the file does not specify whether embeddings are multiplied by sqrt(d). {setting}")
    return {
        "norm_position": "pre" if "encoder.layer_norm.weight" in info.state else "post",
        "scale_embedding": info.metadata["scale_embedding"],
        "activation_function": info.metadata["activation"],
    }


LAYOUT = Layout(
    name="joeynmt",
    title="JoeyNMT 2",
    keys={
        "src_embed.lut.weight": "model.encoder.embed_tokens.weight",
        "trg_embed.lut.weight": "model.decoder.embed_tokens.weight",
        "encoder.pe.pe": sinusoids(),
        "decoder.pe.pe": sinusoids(),
        **layers(ENCODER, "encoder.layers.{i}", ("src_src_att",), FFN, ("layer_norm", "feed_forward.layer_norm"), QKVO),
        **layers(DECODER, "decoder.layers.{i}", ("trg_trg_att", "src_trg_att"), FFN, DECODER_NORMS, QKVO),
        "encoder.layer_norm.{p}": "model.encoder.norm.{p}",
        "decoder.layer_norm.{p}": "model.decoder.norm.{p}",
        "decoder.output_layer.weight": "lm_head.weight",
    },
    config=UNTIED | {"layer_norm_eps": 1e-6},
    settings={"scale_embedding": bool, "activation": ACTIVATIONS},
    default_settings={"activation": "relu"},
    variant_config=variant_config,
    forward=lambda model, source, source_mask, target, target_mask: model._encode_decode(
        src=source,
        trg_input=target,
        src_mask=source_mask[:, 0],
        src_length=source_mask.sum(-1)[:, 0, 0],
        trg_mask=target_mask[:, 0, -1:],
    )[0],
    optional=("encoder.layer_norm.{p}", "decoder.layer_norm.{p}"),
    user_notes=(
        "Residual weights (`alpha`) other than 1, and different numbers of heads in encoder and decoder, are not "
        "supported. In JoeyNMT 2.3, an encoder without `layer_norm` in its configuration is not supported either.",
    ),
)
