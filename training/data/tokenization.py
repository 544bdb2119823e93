"""Tokenization of a corpus: once, in parallel and cached on disk, or at each access for BPE-dropout."""

import hashlib
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from datasets.config import HF_DATASETS_CACHE
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from vanilla_transformer.shared.atomic_io import FREE_SPACE_HINT, make_write_error
from vanilla_transformer.shared.command_line import logger

from ..recipe.arguments import DataArguments
from .parallel_text import ParallelText, format_line_numbers
from .tokenizer import add_bpe_dropout, saved_files

CHUNK_SIZE = 4096  # sentences per call of the tokenizer
EVAL_LENGTH_FACTOR = 4  # times max_length: maximum length of sentences in validation and test data
MIN_EVAL_LENGTH_LIMIT = 1024  # lower bound of that maximum, in tokens
CACHE_VERSION = 3  # part of the cache key; increase it when the cached content changes


def tokenize_corpus(
    text: ParallelText, tokenizer: PreTrainedTokenizerFast, arguments: DataArguments | None = None, dropout: float = 0
) -> Dataset:
    """Tokenize source and target to columns `input_ids` and `labels`, each ending with EOS.

    The Rust tokenizer uses all cores. The result is cached by `datasets` under the hash of text and tokenizer, and
    memory-mapped by all processes and later runs.

    Args:
        text: Sentence pairs. Its `dropped` counts the pairs that are dropped here.
        arguments: Length filters `max_length` and `max_length_ratio`. Defaults to no filters.
        dropout: Probability of BPE-dropout, which re-tokenizes rows at each access. Requires `arguments`. Rows that
            exceed `max_length` with dropout are tokenized without it. Lengths are those without dropout.
    """
    if tokenizer.is_fast:
        states = [backend.to_str() for _, backend in iter_backends(tokenizer)]
    else:
        states = [repr(tokenizer), *(content.hex() for content in saved_files(tokenizer).values())]
    key = hashlib.sha256(
        f"{CACHE_VERSION}{text.sha256()}{''.join(states)}{getattr(tokenizer, 'known', None) or ''}".encode()
    ).hexdigest()
    folder = Path(HF_DATASETS_CACHE) / "vanilla_transformer"
    with progress_bars_on_terminal(), wrap_cache_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        data = Dataset.from_dict({"source": text.sources, "target": text.targets}).map(
            lambda rows: tokenize_rows(tokenizer, rows["source"], rows["target"]),
            batched=True,
            batch_size=10_000,
            remove_columns=["source", "target"],
            cache_file_name=str(folder / f"{key}.arrow"),
            new_fingerprint=key[:32],
            desc="tokens",
        )
    if arguments is None:
        return data
    kept = _filter(sequence_lengths(data), arguments, text.dropped)
    data = data if len(kept) == len(data) else data.select(kept)
    if not dropout:
        return data
    lengths = sequence_lengths(data)
    noisy = add_bpe_dropout(tokenizer, dropout)
    selected = text.select(kept.tolist())
    columns: dict[str, Any] = {"source": selected.sources, "target": selected.targets, "lengths": lengths.tolist()}
    tokenize = partial(tokenize_with_dropout, noisy, tokenizer, arguments.max_length)
    return Dataset.from_dict(columns).with_transform(tokenize, columns=["source", "target"])


@contextmanager
def wrap_cache_errors(folder: Path) -> Iterator[None]:
    """Context manager that adds the path of the cache to disk errors."""
    try:
        yield
    except OSError as error:
        hint = f"{FREE_SPACE_HINT}. Delete files, or set HF_DATASETS_CACHE to another directory."
        raise make_write_error(folder, error, hint) from error


@contextmanager
def progress_bars_on_terminal() -> Iterator[None]:
    """Context manager that disables the progress bars of `datasets` if stderr is not a terminal."""
    is_disabled_here = not sys.stderr.isatty() and not are_progress_bars_disabled()
    if is_disabled_here:
        disable_progress_bars()
    try:
        yield
    finally:
        if is_disabled_here:
            enable_progress_bars()


def tokenize_with_dropout(
    noisy: PreTrainedTokenizerFast, tokenizer: PreTrainedTokenizerFast, limit: int, rows: dict[str, list[str]]
) -> dict[str, list]:
    """Tokenize rows with the tokenizer `noisy`. Sentences of more than `limit` tokens are tokenized with `tokenizer`.

    It is a module-level function, so that worker processes can receive the dataset as a pickle.
    """
    sampled = tokenize_rows(noisy, rows["source"], rows["target"])
    if any(len(ids) > limit for side in sampled.values() for ids in side):
        fixed = tokenize_rows(tokenizer, rows["source"], rows["target"])
        for name, side in sampled.items():
            side[:] = [ids if len(ids) <= limit else fixed[name][i] for i, ids in enumerate(side)]
    return sampled


