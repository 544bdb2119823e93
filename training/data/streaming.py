"""Streaming of a corpus that does not fit into memory, and batches of its pairs."""

from collections.abc import Callable, Container, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from datasets import IterableDataset
from torch.utils.data import IterableDataset as TorchIterableDataset
from transformers import PreTrainedTokenizerFast

from training.arguments import DataArguments
from training.data.batch_shapes import Shape, assign_shapes, count_updates, group_by_shapes
from training.data.batching import batch_by_tokens
from training.data.files import SEVERAL_TARGETS, TABLE_SUFFIXES, iter_stripped_lines, read_table, validate_line_counts
from training.data.hub_datasets import load, use_dataset
from training.data.parallel_text import invalid_pair_reason, pair_of_row
from training.data.tokenization import CHUNK_SIZE, length_filters, tokenize_rows


def stream_pairs(arguments: DataArguments, held_out: Container[str] = ()) -> IterableDataset:
    """Stream the training set with columns `source` and `target`. The dataset is resumable.

    Invalid pairs are dropped if `on_bad_lines` is "drop". Otherwise they raise ValueError. Pairs whose source is in
    `held_out` are dropped.
    """
    languages = (arguments.source_lang, arguments.target_lang)
    if use_dataset(arguments):
        streamed = load(arguments, streaming=True)
        name = str(arguments.dataset_name)

        def pair(row: dict[str, Any]) -> dict[str, str]:
            source, target = pair_of_row(row, languages, name)
            if arguments.on_bad_lines == "error":
                validate_row((source, target), name)
            return {"source": source, "target": target}

        pairs = streamed.map(pair, remove_columns=streamed.column_names)
        pairs = pairs.filter(lambda row: invalid_pair_reason((row["source"], row["target"])) is None)
    else:
        path = Path(arguments.data_dir) / arguments.train_file
        paths = [path]
        if path.suffix not in TABLE_SUFFIXES:
            paths = [path.with_name(f"{path.name}.{language}") for language in languages]
            validate_line_counts(*paths)
        kwargs = {"paths": tuple(map(str, paths)), "languages": languages, "on_bad_lines": arguments.on_bad_lines}
        pairs = IterableDataset.from_generator(_iter_rows, gen_kwargs=kwargs)
    return pairs.filter(lambda row: row["source"] not in held_out) if held_out else pairs


def _iter_rows(paths: tuple[str, ...], languages: tuple[str, str], on_bad_lines: str) -> Iterator[dict[str, str]]:
    first, *second = map(Path, paths)
    rows = (
        zip(iter_stripped_lines(first), iter_stripped_lines(*second), strict=True)
        if second
        else read_table(first, languages)
    )
    for number, row in enumerate(rows, start=1):
        if on_bad_lines == "error":
            validate_row(row, f"{', '.join(paths)}, line {number}")
        if invalid_pair_reason(row) is None:
            if any(row[2:]):
                raise ValueError(f"{paths[0]}, line {number} {SEVERAL_TARGETS}")
            yield {"source": row[0], "target": row[1]}


def validate_row(row: tuple, name: str) -> None:
    """Raise ValueError if a row is invalid."""
    if reason := invalid_pair_reason(row):
        raise ValueError(f"{name}: {reason}. Correct the file, or drop such pairs with --on_bad_lines drop.")


