"""Training losses, computed from log-probabilities and summed over target tokens."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn

from vanilla_transformer import VanillaTransformerConfig

TOKEN_CUTOFF_RATE = 0.05  # fraction of tokens, as for all data sets of the SimCut paper


def supports_fused_loss(model: Any) -> bool:
    """Return whether the model (or the base model of a `PeftModel`) computes the label-smoothed loss itself."""
    return model.config.model_type == VanillaTransformerConfig.model_type


def training_loss(
    model: nn.Module,
    inputs: dict[str, Any],
    smoothing: float,
    rdrop_alpha: float,
    use_fused_loss: bool,
    simcut_alpha: float = 0.0,
    has_fixed_shapes: bool = False,
) -> tuple[torch.Tensor, Any]:
    """Return the label-smoothed cross-entropy (section 5.4), with R-Drop or SimCut, and the outputs of the model.

    The loss is summed over target tokens. `use_fused_loss` selects the chunked loss of the model, which takes less
    memory. R-Drop and SimCut ignore it, because they need all logits. With `has_fixed_shapes`, padding is multiplied by
    zero instead of removed, so that all tensor sizes follow from the batch shape, without host-device synchronization.
    """
    labels = inputs["labels"]  # (B, T)
    if use_fused_loss and not rdrop_alpha and not simcut_alpha:
        outputs = model(**inputs, smoothing=smoothing, num_items_in_batch=1)
        return outputs.loss, outputs
    passes = 2 if rdrop_alpha or simcut_alpha else 1
    inputs = {name: torch.cat([value] * passes) for name, value in inputs.items() if name != "labels"}
    with token_cutoff(model, len(labels)) if simcut_alpha else nullcontext():
        outputs = model(**inputs)
    is_target = labels != -100
    targets, logits = labels, outputs.logits  # (B, T), (passes * B, T, V)
    if not has_fixed_shapes:
        targets, logits = labels[is_target], logits[torch.cat([is_target] * passes)]  # (n), (passes * n, V)
    log_p = logits.float().log_softmax(-1)
    if simcut_alpha:
        log_p, log_q = log_p.chunk(2)  # without and with token cutoff
        loss = cross_entropy(log_p, targets, smoothing)
        return loss + simcut_alpha * (log_p.exp() * (log_p - log_q)).sum(), outputs  # KL, summed over tokens
    loss = cross_entropy(log_p, torch.cat([targets] * passes), smoothing) / passes
    if rdrop_alpha:
        if has_fixed_shapes:
            log_p = log_p * torch.cat([is_target] * passes)[..., None]
        loss = loss + rdrop_alpha / 2 * symmetric_kl_divergence(*log_p.chunk(2))
    return loss, outputs


@contextmanager
def token_cutoff(model: nn.Module, num_uncut_rows: int) -> Iterator[None]:
    """Context manager that applies the token cutoff of SimCut (Gao et al. 2022, section 3.1).

    The embeddings of a random fraction `TOKEN_CUTOFF_RATE` of the source and target tokens are zero, in all rows after
    the first `num_uncut_rows`.
    """
    unwrapped: Any = extract_model_from_parallel(model)
    embeddings = {side.get_input_embeddings() for side in (unwrapped.get_encoder(), unwrapped.get_decoder())}

    def cut(module: nn.Module, inputs: Any, embedded: torch.Tensor) -> torch.Tensor:
        kept = torch.rand(embedded.shape[:2], device=embedded.device) >= TOKEN_CUTOFF_RATE  # (rows, T)
        kept[:num_uncut_rows] = True
        return embedded * kept[..., None]

    hooks = [embedding.register_forward_hook(cut) for embedding in embeddings]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def cross_entropy(log_p: torch.Tensor, targets: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Return the label-smoothed cross-entropy (section 5.4), summed over target tokens.

    `log_p` are log-probabilities (..., V). `targets` are token ids (...), with -100 for padding.
    """
    log_likelihoods = log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0]  # (...)
    smoothed = (1 - smoothing) * log_likelihoods + smoothing * log_p.mean(-1)
    return -(smoothed * (targets != -100)).sum()


def symmetric_kl_divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Return the mean of KL(p, q) and KL(q, p), summed over tokens (R-Drop, Wu et al. 2021, equation 2)."""
    return ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum() / 2
