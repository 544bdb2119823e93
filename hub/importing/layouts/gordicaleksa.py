"""Aleksa Gordić's pytorch-original-transformer."""

from hub.importing.layout import DECODER, ENCODER, UNTIED, Layout, attention, feed_forward
from hub.importing.weight_folding import sinusoids

NETS = ("qkv_nets.0", "qkv_nets.1", "qkv_nets.2", "out_projection_net")
FFN = ("pointwise_net.linear1", "pointwise_net.linear2")
ENC, DEC = "encoder.encoder_layers.{i}", "decoder.decoder_layers.{i}"

LAYOUT = Layout(
    name="gordicaleksa",
    title="Aleksa Gordić, pytorch-original-transformer",
    keys={
        "src_embedding.embeddings_table.weight": "model.encoder.embed_tokens.weight",
        "trg_embedding.embeddings_table.weight": "model.decoder.embed_tokens.weight",
        "src_pos_embedding.positional_encodings_table": sinusoids(),
        "trg_pos_embedding.positional_encodings_table": sinusoids(),
        **attention(f"{ENC}.multi_headed_attention", NETS, f"{ENCODER}.self_attn"),
        **attention(f"{DEC}.trg_multi_headed_attention", NETS, f"{DECODER}.self_attn"),
        **attention(f"{DEC}.src_multi_headed_attention", NETS, f"{DECODER}.cross_attn"),
        **feed_forward(f"{ENC}.", FFN, ENCODER),
        **feed_forward(f"{DEC}.", FFN, DECODER),
        f"{ENC}.sublayers.0.norm.{{p}}": f"{ENCODER}.self_attn_layer_norm.{{p}}",
        f"{ENC}.sublayers.1.norm.{{p}}": f"{ENCODER}.feed_forward_layer_norm.{{p}}",
        f"{DEC}.sublayers.0.norm.{{p}}": f"{DECODER}.self_attn_layer_norm.{{p}}",
        f"{DEC}.sublayers.1.norm.{{p}}": f"{DECODER}.cross_attn_layer_norm.{{p}}",
        f"{DEC}.sublayers.2.norm.{{p}}": f"{DECODER}.feed_forward_layer_norm.{{p}}",
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