def tokenize_rows(tokenizer: PreTrainedTokenizerFast, sources: list[str], targets: list[str]) -> dict[str, list]:
    """Tokenize source and target with the Rust tokenizer directly, which is four times as fast as the wrapper."""
    if not tokenizer.is_fast or getattr(tokenizer, "known", None):  # only the wrapper replaces unknown ids
        return {"input_ids": tokenizer(sources)["input_ids"], "labels": tokenizer(text_target=targets)["input_ids"]}
    sides: dict[str, list] = {"input_ids": [], "labels": []}
    for (name, backend), texts in zip(iter_backends(tokenizer), (sources, targets), strict=True):
        backend.no_truncation()
        backend.no_padding()
        for start in range(0, len(texts), CHUNK_SIZE):  # limits the memory of `Encoding` objects
            sides[name] += [encoding.ids for encoding in backend.encode_batch_fast(texts[start : start + CHUNK_SIZE])]
    return sides


def iter_backends(tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[str, Tokenizer]]:
    """Yield the Rust tokenizer of each side. Finish with one before the next: both can be the same."""
    switches = [getattr(tokenizer, f"_switch_to_{mode}_mode", lambda: None) for mode in ("input", "target")]
    try:
        for name, switch in zip(("input_ids", "labels"), switches, strict=True):
            switch()  # NLLB and mBART change the language token of the only backend
            yield name, tokenizer.backend_tokenizer
    finally:
        switches[0]()


def validate_eval_lengths(
    corpus: dict[str, ParallelText],
    tokenizer: PreTrainedTokenizerFast,
    arguments: DataArguments,
    positions: int = sys.maxsize,
) -> None:
    """Raise ValueError if validation or test sentences, which are not filtered, have too many tokens for attention."""
    limit = min(max(EVAL_LENGTH_FACTOR * arguments.max_length, MIN_EVAL_LENGTH_LIMIT), positions)
    remedy = f"increase max_length={arguments.max_length} (the limit is {EVAL_LENGTH_FACTOR} times as high)"
    if limit == positions:
        remedy = f"use a model with more positions than max_position_embeddings={positions}"
    for split, text in corpus.items():
        if split != "train":
            longest = sequence_lengths(tokenize_corpus(text, tokenizer)).max(1)
            if numbers := [text.line_numbers[i] for i in np.nonzero(longest > limit)[0]]:
                message = (
                    f"the {split} set has sentences of more than {limit} tokens, at {format_line_numbers(numbers)}"
                )
                raise ValueError(f"{message}: shorten them, or {remedy}.")


def sequence_lengths(data: Dataset) -> np.ndarray:
    """Return the number of source and target tokens of each pair: (pairs, 2)."""
    if "lengths" in data.column_names:
        return np.array(data.with_format(None)["lengths"])
    arrow = data.with_format("arrow")
    return np.stack([pc.list_value_length(arrow[:][name]).to_numpy() for name in ("input_ids", "labels")], axis=1)


def _filter(lengths: np.ndarray, arguments: DataArguments, dropped: Counter) -> np.ndarray:
    """Return the indices of pairs that pass the length filters. Print and count the others."""
    filters = length_filters(lengths, arguments)
    is_dropped = np.zeros(len(lengths), bool)
    for reason, mask in filters.items():
        count = int((mask & ~is_dropped).sum())
        if count:
            logger.info(f"dropped {count} of {len(lengths)} pairs: {reason}")
            dropped[reason] += count
        is_dropped |= mask
    if is_dropped.all():
        ratio = f" or max_length_ratio={arguments.max_length_ratio}" if arguments.max_length_ratio else ""
        remedy = f"Increase max_length={arguments.max_length}{ratio}."
        raise ValueError(f"no training pairs are left: {'; '.join(filters)}. {remedy}")
    return np.nonzero(~is_dropped)[0]


def length_filters(lengths: np.ndarray, arguments: DataArguments) -> dict[str, np.ndarray]:
    """Return a mask of the pairs to drop (pairs,) for each reason."""
    longest, limit, ratio = lengths.max(1), arguments.max_length, arguments.max_length_ratio
    filters = {f"a side has more than max_length={limit} tokens": longest > limit}
    if ratio is not None:
        reason = f"one side has more than max_length_ratio={ratio} times the tokens of the other"
        filters[reason] = longest > ratio * lengths.min(1)
    return filters
