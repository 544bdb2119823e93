"""PyTorch's translation tutorial with nn.Transformer: fused projections, post-norm and a final LayerNorm."""

from typing import Any

import torch

from ..layout import ACTIVATIONS, DECODER, ENCODER, UNTIED, CheckpointInfo, Kind, Layout, layers
from ..weight_folding import fused_attention, sinusoids

ATTENTIONS, FFN, NORMS = ("self_attn", "multihead_attn"), ("linear1", "linear2"), ("norm1", "norm2", "norm3")
SETTINGS: dict[str, Kind] = {"norm_first": bool, "activation": ACTIVATIONS}
DEFAULT_SETTINGS = {"norm_first": False, "activation": "relu"}  # defaults of PyTorch; files do not contain them
BODY = {
    **layers(ENCODER, "transformer.encoder.layers.{i}", ATTENTIONS[:1], FFN, NORMS[:2], map_attention=fused_attention),
    **layers(DECODER, "transformer.decoder.layers.{i}", ATTENTIONS, FFN, NORMS, map_attention=fused_attention),
    "transformer.encoder.norm.{p}": "model.encoder.norm.{p}",
    "transformer.decoder.norm.{p}": "model.decoder.norm.{p}",
}


def variant_config(info: CheckpointInfo) -> dict[str, Any]:
    """Return the arguments of `nn.Transformer`, which the parameter names do not show."""
    norm = "pre" if info.metadata["norm_first"] else "post"
    return {"norm_position": norm, "activation_function": info.metadata["activation"]}


def forward(model, source, source_mask, target, target_mask):
    """Call `nn.Transformer` with sequence-first tensors and masks that are True at hidden tokens."""
    causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
    everything = torch.zeros(source.shape[1], source.shape[1], dtype=torch.bool)
    padding = ~source_mask[:, 0, 0]
    target_padding = ~target_mask[:, 0, -1]
    return model(source.T, target.T, everything, causal, padding, target_padding, padding).transpose(0, 1)


LAYOUT = Layout(
    name="torch_tutorial",
    title="PyTorch's translation tutorial with nn.Transformer",
    keys={
        "src_tok_emb.embedding.weight": "model.encoder.embed_tokens.weight",
        "tgt_tok_emb.embedding.weight": "model.decoder.embed_tokens.weight",
        "positional_encoding.pos_embedding": sinusoids(),
        **BODY,
        "generator.{p}": "lm_head.{p}",
    },
    config=UNTIED | {"final_norm": True, "lm_head_bias": True},
    settings=SETTINGS,
    default_settings=DEFAULT_SETTINGS,
    variant_config=variant_config,
    forward=forward,
)
