"""Ben Trevett's pytorch-seq2seq, notebook 6, with learned positions; older files have one shared norm per layer."""

from dataclasses import replace

from ..layout import DECODER, ENCODER, UNTIED, Layout, TensorRule, layers

FC = ("fc_q", "fc_k", "fc_v", "fc_o")
FFN = ("positionwise_feedforward.fc_1", "positionwise_feedforward.fc_2")
DECODER_NORMS = ("self_attn_layer_norm", "enc_attn_layer_norm", "ff_layer_norm")
ENC, DEC = "encoder.layers.{i}", "decoder.layers.{i}"
COMMON = {
    "encoder.tok_embedding.weight": "model.encoder.embed_tokens.weight",
    "decoder.tok_embedding.weight": "model.decoder.embed_tokens.weight",
    "encoder.pos_embedding.weight": "model.encoder.embed_positions.weight",
    "decoder.pos_embedding.weight": "model.decoder.embed_positions.weight",
    "decoder.fc_out.{p}": "lm_head.{p}",
}


def one_norm(layer: str, *sublayers: str) -> TensorRule:
    targets = tuple(f"{layer}.{sublayer}_layer_norm.{{p}}" for sublayer in sublayers)
    return TensorRule(targets, note="one norm that the layer uses after each sublayer")


LAYOUT = Layout(
    name="bentrevett",
    title="Ben Trevett, pytorch-seq2seq (notebook 6)",
    keys={
        **COMMON,
        **layers(ENCODER, ENC, ("self_attention",), FFN, ("self_attn_layer_norm", "ff_layer_norm"), FC),
        **layers(DECODER, DEC, ("self_attention", "encoder_attention"), FFN, DECODER_NORMS, FC),
    },
    config=UNTIED | {"position_embedding_type": "learned", "lm_head_bias": True},
    forward=lambda model, source, source_mask, target, target_mask: model(source, target)[0],
)

OLDER = replace(
    LAYOUT,
    name="bentrevett_2019",
    title="Ben Trevett, pytorch-seq2seq (notebook 6, before the norms were separated)",
    keys={
        **COMMON,
        **layers(ENCODER, ENC, ("self_attention",), FFN, (), FC),
        **layers(DECODER, DEC, ("self_attention", "encoder_attention"), FFN, (), FC),
        f"{ENC}.layer_norm.{{p}}": one_norm(ENCODER, "self_attn", "feed_forward"),
        f"{DEC}.layer_norm.{{p}}": one_norm(DECODER, "self_attn", "cross_attn", "feed_forward"),
    },
)
