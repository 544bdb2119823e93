# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""The projection to the vocabulary and the label-smoothed cross-entropy (sections 3.4 and 5.4) in one, piece by piece.

A batch's logits are its largest tensor by far: 8,000 tokens of a vocabulary of 37,000 take 1.2 GB in float32, and the
usual loss keeps several of that size. Here a few tokens' logits are made, turned into their gradient, multiplied on,
and forgotten.
"""

from typing import Any

import torch
from torch import nn

PIECE = 2**23  # elements of logits that are there at a time: 32 MB in float32


class _SmoothedCrossEntropy(torch.autograd.Function):
    """Gradients are computed with the loss, while the logits are there; the backward pass scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        smoothing: float,
    ) -> torch.Tensor:
        size = len(weight)
        total = states.new_zeros((), dtype=torch.float32)
        kind = torch.get_autocast_dtype(states.device.type) if torch.is_autocast_enabled(states.device.type) else None
        kind = kind or states.dtype
        states, matrix = states.to(kind), weight.to(kind)
        state_gradient = torch.empty_like(states)
        gradient = torch.zeros_like(weight, dtype=torch.float32)
        bias_gradient = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        with torch.autocast(states.device.type, enabled=False):
            for start in range(0, len(states), max(1, PIECE // size)):
                piece = slice(start, start + max(1, PIECE // size))
                rows, ids = states[piece], targets[piece, None]
                logits = (rows @ matrix.T).float()  # (n, V)
                log_p = (logits if bias is None else logits.add_(bias)).log_softmax(1)
                total -= (1 - smoothing) * log_p.gather(1, ids).sum() + smoothing * log_p.mean(1).sum()
                error = log_p.exp_().sub_(smoothing / size)  # softmax - smoothed one-hot
                error.scatter_add_(1, ids, error.new_full(ids.shape, smoothing - 1))
                if bias_gradient is not None:
                    bias_gradient += error.sum(0)
                error = error.to(kind)
                torch.mm(error, matrix, out=state_gradient[piece])
                gradient += error.T @ rows
        ctx.save_for_backward(state_gradient, gradient, bias_gradient)
        return total

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple:
        states, weight, bias = ctx.saved_tensors
        return states * scale.to(states.dtype), weight * scale, None if bias is None else bias * scale, None, None


def smoothed_cross_entropy(
    states: torch.Tensor, projection: nn.Linear, labels: torch.Tensor, smoothing: float = 0.0
) -> torch.Tensor:
    """Sum over target tokens of -sum_v q_v log softmax(W x + b)_v, with q_v = (1 - smoothing) [v is the target] +
    smoothing / V.

    Args:
        states: the decoder's output (B, T, D).
        projection: D to the vocabulary's V.
        labels: (B, T), -100 where there is none; no work is done for those.
        smoothing: section 5.4's epsilon_ls.

    Returns:
        A scalar in float32, in nats.
    """
    wanted = labels != -100
    states, targets = states[wanted], labels[wanted]
    return _SmoothedCrossEntropy.apply(states, projection.weight, projection.bias, targets, smoothing)
