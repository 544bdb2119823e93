"""Batches by number of tokens (section 5.1: "sentence pairs were batched together by approximate sequence length")."""

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

from training.data.batch_shapes import Shape, assign_shapes, batch_by_shapes, count_updates

GROUPING_WINDOW = 16  # updates among which batches of similar cost are grouped


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


def padded_size(batch: np.ndarray, lengths: np.ndarray) -> int:
    """Return the number of source and target tokens of a batch, including padding."""
    return int(len(batch) * lengths[batch].max(0).sum())


class TokenBatchSampler(Sampler[list[int]]):
    """Sampler of batches of pairs with similar length, each with at most `max_tokens` tokens, including padding.

    Each epoch shuffles the pairs and the batches with `seed` and the epoch number, equally in every process.
    The batches of one update have similar cost, so that no process waits for another. The grouping does not depend on
    the number of processes. To make the number of batches a multiple of `batches_per_update`, a few batches are
    halved, unless all batches have a single pair.

    With `shapes`, all batches of an update have the same shape. A batch is the index of its shape, followed by the
    indices of its pairs.

    Args:
        lengths: Tokens of source and target of each pair: (pairs, 2).
        max_tokens: Maximum size of a batch. A longer pair forms a separate batch.
        batches_per_update: Processes times gradient accumulation steps.
        shapes: Result of `choose_shapes`, if the batches have fixed shapes.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        max_tokens: int,
        seed: int,
        batches_per_update: int = 1,
        shapes: list[Shape] | None = None,
    ):
        self.lengths = lengths
        self.max_tokens = max_tokens
        self.seed = seed
        self.batches_per_update = batches_per_update
        self.epoch = 0
        self.shapes = shapes
        if shapes:
            self.shape_indices = assign_shapes(lengths, shapes)
            counts = np.bincount(self.shape_indices, minlength=len(shapes))
            self.updates = count_updates(counts, shapes, batches_per_update)
            self._len = int(self.updates.sum()) * batches_per_update
        else:
            self._len = len(self._batches(np.random.default_rng(0)))

    @property
    def padding(self) -> float:
        """Fraction of positions without a token, including missing rows (only with `shapes`)."""
        positions = [shape.positions for shape in self.shapes or ()]
        return 1 - self.lengths.sum() / (self.batches_per_update * np.dot(self.updates, positions))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self._len  # the same in each epoch

    def __iter__(self) -> Iterator[list[int]]:
        rng = np.random.default_rng([self.seed, self.epoch])
        if self.shapes:
            shaped = batch_by_shapes(self.shape_indices, self.updates, self.batches_per_update, rng)
            yield from ([shape_index, *batch.tolist()] for shape_index, batch in shaped)
            return
        batches = self._batches(rng)
        rng.shuffle(batches)  # type: ignore[arg-type]  # list of arrays
        for group in self._groups(batches, rng):
            yield from (batch.tolist() for batch in group)

    def _batches(self, rng: np.random.Generator) -> list[np.ndarray]:
        batches = batch_by_tokens(self.lengths, self.max_tokens, rng)
        while missing := -len(batches) % self.batches_per_update:
            by_pairs = sorted(range(len(batches)), key=lambda i: -len(batches[i]))[:missing]
            halves = [half for i in by_pairs for half in np.array_split(batches[i], 2) if len(half)]
            if len(halves) == len(by_pairs):
                break
            batches = [batch for i, batch in enumerate(batches) if i not in set(by_pairs)] + halves
        return batches

    def _groups(self, batches: list[np.ndarray], rng: np.random.Generator) -> Iterator[list[np.ndarray]]:
        """Yield the batches of each update, which have similar sizes, from windows of random batches."""
        size = self.batches_per_update
        if size == 1:
            yield from ([batch] for batch in batches)
            return
        for i in range(0, len(batches), GROUPING_WINDOW * size):
            window = sorted(batches[i : i + GROUPING_WINDOW * size], key=lambda batch: padded_size(batch, self.lengths))
            groups = [window[j : j + size] for j in range(0, len(window), size)]
            for k in rng.permutation(len(groups)):
                yield groups[k]
