"""JoeyNMT 2: pre- or post-norm, embeddings scaled or not and tied or not, as its configuration says."""

from typing import Any

from hub.importing.layout import ACTIVATIONS, DECODER, ENCODER, CheckpointInfo, Layout, State, attention, feed_forward
from hub.importing.weight_folding import sinusoids

KQV = ("q_layer", "k_layer", "v_layer", "output_layer")
FFN = ("feed_forward.pwff_layer.0", "feed_forward.pwff_layer.3")


def variant_config(facts: CheckpointInfo, state: State) -> dict[str, Any]:
    """Final norms exist with pre-norm alone; the rest is in JoeyNMT's configuration, not in its file."""
    if "scale_embedding" not in facts.metadata:
        raise ValueError(
            "whether embeddings are multiplied by sqrt(d) stands in JoeyNMT's configuration (`scale`), not in the "
            "file: say --set scale_embedding=true or --set scale_embedding=false."
        )
    is_pre = "encoder.layer_norm.weight" in state
    return {
        "norm_position": "pre" if is_pre else "post",
        "scale_embedding": facts.metadata["scale_embedding"],
        "activation_function": facts.metadata["activation"],
    }


LAYOUT = Layout(
    name="joeynmt",
    title="JoeyNMT 2",
    keys={
        "src_embed.lut.weight": "model.encoder.embed_tokens.weight",
        "trg_embed.lut.weight": "model.decoder.embed_tokens.weight",
        "encoder.pe.pe": sinusoids(),
        "decoder.pe.pe": sinusoids(),
        **attention("encoder.layers.{i}.src_src_att", KQV, f"{ENCODER}.self_attn"),
        **attention("decoder.layers.{i}.trg_trg_att", KQV, f"{DECODER}.self_attn"),
        **attention("decoder.layers.{i}.src_trg_att", KQV, f"{DECODER}.cross_attn"),
        **feed_forward("encoder.layers.{i}.", FFN, ENCODER),
        **feed_forward("decoder.layers.{i}.", FFN, DECODER),
        "encoder.layers.{i}.layer_norm.{p}": f"{ENCODER}.self_attn_layer_norm.{{p}}",
        "encoder.layers.{i}.feed_forward.layer_norm.{p}": f"{ENCODER}.feed_forward_layer_norm.{{p}}",
        "decoder.layers.{i}.x_layer_norm.{p}": f"{DECODER}.self_attn_layer_norm.{{p}}",
        "decoder.layers.{i}.dec_layer_norm.{p}": f"{DECODER}.cross_attn_layer_norm.{{p}}",
        "decoder.layers.{i}.feed_forward.layer_norm.{p}": f"{DECODER}.feed_forward_layer_norm.{{p}}",
        "encoder.layer_norm.{p}": "model.encoder.norm.{p}",
        "decoder.layer_norm.{p}": "model.decoder.norm.{p}",
        "decoder.output_layer.weight": "lm_head.weight",
    },
    config={"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
    norm_eps=lambda d_model: 1e-6,
    settings={"scale_embedding": bool, "activation": ACTIVATIONS},
    assumed={"activation": "relu"},
    variant_config=variant_config,
    run=lambda model, source, source_mask, target, target_mask: model._encode_decode(
        src=source,
        trg_input=target,
        src_mask=source_mask[:, 0],
        src_length=source_mask.sum(-1)[:, 0, 0],
        trg_mask=target_mask[:, 0, -1:],
    )[0],
    optional=("encoder.layer_norm.{p}", "decoder.layer_norm.{p}"),
    check=("Residual weights (`alpha`) other than 1 in its configuration are not in the file and not supported.",),
)
