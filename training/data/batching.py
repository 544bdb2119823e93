"""Batches by number of tokens: section 5.1, "sentence pairs were batched together by approximate sequence length"."""

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

from training.data.batch_shapes import Shape, assign_shapes, batch_by_shapes, count_updates

GROUPING_WINDOW = 16  # updates among which batches of equal work are looked for


def batch_by_tokens(lengths: np.ndarray, max_tokens: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Indices of pairs, sorted by length and cut into batches of at most `max_tokens` tokens with their padding.

    A batch counts as its number of pairs times the longest sequence in it, of either side. Lots are drawn among pairs
    of equal lengths alone, so that the sizes of the batches do not depend on `rng`.

    Args:
        lengths: tokens of source and target of every pair, (pairs, 2).
        max_tokens: a batch's size; a pair that is longer makes a batch of its own.
    """
    longest = lengths.max(1)
    order = np.lexsort((rng.random(len(lengths)), lengths[:, 1], lengths[:, 0], longest))
    starts, start = [0], 0
    for i, length in enumerate(longest[order].tolist()):  # ascending: the pair itself is the longest so far
        if i > start and (i + 1 - start) * length > max_tokens:
            starts.append(start := i)
    return np.split(order, starts[1:])


def padded_size(batch: np.ndarray, lengths: np.ndarray) -> int:
    """What a batch costs: its tokens of both sides, with padding."""
    return int(len(batch) * lengths[batch].max(0).sum())


class TokenBatchSampler(Sampler[list[int]]):
    """Batches of sentence pairs of like length, each of at most `max_tokens` tokens with its padding.

    Which pairs meet in a batch, and the order of the batches, are drawn anew each epoch from `seed + epoch`, equally in
    every process. `batches_per_update` successive batches make an update; they cost about the same, so that no process
    waits for another, and which ones they are does not depend on how many processes share them. An epoch has a
    multiple of them, unless all batches hold a single pair: a few batches are halved for that.

    With `shapes`, all batches of an update are of one of these, and a batch is its number, then the indices of pairs.

    Args:
        lengths: tokens of source and target of every pair, (pairs, 2).
        max_tokens: a batch's size; a pair that is longer makes a batch of its own.
        seed: of the first epoch.
        batches_per_update: processes times gradient accumulation steps.
        shapes: of `choose_shapes`, which hold every pair.
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
            self.numbers = assign_shapes(lengths, shapes)
            counts = np.bincount(self.numbers, minlength=len(shapes))
            self.updates = count_updates(counts, shapes, batches_per_update)
            self._len = int(self.updates.sum()) * batches_per_update
        else:
            self._len = len(self._batches(np.random.default_rng(0)))

    @property
    def padding(self) -> float:
        """With shapes: the share of positions that hold no token, missing rows included."""
        positions = [shape.positions for shape in self.shapes or ()]
        return 1 - self.lengths.sum() / (self.batches_per_update * np.dot(self.updates, positions))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self._len  # the same in each epoch

    def __iter__(self) -> Iterator[list[int]]:
        rng = np.random.default_rng([self.seed, self.epoch])
        if self.shapes:
            shaped = batch_by_shapes(self.numbers, self.updates, self.batches_per_update, rng)
            yield from ([number, *batch.tolist()] for number, batch in shaped)
            return
        batches = self._batches(rng)
        rng.shuffle(batches)  # type: ignore[arg-type]  # a list of arrays is a sequence
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
        """The batches of each update: within a window of random batches, those whose work is nearest."""
        size = self.batches_per_update
        if size == 1:
            yield from ([batch] for batch in batches)
            return
        for i in range(0, len(batches), GROUPING_WINDOW * size):
            window = sorted(batches[i : i + GROUPING_WINDOW * size], key=lambda batch: padded_size(batch, self.lengths))
            groups = [window[j : j + size] for j in range(0, len(window), size)]
            for k in rng.permutation(len(groups)):
                yield groups[k]
