# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""Input checks that read tensor values. They run on CPU only, because reading values on a GPU synchronizes with it."""

import torch
from torch._subclasses.fake_tensor import FakeTensor


def is_eager_on_cpu(tensor: torch.Tensor) -> bool:
    """Return whether values of `tensor` can be read cheaply: it is a real CPU tensor, and no compiler is tracing."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and not isinstance(tensor, FakeTensor)


def validate_input_ids(input_ids: torch.Tensor, size: int, name_prefix: str = "") -> None:
    """Raise ValueError if an id is outside the vocabulary of `size` tokens. The message adds `name_prefix`."""
    if not is_eager_on_cpu(input_ids) or not input_ids.numel():
        return
    low, high = (int(bound) for bound in input_ids.aminmax())
    if low < 0 or high >= size:
        raise ValueError(
            f"{name_prefix}input_ids contains the id {low if low < 0 else high}, outside the vocabulary of {size} "
            f"tokens (0 to {size - 1}). Encode the text with the tokenizer of this model."
        )


def validate_sequence_length(positions: torch.Tensor, size: int) -> None:
    """Raise ValueError if a position is outside the table of `size` learned positions."""
    if is_eager_on_cpu(positions) and positions.numel() and (length := int(positions.max()) + 1) > size:
        raise ValueError(
            f"A sequence of {length} tokens is longer than the {size} learned positions "
            f"(max_position_embeddings={size}): shorten it, or train with sinusoidal positions."
        )


def validate_nonempty_sources(inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
    """Raise ValueError if a source has no unmasked token, so that there is nothing to attend to.

    `inputs_embeds` has the shape (B, S, D). `attention_mask` is checked only if it is a padding mask (B, S).
    """
    if inputs_embeds.shape[1] == 0:
        raise ValueError("The sources are empty (length 0): every source needs at least one token, such as </s>.")
    if attention_mask is not None and attention_mask.ndim == 2 and is_eager_on_cpu(attention_mask):
        empty = (attention_mask == 0).all(-1)
        if empty.any():
            row = int(empty.int().argmax())
            raise ValueError(f"Source {row} of the batch is empty: its attention_mask has no 1. Remove this source.")
