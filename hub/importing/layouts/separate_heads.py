"""Article 'What is a Transformer?' (dm, dk, dv, nhead): separate head dimensions, norms with unbiased variance."""

from ..layout import DECODER, ENCODER, PROJECTIONS, UNTIED, Keys, Layout, layers
from ..weight_folding import sinusoids, unbiased_norm

W = ("wq", "wk", "wv", "wo")
NORMS = ("norm1", "norm2", "norm3")
FFN = ("feedforward.w1", "feedforward.w2")


def norm(key: str, target: str) -> Keys:
    note = "gamma / sqrt(unbiased variance + eps): gamma times sqrt((n - 1) / n), and eps times (n - 1) / n"
    return {f"{key}.gamma": unbiased_norm(f"{target}.weight", note), f"{key}.beta": f"{target}.bias"}


LAYOUT = Layout(
    name="separate_heads",
    title="'What is a Transformer?' (dm, dk, dv, nhead)",
    keys={
        "encoder.embeddings.embedding.weight": "model.encoder.embed_tokens.weight",
        "decoder.embeddings.embedding.weight": "model.decoder.embed_tokens.weight",
        "encoder.pos_encodings.pos_encodings": sinusoids(),
        "decoder.pos_encodings.pos_encodings": sinusoids(),
        **layers(ENCODER, "encoder.stack.{i}", ("multihead",), FFN, NORMS[:2], W, map_norm=norm),
        **layers(DECODER, "decoder.stack.{i}", ("maskmultihead", "multihead"), FFN, NORMS, W, map_norm=norm),
        "linear.{p}": "lm_head.{p}",
    },
    config=UNTIED | {"lm_head_bias": True},
    zero_biases=PROJECTIONS,
    forward=lambda model, source, source_mask, target, target_mask: model(
        source, target, src_mask=source_mask[:, 0], trg_mask=target_mask[:, 0]
    ),
    settings={"scale": bool},
    default_settings={"scale": True},  # embeddings are multiplied by sqrt(dm) by default
    variant_config=lambda info: {
        "layer_norm_eps": 1e-6 * (info.d_model - 1) / info.d_model,
        "scale_embedding": info.metadata["scale"],
    },
    user_notes=("The eps of the norms is assumed to be 1e-6, as in the original code.",),
)
