"""Aleksa Gordić's pytorch-original-transformer."""

from ..layout import DECODER, ENCODER, UNTIED, Layout, layers
from ..weight_folding import sinusoids

NETS = ("qkv_nets.0", "qkv_nets.1", "qkv_nets.2", "out_projection_net")
FFN = ("pointwise_net.linear1", "pointwise_net.linear2")
ATTENTIONS = ("trg_multi_headed_attention", "src_multi_headed_attention")
NORMS = ("sublayers.0.norm", "sublayers.1.norm", "sublayers.2.norm")

LAYOUT = Layout(
    name="gordicaleksa",
    title="Aleksa Gordić, pytorch-original-transformer",
    keys={
        "src_embedding.embeddings_table.weight": "model.encoder.embed_tokens.weight",
        "trg_embedding.embeddings_table.weight": "model.decoder.embed_tokens.weight",
        "src_pos_embedding.positional_encodings_table": sinusoids(),
        "trg_pos_embedding.positional_encodings_table": sinusoids(),
        **layers(ENCODER, "encoder.encoder_layers.{i}", ("multi_headed_attention",), FFN, NORMS[:2], NETS),
        **layers(DECODER, "decoder.decoder_layers.{i}", ATTENTIONS, FFN, NORMS, NETS),
        "encoder.norm.{p}": "model.encoder.norm.{p}",
        "decoder.norm.{p}": "model.decoder.norm.{p}",
        "decoder_generator.linear.{p}": "lm_head.{p}",
    },
    config=UNTIED | {"norm_position": "pre", "lm_head_bias": True},
    forward=lambda model, source, source_mask, target, target_mask: model(
        source, target, source_mask, target_mask
    ).view(*target.shape, -1),
    user_notes=("The original generator returns log-probabilities. This model returns logits.",),
)
