"""Batching by number of tokens (section 5.1: "sentence pairs were batched together by approximate sequence length")."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from .batch_shapes import Shape, assign_shapes, count_groups, group_by_shapes

GROUPS_PER_UPDATE = 2  # groups of pairs of similar length; updates of a single length reach lower scores


def groups_per_update(micro_batches: int) -> int:
    """Return 2, or 1 if the micro-batches of an update are odd: each contains pairs of only one group."""
    return GROUPS_PER_UPDATE if micro_batches % GROUPS_PER_UPDATE == 0 else 1


def split_update(groups: list[Any], micro_batches: int) -> Iterator[tuple[Any, np.ndarray]]:
    """Split the groups of an update (label, pairs) into `micro_batches` equal parts. Yield each with its label."""
    for label, pairs in groups:
        yield from ((label, part) for part in np.array_split(pairs, micro_batches // len(groups)))


def batch_by_tokens(lengths: np.ndarray, max_tokens: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Sort pairs by length and split their indices into batches of at most `max_tokens` tokens, including padding.

    The size of a batch is its number of pairs times its longest sequence, source or target. A longer pair forms a
    separate batch. `lengths` are tokens of source and target (pairs, 2). `rng` shuffles only pairs of equal lengths.
    """
    longest = lengths.max(1)
    order = np.lexsort((rng.random(len(lengths)), lengths[:, 1], lengths[:, 0], longest))
    starts, start = [0], 0
    for i, length in enumerate(longest[order].tolist()):  # ascending, so `length` is the longest so far
        if i > start and (i + 1 - start) * length > max_tokens:
            starts.append(start := i)
    return np.split(order, starts[1:])


class TokenBatchSampler(Sampler[list[int]]):
    """Sampler of micro-batches of pairs with similar length.

    An update has at most `tokens_per_update` tokens, including padding, in two groups of pairs with similar length, or
    in one if `micro_batches` is odd. Each epoch shuffles the pairs and the groups with `seed` and the epoch number. A
    group is split into parts of successive pairs, so the pairs of an update do not depend on the number of parts. If
    there are more parts than pairs, the last ones are empty.

    With `shapes`, an update has one group, so that all processes have the same shape. A micro-batch is the index of
    this shape, followed by the indices of its pairs.

    Args:
        lengths: Tokens of source and target of each pair: (pairs, 2).
        tokens_per_update: Maximum size of an update. A pair of more than half of it forms a separate group.
        micro_batches: Processes times gradient accumulation steps.
        shapes: Result of `choose_shapes`, if the updates have fixed shapes.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        tokens_per_update: int,
        seed: int,
        micro_batches: int = 1,
        shapes: list[Shape] | None = None,
    ):
        self.lengths = lengths
        self.groups = 1 if shapes else groups_per_update(micro_batches)
        self.tokens_per_group = max(1, tokens_per_update // self.groups)
        self.seed = seed
        self.micro_batches = micro_batches
        self.epoch = 0
        self.shapes = shapes
        if shapes:
            self.shape_indices = assign_shapes(lengths, shapes)
            self.group_counts = count_groups(np.bincount(self.shape_indices, minlength=len(shapes)), shapes)
        groups = sum(1 for _ in self._groups(np.random.default_rng(0)))  # the same in each epoch
        self._len = micro_batches * -(-groups // self.groups)

    @property
    def padding(self) -> float:
        """Fraction of positions without a token, including missing rows (only with `shapes`)."""
        parts = self.micro_batches // self.groups
        positions = [shape.split(parts).positions for shape in self.shapes or ()]
        return 1 - self.lengths.sum() / (parts * np.dot(self.group_counts, positions))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[list[int]]:
        groups = self._groups(np.random.default_rng([self.seed, self.epoch]))
        while update := list(islice(groups, self.groups)):
            for shape_index, part in split_update(update, self.micro_batches):
                yield [*shape_index, *part.tolist()]

    def _groups(self, rng: np.random.Generator) -> Iterator[tuple[list[int], np.ndarray]]:
        """Yield the index of a shape, if there are shapes, and the indices of the pairs of each group."""
        if self.shapes:
            groups = group_by_shapes(self.shape_indices, self.group_counts, rng)
            yield from (([index], pairs) for index, pairs in groups)
            return
        batches = batch_by_tokens(self.lengths, self.tokens_per_group, rng)
        rng.shuffle(batches)  # type: ignore[arg-type]  # list of arrays
        yield from (([], batch) for batch in batches)
