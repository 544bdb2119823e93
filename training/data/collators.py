"""Code of the loader workers: padding of pairs of token ids to the tensors of a batch, and handling of signals.

Worker processes receive a collator as a pickle, so it contains neither model nor tokenizer. The trainer computes the
decoder input from the labels.
"""

import signal

import numpy as np
import torch

from .batch_shapes import Shape

Pair = tuple[list[int], list[int]]  # token ids of source and target


def pad_pairs(pairs: list[Pair], shape: Shape, pad_id: int) -> dict[str, torch.Tensor]:
    """Pad pairs on the right to the tensors `input_ids`, `attention_mask` and `labels`.

    Missing rows are filled with one source token and no target, so that they do not contribute to the loss.
    """
    ids = np.full((shape.rows, shape.source), pad_id)
    mask = np.zeros((shape.rows, shape.source), dtype=np.int64)
    labels = np.full((shape.rows, shape.target), -100)
    mask[len(pairs) :, 0] = 1
    for row, (source, target) in enumerate(pairs):
        ids[row, : len(source)], mask[row, : len(source)] = source, 1
        labels[row, : len(target)] = target
    arrays = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


class PaddingCollator:
    """Collator that pads rows with the columns `input_ids` and `labels` to the longest of the batch.

    A batch without rows has one source token and no target.
    """

    def __init__(self, pad_id: int):
        self.pad_id = pad_id

    def __call__(self, rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        pairs = [(row["input_ids"], row["labels"]) for row in rows]
        lengths = [max(map(len, side)) for side in zip(*pairs, strict=True)] or [1, 1]
        return pad_pairs(pairs, Shape(max(1, len(pairs)), *lengths), self.pad_id)


class FixedShapeCollator:
    """Collator that pads the micro-batches of `ShapedPairs` to their shape."""

    def __init__(self, shapes: list[Shape], pad_id: int):
        self.shapes, self.pad_id = shapes, pad_id

    def __call__(self, batch: tuple[int, list[Pair]]) -> dict[str, torch.Tensor]:
        shape_index, pairs = batch
        return pad_pairs(pairs, self.shapes[shape_index], self.pad_id)


def defer_stop_signals(worker: int) -> None:
    """Initialize a loader worker so that it ignores Ctrl-C and the first SIGTERM, which all processes may receive.

    The main process needs its batches to finish the current update. It stops the worker at the end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(number, signal.SIG_DFL))
