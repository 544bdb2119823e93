"""Parallel text in files: two text files, or a table (.tsv, .jsonl, .parquet) with source and target."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
from pyarrow.parquet import ParquetFile

from ..recipe.arguments import DataArguments
from .parallel_text import ParallelText, collect_valid_pairs, format_line_numbers, pair_of_row

SEVERAL_TARGETS = "has more than two columns: only validation and test files can have several targets per line."
TABLE_SUFFIXES = (".tsv", ".jsonl", ".json", ".parquet")  # otherwise: two text files


def read_file(arguments: DataArguments, name: str) -> ParallelText:
    """Read `<data_dir>/<name>` if it is a .tsv, .jsonl or .parquet file, else two files `<data_dir>/<name>.<lang>`."""
    path = Path(arguments.data_dir) / name
    languages = (arguments.source_lang, arguments.target_lang)
    if path.suffix in TABLE_SUFFIXES:
        return collect_valid_pairs(read_table(path, languages), str(path), arguments.on_bad_lines)
    source, target = (path.with_name(f"{path.name}.{language}") for language in languages)
    return read_pair(source, target, arguments.on_bad_lines)


def add_references(text: ParallelText, path: Path) -> None:
    """Set the references of `text` from a .tsv file: line i has the source and the references of line i of the data."""
    if path.suffix != ".tsv":
        raise ValueError(f"test_references={path.name} must be a .tsv file.")
    rows, lines = list(read_table(path, ("", ""))), len(text) + sum(text.dropped.values())
    if len(rows) != lines:
        raise ValueError(f"{path} has {len(rows)} lines, but the test data have {lines}: the numbers must be equal.")
    text.references = [[cell for cell in rows[number - 1][1:] if cell] for number in text.line_numbers]
    if missing := [number for number, row in zip(text.line_numbers, text.references, strict=True) if not row]:
        raise ValueError(
            f"{path} has no reference at {format_line_numbers(missing)}. Add one, or remove the test pair."
        )


def read_pair(source_path: Path, target_path: Path, on_bad_lines: str = "error") -> ParallelText:
    """Read two text files with one sentence per line. Line i of one translates line i of the other."""
    return collect_valid_pairs(read_rows(source_path, target_path), f"{source_path}, {target_path}", on_bad_lines)


def read_rows(source_path: Path, target_path: Path) -> Iterator[tuple]:
    """Yield rows (source, target) of two text files. Raises ValueError if their numbers of lines differ."""
    validate_line_counts(source_path, target_path)
    yield from zip(iter_stripped_lines(source_path), iter_stripped_lines(target_path), strict=True)


def validate_line_counts(source_path: Path, target_path: Path) -> None:
    """Raise ValueError if two text files have different numbers of lines."""
    counts = []
    for path in (source_path, target_path):
        with open_file(path) as file:
            counts.append((sum(1 for _ in file), path))
    (fewer, short), (more, long) = sorted(counts)
    if fewer != more:
        raise ValueError(
            f"{short} has {fewer} lines and {long} has {more}: line i of one must translate line i of the other."
        )


@contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Context manager that opens a file for reading. Raises ValueError if it cannot be read."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}. Check --data-dir.") from error


def iter_stripped_lines(path: Path) -> Iterator[str | None]:
    """Yield lines without surrounding white space, None for lines that are not UTF-8. Only a newline ends a line."""
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
    """Yield rows (source, target, additional references ...) of a .tsv, .jsonl or .parquet file.

    A .tsv file has one column for the source and one or more for the targets. The other formats have one field per
    language, or one field "translation" that contains both.
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
                raise ValueError(f"{path}, line {number}: no tab. Expected a source, a tab and a target.")
            row = tuple(cell.strip() for cell in cells)
            if number == 1 and set(row) == set(languages):
                raise ValueError(f"{path}, line 1: a .tsv file has no header. Its first column must be the source.")
            yield row
        else:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # RecursionError: deep nesting
                raise ValueError(f"{path}, line {number}: expected a JSON object ({error}).") from None
            yield pair_of_row(row, languages, f"{path}, line {number}")


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        raise ValueError(f"cannot read {path}: no such file. Check --data-dir.")
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a parquet file, or is damaged: {error}") from error
