"""Batching by number of tokens (section 5.1: "sentence pairs were batched together by approximate sequence length")."""

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

from training.data.batch_shapes import Shape, assign_shapes, count_updates, group_by_shapes


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

    An update has at most `tokens_per_update` tokens, including padding. Each epoch shuffles the pairs and the updates
    with `seed` and the epoch number. The pairs of an update do not depend on `micro_batches`, the number of parts into
    which each update is split. Parts have successive pairs in the order of their lengths. If there are more parts than
    pairs, the last ones are empty.

    With `shapes`, an update has the index of a shape. A micro-batch is this index, followed by the indices of its
    pairs.

    Args:
        lengths: Tokens of source and target of each pair: (pairs, 2).
        tokens_per_update: Maximum size of an update. A longer pair forms a separate update.
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
        self.tokens_per_update = tokens_per_update
        self.seed = seed
        self.micro_batches = micro_batches
        self.epoch = 0
        self.shapes = shapes
        if shapes:
            self.shape_indices = assign_shapes(lengths, shapes)
            self.updates = count_updates(np.bincount(self.shape_indices, minlength=len(shapes)), shapes)
        self._len = micro_batches * sum(1 for _ in self._updates(np.random.default_rng(0)))  # the same in each epoch

    @property
    def padding(self) -> float:
        """Fraction of positions without a token, including missing rows (only with `shapes`)."""
        positions = [shape.split(self.micro_batches).positions for shape in self.shapes or ()]
        return 1 - self.lengths.sum() / (self.micro_batches * np.dot(self.updates, positions))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[list[int]]:
        for shape_index, update in self._updates(np.random.default_rng([self.seed, self.epoch])):
            for part in np.array_split(update, self.micro_batches):
                yield [*shape_index, *part.tolist()]

    def _updates(self, rng: np.random.Generator) -> Iterator[tuple[list[int], np.ndarray]]:
        """Yield the index of a shape, if there are shapes, and the indices of the pairs of each update."""
        if self.shapes:
            yield from (([index], pairs) for index, pairs in group_by_shapes(self.shape_indices, self.updates, rng))
            return
        updates = batch_by_tokens(self.lengths, self.tokens_per_update, rng)
        rng.shuffle(updates)  # type: ignore[arg-type]  # list of arrays
        yield from (([], update) for update in updates)
