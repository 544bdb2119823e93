"""Code of the loader workers: padding of pairs of token ids to the tensors of a batch, and handling of signals.

Worker processes receive a collator as a pickle, so it contains neither model nor tokenizer. The trainer computes the
decoder input from the labels.
"""

import signal
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .batch_shapes import Shape

Pair = tuple[list[int], list[int]]  # token ids of source and target


@dataclass
class PaddingCollator:
    """Collator that pads pairs on the right to the tensors `input_ids`, `attention_mask` and `labels`.

    Without `shapes`, the rows of a batch have the columns `input_ids` and `labels`, and are padded to the longest ones.
    With `shapes`, a batch is one of `ShapedPairs`. Missing rows are filled with one source token and no target, so that
    they do not contribute to the loss. A batch without rows has one such row.
    """

    pad_id: int
    shapes: list[Shape] | None = None

    def __call__(self, batch: Any) -> dict[str, torch.Tensor]:
        if self.shapes is None:
            pairs = [(row["input_ids"], row["labels"]) for row in batch]
            lengths = [max(map(len, side)) for side in zip(*pairs, strict=True)] or [1, 1]
            shape = Shape(max(1, len(pairs)), *lengths)
        else:
            shape_index, pairs = batch
            shape = self.shapes[shape_index]
        ids = np.full((shape.rows, shape.source), self.pad_id)
        mask = np.zeros((shape.rows, shape.source), dtype=np.int64)
        labels = np.full((shape.rows, shape.target), -100)
        mask[len(pairs) :, 0] = 1
        for row, (source, target) in enumerate(pairs):
            ids[row, : len(source)], mask[row, : len(source)] = source, 1
            labels[row, : len(target)] = target
        arrays = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def defer_stop_signals(worker: int) -> None:
    """Initialize a loader worker so that it ignores Ctrl-C and the first SIGTERM, which all processes may receive.

    The main process needs its batches to finish the current update. It stops the worker at the end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(number, signal.SIG_DFL))
