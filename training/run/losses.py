"""The loss of a training step, and what it is made of: losses of log-probabilities, summed over target tokens."""

from typing import Any

import torch
from torch import nn

from vanilla_transformer import VanillaTransformerConfig


def smooths_labels(model: Any) -> bool:
    """Whether a model, or the one inside peft's, computes the smoothed loss itself, in pieces."""
    return model.config.model_type == VanillaTransformerConfig.model_type


def training_loss(
    model: nn.Module, inputs: dict[str, Any], smoothing: float, rdrop_alpha: float, in_pieces: bool
) -> tuple[torch.Tensor, Any]:
    """The smoothed cross-entropy (section 5.4) of a batch, with R-Drop's divergence, summed; and the model's outputs.

    Args:
        in_pieces: the model can smooth labels itself, with less memory; R-Drop needs all logits.
    """
    labels = inputs["labels"]
    if in_pieces and not rdrop_alpha:
        outputs = model(**inputs, smoothing=smoothing, num_items_in_batch=1)
        return outputs.loss, outputs
    passes = 2 if rdrop_alpha else 1
    inputs = {name: torch.cat([value] * passes) for name, value in inputs.items() if name != "labels"}
    outputs = model(**inputs)
    logits = outputs.logits[torch.cat([labels] * passes) != -100]  # (passes * tokens, V), without padding
    log_p = logits.float().log_softmax(-1)
    loss = cross_entropy(log_p, labels[labels != -100].repeat(passes), smoothing) / passes
    if passes == 2:
        loss = loss + rdrop_alpha / 2 * divergence(*log_p.chunk(2))
    return loss, outputs


def cross_entropy(log_p: torch.Tensor, targets: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Section 5.4: label-smoothed, summed over tokens, of log-probabilities (tokens, V) and token ids (tokens)."""
    likelihood = log_p.gather(1, targets[:, None]).sum()
    return -((1 - smoothing) * likelihood + smoothing * log_p.mean(1).sum())


def divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """R-Drop (Wu et al. 2021), equation 2: mean of KL(p, q) and KL(q, p), summed over tokens; both (tokens, V)."""
    return ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum() / 2
