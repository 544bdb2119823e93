"""From text to token ids: once, in parallel, kept on disk; or anew each time, for BPE-dropout and streams."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset
from datasets.config import HF_DATASETS_CACHE
from torch.utils.data import IterableDataset as TorchIterableDataset
from transformers import PreTrainedTokenizerFast

from training.batching import cut_by_tokens
from training.data import ParallelText
from training.recipe import DataArguments
from training.tokenizer import with_dropout

CHUNK = 4096  # sentences encoded at a time
FORMAT = 1  # part of the key of what is kept on disk: raised when its content changes


def encode(
    text: ParallelText, tokenizer: PreTrainedTokenizerFast, arguments: DataArguments | None = None, dropout: float = 0
) -> Dataset:
    """Token ids of both sides, `input_ids` and `labels`, each ending with `</s>`.

    The Rust tokenizer encodes with all cores; the result lies in the cache of `datasets` under the hash of text and
    tokenizer, and is mapped from there by every process and every later run.

    Args:
        arguments: its `max_length` and `max_length_ratio` say which pairs are left out, which is printed and counted in
            `text.dropped`; None: none are.
        dropout: BPE-dropout: the rows are then split anew each time they are read (and lengths are those without it).
    """
    backends = [getattr(tokenizer, name, None) for name in ("backend_tokenizer", "target_tokenizer")]
    states = [backend.to_str() for backend in backends if backend is not None]
    states = states or [repr(tokenizer), json.dumps(tokenizer.get_vocab())]  # one that is written in Python
    key = hashlib.sha256(f"{FORMAT}{text.digest()}{''.join(states)}".encode()).hexdigest()
    folder = Path(HF_DATASETS_CACHE) / "vanilla_transformer"
    folder.mkdir(parents=True, exist_ok=True)
    data = Dataset.from_dict({"source": text.sources, "target": text.targets}).map(
        lambda rows: encode_rows(tokenizer, rows["source"], rows["target"]),
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
    noisy = with_dropout(tokenizer, dropout)
    chosen = text.select(kept.tolist())
    columns: dict[str, Any] = {"source": chosen.sources, "target": chosen.targets, "lengths": lengths.tolist()}
    return Dataset.from_dict(columns).with_transform(
        lambda rows: encode_rows(noisy, rows["source"], rows["target"]), columns=["source", "target"]
    )


def encode_rows(tokenizer: PreTrainedTokenizerFast, sources: list[str], targets: list[str]) -> dict[str, list]:
    """Ids of both sides, by the Rust tokenizer itself: wrapped by transformers it takes four times as long."""
    if not tokenizer.is_fast:
        return {"input_ids": tokenizer(sources)["input_ids"], "labels": tokenizer(text_target=targets)["input_ids"]}
    source, target = tokenizer.backend_tokenizer, getattr(tokenizer, "target_tokenizer", tokenizer.backend_tokenizer)
    sides: dict[str, list] = {"input_ids": [], "labels": []}
    for start in range(0, len(sources), CHUNK):  # what it makes besides ids takes memory
        for name, backend, texts in (("input_ids", source, sources), ("labels", target, targets)):
            backend.no_truncation()
            backend.no_padding()
            sides[name] += [encoding.ids for encoding in backend.encode_batch_fast(texts[start : start + CHUNK])]
    return sides


def sequence_lengths(data: Dataset) -> np.ndarray:
    """Tokens of source and target of every pair: (pairs, 2)."""
    if "lengths" in data.column_names:
        return np.array(data.with_format(None)["lengths"])
    arrow = data.with_format("arrow")
    return np.stack([pc.list_value_length(arrow[:][name]).to_numpy() for name in ("input_ids", "labels")], axis=1)


def _filter(lengths: np.ndarray, arguments: DataArguments, dropped: Counter) -> np.ndarray:
    """Indices of the pairs that are neither too long nor too unequal; prints and counts the others."""
    reasons = reasons_to_drop(lengths, arguments)
    bad = np.zeros(len(lengths), bool)
    for reason, found in reasons.items():
        found = found & ~bad
        if found.any():
            print(f"left out {found.sum()} of {len(lengths)} pairs: {reason}")
            dropped[reason] += int(found.sum())
        bad |= found
    if bad.all():
        raise ValueError(
            f"no pair has at most max_length={arguments.max_length} tokens on both sides: raise max_length."
        )
    return np.nonzero(~bad)[0]


def reasons_to_drop(lengths: np.ndarray, arguments: DataArguments) -> dict[str, np.ndarray]:
    """For every reason to leave a pair out, in words, whether it holds: (pairs,) of booleans."""
    longest, limit, ratio = lengths.max(1), arguments.max_length, arguments.max_length_ratio
    reasons = {f"a side has more than max_length={limit} tokens": longest > limit}
    if ratio is not None:
        text = f"one side has more than max_length_ratio={ratio} times the tokens of the other"
        reasons[text] = longest > ratio * lengths.min(1)
    return reasons


class TokenBatchStream(TorchIterableDataset):
    """Batches by tokens out of a corpus of any length: lists of pairs {"input_ids", "labels"}, without end.

    `buffer_size` pairs are read, encoded, sorted by length, cut into batches, and handed out in random order; then the
    next ones. When the corpus is over it begins anew. Every process has a share of the rows.

    `state_at(n)` is what `load_state` needs to go on behind the first `n` batches: where the buffer that holds the
    next one begins, as the dataset tells it, and how many of its batches to pass over.

    Args:
        pairs: with columns `source` and `target`; it tells and takes its state.
        arguments: the recipe's filters and `buffer_size`.
        max_tokens: as for `TokenBatchSampler`.
        seed: of the order.
    """

    def __init__(
        self,
        pairs: IterableDataset,
        tokenizer: PreTrainedTokenizerFast,
        arguments: DataArguments,
        max_tokens: int,
        seed: int,
    ):
        self.pairs = pairs
        self.tokenizer = tokenizer
        self.arguments = arguments
        self.max_tokens = max_tokens
        self.seed = seed
        self.pairs_read = self.pairs_dropped = 0
        self._start = pairs.state_dict()
        self.load_state({"batches": 0, "buffer": 0, "rows": self._start})

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on where `state_at` was taken; to be called before iterating."""
        self._skip = state.get("skip", 0)
        self._buffers = [state]  # where those buffers began whose batches may not all have been trained on

    def state_at(self, batches: int) -> dict[str, Any]:
        while len(self._buffers) > 1 and self._buffers[1]["batches"] <= batches:
            self._buffers.pop(0)
        return self._buffers[0] | {"skip": batches - self._buffers[0]["batches"]}

    def __iter__(self) -> Iterator[list[dict[str, list[int]]]]:
        begin, skip = self._buffers[-1], self._skip
        batches, buffer = begin["batches"], begin["buffer"]
        self.pairs.load_state_dict(begin["rows"])
        rows, gained = iter(self.pairs), True
        while True:
            chunk = list(islice(rows, self.arguments.buffer_size))
            if not chunk:  # the corpus is over
                if not gained:
                    raise ValueError("no pair of the training data is left: see max_length and bad_lines.")
                self.pairs.load_state_dict(self._start)
                rows, gained = iter(self.pairs), False
                continue
            found = self._batches(chunk, buffer)
            yield from found[skip:]
            gained = gained or bool(found)
            batches, buffer, skip = batches + len(found), buffer + 1, 0
            self._buffers.append({"batches": batches, "buffer": buffer, "rows": self.pairs.state_dict()})

    def _batches(self, rows: list[dict[str, str]], buffer: int) -> list[list[dict[str, list[int]]]]:
        encoded = encode_rows(self.tokenizer, [row["source"] for row in rows], [row["target"] for row in rows])
        pairs = list(zip(encoded["input_ids"], encoded["labels"], strict=True))
        lengths = np.array([[len(source), len(target)] for source, target in pairs])
        self.pairs_read += len(pairs)
        rng = np.random.default_rng([self.seed, buffer])
        kept = np.nonzero(~np.any(list(reasons_to_drop(lengths, self.arguments).values()), axis=0))[0]
        self.pairs_dropped += len(pairs) - len(kept)
        if not len(kept):
            return []
        batches = cut_by_tokens(lengths[kept], self.max_tokens, rng)
        rng.shuffle(batches)  # type: ignore[arg-type]  # a list of arrays is a sequence
        return [[{"input_ids": pairs[i][0], "labels": pairs[i][1]} for i in kept[batch].tolist()] for batch in batches]