class TokenBatchStream(TorchIterableDataset):
    """Infinite stream of micro-batches by tokens: lists of pairs {"input_ids", "labels"}.

    A buffer of `buffer_size` pairs is read, tokenized, sorted by length and split into updates of at most `max_tokens`
    tokens, which are returned in random order. Each update is split into `micro_batches` parts. The corpus is repeated
    without end. Each process reads a part of the rows.

    After `set_batch_shapes`, all processes have the same shape in an update. For every buffer they exchange the number
    of updates of each shape, and a process with fewer pairs returns smaller micro-batches. A micro-batch is then the
    index of its shape and pairs of token ids, as `FixedShapeCollator` expects.

    `pairs` is a resumable dataset with columns `source` and `target`. `pairs_read` counts the pairs in the buffers that
    were read for training, `pairs_dropped` those that the length filters dropped.
    """

    def __init__(
        self,
        pairs: IterableDataset,
        tokenizer: PreTrainedTokenizerFast,
        arguments: DataArguments,
        max_tokens: int,
        seed: int,
        micro_batches: int = 1,
    ):
        self.pairs = pairs
        self.tokenizer = tokenizer
        self.arguments = arguments
        self.max_tokens = max_tokens
        self.seed = seed
        self.micro_batches = micro_batches
        self._shapes: list[Shape] = []
        self._start = pairs.state_dict()
        self.load_state_dict({"updates": 0, "buffer": 0, "rows": self._start})

    def set_batch_shapes(self, shapes: list[Shape], max_over_processes: Callable[[np.ndarray], np.ndarray]) -> None:
        """Use fixed shapes of updates. `max_over_processes` returns the maximum of an array over all processes."""
        self._shapes, self._max_over_processes = shapes, max_over_processes

    def first_lengths(self) -> np.ndarray:
        """Return source and target lengths of the valid pairs in the first buffer: (pairs, 2)."""
        self.pairs.load_state_dict(self._start)
        pairs, kept = self._encode(list(islice(iter(self.pairs), self.arguments.buffer_size)))
        return np.array([[len(source), len(target)] for source, target in pairs]).reshape(-1, 2)[kept]

    def is_empty(self) -> bool:
        """Return whether the filters drop all pairs of this process."""
        self.pairs.load_state_dict(self._start)
        rows = iter(self.pairs)
        while chunk := list(islice(rows, CHUNK_SIZE)):
            if len(self._encode(chunk)[1]):
                return False
        return True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a result of `state_dict_at`. Must be called before iterating."""
        self._skip = state.get("skip", 0)
        self.pairs_read, self.pairs_dropped = state.get("read", 0), state.get("dropped", 0)
        self._buffers = [state]  # start states of buffers that may not be used up yet

    def state_dict_at(self, updates: int) -> dict[str, Any]:
        """Return the state after `updates` updates: start of a buffer, number of its updates to skip, and counts."""
        while len(self._buffers) > 1 and self._buffers[1]["updates"] <= updates:
            self._buffers.pop(0)
        return self._buffers[0] | {"skip": updates - self._buffers[0]["updates"]}

    def __iter__(self) -> Iterator[Any]:
        start, skip = self._buffers[-1], self._skip
        updates, buffer = start["updates"], start["buffer"]
        self.pairs.load_state_dict(start["rows"])
        rows, has_updates = iter(self.pairs), True
        while True:
            chunk = list(islice(rows, self.arguments.buffer_size))
            if not chunk:  # end of the corpus
                if not has_updates:
                    raise ValueError("no training pairs are left. Check max_length and on_bad_lines.")
                self.pairs.load_state_dict(self._start)
                rows, has_updates = iter(self.pairs), False
                continue
            pairs, buffered = self._make_updates(chunk, buffer)
            for shape_index, update in buffered[skip:]:
                for part in np.array_split(update, self.micro_batches):
                    rows_of_part = [pairs[i] for i in part.tolist()]
                    if self._shapes:
                        yield shape_index, rows_of_part
                    else:
                        yield [{"input_ids": source, "labels": target} for source, target in rows_of_part]
            has_updates = has_updates or bool(buffered)
            updates, buffer, skip = updates + len(buffered), buffer + 1, 0
            counts = {"read": self.pairs_read, "dropped": self.pairs_dropped}
            self._buffers.append({"updates": updates, "buffer": buffer, "rows": self.pairs.state_dict(), **counts})

    def _encode(self, rows: list[dict[str, str]]) -> tuple[list[tuple[list[int], list[int]]], np.ndarray]:
        """Return source and target ids of all rows, and the indices of rows that pass the length filters."""
        encoded = tokenize_rows(self.tokenizer, [row["source"] for row in rows], [row["target"] for row in rows])
        pairs = list(zip(encoded["input_ids"], encoded["labels"], strict=True))
        lengths = np.array([[len(source), len(target)] for source, target in pairs])
        return pairs, np.nonzero(~np.any(list(length_filters(lengths, self.arguments).values()), axis=0))[0]

    def _make_updates(self, rows: list[dict[str, str]], buffer: int) -> tuple[list, list[tuple[int, np.ndarray]]]:
        """Return token ids of all rows, and the index of a shape (0 without shapes) and row indices of each update."""
        pairs, kept = self._encode(rows)
        self.pairs_read += len(pairs)
        self.pairs_dropped += len(pairs) - len(kept)
        lengths = np.array([[len(pairs[i][0]), len(pairs[i][1])] for i in kept]).reshape(-1, 2)
        rng = np.random.default_rng([self.seed, buffer])
        if self._shapes:
            shape_indices = assign_shapes(lengths, self._shapes)
            counts = np.bincount(shape_indices, minlength=len(self._shapes))
            updates = self._max_over_processes(count_updates(counts, self._shapes))
            return pairs, [(index, kept[update]) for index, update in group_by_shapes(shape_indices, updates, rng)]
        if not len(kept):
            return pairs, []
        batches = batch_by_tokens(lengths, self.max_tokens, rng)
        rng.shuffle(batches)  # type: ignore[arg-type]  # list of arrays
        return pairs, [(0, kept[batch]) for batch in batches]
