"""Parallel text: reading it from files of several kinds or a dataset, checking it, and saying what was left out."""

import hashlib
import json
import random
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset, load_dataset, load_from_disk

from training import demo_corpus
from training.recipe import DataArguments

TABLES = (".tsv", ".jsonl", ".json", ".parquet")  # files with both sides; any other name means two text files
SHOWN = 3  # line numbers in a message
RANDOM_PAIRS, RANDOM_LENGTH, RANDOM_WORDS = 64, 98, 4996  # of the corpus "random": see random_pairs


@dataclass
class ParallelText:
    """Sentence pairs of one split: `sources[i]` and `targets[i]` belong together.

    `numbers[i]` is the pair's line in its file, from 1 (without: i + 1), `references[i]` every accepted target where a
    file has several, and `dropped` counts what was left out, by reason.
    """

    sources: list[str]
    targets: list[str]
    numbers: array = field(default_factory=lambda: array("q"))
    references: list[list[str]] | None = None
    dropped: Counter = field(default_factory=Counter)

    def __post_init__(self):
        if not self.numbers:
            self.numbers = array("q", range(1, len(self.sources) + 1))

    def __len__(self) -> int:
        return len(self.sources)

    def select(self, indices: Iterable[int]) -> "ParallelText":
        """The pairs at `indices`, in that order, with their line numbers."""
        indices = list(indices)
        references = self.references and [self.references[i] for i in indices]
        sources, targets = ([side[i] for i in indices] for side in (self.sources, self.targets))
        return ParallelText(sources, targets, array("q", [self.numbers[i] for i in indices]), references, self.dropped)

    def digest(self) -> str:
        """SHA-256 of the text, for the record of a run."""
        digest = hashlib.sha256()
        for source, target in zip(self.sources, self.targets, strict=True):
            digest.update(f"{source}\t{target}\n".encode())
        return digest.hexdigest()


def read_corpus(arguments: DataArguments) -> dict[str, ParallelText]:
    """The splits "train" (not when streaming), "validation" and, where there is one, "test".

    From files in `data_dir`; where nobody gave a folder and the default one has none, from the recipe's dataset on the
    Hub; or made up. Pairs with a blank side or bytes that are not UTF-8, and training pairs whose source is also in the
    validation or test set, are treated as `bad_lines` and `overlap` say.

    Raises:
        ValueError: files that are missing, of different length or not what their name says, bad lines; names the place.
    """
    if arguments.corpus == "demo":
        return {name: _from_pairs(pairs) for name, pairs in demo_corpus.generate().items()}
    if arguments.corpus == "random":
        return {"train": _from_pairs(random_pairs())}
    if _use_dataset(arguments):
        corpus = _read_dataset(arguments)
    else:
        names = {"train": arguments.train_file, "validation": arguments.validation_file, "test": arguments.test_file}
        if arguments.streaming:
            del names["train"]
        corpus = {split: read_file(arguments, name) for split, name in names.items() if name is not None}
    for split, text in corpus.items():
        if not len(text):
            raise ValueError(f"the {split} set has no pairs.")
    if arguments.test_references is not None and "test" in corpus:
        add_references(corpus["test"], Path(arguments.data_dir) / arguments.test_references)
    if "train" not in corpus:
        return corpus
    if corpus["train"].references:
        raise ValueError(
            f"{arguments.train_file} has more than two columns: a training file has one target a line, and only "
            f"validation and test files may list several."
        )
    if "validation" not in corpus and arguments.validation_size:
        corpus = _split_off_validation(corpus, arguments.validation_size)
    return _without_overlap(corpus, arguments.overlap)


def read_file(arguments: DataArguments, name: str) -> ParallelText:
    """`<data_dir>/<name>` if that is a .tsv, .jsonl or .parquet file, else the two `<data_dir>/<name>.<language>`."""
    path = Path(arguments.data_dir) / name
    languages = (arguments.source_lang, arguments.target_lang)
    if path.suffix in TABLES:
        return clean(read_table(path, languages), str(path), arguments.bad_lines)
    source, target = (path.with_name(f"{path.name}.{language}") for language in languages)
    return read_pair(source, target, arguments.bad_lines)


