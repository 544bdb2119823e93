"""Batches by number of tokens: section 5.1, "sentence pairs were batched together by approximate sequence length"."""

import random
from collections.abc import Iterator

from torch.utils.data import Sampler


class TokenBatchSampler(Sampler[list[int]]):
    """Batches of sentence pairs of like length, each of at most `max_tokens` tokens with its padding.

    A batch counts as its number of pairs times the longest sequence in it, of either side. Which pairs meet in a batch,
    and the order of the batches, are drawn anew each epoch from `seed + epoch`, equally in every process.

    Args:
        lengths: tokens of (source, target) of every pair.
        max_tokens: a batch's size; a pair that is longer makes a batch of its own.
        seed: of the first epoch.
    """

    def __init__(self, lengths: list[tuple[int, int]], max_tokens: int, seed: int):
        self.lengths = lengths
        self.max_tokens = max_tokens
        self.seed = seed
        self.epoch = 0
        self.sampler = self  # where accelerate looks for set_epoch behind its own wrapper
        self._len = len(self._cut(self._sorted()))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self._len  # the same in each epoch: sorting draws lots among equal lengths alone

    def __iter__(self) -> Iterator[list[int]]:
        batches = self._cut(self._sorted())
        random.Random(f"batches {self.seed + self.epoch}").shuffle(batches)
        yield from batches

    def _sorted(self) -> list[int]:
        rng = random.Random(f"pairs {self.seed + self.epoch}")
        tie = [rng.random() for _ in self.lengths]
        return sorted(range(len(self.lengths)), key=lambda i: (max(self.lengths[i]), *self.lengths[i], tie[i]))

    def _cut(self, order: list[int]) -> list[list[int]]:
        batches: list[list[int]] = [[]]
        for i in order:  # ascending, so that the pair itself is the longest of its batch
            if batches[-1] and (len(batches[-1]) + 1) * max(self.lengths[i]) > self.max_tokens:
                batches.append([])
            batches[-1].append(i)
        return batches
