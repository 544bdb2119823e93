"""Aladdin Persson's Machine-Learning-Collection: the Transformer from scratch, and a model with nn.Transformer."""

import torch

from ..layout import DECODER, ENCODER, PROJECTIONS, UNTIED, CheckpointInfo, Keys, Layout, layers
from ..weight_folding import block_diagonal_heads
from .torch_transformer import BODY, DEFAULT_SETTINGS, SETTINGS, variant_config


def attention(key: str, projections: tuple[str, ...], target: str) -> Keys:
    """Map projections (k, k) that all heads share, or (d, d). The scores are divided by the root of d."""
    return {
        f"{key}.queries.{{p}}": block_diagonal_heads(f"{target}.q_proj.{{p}}", scaled_by_d_model=True),
        f"{key}.keys.{{p}}": block_diagonal_heads(f"{target}.k_proj.{{p}}"),
        f"{key}.values.{{p}}": block_diagonal_heads(f"{target}.v_proj.{{p}}"),
        f"{key}.fc_out.{{p}}": f"{target}.out_proj.{{p}}",
    }


def num_heads(info: CheckpointInfo) -> int | None:
    """Return the number of heads that share a matrix, or None if the matrix covers all heads."""
    heads = info.d_model // max(1, len(info.state["encoder.layers.0.attention.queries.weight"]))
    return heads if heads > 1 else None


def forward(model, source, source_mask, target, target_mask):
    """Run each sentence without padding, because the cross-attention of this code attends to source padding."""
    rows = zip(source, source_mask[:, 0, 0], target, strict=True)
    return torch.stack([model(ids[real][:, None], tokens[:, None])[:, 0] for ids, real, tokens in rows])


ATTENTIONS = ("attention", "transformer_block.attention")
FFN = ("feed_forward.0", "feed_forward.2")
DECODER_FFN = ("transformer_block.feed_forward.0", "transformer_block.feed_forward.2")
DECODER_NORMS = ("norm", "transformer_block.norm1", "transformer_block.norm2")
CONFIG = UNTIED | {"position_embedding_type": "learned", "lm_head_bias": True, "scale_embedding": False}

LAYOUT = Layout(
    name="aladdin_persson",
    title="Aladdin Persson, transformer_from_scratch.py",
    keys={
        "encoder.word_embedding.weight": "model.encoder.embed_tokens.weight",
        "decoder.word_embedding.weight": "model.decoder.embed_tokens.weight",
        "encoder.position_embedding.weight": "model.encoder.embed_positions.weight",
        "decoder.position_embedding.weight": "model.decoder.embed_positions.weight",
        **layers(ENCODER, "encoder.layers.{i}", ATTENTIONS[:1], FFN, ("norm1", "norm2"), map_attention=attention),
        **layers(DECODER, "decoder.layers.{i}", ATTENTIONS, DECODER_FFN, DECODER_NORMS, map_attention=attention),
        "decoder.fc_out.{p}": "lm_head.{p}",
    },
    config=CONFIG,
    num_heads=num_heads,
    zero_biases=PROJECTIONS,
    user_notes=("The original code does not mask target padding. With padding on the right, the results are equal.",),
)

SEQ2SEQ = Layout(
    name="aladdin_persson_seq2seq",
    title="Aladdin Persson, seq2seq_transformer.py (nn.Transformer)",
    keys={
        "src_word_embedding.weight": "model.encoder.embed_tokens.weight",
        "trg_word_embedding.weight": "model.decoder.embed_tokens.weight",
        "src_position_embedding.weight": "model.encoder.embed_positions.weight",
        "trg_position_embedding.weight": "model.decoder.embed_positions.weight",
        **BODY,
        "fc_out.{p}": "lm_head.{p}",
    },
    config=CONFIG | {"final_norm": True},
    settings=SETTINGS,
    default_settings=DEFAULT_SETTINGS,
    variant_config=variant_config,
    forward=forward,
    user_notes=(
        "The original code also counts padding positions. With padding on the right, the positions are equal.",
        "The original cross-attention attends to source padding, so its results differ in batches with padding.",
    ),
)
