"""Validation and test data that do not overlap with the training data."""

import random
from collections.abc import Iterable
from itertools import chain

from vanilla_transformer.shared.command_line import logger

from ..parallel_text import ParallelText, format_line_numbers
from .near_duplicates import MIN_SIMILARITY, WordIndex, iter_groups

MAX_TRIALS = 20  # pairs that are considered for each pair that is split off
MAX_GROUP_FRACTION = 0.05  # of a split; larger groups of similar pairs stay in the training data


def split_off(corpus: dict[str, ParallelText], sizes: dict[str, int]) -> dict[str, ParallelText]:
    """Move `sizes[split]` training pairs to each of the splits, the same ones in every run.

    Pairs that share a source or a target, or have near-duplicate sources, are in the same split. If too many pairs are
    similar, near-duplicates may be in different splits. If this is not enough, copies may be, too. A message reports
    this.
    """
    train, total = corpus["train"], sum(sizes.values())
    if total >= len(train):
        keys = " plus ".join(f"{split}_size={size}" for split, size in sizes.items())
        raise ValueError(f"{keys} must be less than the number of training pairs, {len(train)}.")
    order = list(range(len(train)))
    random.Random("validation").shuffle(order)
    limit = max(2, int(MAX_GROUP_FRACTION * total))
    texts = train.sources, train.targets, order[: MAX_TRIALS * total], limit
    attempts: dict[str, Iterable[list[int]]] = {
        "near-duplicates": iter_groups(*texts, use_words=True),
        "copies": iter_groups(*texts, use_words=False),
        "": ([i] for i in order),
    }
    for kept_together, groups in attempts.items():
        parts: dict[str, list[int]] = {split: [] for split in sizes}
        for group in groups:
            for split, size in sizes.items():
                if len(group) <= size - len(parts[split]):
                    parts[split] += group
                    break
            if sum(map(len, parts.values())) == total:
                break
        if sum(map(len, parts.values())) == total:
            break
        logger.info(f"too many training pairs are similar: {kept_together} of a pair may be in different splits")
    held_out = set(chain(*parts.values()))
    result = {"train": train.select(i for i in range(len(train)) if i not in held_out)}
    for split, part in parts.items():
        result[split] = train.select(sorted(part))
        result[split].origin = train.origin | {"split_off": "train"}
    return corpus | result


def filter_overlap(corpus: dict[str, ParallelText], overlap: str) -> dict[str, ParallelText]:
    """Report validation and test sources that have a copy or a near-duplicate in the training data.

    With "drop", these training pairs are dropped. With "error", copies raise ValueError.
    """
    train = corpus["train"]
    splits = {split: text for split, text in corpus.items() if split != "train"}
    index = WordIndex(train.sources if splits else ())
    copies: set[int] = set()
    similar: set[int] = set()
    for split, text in splits.items():
        sources = set(text.sources)
        same = [i for i, source in enumerate(train.sources) if source in sources]
        copied = {train.sources[i] for i in same}
        near = {source: index.near_duplicates(source) for source in sources}
        found = set(same).union(*near.values())
        if not found:
            continue
        num_similar = sum(bool(near[source]) for source in text.sources if source not in copied)
        message = (
            f"{split} set: {sum(source in copied for source in text.sources)} of {len(text)} sources are also in the "
            f"training data, {num_similar} have a near-duplicate there "
            f"(at least {MIN_SIMILARITY:.0%} of the words in common); {len(found)} training pairs, at "
            f"{format_line_numbers(train.line_numbers[i] for i in sorted(found))}"
        )
        if overlap == "error" and same:
            raise ValueError(f"{message}. Remove them, or set --on-eval-overlap to drop or keep.")
        logger.info(f"{message}: {'dropped' if overlap == 'drop' else 'kept'}")
        copies.update(same)
        similar |= found
    if overlap != "drop" or not similar:
        return corpus
    train.dropped["source held out"] += len(copies)
    if near_only := similar - copies:
        train.dropped["source similar to held-out source"] += len(near_only)
    if len(similar) == len(train):
        raise ValueError(
            "every training source is in the validation or test data, or similar: no training pairs are left."
        )
    return corpus | {"train": train.select(i for i in range(len(train)) if i not in similar)}
