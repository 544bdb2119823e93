"""The loss of a training step, and what it is made of: losses of log-probabilities, summed over target tokens."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn

from vanilla_transformer import VanillaTransformerConfig

TOKEN_CUTOFF_RATE = 0.05  # share of tokens; the paper's for all of its data sets


def supports_fused_loss(model: Any) -> bool:
    """Whether a model, or the one inside peft's, computes the smoothed loss itself, in pieces."""
    return model.config.model_type == VanillaTransformerConfig.model_type


def training_loss(
    model: nn.Module,
    inputs: dict[str, Any],
    smoothing: float,
    rdrop_alpha: float,
    use_fused_loss: bool,
    simcut_alpha: float = 0.0,
) -> tuple[torch.Tensor, Any]:
    """The smoothed cross-entropy (section 5.4) of a batch, with the divergence of R-Drop or SimCut, summed; and the
    model's outputs.

    Args:
        in_pieces: the model can smooth labels itself, with less memory; a divergence needs all logits.
    """
    labels = inputs["labels"]
    if use_fused_loss and not rdrop_alpha and not simcut_alpha:
        outputs = model(**inputs, smoothing=smoothing, num_items_in_batch=1)
        return outputs.loss, outputs
    passes = 2 if rdrop_alpha or simcut_alpha else 1
    inputs = {name: torch.cat([value] * passes) for name, value in inputs.items() if name != "labels"}
    with token_cutoff(model, len(labels)) if simcut_alpha else nullcontext():
        outputs = model(**inputs)
    logits = outputs.logits[torch.cat([labels] * passes) != -100]  # (passes * tokens, V), without padding
    log_p = logits.float().log_softmax(-1)
    targets = labels[labels != -100]
    if simcut_alpha:  # of the whole pass alone there is a cross-entropy
        whole, cut = log_p.chunk(2)
        return cross_entropy(whole, targets, smoothing) + simcut_alpha * kl_divergence(whole, cut), outputs
    loss = cross_entropy(log_p, targets.repeat(passes), smoothing) / passes
    if rdrop_alpha:
        loss = loss + rdrop_alpha / 2 * symmetric_kl_divergence(*log_p.chunk(2))
    return loss, outputs


@contextmanager
def token_cutoff(model: nn.Module, whole: int) -> Iterator[None]:
    """Context manager that zeroes the embeddings of a random fraction `TOKEN_CUTOFF_RATE` of the tokens of both sides.

    It applies to all rows after the first `whole` ones: the token cutoff of SimCut (Gao et al. 2022, section 3.1).
    """
    own: Any = extract_model_from_parallel(model)
    embeddings = {own.get_encoder().get_input_embeddings(), own.get_decoder().get_input_embeddings()}

    def cut(module: nn.Module, inputs: Any, embedded: torch.Tensor) -> torch.Tensor:
        kept = torch.rand(embedded.shape[:2], device=embedded.device) >= TOKEN_CUTOFF_RATE  # (rows, T)
        kept[:whole] = True
        return embedded * kept[..., None]

    hooks = [embedding.register_forward_hook(cut) for embedding in embeddings]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def cross_entropy(log_p: torch.Tensor, targets: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Label-smoothed cross-entropy (section 5.4), summed over target tokens.

    Args:
        log_p: log-probabilities (..., V).
        targets: token ids (...), -100 at padding.
    """
    likelihoods = log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0]  # (...)
    gains = (1 - smoothing) * likelihoods + smoothing * log_p.mean(-1)
    return -(gains * (targets != -100)).sum()


def kl_divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p, q), summed over tokens; both (tokens, V)."""
    return (log_p.exp() * (log_p - log_q)).sum()


def symmetric_kl_divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """R-Drop (Wu et al. 2021), equation 2: mean of KL(p, q) and KL(q, p), summed over tokens; both (tokens, V)."""
    return ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum() / 2
