"""Streaming of a corpus that does not fit into memory, and batches of its pairs."""

from collections.abc import Callable, Container, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from datasets import IterableDataset
from torch.utils.data import IterableDataset as TorchIterableDataset
from transformers import PreTrainedTokenizerFast

from ..recipe.arguments import DataArguments, use_dataset
from .batch_shapes import Shape, assign_shapes, choose_shapes, count_groups, group_by_shapes
from .batching import GROUPS_PER_UPDATE, batch_by_tokens, groups_per_update, split_update
from .collators import Pair
from .files import (
    SEVERAL_TARGETS,
    TABLE_SUFFIXES,
    find_text_files,
    iter_stripped_lines,
    read_table,
    validate_line_counts,
)
from .hub_datasets import load
from .parallel_text import invalid_pair_reason, pair_of_row
from .tokenization import length_filters, tokenize_rows


def stream_pairs(arguments: DataArguments, held_out: Container[str] = ()) -> IterableDataset:
    """Stream the training set with columns `source` and `target`. The dataset is resumable.

    Invalid pairs are dropped if `on_bad_lines` is "drop". Otherwise they raise ValueError. Pairs whose source is in
    `held_out` are dropped.
    """
    languages = (arguments.source_lang, arguments.target_lang)
    if use_dataset(arguments):
        streamed, name = load(arguments, streaming=True), str(arguments.dataset_name)
        pairs = streamed.map(
            lambda row: dict(zip(("source", "target"), pair_of_row(row, languages, name), strict=True)),
            remove_columns=streamed.column_names,
        )
        pairs = pairs.filter(lambda row: is_valid((row["source"], row["target"]), name, arguments.on_bad_lines))
    else:
        path = Path(arguments.data_dir) / arguments.train_file
        paths = [path] if path.suffix in TABLE_SUFFIXES else [*find_text_files(path, languages)]
        if len(paths) > 1:
            validate_line_counts(*paths)
        kwargs = {"paths": tuple(map(str, paths)), "languages": languages, "on_bad_lines": arguments.on_bad_lines}
        pairs = IterableDataset.from_generator(_iter_rows, gen_kwargs=kwargs)
    return pairs.filter(lambda row: row["source"] not in held_out) if held_out else pairs


def _iter_rows(paths: tuple[str, ...], languages: tuple[str, str], on_bad_lines: str) -> Iterator[dict[str, str]]:
    columns = [iter_stripped_lines(Path(path)) for path in paths]
    rows = zip(*columns, strict=True) if len(paths) > 1 else read_table(Path(paths[0]), languages)
    for number, row in enumerate(rows, start=1):
        # a row without cells is a header
        if row and is_valid(row, f"{', '.join(paths)}, line {number}", on_bad_lines):
            if any(row[2:]):
                raise ValueError(f"{paths[0]}, line {number} {SEVERAL_TARGETS}")
            yield {"source": row[0], "target": row[1]}


def is_valid(row: tuple, name: str, on_bad_lines: str) -> bool:
    """Return whether a row is a valid pair. Raises ValueError if it is not, and `on_bad_lines` is "error"."""
    reason = invalid_pair_reason(row)
    if reason and on_bad_lines == "error":
        raise ValueError(f"{name}: {reason}. Correct the file, or drop such pairs with --on-bad-lines drop.")
    return reason is None


