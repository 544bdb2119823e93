"""From text to token ids: once, in parallel, kept on disk; or anew each time, for BPE-dropout."""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset
from datasets.config import HF_DATASETS_CACHE
from datasets.utils.logging import disable_progress_bar
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from training.arguments import DataArguments
from training.data.parallel_text import ParallelText, some_lines
from training.data.tokenizer import add_bpe_dropout

CHUNK_SIZE = 4096  # sentences encoded at a time
EVAL_LENGTH_FACTOR = (
    4  # times max_length, or UNLIMITED where this is more: longest sentence in validation and test data
)
MIN_EVAL_LENGTH_LIMIT = 1024  # tokens of a sentence that never is too long there
CACHE_VERSION = 1  # part of the key of what is kept on disk: raised when its content changes


def tokenize_corpus(
    text: ParallelText, tokenizer: PreTrainedTokenizerFast, arguments: DataArguments | None = None, dropout: float = 0
) -> Dataset:
    """Token ids of both sides, `input_ids` and `labels`, each ending with `</s>`.

    The Rust tokenizer encodes with all cores; the result lies in the cache of `datasets` under the hash of text and
    tokenizer, and is mapped from there by every process and every later run.

    Args:
        arguments: its `max_length` and `max_length_ratio` say which pairs are left out, which is printed and counted in
            `text.dropped`; None: none are.
        dropout: BPE-dropout: the rows are then split anew each time they are read (and lengths are those without it).
            A sentence that would have more than `max_length` tokens is split without it.
    """
    if tokenizer.is_fast:
        states = [backend.to_str() for _, backend in iter_backends(tokenizer)]
    else:
        states = [repr(tokenizer), json.dumps(tokenizer.get_vocab())]
    key = hashlib.sha256(
        f"{CACHE_VERSION}{text.sha256()}{''.join(states)}{getattr(tokenizer, 'known', None) or ''}".encode()
    ).hexdigest()
    folder = Path(HF_DATASETS_CACHE) / "vanilla_transformer"
    folder.mkdir(parents=True, exist_ok=True)
    if not sys.stderr.isatty():
        disable_progress_bar()
    data = Dataset.from_dict({"source": text.sources, "target": text.targets}).map(
        lambda rows: tokenize_rows(tokenizer, rows["source"], rows["target"]),
        batched=True,
        batch_size=10_000,
        remove_columns=["source", "target"],
        cache_file_name=str(folder / f"{key}.arrow"),
        new_fingerprint=key[:32],
        desc="tokens",
    )
    kept = np.arange(len(data))
    if arguments is not None:
        kept = _filter(sequence_lengths(data), arguments, text.dropped)
        data = data if len(kept) == len(data) else data.select(kept)
    if not dropout:
        return data
    lengths = sequence_lengths(data)
    noisy = add_bpe_dropout(tokenizer, dropout)
    chosen = text.select(kept.tolist())
    columns: dict[str, Any] = {"source": chosen.sources, "target": chosen.targets, "lengths": lengths.tolist()}
    limit = sys.maxsize if arguments is None else arguments.max_length

    def split(rows: dict[str, list[str]]) -> dict[str, list]:
        found = tokenize_rows(noisy, rows["source"], rows["target"])
        if any(len(ids) > limit for side in found.values() for ids in side):
            plain = tokenize_rows(tokenizer, rows["source"], rows["target"])
            for name, side in found.items():
                side[:] = [ids if len(ids) <= limit else plain[name][i] for i, ids in enumerate(side)]
        return found

    return Dataset.from_dict(columns).with_transform(split, columns=["source", "target"])


def tokenize_rows(tokenizer: PreTrainedTokenizerFast, sources: list[str], targets: list[str]) -> dict[str, list]:
    """Ids of both sides, by the Rust tokenizer itself: wrapped by transformers it takes four times as long."""
    if not tokenizer.is_fast or getattr(tokenizer, "known", None):  # ids that only the tokenizer itself corrects
        return {"input_ids": tokenizer(sources)["input_ids"], "labels": tokenizer(text_target=targets)["input_ids"]}
    sides: dict[str, list] = {"input_ids": [], "labels": []}
    for (name, backend), texts in zip(iter_backends(tokenizer), (sources, targets), strict=True):
        backend.no_truncation()
        backend.no_padding()
        for start in range(0, len(texts), CHUNK_SIZE):  # what it makes besides ids takes memory
            sides[name] += [encoding.ids for encoding in backend.encode_batch_fast(texts[start : start + CHUNK_SIZE])]
    return sides


def iter_backends(tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[str, Tokenizer]]:
    """Yields the Rust tokenizer of each side, which may be one object: use it before the next one is taken."""
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
    """Raise ValueError if validation or test data, of which nothing is dropped, have sentences with more tokens than
    the model has positions, or so many that attention would need too much memory."""
    limit = min(max(EVAL_LENGTH_FACTOR * arguments.max_length, MIN_EVAL_LENGTH_LIMIT), positions)
    remedy = f"raise max_length={arguments.max_length}, of which {EVAL_LENGTH_FACTOR} times as many are allowed there"
    if limit == positions:
        remedy = f"use a model with more positions than max_position_embeddings={positions}"
    for split, text in corpus.items():
        if split != "train":
            longest = sequence_lengths(tokenize_corpus(text, tokenizer)).max(1)
            if found := [text.line_numbers[i] for i in np.nonzero(longest > limit)[0]]:
                raise ValueError(
                    f"the {split} set has sentences of more than {limit} tokens, at {some_lines(found)}: shorten them, "
                    f"or {remedy}."
                )


def sequence_lengths(data: Dataset) -> np.ndarray:
    """Tokens of source and target of every pair: (pairs, 2)."""
    if "lengths" in data.column_names:
        return np.array(data.with_format(None)["lengths"])
    arrow = data.with_format("arrow")
    return np.stack([pc.list_value_length(arrow[:][name]).to_numpy() for name in ("input_ids", "labels")], axis=1)


def _filter(lengths: np.ndarray, arguments: DataArguments, dropped: Counter) -> np.ndarray:
    """Indices of the pairs that are neither too long nor too unequal; prints and counts the others."""
    reasons = length_filters(lengths, arguments)
    bad = np.zeros(len(lengths), bool)
    for reason, found in reasons.items():
        found = found & ~bad
        if found.any():
            print(f"left out {found.sum()} of {len(lengths)} pairs: {reason}")
            dropped[reason] += int(found.sum())
        bad |= found
    if bad.all():
        raise ValueError(
            f"no training pair is left: {'; '.join(reasons)}. Raise max_length={arguments.max_length}"
            + (f" or max_length_ratio={arguments.max_length_ratio}." if arguments.max_length_ratio else ".")
        )
    return np.nonzero(~bad)[0]


def length_filters(lengths: np.ndarray, arguments: DataArguments) -> dict[str, np.ndarray]:
    """For every reason to leave a pair out, in words, whether it holds: (pairs,) of booleans."""
    longest, limit, ratio = lengths.max(1), arguments.max_length, arguments.max_length_ratio
    reasons = {f"a side has more than max_length={limit} tokens": longest > limit}
    if ratio is not None:
        text = f"one side has more than max_length_ratio={ratio} times the tokens of the other"
        reasons[text] = longest > ratio * lengths.min(1)
    return reasons
