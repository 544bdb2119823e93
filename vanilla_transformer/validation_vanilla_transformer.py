# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""Checks that look at the data: on a CPU alone, since a GPU would have to be waited for."""

import torch
from torch._subclasses.fake_tensor import FakeTensor


def is_eager_on_cpu(tensor: torch.Tensor) -> bool:
    """Whether values of `tensor` may be looked at: on the CPU, and not while a compiler or fake tensors trace."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and not isinstance(tensor, FakeTensor)


def validate_input_ids(input_ids: torch.Tensor, size: int, side: str = "") -> None:
    """Raises ValueError where an id is outside a vocabulary of `size` tokens.

    Args:
        side: "decoder_" for those of the target, for the message.
    """
    if not is_eager_on_cpu(input_ids) or not input_ids.numel():
        return
    low, high = (int(bound) for bound in input_ids.aminmax())
    if low < 0 or high >= size:
        raise ValueError(
            f"{side}input_ids holds the id {low if low < 0 else high}, outside the vocabulary of {size} tokens (0 to "
            f"{size - 1}): was the text encoded with this model's tokenizer?"
        )


def validate_sequence_length(positions: torch.Tensor, size: int) -> None:
    """Raises ValueError where a position is beyond a table of `size` learned ones."""
    if is_eager_on_cpu(positions) and positions.numel() and (length := int(positions.max()) + 1) > size:
        raise ValueError(
            f"A sequence of {length} tokens is longer than the {size} learned positions "
            f"(max_position_embeddings={size}): shorten it, or train with sinusoidal positions."
        )


def validate_nonempty_sources(inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
    """Raises ValueError where a source has no token that may be seen: there is nothing to attend to.

    Args:
        inputs_embeds: (B, S, D).
        attention_mask: (B, S), zero at padding; of another form it is not looked at.
    """
    if inputs_embeds.shape[1] == 0:
        raise ValueError("The sources are empty (length 0): every source needs at least one token, such as </s>.")
    if attention_mask is not None and attention_mask.ndim == 2 and is_eager_on_cpu(attention_mask):
        empty = (attention_mask == 0).all(-1)
        if empty.any():
            row = int(empty.int().argmax())
            raise ValueError(f"Source {row} of the batch is empty: its attention_mask has no 1. Leave it out.")
