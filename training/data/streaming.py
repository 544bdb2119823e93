"""A corpus larger than the memory: its pairs, read as they are needed, and batches by tokens out of them."""

from collections.abc import Callable, Container, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from datasets import IterableDataset
from torch.utils.data import IterableDataset as TorchIterableDataset
from transformers import PreTrainedTokenizerFast

from training.arguments import DataArguments
from training.data.batch_shapes import Shape, assign_shapes, batch_by_shapes, count_updates
from training.data.batching import batch_by_tokens
from training.data.files import SEVERAL_TARGETS, TABLE_SUFFIXES, iter_stripped_lines, read_table, validate_line_counts
from training.data.hub_datasets import load, use_dataset
from training.data.parallel_text import invalid_pair_reason, pair_of_row
from training.data.tokenization import CHUNK_SIZE, length_filters, tokenize_rows


def stream_pairs(arguments: DataArguments, held_out: Container[str] = ()) -> IterableDataset:
    """The training set with columns `source` and `target`, read as it is needed; it tells and takes its state.

    Pairs that are `invalid_pair_reason` are left out where `on_bad_lines` says so, else refused.

    Args:
        arguments: settings of the data.
        held_out: sources of validation and test data; pairs with such a source are dropped.
    """
    languages = (arguments.source_lang, arguments.target_lang)
    if use_dataset(arguments):
        streamed = load(arguments, streaming=True)
        place = str(arguments.dataset_name)

        def pair(row: dict[str, Any]) -> dict[str, str]:
            source, target = pair_of_row(row, languages, place)
            if arguments.on_bad_lines == "error":
                validate_row((source, target), place)
            return {"source": source, "target": target}

        pairs = streamed.map(pair, remove_columns=streamed.column_names)
        pairs = pairs.filter(lambda row: invalid_pair_reason((row["source"], row["target"])) is None)
    else:
        path = Path(arguments.data_dir) / arguments.train_file
        paths = (
            [path] if path.suffix in TABLE_SUFFIXES else [path.with_name(f"{path.name}.{lang}") for lang in languages]
        )
        if len(paths) > 1:
            validate_line_counts(*paths)
        given = {"paths": tuple(map(str, paths)), "languages": languages, "on_bad_lines": arguments.on_bad_lines}
        pairs = IterableDataset.from_generator(_rows, gen_kwargs=given)
    return pairs.filter(lambda row: row["source"] not in held_out) if held_out else pairs


def _rows(paths: tuple[str, ...], languages: tuple[str, str], on_bad_lines: str) -> Iterator[dict[str, str]]:
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


def validate_row(row: tuple, place: str) -> None:
    if reason := invalid_pair_reason(row):
        raise ValueError(f"{place}: {reason}. Correct the file, or leave such pairs out with --on_bad_lines drop.")


