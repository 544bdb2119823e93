"""Batches with few fixed shapes, so that a training step is compiled for few shapes.

Each batch is padded to one of at most twelve shapes, in rows and in tokens of source and target. The shapes of groups
of pairs do not depend on the machine. A micro-batch has an equal part of the rows of its group.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.utils.data import Dataset

MAX_SHAPES = 12
MAX_PADDING_FRACTION = 0.05  # goal, not a limit; only the longer side of each pair counts
MAX_CANDIDATE_LENGTHS = 256  # lengths that are considered as the maximum length of a shape


@dataclass(frozen=True)
class Shape:
    """Number of pairs of a group or of a micro-batch, and sequence lengths of source and target (tokens)."""

    rows: int
    source: int
    target: int

    @property
    def positions(self) -> int:
        return self.rows * (self.source + self.target)

    def split(self, parts: int) -> "Shape":
        return replace(self, rows=-(-self.rows // parts))

    def without_ones(self) -> "Shape":
        """Return the shape with sizes of at least 2: `torch.compile` would compile separate code for a size of 1."""
        return Shape(max(2, self.rows), max(2, self.source), max(2, self.target))


def choose_shapes(lengths: np.ndarray, tokens_per_group: int) -> list[Shape]:
    """Choose the fewest shapes of groups whose padding fraction is at most `MAX_PADDING_FRACTION`.

    If no allowed number of shapes reaches it, choose the shapes with the least padding. Each shape also fits every pair
    that fits the previous one. For each number of shapes, dynamic programming over the histogram of lengths (of the
    longer sides) finds the maximum lengths that minimize the positions per epoch.

    Args:
        lengths: Tokens of source and target of each pair: (pairs, 2).
        tokens_per_group: Maximum of rows times longer side. A single longer pair may exceed it.
    """
    longest = lengths.max(1)
    ends = np.unique(longest)
    if len(ends) > MAX_CANDIDATE_LENGTHS:  # evenly spaced lengths, and the longest
        ends = np.unique(np.append(ends[:: math.ceil(len(ends) / MAX_CANDIDATE_LENGTHS)], ends[-1]))
    below = np.concatenate([[0], np.searchsorted(np.sort(longest), ends, side="right")])  # pairs up to each end
    pairs = np.maximum(below[None, 1:] - below[:-1, None], 0)  # (from, to): pairs of a shape with lengths in (from, to]
    most_rows = np.maximum(1, tokens_per_group // ends)
    groups = np.maximum(1, -(-pairs // most_rows))
    rows = np.maximum(1, -(-pairs // groups))  # if the pairs are distributed evenly
    costs = groups * most_rows * ends  # groups count as full; otherwise, shapes with few pairs seem cheap
    costs = np.where(np.arange(len(ends))[:, None] <= np.arange(len(ends)), costs, np.inf)
    rounds = [(costs[0], np.zeros(len(ends), dtype=int))]  # per number of shapes: lowest costs, start indices
    for _ in range(min(MAX_SHAPES, len(ends)) - 1):
        if 1 - longest.sum() / rounds[-1][0][-1] <= MAX_PADDING_FRACTION:
            break
        through = np.append(np.inf, rounds[-1][0][:-1])[:, None] + costs
        rounds.append((through.min(0), through.argmin(0)))
    best = min(range(len(rounds)), key=lambda i: rounds[i][0][-1])
    last, chosen = len(ends) - 1, []  # indices of the first and last length of each shape, found from the end
    for _, first_indices in reversed(rounds[1 : best + 1]):
        chosen.append((first_indices[last], last))
        last = first_indices[last] - 1
    chosen.append((0, last))
    shapes = []
    for first, last in reversed(chosen):
        fitting = lengths[longest <= ends[last]]
        shapes.append(Shape(int(rows[first, last]), int(fitting[:, 0].max()), int(fitting[:, 1].max())))
    return shapes


def assign_shapes(lengths: np.ndarray, shapes: list[Shape]) -> np.ndarray:
    """Return the index of the first shape that fits each pair: (pairs,). Raises ValueError if none fits."""
    sizes = np.array([[shape.source, shape.target] for shape in shapes])
    fits = (lengths[:, None] <= sizes).all(-1)  # (pairs, shapes)
    if not fits.any(-1).all():
        source, target = lengths[~fits.any(-1)][0]
        raise ValueError(f"a pair of {source} and {target} tokens is longer than the largest shape, {shapes[-1]}.")
    return fits.argmax(-1)


def count_groups(counts: np.ndarray, shapes: list[Shape]) -> np.ndarray:
    """Return the number of groups per shape, given its number of pairs: (shapes,)."""
    return -(-counts // np.array([shape.rows for shape in shapes]))


def group_by_shapes(
    shape_indices: np.ndarray, group_counts: np.ndarray, rng: np.random.Generator
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each group as the index of its shape and the indices of its pairs, which are distributed evenly.

    `shape_indices` has one entry per pair: (pairs,). `group_counts` is the number of groups per shape: (shapes,).
    Groups of a shape with few pairs can be empty.
    """
    order = rng.permutation(np.repeat(np.arange(len(group_counts)), group_counts)).tolist()  # first: processes agree
    groups = {}
    for shape_index in np.nonzero(group_counts)[0].tolist():
        pairs = rng.permutation(np.nonzero(shape_indices == shape_index)[0])
        groups[shape_index] = iter(np.array_split(pairs, group_counts[shape_index]))
    for shape_index in order:
        yield shape_index, next(groups[shape_index])


class ShapedPairs(Dataset):
    """Dataset that is indexed by the batches of `TokenBatchSampler`: [index of a shape, index of a pair, ...]."""

    def __init__(self, data: Any):
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, items: list[int]) -> tuple[int, list[tuple]]:
        """Return the pairs of a batch. torch's `DataLoader` calls this instead of `__getitem__`."""
        shape_index, *rows = items
        columns = self.data[rows]
        return shape_index, list(zip(columns["input_ids"], columns["labels"], strict=True))