class TokenBatchStream(TorchIterableDataset):
    """Infinite stream of micro-batches by tokens: lists of pairs {"input_ids", "labels"}.

    All processes read the same buffers of `buffer_size` pairs. Each process tokenizes its part of a buffer, sorts it by
    length and splits it into groups, which are returned in random order. Its part of an update is as in
    `TokenBatchSampler`, with at most `tokens_per_update / processes` tokens. With one group per part, every second
    process has another group. The corpus is repeated without end.

    For every buffer, the processes exchange the number of groups. A process with fewer pairs returns smaller or empty
    micro-batches. So all processes have the same position in the corpus, and a run can be resumed with another number
    of processes: it continues in the same buffer.

    With `shapes`, all processes have the same shapes in an update. A micro-batch is then the index of its shape and
    pairs of token ids, as `PaddingCollator` expects.

    `pairs_read` counts the pairs in the buffers that were read for training, `pairs_dropped` those that the length
    filters dropped, both in all processes.

    Args:
        pairs: Resumable dataset with columns `source` and `target`.
        micro_batches: Gradient accumulation steps.
        exchange: Returns the objects that all processes pass to it.
    """

    def __init__(
        self,
        pairs: IterableDataset,
        tokenizer: PreTrainedTokenizerFast,
        arguments: DataArguments,
        tokens_per_update: int,
        seed: int,
        micro_batches: int = 1,
        rank: int = 0,
        processes: int = 1,
        exchange: Callable[[Any], list[Any]] = lambda value: [value],
    ):
        self.pairs = pairs
        self.tokenizer = tokenizer
        self.arguments = arguments
        self.groups = groups_per_update(micro_batches)
        self.tokens_per_group = max(1, tokens_per_update // processes // self.groups)
        self.seed = seed
        self.micro_batches = micro_batches
        self.rank, self.processes, self.exchange = rank, processes, exchange
        self.shapes: list[Shape] = []
        self._start = pairs.state_dict()
        self.load_state_dict({"updates": 0, "buffer": 0, "rows": self._start})

    def choose_shapes(self) -> list[Shape]:
        """Use and return shapes for the groups of the first buffer of the main process."""
        max_lengths = np.full((1, 2), self.arguments.max_length)  # may occur in a later buffer
        lengths = np.concatenate([self.first_lengths(), max_lengths])
        self.shapes = self.exchange(choose_shapes(lengths, self.tokens_per_group))[0]
        return self.shapes

    def first_lengths(self) -> np.ndarray:
        """Return source and target lengths of the valid pairs of this process in the first buffer: (pairs, 2)."""
        self.pairs.load_state_dict(self._start)
        return self._encode(list(islice(iter(self.pairs), self.arguments.buffer_size)))[1]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a result of `state_dict_at`. Must be called before iterating."""
        self._skip = state.get("skip", 0)
        self.pairs_read, self.pairs_dropped = state.get("counts", (state.get("read", 0), state.get("dropped", 0)))
        self._buffers = [state]  # start states of buffers that may not be used up yet

    def state_dict_at(self, updates: int) -> dict[str, Any]:
        """Return the state after `updates` updates: start of a buffer, number of its updates to skip, and counts."""
        while len(self._buffers) > 1 and self._buffers[1]["updates"] <= updates:
            self._buffers.pop(0)
        counts = self.pairs_read, self.pairs_dropped  # if no update follows
        return self._buffers[0] | {"skip": updates - self._buffers[0]["updates"], "counts": counts}

    def __iter__(self) -> Iterator[Any]:
        start, skip = self._buffers[-1], self._skip
        updates, buffer = start["updates"], start["buffer"]
        self.pairs_read, self.pairs_dropped = start.get("read", 0), start.get("dropped", 0)
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
            for update in buffered[skip:]:
                for shape_index, part in split_update(update, self.micro_batches):
                    micro_batch = [pairs[i] for i in part.tolist()]
                    if self.shapes:
                        yield shape_index, micro_batch
                    else:
                        yield [{"input_ids": source, "labels": target} for source, target in micro_batch]
            has_updates = has_updates or bool(buffered)
            updates, buffer, skip = updates + max(skip, len(buffered)), buffer + 1, 0
            counts = {"read": self.pairs_read, "dropped": self.pairs_dropped}
            self._buffers.append({"updates": updates, "buffer": buffer, "rows": self.pairs.state_dict(), **counts})

    def _encode(self, rows: list[dict[str, str]]) -> tuple[list[Pair], np.ndarray]:
        """Return token ids and lengths of the rows of this process that pass the length filters."""
        own = rows[self.rank :: self.processes]
        encoded = tokenize_rows(self.tokenizer, [row["source"] for row in own], [row["target"] for row in own])
        pairs = list(zip(encoded["input_ids"], encoded["labels"], strict=True))
        lengths = np.array([[len(source), len(target)] for source, target in pairs], dtype=int).reshape(-1, 2)
        kept = np.nonzero(~np.any(list(length_filters(lengths, self.arguments).values()), axis=0))[0]
        return [pairs[i] for i in kept.tolist()], lengths[kept]

    def _make_updates(
        self, rows: list[dict[str, str]], buffer: int
    ) -> tuple[list[Pair], list[list[tuple[int, np.ndarray]]]]:
        """Return the pairs, and for each group of each update its shape (0 without shapes) and its pairs' indices."""
        pairs, lengths = self._encode(rows)
        rng = np.random.default_rng([self.seed, buffer])
        if self.shapes:
            shape_indices = assign_shapes(lengths, self.shapes)
            counts = count_groups(np.bincount(shape_indices, minlength=len(self.shapes)), self.shapes)
        else:
            batches = batch_by_tokens(lengths, self.tokens_per_group, rng) if pairs else []
            counts = np.array([len(batches)])
        exchanged = self.exchange((counts, len(pairs)))
        most = np.max([each for each, _ in exchanged], axis=0)
        self.pairs_read += len(rows)
        self.pairs_dropped += len(rows) - sum(count for _, count in exchanged)
        if self.shapes:
            groups = list(group_by_shapes(shape_indices, most, rng))
        else:
            batches += [np.array([], dtype=int)] * (most[0] - len(batches))
            order = np.random.default_rng([self.seed, buffer]).permutation(len(batches))  # equal in all processes
            if self.groups == 1:  # every second process has another group, so that an update has two
                order = np.roll(order, self.rank % GROUPS_PER_UPDATE)
            groups = [(0, batches[i]) for i in order]
        return pairs, [groups[i : i + self.groups] for i in range(0, len(groups), self.groups)]
