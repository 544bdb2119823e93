"""Batches of few fixed shapes, so that a training step is compiled, or recorded on a GPU, once for each.

A batch has as many rows, and is padded to as many tokens on either side, as one of at most twelve shapes says. They are
chosen from the lengths of the data, such that little is padding.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

MAX_SHAPES = 12  # shapes
MAX_PADDING_FRACTION = 0.05  # share of an epoch's longer sides that may be padding, if so many shapes suffice for that
MAX_CANDIDATE_LENGTHS = 256  # different lengths that are looked at as ends of a shape


@dataclass(frozen=True)
class Shape:
    """A batch's size: pairs, tokens of their sources, tokens of their targets."""

    rows: int
    source: int
    target: int

    @property
    def positions(self) -> int:
        return self.rows * (self.source + self.target)


def choose_shapes(lengths: np.ndarray, max_tokens: int, batches_per_update: int = 1) -> list[Shape]:
    """Choose the fewest batch shapes with at most `MAX_PADDING_FRACTION` of padding, else those with the least.

    Each shape also fits every pair that fits the previous one.

    Pairs belong together by their longer side. For every number of shapes, the lengths that end them are those with the
    least positions in an epoch, found by dynamic programming over the histogram of lengths.

    Args:
        lengths: tokens of source and target of every pair, (pairs, 2).
        max_tokens: rows times the longer side are at most so many, but for a pair that is longer alone.
        batches_per_update: the pairs of a shape are shared out over a multiple of so many batches.
    """
    longest = lengths.max(1)
    ends = np.unique(longest)
    if len(ends) > MAX_CANDIDATE_LENGTHS:  # every few tokens, and the last
        ends = np.unique(np.append(ends[:: math.ceil(len(ends) / MAX_CANDIDATE_LENGTHS)], ends[-1]))
    below = np.concatenate([[0], np.searchsorted(np.sort(longest), ends, side="right")])  # pairs up to each end
    pairs = np.maximum(below[None, 1:] - below[:-1, None], 0)  # (from, to): those of a shape that begins behind `from`
    most_rows = np.maximum(1, max_tokens // ends)
    updates, rows = compute_updates_and_rows(pairs, most_rows, batches_per_update)
    costs = updates * batches_per_update * most_rows * ends  # as if all were full: else shapes of few pairs look cheap
    costs = np.where(np.arange(len(ends))[:, None] <= np.arange(len(ends)), costs, np.inf)
    rounds = [(costs[0], np.zeros(len(ends), dtype=int))]  # for 1, 2, ... shapes: the least to each end, and from where
    for _ in range(min(MAX_SHAPES, len(ends)) - 1):
        if 1 - longest.sum() / rounds[-1][0][-1] <= MAX_PADDING_FRACTION:
            break
        through = np.append(np.inf, rounds[-1][0][:-1])[:, None] + costs
        rounds.append((through.min(0), through.argmin(0)))
    best = min(range(len(rounds)), key=lambda i: rounds[i][0][-1])
    last, chosen = len(ends) - 1, []
    for _, origin in reversed(rounds[1 : best + 1]):
        chosen.append((origin[last], last))
        last = origin[last] - 1
    chosen.append((0, last))
    shapes = []
    for first, last in reversed(chosen):
        held = lengths[longest <= ends[last]]
        shapes.append(Shape(int(rows[first, last]), int(held[:, 0].max()), int(held[:, 1].max())))
    return shapes


def compute_updates_and_rows(pairs: Any, most_rows: Any, batches_per_update: int) -> tuple[Any, Any]:
    """Updates that so many pairs take, and the rows that each of their batches needs to have, if shared out evenly."""
    updates = np.maximum(1, -(-pairs // (most_rows * batches_per_update)))
    return updates, np.maximum(1, -(-pairs // (updates * batches_per_update)))


def assign_shapes(lengths: np.ndarray, shapes: list[Shape]) -> np.ndarray:
    """The number of the first shape that holds each pair (pairs,). Raises ValueError where none does."""
    holds = np.array([[shape.source, shape.target] for shape in shapes])
    found = (lengths[:, None] <= holds).all(-1)  # (pairs, shapes)
    if not found.any(-1).all():
        source, target = lengths[~found.any(-1)][0]
        raise ValueError(f"a pair of {source} and {target} tokens is longer than the largest shape, {shapes[-1]}.")
    return found.argmax(-1)


def count_updates(counts: np.ndarray, shapes: list[Shape], batches_per_update: int) -> np.ndarray:
    """The updates that so many pairs of each shape need (shapes,)."""
    return -(-counts // (np.array([shape.rows for shape in shapes]) * batches_per_update))


def batch_by_shapes(
    numbers: np.ndarray, updates: np.ndarray, batches_per_update: int, rng: np.random.Generator
) -> Iterator[tuple[int, np.ndarray]]:
    """Batches: the number of each one's shape, and its pairs' indices; each pair once, shared out evenly in its shape.

    Successive `batches_per_update` are of one shape; where a shape has too few pairs, there may be batches without any.

    Args:
        numbers: the shape of every pair, (pairs,).
        updates: for every shape how many there are; they are in random order.
    """
    order = rng.permutation(np.repeat(np.arange(len(updates)), updates)).tolist()  # first: alike in all processes
    batches = {}
    for number in np.nonzero(updates)[0].tolist():
        pairs = rng.permutation(np.nonzero(numbers == number)[0])
        batches[number] = iter(np.array_split(pairs, updates[number] * batches_per_update))
    for number in order:
        for _ in range(batches_per_update):
            yield number, next(batches[number])


class ShapedPairs(Dataset):
    """Token ids by [number of a shape, index of a pair, index, ...], as `TokenBatchSampler` deals them out.

    Args:
        data: a `datasets.Dataset` with columns `input_ids` and `labels`.
    """

    def __init__(self, data: Any):
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, items: list[int]) -> tuple[int, list[tuple]]:  # what torch's loaders ask for a whole batch
        number, *rows = items
        if not rows:
            return number, []
        found = self.data[rows]
        return number, list(zip(found["input_ids"], found["labels"], strict=True))


class FixedShapeCollator:
    """The number of a shape, and pairs of token ids that it holds -> tensors of that shape.

    Rows that are missing have one token of source and no target, so that they weigh nothing.

    Args:
        model: for its `prepare_decoder_input_ids_from_labels`.
        pad_id: the source's; also the one token of a missing row.
    """

    def __init__(self, shapes: list[Shape], model: Any, pad_id: int):
        self.shapes, self.model, self.pad_id = shapes, model, pad_id

    def __call__(self, batch: tuple[int, list[tuple]]) -> dict[str, torch.Tensor]:
        number, pairs = batch
        shape = self.shapes[number]
        ids = np.full((shape.rows, shape.source), self.pad_id)
        mask = np.zeros((shape.rows, shape.source), dtype=np.int64)
        labels = np.full((shape.rows, shape.target), -100)
        mask[len(pairs) :, 0] = 1
        for row, (source, target) in enumerate(pairs):
            ids[row, : len(source)], mask[row, : len(source)] = source, 1
            labels[row, : len(target)] = target
        targets = torch.from_numpy(labels)
        return {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(mask),
            "labels": targets,
            "decoder_input_ids": self.model.prepare_decoder_input_ids_from_labels(targets),
        }
