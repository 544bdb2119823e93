"""hyunwoongko's transformer: post-norm with gamma and beta, positions that are not saved, unscaled embeddings."""

from hub.importing.layout import DECODER, ENCODER, UNTIED, Keys, Layout, attention, feed_forward
from hub.importing.weight_folding import unbiased_norm

W = ("w_q", "w_k", "w_v", "w_concat")
FFN = ("ffn.linear1", "ffn.linear2")


def norm(key: str, target: str) -> Keys:
    return {f"{key}.gamma": unbiased_norm(f"{target}.weight", note=""), f"{key}.beta": f"{target}.bias"}


LAYOUT = Layout(
    name="hyunwoongko",
    title="hyunwoongko, transformer",
    keys={
        "encoder.emb.tok_emb.weight": "model.encoder.embed_tokens.weight",
        "decoder.emb.tok_emb.weight": "model.decoder.embed_tokens.weight",
        **attention("encoder.layers.{i}.attention", W, f"{ENCODER}.self_attn"),
        **attention("decoder.layers.{i}.self_attention", W, f"{DECODER}.self_attn"),
        **attention("decoder.layers.{i}.enc_dec_attention", W, f"{DECODER}.cross_attn"),
        **feed_forward("encoder.layers.{i}.", FFN, ENCODER),
        **feed_forward("decoder.layers.{i}.", FFN, DECODER),
        **norm("encoder.layers.{i}.norm1", f"{ENCODER}.self_attn_layer_norm"),
        **norm("encoder.layers.{i}.norm2", f"{ENCODER}.feed_forward_layer_norm"),
        **norm("decoder.layers.{i}.norm1", f"{DECODER}.self_attn_layer_norm"),
        **norm("decoder.layers.{i}.norm2", f"{DECODER}.cross_attn_layer_norm"),
        **norm("decoder.layers.{i}.norm3", f"{DECODER}.feed_forward_layer_norm"),
        "decoder.linear.{p}": "lm_head.{p}",
    },
    config=UNTIED | {"lm_head_bias": True, "scale_embedding": False},
    norm_eps=lambda d_model: 1e-12,
    special_ids={"pad_token_id": 1},
    settings={"unbiased_norm": bool},
    default_settings={"unbiased_norm": False},  # true before December 2022
    user_notes=(
        "The file does not contain positions. The sinusoids of the original code are used.",
        "The original target mask hides rows instead of columns of padding. Real tokens are not affected.",
    ),
)
