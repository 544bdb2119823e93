"""jadore801120's attention-is-all-you-need-pytorch: embedding LayerNorm, norms in the sublayers, no biases."""

from typing import Any

import torch

from ..layout import DECODER, ENCODER, PROJECTIONS, UNTIED, CheckpointInfo, Layout, TensorRule, layers
from ..weight_folding import sinusoids

TARGET, OUTPUT = "decoder.trg_word_emb.weight", "trg_word_prj.weight"
W = ("w_qs", "w_ks", "w_vs", "fc")
FFN = ("pos_ffn.w_1", "pos_ffn.w_2")
NORMS = ("slf_attn.layer_norm", "enc_attn.layer_norm", "pos_ffn.layer_norm")


def scale_logits(tensor, info: CheckpointInfo):
    """Multiply the LM head by d^-0.5 if the original code scales the logits (`scale_emb_or_prj="prj"`)."""
    return (tensor * (info.d_model**-0.5 if resolve_scaling(info) == "prj" else 1.0),)


def resolve_scaling(info: CheckpointInfo) -> str:
    """Return "emb", "prj" or "none" if the LM head shares the target embeddings, else "none"."""
    is_equal = torch.equal(info.state[OUTPUT], info.state[TARGET])
    return info.metadata["scale_emb_or_prj"] if info.metadata.get("proj_share_weight", is_equal) else "none"


def variant_config(info: CheckpointInfo) -> dict[str, Any]:
    settings = info.metadata
    fields: dict[str, Any] = {"scale_embedding": resolve_scaling(info) == "emb"}
    if "src_pad_idx" in settings:
        if settings["src_pad_idx"] != settings.get("trg_pad_idx", settings["src_pad_idx"]):
            raise ValueError("src_pad_idx and trg_pad_idx differ, which is not supported.")
        fields["pad_token_id"] = settings["src_pad_idx"]
    return fields


LAYOUT = Layout(
    name="jadore801120",
    title="jadore801120, attention-is-all-you-need-pytorch",
    keys={
        "encoder.src_word_emb.weight": "model.encoder.embed_tokens.weight",
        TARGET: "model.decoder.embed_tokens.weight",
        "encoder.position_enc.pos_table": sinusoids(),
        "decoder.position_enc.pos_table": sinusoids(),
        "encoder.layer_norm.{p}": "model.encoder.embedding_layer_norm.{p}",
        "decoder.layer_norm.{p}": "model.decoder.embedding_layer_norm.{p}",
        **layers(ENCODER, "encoder.layer_stack.{i}", ("slf_attn",), FFN, (NORMS[0], NORMS[2]), W),
        **layers(DECODER, "decoder.layer_stack.{i}", ("slf_attn", "enc_attn"), FFN, NORMS, W),
        OUTPUT: TensorRule(
            ("lm_head.weight",), scale_logits, "logits * d^-0.5 if the LM head shares the target embeddings"
        ),
    },
    config=UNTIED | {"embedding_norm": True, "layer_norm_eps": 1e-6},
    zero_biases=PROJECTIONS,
    num_heads=lambda info: info.metadata.get("n_head"),
    settings={
        "proj_share_weight": bool,
        "scale_emb_or_prj": ("emb", "prj", "none"),
        "n_head": int,
        "src_pad_idx": int,
        "trg_pad_idx": int,
    },
    default_settings={"scale_emb_or_prj": "prj"},
    variant_config=variant_config,
    user_notes=("Code before 7 June 2020 computes other results with the same names. Verify with --compare-with.",),
    forward=lambda model, source, source_mask, target, target_mask: model(source, target).view(*target.shape, -1),
)
