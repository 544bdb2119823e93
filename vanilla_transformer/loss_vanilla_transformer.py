# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""The LM head and the label-smoothed cross-entropy (sections 3.4 and 5.4), fused and computed in chunks.

The logits are by far the largest tensor of a batch. 8,000 tokens with a vocabulary of 37,000 take 1.2 GB in float32,
and the usual loss keeps several tensors of that size. Here only the logits of one chunk of tokens are in memory. They
are freed as soon as the gradients of this chunk are computed.
"""

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

CPU_CHUNK_SIZE = 2**23  # logits per chunk on a CPU: 32 MB in float32
GPU_CHUNK_SIZE = 2**28  # on a GPU; a step of the base model takes 79 ms on an H100, and 112 ms with 2**23 logits


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """Loss that computes the gradients in the forward pass, while the logits of each chunk are in memory.

    The backward pass only scales them, so they have no derivatives (RuntimeError with `create_graph`).
    `needs_gradient` has one flag each for `states`, `weight` and `bias`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        mask: torch.Tensor | None,
        smoothing: float,
        needs_gradient: tuple[bool, bool, bool],
    ) -> torch.Tensor:
        size = len(weight)
        total = states.new_zeros((), dtype=torch.float32)
        device = states.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
        states, matrix = states.to(dtype), weight.to(dtype)
        state_gradient = torch.empty_like(states) if needs_gradient[0] else None
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if needs_gradient[1] else None
        bias_gradient = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needs_gradient[2] else None
        with torch.autocast(device, enabled=False):
            length = max(1, (CPU_CHUNK_SIZE if device == "cpu" else GPU_CHUNK_SIZE) // size)
            for start in range(0, len(states), length):
                chunk = slice(start, start + length)
                rows, ids = states[chunk], targets[chunk, None]
                logits = (rows @ matrix.T).float()  # (n, V)
                log_p = (logits if bias is None else logits.add_(bias)).log_softmax(1)
                log_likelihoods = (1 - smoothing) * log_p.gather(1, ids)[:, 0] + smoothing * log_p.mean(1)  # (n)
                total -= (log_likelihoods if mask is None else log_likelihoods * mask[chunk]).sum()
                if not any(needs_gradient):
                    continue
                logits_gradient = log_p.exp_().sub_(smoothing / size)  # softmax - smoothed one-hot
                logits_gradient.scatter_add_(1, ids, logits_gradient.new_full(ids.shape, smoothing - 1))
                if mask is not None:
                    logits_gradient *= mask[chunk, None]
                if bias_gradient is not None:
                    bias_gradient += logits_gradient.sum(0)
                logits_gradient = logits_gradient.to(dtype)
                if state_gradient is not None:
                    torch.mm(logits_gradient, matrix, out=state_gradient[chunk])
                if weight_gradient is not None:
                    weight_gradient += logits_gradient.T @ rows
        ctx.save_for_backward(state_gradient, weight_gradient, bias_gradient)
        return total

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple:
        if torch.is_grad_enabled():  # only with `create_graph`
            raise RuntimeError("The fused loss has no second derivatives. Compute the loss from the logits instead.")
        gradients = [each if each is None else each * scale.to(each.dtype) for each in ctx.saved_tensors]
        return *gradients, None, None, None, None


def is_eager_on_cpu(tensor: torch.Tensor) -> bool:
    """Return whether values of `tensor` can be read cheaply. On a GPU, reading them would synchronize with it.

    Returns False for tensors that are not on a CPU, for fake tensors, and while a compiler traces.
    """
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and not isinstance(tensor, FakeTensor)


def is_unmodified_linear(module: nn.Module) -> bool:
    """Return whether `module` only computes W x + b, without adapter, hook, parametrization or quantization."""
    hook_names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if type(module) is not nn.Linear or "forward" in vars(module) or any(getattr(module, name) for name in hook_names):
        return False
    return type(module.weight) in (nn.Parameter, FakeTensor)


def fused_linear_cross_entropy(
    states: torch.Tensor, projection: nn.Module, labels: torch.Tensor, smoothing: float = 0.0
) -> torch.Tensor:
    """Return the sum over target tokens of -sum_v q_v log softmax(W x + b)_v, in nats: a scalar in float32.

    The target distribution is q_v = (1 - smoothing) [v is the target] + smoothing / V.

    Args:
        states: Output of the decoder (B, T, D).
        projection: LM head, from D to V. If it is not an unmodified `nn.Linear`, it is called, and all logits are kept
            for the backward pass.
        labels: Target ids (B, T); -100 marks positions without a target. On CPU, these positions are skipped. On GPU,
            they are computed and masked, because skipping them would need a host-device synchronization.
        smoothing: Label smoothing factor, epsilon_ls of section 5.4.
    """
    if not is_unmodified_linear(projection):
        logits, targets = projection(states).float().flatten(0, -2), labels.flatten()
        return nn.functional.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
    is_target = labels != -100
    mask = None
    if is_eager_on_cpu(labels):
        states, targets = states[is_target], labels[is_target]
    else:
        states, targets = states.flatten(0, -2), labels.clamp(min=0).flatten()
        mask = is_target.flatten().float()
    inputs = states, projection.weight, projection.bias
    needs_gradient = tuple(torch.is_grad_enabled() and each is not None and each.requires_grad for each in inputs)
    return _FusedLinearCrossEntropy.apply(*inputs, targets, mask, smoothing, needs_gradient)
