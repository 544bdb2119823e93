"""Aladdin Persson's Machine-Learning-Collection: the Transformer from scratch, and the one around nn.Transformer."""

import torch

from hub.importing.layout import DECODER, ENCODER, PROJECTIONS, CheckpointInfo, Layout, State, TensorRule, feed_forward
from hub.importing.layouts.torch_transformer import ASSUMED, BODY, SETTINGS, variant_config
from hub.importing.weight_folding import block_diagonal_heads


def attention(theirs: str, ours: str) -> dict[str, str | TensorRule]:
    """Matrices of one head's width that all heads share, or of d_model; scores are divided by the root of d_model."""
    return {
        f"{theirs}.queries.{{p}}": block_diagonal_heads(f"{ours}.q_proj.{{p}}", scores_divided_by_width=True),
        f"{theirs}.keys.{{p}}": block_diagonal_heads(f"{ours}.k_proj.{{p}}"),
        f"{theirs}.values.{{p}}": block_diagonal_heads(f"{ours}.v_proj.{{p}}"),
        f"{theirs}.fc_out.{{p}}": f"{ours}.out_proj.{{p}}",
    }


def num_heads(facts: CheckpointInfo, state: State) -> int | None:
    """Return the number of heads that share a matrix; None if the matrix has the width of all heads."""
    heads = facts.d_model // max(1, len(state["encoder.layers.0.attention.queries.weight"]))
    return heads if heads > 1 else None


def run(model, source, source_mask, target, target_mask):
    """Run each sentence without padding: the cross-attention of this code attends to the padding of sources."""
    rows = zip(source, source_mask[:, 0, 0], target, strict=True)
    return torch.stack([model(ids[real][:, None], given[:, None])[:, 0] for ids, real, given in rows])


ENC, DEC, BLOCK = "encoder.layers.{i}", "decoder.layers.{i}", "decoder.layers.{i}.transformer_block"
FFN = ("feed_forward.0", "feed_forward.2")
CONFIG = {
    "position_embedding_type": "learned",
    "share_encoder_decoder_embeddings": False,
    "tie_word_embeddings": False,
    "lm_head_bias": True,
    "scale_embedding": False,
}

LAYOUT = Layout(
    name="aladdin_persson",
    title="Aladdin Persson, transformer_from_scratch.py",
    keys={
        "encoder.word_embedding.weight": "model.encoder.embed_tokens.weight",
        "decoder.word_embedding.weight": "model.decoder.embed_tokens.weight",
        "encoder.position_embedding.weight": "model.encoder.embed_positions.weight",
        "decoder.position_embedding.weight": "model.decoder.embed_positions.weight",
        **attention(f"{ENC}.attention", f"{ENCODER}.self_attn"),
        **attention(f"{DEC}.attention", f"{DECODER}.self_attn"),
        **attention(f"{BLOCK}.attention", f"{DECODER}.cross_attn"),
        **feed_forward(f"{ENC}.", FFN, ENCODER),
        **feed_forward(f"{BLOCK}.", FFN, DECODER),
        f"{ENC}.norm1.{{p}}": f"{ENCODER}.self_attn_layer_norm.{{p}}",
        f"{ENC}.norm2.{{p}}": f"{ENCODER}.feed_forward_layer_norm.{{p}}",
        f"{DEC}.norm.{{p}}": f"{DECODER}.self_attn_layer_norm.{{p}}",
        f"{BLOCK}.norm1.{{p}}": f"{DECODER}.cross_attn_layer_norm.{{p}}",
        f"{BLOCK}.norm2.{{p}}": f"{DECODER}.feed_forward_layer_norm.{{p}}",
        "decoder.fc_out.{p}": "lm_head.{p}",
    },
    config=CONFIG,
    num_heads=num_heads,
    zero_biases=PROJECTIONS,
    check=(
        "Its code hides the target's padding from nothing; padding stands behind every sentence, so nothing sees it.",
    ),
)

AROUND_TORCH = Layout(
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
    assumed=ASSUMED,
    variant_config=variant_config,
    run=run,
    check=(
        "It counts positions of padding as well; ours count real tokens, the same where padding stands behind.",
        "Its cross-attention attends to the padding of sources: in batches of different lengths its results differ.",
    ),
)