class TokenBatchStream(TorchIterableDataset):
    """Batches by tokens out of a corpus of any length: lists of pairs {"input_ids", "labels"}, without end.

    `buffer_size` pairs are read, encoded, sorted by length, cut into batches, and handed out in random order; then the
    next ones. When the corpus is over it begins anew. Every process has a share of the rows.

    `pairs_read` counts the pairs of the buffers that were read for training, `pairs_dropped` those that a filter of the
    recipe dropped.

    `state_dict_at(n)` is what `load_state` needs to go on behind the first `n` batches: where the buffer that holds the
    next one begins, as the dataset tells it, how many of its batches to pass over, and the two counts before it.

    After `set_batch_shapes`, all processes have batches of the same shape in an update. For every buffer they exchange
    the number of pairs of each shape, and a process that has fewer pairs returns smaller batches. A batch is then the
    number of its shape, and pairs of token ids: what a `FixedShapeCollator` takes.

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
        self._shapes: list[Shape] = []
        self._start = pairs.state_dict()
        self.load_state_dict({"batches": 0, "buffer": 0, "rows": self._start})

    def set_batch_shapes(
        self, shapes: list[Shape], batches_per_update: int, max_over_processes: Callable[[np.ndarray], np.ndarray]
    ) -> None:
        """Batches of these shapes from now on; one of the longest sentences has to be among them.

        Args:
            batches_per_update: gradient accumulation steps: so many successive batches are of one shape.
            most: from this process's updates of every shape to the most of any process.
        """
        self._shapes, self._batches_per_update = shapes, batches_per_update
        self._max_over_processes = max_over_processes

    def first_lengths(self) -> np.ndarray:
        """Tokens of source and target of the pairs that are kept of the first buffer, (pairs, 2)."""
        self.pairs.load_state_dict(self._start)
        pairs, kept = self._encode(list(islice(iter(self.pairs), self.arguments.buffer_size)))
        return np.array([[len(source), len(target)] for source, target in pairs]).reshape(-1, 2)[kept]

    def is_empty(self) -> bool:
        """Return True if the filters leave no pair of this process's share."""
        self.pairs.load_state_dict(self._start)
        rows = iter(self.pairs)
        while chunk := list(islice(rows, CHUNK_SIZE)):
            if len(self._encode(chunk)[1]):
                return False
        return True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict_at` was taken; to be called before iterating."""
        self._skip = state.get("skip", 0)
        self.pairs_read, self.pairs_dropped = state.get("read", 0), state.get("dropped", 0)
        self._buffers = [state]  # where those buffers began whose batches may not all have been trained on

    def state_dict_at(self, batches: int) -> dict[str, Any]:
        while len(self._buffers) > 1 and self._buffers[1]["batches"] <= batches:
            self._buffers.pop(0)
        return self._buffers[0] | {"skip": batches - self._buffers[0]["batches"]}

    def __iter__(self) -> Iterator[Any]:
        begin, skip = self._buffers[-1], self._skip
        batches, buffer = begin["batches"], begin["buffer"]
        self.pairs.load_state_dict(begin["rows"])
        rows, gained = iter(self.pairs), True
        while True:
            chunk = list(islice(rows, self.arguments.buffer_size))
            if not chunk:  # the corpus is over
                if not gained:
                    raise ValueError("no pair of the training data is left: see max_length and on_bad_lines.")
                self.pairs.load_state_dict(self._start)
                rows, gained = iter(self.pairs), False
                continue
            found = self._batches(chunk, buffer)
            yield from found[skip:]
            gained = gained or bool(found)
            batches, buffer, skip = batches + len(found), buffer + 1, 0
            counts = {"read": self.pairs_read, "dropped": self.pairs_dropped}
            self._buffers.append({"batches": batches, "buffer": buffer, "rows": self.pairs.state_dict(), **counts})

    def _encode(self, rows: list[dict[str, str]]) -> tuple[list[tuple[list[int], list[int]]], np.ndarray]:
        """Ids of source and target of every row, and the numbers of those rows that are kept."""
        encoded = tokenize_rows(self.tokenizer, [row["source"] for row in rows], [row["target"] for row in rows])
        pairs = list(zip(encoded["input_ids"], encoded["labels"], strict=True))
        lengths = np.array([[len(source), len(target)] for source, target in pairs])
        return pairs, np.nonzero(~np.any(list(length_filters(lengths, self.arguments).values()), axis=0))[0]

    def _batches(self, rows: list[dict[str, str]], buffer: int) -> list[Any]:
        pairs, kept = self._encode(rows)
        self.pairs_read += len(pairs)
        self.pairs_dropped += len(pairs) - len(kept)
        lengths = np.array([[len(pairs[i][0]), len(pairs[i][1])] for i in kept]).reshape(-1, 2)
        rng = np.random.default_rng([self.seed, buffer])
        if self._shapes:
            numbers = assign_shapes(lengths, self._shapes)
            counts = np.bincount(numbers, minlength=len(self._shapes))
            updates = self._max_over_processes(count_updates(counts, self._shapes, self._batches_per_update))
            shaped = batch_by_shapes(numbers, updates, self._batches_per_update, rng)
            return [(number, [pairs[i] for i in kept[batch].tolist()]) for number, batch in shaped]
        if not len(kept):
            return []
        batches = batch_by_tokens(lengths, self.max_tokens, rng)
        rng.shuffle(batches)  # type: ignore[arg-type]  # a list of arrays is a sequence
        return [[{"input_ids": pairs[i][0], "labels": pairs[i][1]} for i in kept[batch].tolist()] for batch in batches]
