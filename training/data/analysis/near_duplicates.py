"""Sentences that share most of their words, found with an inverted index in time linear in the number of sentences."""

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

MIN_SIMILARITY = 0.6  # Jaccard similarity of the word sets of near-duplicates
MIN_WORD_TYPES = 500  # texts with fewer, such as letters or commands, share words without being similar
MAX_SENTENCES = 1_000_000  # the index of more sentences takes too much memory


class WordIndex:
    def __init__(self, sentences: Iterable[str]):
        words, sizes = array("q"), array("q")
        self.ids: dict[str, int] = {}
        for sentence in sentences:
            found = word_set(sentence)
            words.extend(self.ids.setdefault(word, len(self.ids)) for word in found)
            sizes.append(len(found))
        self.sizes = np.array(sizes)  # (sentences,): number of different words
        counts = np.bincount(words, minlength=len(self.ids)) if words else np.zeros(0, int)
        self.ends = np.cumsum(counts)
        self.starts = self.ends - counts
        rows = np.repeat(np.arange(len(sizes)), self.sizes)
        self.rows = rows[np.argsort(words, kind="stable")]  # sentences of each word, by id

    def near_duplicates(self, sentence: str) -> list[int]:
        """Return the indices of near-duplicates, including copies. Returns [] if the texts have few different words."""
        if len(self.ids) < MIN_WORD_TYPES or len(self.sizes) > MAX_SENTENCES:
            return []
        shared, size = self._count_shared_words(sentence)
        candidates = np.nonzero(shared >= max(1, MIN_SIMILARITY * size))[0]
        shared = shared[candidates]
        return candidates[shared / (self.sizes[candidates] + size - shared) >= MIN_SIMILARITY].tolist()

    def nearest(self, sentence: str) -> int:
        """Return the index of the first sentence with the highest Jaccard similarity."""
        shared, size = self._count_shared_words(sentence)
        return int(np.argmax(shared / np.maximum(1, self.sizes + size - shared)))

    def _count_shared_words(self, sentence: str) -> tuple[np.ndarray, int]:
        """Return the number of words shared with each sentence of the index, and the number of words of `sentence`."""
        own = word_set(sentence)
        ids = [self.ids[word] for word in own if word in self.ids]
        rows = [self.rows[self.starts[i] : self.ends[i]] for i in ids]
        return np.bincount(np.concatenate([self.rows[:0], *rows]), minlength=len(self.sizes)), len(own)


def word_set(sentence: str) -> set[str]:
    return set(re.findall(r"\w+", sentence.lower()))


def iter_groups(
    sources: Sequence[str], targets: Sequence[str], order: Iterable[int], max_size: int, use_words: bool
) -> Iterator[list[int]]:
    """Yield groups of pairs such that no source or target is in two groups, in the order of their first pairs.

    With `use_words`, near-duplicates of a source are also in its group. Larger groups than `max_size` are skipped.
    """
    index = WordIndex(sources if use_words else ())
    equal: dict[tuple[int, str], list[int]] = {}
    for side, texts in enumerate((sources, targets)):
        for i, text in enumerate(texts):
            equal.setdefault((side, text), []).append(i)
    done: set[int] = set()
    for first in order:
        if first in done:
            continue
        group, pending = {first}, [first]
        while pending and len(group) <= max_size and not group & done:
            i = pending.pop()
            found = {*equal[0, sources[i]], *equal[1, targets[i]]}
            found.update(index.near_duplicates(sources[i]) if use_words else ())
            pending += sorted(found - group)
            group |= found
        if len(group) <= max_size and not group & done:
            yield sorted(group)
        done |= group
