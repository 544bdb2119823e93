"""hyunwoongko's transformer: post-norm with gamma and beta, positions that are not saved, unscaled embeddings."""

from ..layout import DECODER, ENCODER, UNTIED, Keys, Layout, layers
from ..weight_folding import unbiased_norm

W = ("w_q", "w_k", "w_v", "w_concat")
DECODER_ATTENTIONS = ("self_attention", "enc_dec_attention")
NORMS = ("norm1", "norm2", "norm3")
FFN = ("ffn.linear1", "ffn.linear2")


def norm(key: str, target: str) -> Keys:
    return {f"{key}.gamma": unbiased_norm(f"{target}.weight", note=""), f"{key}.beta": f"{target}.bias"}


LAYOUT = Layout(
    name="hyunwoongko",
    title="hyunwoongko, transformer",
    keys={
        "encoder.emb.tok_emb.weight": "model.encoder.embed_tokens.weight",
        "decoder.emb.tok_emb.weight": "model.decoder.embed_tokens.weight",
        **layers(ENCODER, "encoder.layers.{i}", ("attention",), FFN, NORMS[:2], W, map_norm=norm),
        **layers(DECODER, "decoder.layers.{i}", DECODER_ATTENTIONS, FFN, NORMS, W, map_norm=norm),
        "decoder.linear.{p}": "lm_head.{p}",
    },
    config=UNTIED | {"lm_head_bias": True, "scale_embedding": False, "layer_norm_eps": 1e-12, "pad_token_id": 1},
    settings={"unbiased_norm": bool},
    default_settings={"unbiased_norm": False},  # true before December 2022
    user_notes=(
        "The file does not contain positions. The sinusoids of the original code are used.",
        "The original target mask hides rows instead of columns of padding. Real tokens are not affected.",
    ),
)