def add_references(text: ParallelText, path: Path) -> None:
    """Gives line i of the file that `text` was read from the targets in line i of a table, behind its first column."""
    if path.suffix != ".tsv":
        raise ValueError(f"test_references={path.name}: give a .tsv file.")
    rows, lines = list(read_table(path, ("", ""))), len(text) + sum(text.dropped.values())
    if len(rows) != lines:
        raise ValueError(f"{path} has {len(rows)} lines, and the test data {lines}: line i of one belongs to line i.")
    text.references = [[cell for cell in rows[number - 1][1:] if cell] for number in text.numbers]


def read_pair(source_path: Path, target_path: Path, bad_lines: str = "refuse") -> ParallelText:
    """Two text files with a sentence a line; line i of one translates line i of the other."""
    rows = zip_longest(read_lines(source_path), read_lines(target_path), fillvalue=_END)
    return clean(_same_length(rows, source_path, target_path), f"{source_path}, {target_path}", bad_lines)


# --- Files, line by line ---------------------------------------------------------------------------------------------

_END = "\0end of file"


def read_lines(path: Path) -> Iterator[str | None]:
    """Lines without surrounding space; None for one that is not UTF-8. Only "\\n" ends a line: other separators of
    Unicode stay inside."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file):
                try:
                    yield line.decode("utf-8-sig" if number == 0 else "utf-8").strip()
                except UnicodeDecodeError:
                    yield None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}. Give the folder with --data_dir.") from error


def _same_length(rows: Iterator[tuple], source_path: Path, target_path: Path) -> Iterator[tuple]:
    for number, row in enumerate(rows):
        if _END in row:
            short, long = (source_path, target_path) if row[0] == _END else (target_path, source_path)
            more = number + 1 + sum(1 for _ in rows)
            raise ValueError(
                f"{short} has {number} lines and {long} has {more}: line i of one must translate line i of the other."
            )
        yield row


def read_table(path: Path, languages: tuple[str, str]) -> Iterator[tuple]:
    """Rows (source, target, further accepted targets ...) of a .tsv, .jsonl or .parquet file.

    A .tsv has a column for the source, one for the target, and where it is no training file any number of further
    references. The others have a field for each language, or one "translation" that holds both.
    """
    if path.suffix == ".parquet":
        if not path.exists():
            raise ValueError(f"cannot read {path}: no such file. Give the folder with --data_dir.")
        try:
            table = Dataset.from_parquet(str(path), keep_in_memory=True)
        except Exception as error:  # pyarrow's own types, wrapped differently by each release of datasets
            raise ValueError(f"{path} is not a parquet file: {error}") from error
        yield from (pair_of_row(row, languages, f"{path}, row {i}") for i, row in enumerate(table, start=1))
        return
    for number, line in enumerate(read_lines(path), start=1):
        if line is None:
            yield (None, None)
        elif path.suffix == ".tsv":
            cells = line.split("\t")
            if len(cells) < 2:
                raise ValueError(f"{path}, line {number}: no tab, where a source, a tab and a target should stand.")
            yield tuple(cell.strip() for cell in cells)
        else:
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path}, line {number}: not a JSON object ({error.msg}): one a line, please."
                ) from None
            yield pair_of_row(row, languages, f"{path}, line {number}")


def pair_of_row(row: Any, languages: tuple[str, str], place: str) -> tuple[str, str]:
    """Source and target of a row {"en": ..., "de": ...} or {"translation": {"en": ..., "de": ...}}."""
    fields = row.get("translation", row) if isinstance(row, dict) else {}
    missing = [language for language in languages if not isinstance(fields.get(language), str)]
    if missing:
        found = ", ".join(map(str, fields)) or type(row).__name__
        raise ValueError(
            f"{place}: no text named {missing[0]!r} (there is: {found}): give the columns' names with --source_lang "
            f"and --target_lang."
        )
    source, target = (fields[language].strip() for language in languages)
    return source, target


def clean(rows: Iterable[tuple], place: str, bad_lines: str) -> ParallelText:
    """Pairs of rows, less those with a blank side or bytes that are not UTF-8; "refuse" raises ValueError instead."""
    text = ParallelText([], [])
    references, bad = [], {"not UTF-8": array("q"), "blank": array("q")}
    for number, row in enumerate(rows, start=1):
        if None in row:
            bad["not UTF-8"].append(number)
        elif not row[0] or not row[1]:
            bad["blank"].append(number)
        else:
            text.sources.append(row[0])
            text.targets.append(row[1])
            text.numbers.append(number)
            references.append([cell for cell in row[1:] if cell])
    if any(len(row) > 1 for row in references):
        text.references = references
    for reason, numbers in bad.items():
        if numbers:
            told = f"{place}: {len(numbers)} lines {reason}, at {_some(numbers)}"
            if bad_lines == "refuse":
                raise ValueError(f"{told}. Correct the file, or leave such pairs out with --bad_lines drop.")
            print(f"{told}: left out")
            text.dropped[reason] += len(numbers)
    return text


def _some(numbers: Iterable[int]) -> str:
    """The first few of many line numbers, as words."""
    numbers = list(numbers)
    more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return f"line{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:SHOWN]))}{more}"


# --- Datasets --------------------------------------------------------------------------------------------------------


def _use_dataset(arguments: DataArguments) -> bool:
    """Whether the recipe's dataset is asked for: it has one, and nobody gave a folder (a slip in its name would train
    on other data)."""
    if arguments.dataset_name is None or arguments.data_dir != DataArguments.data_dir:
        return False
    folder, name = Path(arguments.data_dir), arguments.train_file
    return not (folder / name).exists() and not (folder / f"{name}.{arguments.source_lang}").exists()


def _load(arguments: DataArguments, **kwargs: Any) -> Any:
    name = str(arguments.dataset_name)
    try:
        if Path(name, "dataset_dict.json").exists():
            return load_from_disk(name)
        return load_dataset(name, arguments.dataset_config, **kwargs)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the dataset {name} could not be loaded ({error}): give the folder of your files with --data_dir, or "
            f"connect to the network."
        ) from error


def _read_dataset(arguments: DataArguments) -> dict[str, ParallelText]:
    print(f"no files in {arguments.data_dir}: loading the dataset {arguments.dataset_name}")
    splits = _load(arguments)
    if not isinstance(splits, DatasetDict) or "train" not in splits:
        raise ValueError(f"the dataset {arguments.dataset_name} has no split named 'train'.")
    languages = (arguments.source_lang, arguments.target_lang)
    wanted = ("validation", "test") if arguments.streaming else ("train", "validation", "test")
    corpus = {}
    for split in wanted:
        if split in splits:
            place = f"{arguments.dataset_name}, {split}"
            rows = (pair_of_row(row, languages, f"{place}, row {i}") for i, row in enumerate(splits[split], start=1))
            corpus[split] = clean(rows, place, arguments.bad_lines)
    return corpus


def stream_pairs(arguments: DataArguments) -> IterableDataset:
    """The training set with columns `source` and `target`, read as it is needed; it tells and takes its state.

    Pairs with a blank side or bytes that are not UTF-8 are left out where `bad_lines` says so, else refused.
    """
    languages = (arguments.source_lang, arguments.target_lang)
    if _use_dataset(arguments):
        streamed = _load(arguments, split="train", streaming=True)
        place = str(arguments.dataset_name)
        return streamed.map(
            lambda row: dict(zip(("source", "target"), pair_of_row(row, languages, place), strict=True)),
            remove_columns=streamed.column_names,
        )
    path = Path(arguments.data_dir) / arguments.train_file
    paths = [path] if path.suffix in TABLES else [path.with_name(f"{path.name}.{lang}") for lang in languages]
    for each in paths:
        if not each.exists():
            raise ValueError(f"cannot read {each}: no such file. Give the folder with --data_dir.")
    return IterableDataset.from_generator(
        _rows, gen_kwargs={"paths": tuple(map(str, paths)), "languages": languages, "bad_lines": arguments.bad_lines}
    )


def _rows(paths: tuple[str, ...], languages: tuple[str, str], bad_lines: str) -> Iterator[dict[str, str]]:
    if len(paths) == 1:
        rows = read_table(Path(paths[0]), languages)
    else:
        source, target = map(Path, paths)
        rows = _same_length(zip_longest(read_lines(source), read_lines(target), fillvalue=_END), source, target)
    for number, row in enumerate(rows, start=1):
        if None not in row and row[0] and row[1]:
            yield {"source": row[0], "target": row[1]}
        elif bad_lines == "refuse":
            reason = "not UTF-8" if None in row else "blank"
            raise ValueError(
                f"{', '.join(paths)}, line {number}: {reason}. Correct the file, or leave such pairs out with "
                f"--bad_lines drop."
            )


# --- Splits ----------------------------------------------------------------------------------------------------------


def _split_off_validation(corpus: dict[str, ParallelText], size: int) -> dict[str, ParallelText]:
    """Takes `size` pairs out of the training set, the same ones in every run."""
    train = corpus["train"]
    if size >= len(train):
        raise ValueError(f"validation_size={size}, but there are only {len(train)} training pairs: give less.")
    order = list(range(len(train)))
    random.Random("validation").shuffle(order)
    parts = {"train": train.select(sorted(order[size:])), "validation": train.select(sorted(order[:size]))}
    return parts | {name: text for name, text in corpus.items() if name != "train"}


def _without_overlap(corpus: dict[str, ParallelText], overlap: str) -> dict[str, ParallelText]:
    """Tells which training pairs have a source of the validation or test set, and drops or refuses them."""
    train = corpus["train"]
    leaks: set[int] = set()
    for split, text in corpus.items():
        if split == "train":
            continue
        held_out = set(text.sources)
        same = [i for i, source in enumerate(train.sources) if source in held_out]
        if same:
            lines = _some(train.numbers[i] for i in same)
            told = f"{len(same)} training pairs have a source of the {split} set, at {lines}"
            if overlap == "refuse":
                raise ValueError(f"{told}. Remove them, or choose --overlap drop or keep.")
            print(f"{told}: {'left out' if overlap == 'drop' else 'kept'}")
            leaks.update(same)
    if overlap != "drop" or not leaks:
        return corpus
    train.dropped["source held out"] += len(leaks)
    if len(leaks) == len(train):
        raise ValueError("every training pair has a source of the validation or test set: nothing is left to train on.")
    return corpus | {"train": train.select(i for i in range(len(train)) if i not in leaks)}


# --- Made-up corpora -------------------------------------------------------------------------------------------------


def _from_pairs(pairs: Iterable[tuple[str, str]]) -> ParallelText:
    sources, targets = map(list, zip(*pairs, strict=True))
    return ParallelText(sources, targets)


def random_pairs(seed: int = 42) -> list[tuple[str, str]]:
    """64 pairs of random numbers below 4,996 that have nothing to do with each other: what can only be memorized.

    With the four special tokens the vocabulary is 5,000, and a sequence has 100 tokens with its begin and end.
    """
    rng = random.Random(seed)

    def line(length: int) -> str:
        return " ".join(str(rng.randrange(RANDOM_WORDS)) for _ in range(length))

    return [(line(RANDOM_LENGTH + 1), line(RANDOM_LENGTH)) for _ in range(RANDOM_PAIRS)]
