# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""The projection to the vocabulary and the label-smoothed cross-entropy (sections 3.4 and 5.4) in one, piece by piece.

A batch's logits are its largest tensor by far: 8,000 tokens of a vocabulary of 37,000 take 1.2 GB in float32, and the
usual loss keeps several of that size. Here a few tokens' logits are made, turned into their gradient, multiplied on,
and forgotten.
"""

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from .validation_vanilla_transformer import is_eager_on_cpu

CPU_CHUNK_SIZE = 2**23  # elements of logits that are there at a time on a CPU: 32 MB in float32
GPU_CHUNK_SIZE = 2**28  # elsewhere: on an H100 a base model's step takes 79 ms with these, 112 ms with a CPU's


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """Gradients are computed with the loss, while the logits are there; the backward pass scales them.

    Those that nobody asks for are left out: the head's where it is frozen, all of them under `no_grad`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        counts: torch.Tensor | None,
        smoothing: float,
        wanted: tuple[bool, bool, bool],
    ) -> torch.Tensor:
        size = len(weight)
        total = states.new_zeros((), dtype=torch.float32)
        device = states.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
        states, matrix = states.to(dtype), weight.to(dtype)
        state_gradient = torch.empty_like(states) if wanted[0] else None
        gradient = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        bias_gradient = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wanted[2] else None
        with torch.autocast(device, enabled=False):
            length = max(1, (CPU_CHUNK_SIZE if device == "cpu" else GPU_CHUNK_SIZE) // size)
            for start in range(0, len(states), length):
                piece = slice(start, start + length)
                rows, ids = states[piece], targets[piece, None]
                logits = (rows @ matrix.T).float()  # (n, V)
                log_p = (logits if bias is None else logits.add_(bias)).log_softmax(1)
                gains = (1 - smoothing) * log_p.gather(1, ids)[:, 0] + smoothing * log_p.mean(1)  # (n)
                total -= (gains if counts is None else gains * counts[piece]).sum()
                if not any(wanted):
                    continue
                error = log_p.exp_().sub_(smoothing / size)  # softmax - smoothed one-hot
                error.scatter_add_(1, ids, error.new_full(ids.shape, smoothing - 1))
                if counts is not None:
                    error *= counts[piece, None]
                if bias_gradient is not None:
                    bias_gradient += error.sum(0)
                error = error.to(dtype)
                if state_gradient is not None:
                    torch.mm(error, matrix, out=state_gradient[piece])
                if gradient is not None:
                    gradient += error.T @ rows
        ctx.save_for_backward(state_gradient, gradient, bias_gradient)
        return total

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple:
        gradients = [each if each is None else each * scale.to(each.dtype) for each in ctx.saved_tensors]
        return *gradients, None, None, None, None


def is_plain_linear(module: nn.Module) -> bool:
    """Return whether a call of `module` only computes W x + b: no adapter, hook, parametrization or quantization."""
    hooks = (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    )  # fmt: skip
    if type(module) is not nn.Linear or "forward" in vars(module) or any(hooks):
        return False
    return type(module.weight) in (nn.Parameter, FakeTensor)


def fused_linear_cross_entropy(
    states: torch.Tensor, projection: nn.Module, labels: torch.Tensor, smoothing: float = 0.0
) -> torch.Tensor:
    """Sum over target tokens of -sum_v q_v log softmax(W x + b)_v, with q_v = (1 - smoothing) [v is the target] +
    smoothing / V.

    Args:
        states: the decoder's output (B, T, D).
        projection: D to the vocabulary's V. Unless it is a plain `nn.Linear`, it is called, and all logits are kept for
            the backward pass.
        labels: (B, T), -100 where there is none. On a CPU no work is done for those; a GPU would have to be asked how
            many there are, and waited for.
        smoothing: section 5.4's epsilon_ls.

    Returns:
        A scalar in float32, in nats.
    """
    if not is_plain_linear(projection):
        logits, targets = projection(states).float().flatten(0, -2), labels.flatten()
        return nn.functional.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
    is_target = labels != -100
    counts = None
    if is_eager_on_cpu(labels):
        states, targets = states[is_target], labels[is_target]
    else:
        states, targets = states.flatten(0, -2), labels.clamp(min=0).flatten()
        counts = is_target.flatten().float()
    inputs = states, projection.weight, projection.bias
    needed = tuple(torch.is_grad_enabled() and each is not None and each.requires_grad for each in inputs)
    return _FusedLinearCrossEntropy.apply(*inputs, targets, counts, smoothing, needed)
