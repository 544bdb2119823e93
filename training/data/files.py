"""Parallel text in files: two text files, or a table (.tsv, .jsonl, .parquet) with both sides; line by line."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
from pyarrow.parquet import ParquetFile

from training.arguments import DataArguments
from training.data.parallel_text import ParallelText, collect_valid_pairs, pair_of_row, some_lines

SEVERAL_TARGETS = (
    "has more than two columns: a training file has one target per line, only validation and test files several."
)
TABLE_SUFFIXES = (".tsv", ".jsonl", ".json", ".parquet")  # files with both sides; any other name means two text files


def read_file(arguments: DataArguments, name: str) -> ParallelText:
    """`<data_dir>/<name>` if that is a .tsv, .jsonl or .parquet file, else the two `<data_dir>/<name>.<language>`."""
    path = Path(arguments.data_dir) / name
    languages = (arguments.source_lang, arguments.target_lang)
    if path.suffix in TABLE_SUFFIXES:
        return collect_valid_pairs(read_table(path, languages), str(path), arguments.on_bad_lines)
    source, target = (path.with_name(f"{path.name}.{language}") for language in languages)
    return read_pair(source, target, arguments.on_bad_lines)


def add_references(text: ParallelText, path: Path) -> None:
    """Gives line i of the file that `text` was read from the targets in line i of a table, behind its first column."""
    if path.suffix != ".tsv":
        raise ValueError(f"test_references={path.name}: give a .tsv file.")
    rows, lines = list(read_table(path, ("", ""))), len(text) + sum(text.dropped.values())
    if len(rows) != lines:
        raise ValueError(f"{path} has {len(rows)} lines, and the test data {lines}: line i of one belongs to line i.")
    text.references = [[cell for cell in rows[number - 1][1:] if cell] for number in text.line_numbers]
    if without := [number for number, found in zip(text.line_numbers, text.references, strict=True) if not found]:
        raise ValueError(f"{path} has no translation at {some_lines(without)}: add one, or remove the test pair.")


def read_pair(source_path: Path, target_path: Path, on_bad_lines: str = "error") -> ParallelText:
    """Two text files with a sentence a line; line i of one translates line i of the other."""
    return collect_valid_pairs(read_rows(source_path, target_path), f"{source_path}, {target_path}", on_bad_lines)


def read_rows(source_path: Path, target_path: Path) -> Iterator[tuple]:
    """Rows (source, target) of two text files. Raises ValueError, before the first row, if one has more lines."""
    validate_line_counts(source_path, target_path)
    yield from zip(iter_stripped_lines(source_path), iter_stripped_lines(target_path), strict=True)


def validate_line_counts(source_path: Path, target_path: Path) -> None:
    """Raise ValueError if one of two text files has more lines."""
    lines = []
    for path in (source_path, target_path):
        with open_file(path) as file:
            lines.append((sum(1 for _ in file), path))
    (fewer, short), (more, long) = sorted(lines)
    if fewer != more:
        raise ValueError(
            f"{short} has {fewer} lines and {long} has {more}: line i of one must translate line i of the other."
        )


@contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Context manager: a file of text, open for reading. Raises ValueError if it cannot be read."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}. Give the folder with --data_dir.") from error


def iter_stripped_lines(path: Path) -> Iterator[str | None]:
    """Lines without surrounding space; None for one that is not UTF-8. Only "\\n" ends a line: other separators of
    Unicode stay inside."""
    for line in _decode_lines(path):
        yield line and line.strip()


def _decode_lines(path: Path) -> Iterator[str | None]:
    with open_file(path) as file:
        for number, line in enumerate(file):
            try:
                yield line.decode("utf-8-sig" if number == 0 else "utf-8")
            except UnicodeDecodeError:
                yield None


def read_table(path: Path, languages: tuple[str, str]) -> Iterator[tuple]:
    """Rows (source, target, further accepted targets ...) of a .tsv, .jsonl or .parquet file.

    A .tsv has a column for the source, one for the target, and where it is no training file any number of further
    references. The others have a field for each language, or one "translation" that holds both.
    """
    if path.suffix == ".parquet":
        yield from (pair_of_row(row, languages, f"{path}, row {i}") for i, row in enumerate(_parquet(path), start=1))
        return
    for number, line in enumerate(_decode_lines(path), start=1):
        if line is None:
            yield (None, None)
        elif not line.strip():
            yield ("", "")
        elif path.suffix == ".tsv":
            cells = line.split("\t")
            if len(cells) < 2:
                raise ValueError(f"{path}, line {number}: no tab, where a source, a tab and a target should stand.")
            yield tuple(cell.strip() for cell in cells)
        else:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # too many brackets
                raise ValueError(f"{path}, line {number}: not a JSON object ({error}): one a line, please.") from None
            yield pair_of_row(row, languages, f"{path}, line {number}")


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        raise ValueError(f"cannot read {path}: no such file. Give the folder with --data_dir.")
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a parquet file, or a damaged one: {error}") from error
