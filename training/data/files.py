"""Parallel text in files: two text files, or a table (.tsv, .csv, .jsonl, .parquet, .tmx) with source and target."""

import csv
import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from glob import escape
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO
from xml.etree import ElementTree

import pyarrow as pa
from pyarrow.parquet import ParquetFile

from vanilla_transformer.shared.command_line import logger
from vanilla_transformer.shared.text_lines import validate_not_utf_16

from ..recipe.arguments import DataArguments
from .analysis.languages import SIDES, find_columns, language_code
from .parallel_text import ParallelText, collect_valid_pairs, format_line_numbers, pair_of_row

SEVERAL_TARGETS = "has more than two columns: only validation and test files can have several targets per line."
TABLE_SUFFIXES = (".tsv", ".csv", ".jsonl", ".json", ".parquet", ".tmx")  # otherwise: two text files
MAX_ROW_LINES = 20  # lines of the first row of a .csv file, if its cells contain line breaks
NOT_UTF_8 = re.compile("[\udc80-\udcff]")  # bytes that were decoded with the error handler "surrogateescape"
XML_LANG = "{http://www.w3.org/XML/1998/namespace}lang"


def read_file(arguments: DataArguments, name: str) -> ParallelText:
    """Read the table `<data_dir>/<name>`, or two text files `<data_dir>/<name>.<language>`."""
    path = Path(arguments.data_dir) / name
    languages = (arguments.source_lang, arguments.target_lang)
    if path.suffix in TABLE_SUFFIXES:
        return read_table_pairs(path, languages, arguments.on_bad_lines)
    return read_pair(*find_text_files(path, languages), arguments.on_bad_lines)


def read_table_pairs(path: Path, languages: tuple[str, str], on_bad_lines: str | None) -> ParallelText:
    """Read the pairs of a table. If it has no header, log the first pair."""
    text = collect_valid_pairs(read_table(path, languages), str(path), on_bad_lines)
    if path.suffix in (".tsv", ".csv") and text.first_line == 1 and len(text):
        logger.info(
            f"{path} has no header: column 1 is the source ({languages[0]}), column 2 the target ({languages[1]}). "
            f"First pair: {text.sources[0][:80]} -> {text.targets[0][:80]}"
        )
    return text


def find_text_files(path: Path, languages: tuple[str, str]) -> tuple[Path, Path]:
    """Return the files `<path>.<language>`. Raises ValueError with the existing endings if one is missing."""
    source, target = (path.with_name(f"{path.name}.{language}") for language in languages)
    endings = [each.name.removeprefix(f"{path.name}.") for each in sorted(path.parent.glob(f"{escape(path.name)}.*"))]
    for option, language in zip(("--source-lang", "--target-lang"), languages, strict=True):
        others = [ending for ending in endings if ending not in languages]
        if language not in endings and others:
            found = ", ".join(f"{path.name}.{ending}" for ending in endings)
            remedy = " or ".join(f"{option} {ending}" for ending in others)
            raise ValueError(f"cannot read {path}.{language}: no such file. Found: {found}. Use {remedy}.")
    return source, target


def add_references(text: ParallelText, path: Path, languages: tuple[str, str]) -> None:
    """Set the references of `text` from a .tsv file: line i has the source and the references of line i of the data.

    The sources must be equal, except for white space.
    """
    if path.suffix != ".tsv":
        raise ValueError(f"test_references={path.name} must be a .tsv file.")
    rows = list(read_table(path, languages))
    rows = rows[max((i + 1 for i, row in enumerate(rows) if not row), default=0) :]  # after the header
    expected = len(text) + sum(text.dropped.values())
    if len(rows) != expected:
        raise ValueError(f"{path} has {len(rows)} lines, but the test data have {expected}: the numbers must be equal.")
    rows = [rows[number - text.first_line] for number in text.line_numbers]
    different = [
        number
        for number, row, source in zip(text.line_numbers, rows, text.sources, strict=True)
        if "".join((row[0] or "").split()) != "".join(source.split())
    ]
    if different:
        lines = format_line_numbers(different)
        raise ValueError(f"{path}: the source differs from that of {lines} of the test data. Use their references.")
    text.references = [[cell for cell in row[1:] if cell] for row in rows]
    if missing := [number for number, row in zip(text.line_numbers, text.references, strict=True) if not row]:
        raise ValueError(
            f"{path} has no reference for {format_line_numbers(missing)} of the test data. Add one, or remove the pair."
        )


def read_pair(source_path: Path, target_path: Path, on_bad_lines: str = "error") -> ParallelText:
    """Read two text files with one sentence per line. Line i of one translates line i of the other."""
    return collect_valid_pairs(read_rows(source_path, target_path), f"{source_path}, {target_path}", on_bad_lines)


def read_rows(path: Path, *others: Path) -> Iterator[tuple]:
    """Yield rows with a line of each text file. Raises ValueError if their numbers of lines differ."""
    for other in others:
        validate_line_counts(path, other)
    yield from zip(*map(iter_stripped_lines, (path, *others)), strict=True)


def validate_line_counts(source_path: Path, target_path: Path) -> None:
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
    """Context manager that opens a file for reading. Raises ValueError if it cannot be read or is in UTF-16."""
    try:
        with path.open("rb") as file:
            if path.suffix != ".tmx":  # XML names its encoding
                validate_not_utf_16(file.peek(2), str(path))
            yield file
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}. Check --data-dir.") from error


def iter_stripped_lines(path: Path) -> Iterator[str | None]:
    """Yield lines without surrounding white space, None for lines that are not UTF-8. Only a newline ends a line."""
    with open_file(path) as file:
        for number, line in enumerate(file):
            try:
                yield line.decode("utf-8-sig" if number == 0 else "utf-8").strip()
            except UnicodeDecodeError:
                yield None


def read_table(path: Path, languages: tuple[str, str]) -> Iterator[tuple]:
    """Yield rows (source, target, additional references ...) of a table, and an empty row for a header.

    The header of a .tsv or .csv file names the columns of the source and of one or more targets. Without a header, the
    first column is the source. The other formats have one field per language, or one field "translation" that contains
    both. Blank rows are yielded as ("", ""), and rows that are not UTF-8 as (None, None).
    """
    if path.suffix in (".tsv", ".csv"):
        yield from _iter_selected_columns(path, languages)
        return
    unit = {".parquet": "row", ".tmx": "unit"}.get(path.suffix, "line")
    has_pairs = path.suffix != ".tmx"
    for number, record in enumerate(iter_records(path), start=1):
        if isinstance(record, bytes):
            yield (None, None) if record.strip() else ("", "")
        elif path.suffix == ".tmx" and find_columns(list(record), languages) is None:  # a language is missing
            yield ("", "")
        else:
            has_pairs = True
            yield pair_of_row(record, languages, f"{path}, {unit} {number}")
    if not has_pairs:
        found = sorted({language for record in islice(iter_records(path), 100) for language in record})
        raise ValueError(
            f"{path}: no unit has both {' and '.join(languages)} (found: {', '.join(found) or 'nothing'}). Set "
            f"--source-lang and --target-lang."
        )


def _iter_selected_columns(path: Path, languages: tuple[str, str]) -> Iterator[tuple]:
    columns, width, is_first, num_blank = None, 2, True, 0
    for number, cells in enumerate(iter_cells(path), start=1):
        if not any(cells):
            if is_first:
                num_blank += 1
            else:
                yield ("", "")
            continue
        may_be_header, is_first = is_first, False
        if may_be_header:
            columns = find_header(cells, languages, path)
            yield from [() if columns else ("", "")] * num_blank  # blank lines before a header belong to it
        if may_be_header and columns:
            width = len(cells)
            yield ()
        elif any(map(NOT_UTF_8.search, cells)):
            yield (None, None)
        elif len(cells) < width or (columns and any(cells[width:])):
            separator = "tab" if path.suffix == ".tsv" else "comma"
            problem = f"{len(cells)} columns, but the header has {width}" if columns else f"no {separator}"
            raise ValueError(f"{path}, line {number}: {problem}. Expected a source, a {separator} and a target.")
        else:
            yield (cells[columns[0]], *(cells[i] for i in columns[1])) if columns else tuple(cells)


def find_header(cells: list[str], languages: tuple[str, str], path: Path) -> tuple[int, list[int]] | None:
    """Return the columns of source and targets if the first row of a table is a header.

    Raises ValueError if it names languages, but not both of `languages`.
    """
    columns = find_columns(cells, languages)
    codes = [language_code(cell) for cell in cells]
    if columns is None and languages == SIDES and len({*codes} - {None, *SIDES}) > 1:
        raise ValueError(
            f"{path}, line 1: the header {', '.join(cells)} names languages, but those of the source and the target "
            f"are unknown. Rename the columns to source and target. Training also has --source-lang and --target-lang."
        )
    if columns is None and len(cells) > 1 and None not in codes and {*map(language_code, languages)} & {*codes}:
        raise ValueError(
            f"{path}, line 1: the columns {', '.join(cells)} do not include {' and '.join(languages)}. Rename them, or "
            f"in training, set --source-lang and --target-lang to two of them."
        )
    return columns


def iter_cells(path: Path) -> Iterator[list[str]]:
    """Yield the cells of each row of a .tsv or .csv file. Bytes that are not UTF-8 become surrogates.

    A .tsv file has no quotes. In a .csv file, the separator is a comma, a semicolon or a tab. It is the one between the
    languages of the header. Without a header, it is the one that divides the first row into two cells.
    """
    with open_file(path) as file:
        lines = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="\n")
        if path.suffix == ".tsv":
            for line in lines:
                yield [cell.strip() for cell in line.split("\t")]
            return
        first = list(islice(lines, MAX_ROW_LINES)) or [""]
        header = next(filter(str.strip, first), "")
        headers = {each: [cell.strip(' "\r\n') for cell in header.split(each)] for each in ",;\t"}
        known = [separator for separator, cells in headers.items() if len(set(map(language_code, cells)) - {None}) > 1]
        separator = known[0] if known else max(",;\t", key=partial(rate_separator, first))
        rows = csv.reader(chain(first, lines), delimiter=separator, strict=True, skipinitialspace=True)
        try:
            for row in rows:
                yield [cell.strip() for cell in row]
        except csv.Error as error:
            raise ValueError(
                f"{path}, line {rows.line_num}: not valid CSV ({error}). A text with commas must be in quotes, and a "
                f"quote inside of it must be doubled."
            ) from None


def rate_separator(lines: list[str], separator: str) -> tuple[bool, int]:
    """Return whether a separator divides the first row into two cells, and minus the number of quotes in the cells."""
    rows = csv.reader(lines, delimiter=separator, strict=True, skipinitialspace=True)
    cells: list[str] = []
    with suppress(csv.Error):
        cells = next(filter(None, rows), cells)
    return (True, -sum(cell.count('"') for cell in cells)) if len(cells) == 2 else (False, 0)


def iter_records(path: Path) -> Iterator[Any]:
    """Yield the rows of a .jsonl, .json, .parquet or .tmx file, as dictionaries from column to text.

    Lines of JSON files that are blank or not UTF-8 are yielded as bytes.
    """
    return {".parquet": _iter_parquet, ".tmx": _iter_tmx}.get(path.suffix, _iter_json)(path)


def _iter_json(path: Path) -> Iterator[Any]:
    with open_file(path) as file:
        is_array = path.suffix == ".json" and file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["
        file.seek(0)
        for number, line in enumerate([file.read()] if is_array else file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                value = json.loads(text) if text.strip() else line
            except UnicodeDecodeError:
                yield line
                continue
            except (ValueError, RecursionError) as error:  # RecursionError: deep nesting
                raise ValueError(f"{path}, line {number}: expected a JSON object ({error}).") from None
            yield from value if is_array else [value]


def _iter_tmx(path: Path) -> Iterator[dict[str, str]]:
    """Yield the texts of each translation unit by language, without the codes of inline elements."""
    with open_file(path) as file:
        try:
            for _, unit in ElementTree.iterparse(file):
                unit.tag = unit.tag.rpartition("}")[2]  # without the namespace
                if unit.tag == "tu":
                    texts = {}
                    for variant in unit.iter("tuv"):
                        language = variant.get(XML_LANG) or variant.get("lang") or ""
                        for tag in ("bpt", "ept", "it", "ph", "ut"):
                            for code in list(variant.iter(tag)):  # the text after it belongs to the sentence
                                code.text = None
                                code[:] = []
                        texts[language] = "".join("".join(seg.itertext()) for seg in variant.iter("seg"))
                    yield texts
                    unit.clear()
        except (ElementTree.ParseError, LookupError, ValueError) as error:  # the last two: unsupported encodings
            raise ValueError(f"{path} is not valid TMX: {error}. Correct it, or convert it to UTF-8.") from error


def _iter_parquet(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        raise ValueError(f"cannot read {path}: no such file. Check --data-dir.")
    try:
        with ParquetFile(path) as file:
            # Python cannot represent all dates and times
            names = [field.name for field in file.schema_arrow if not pa.types.is_temporal(field.type)]
            for batch in file.iter_batches(columns=names):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a parquet file, or is damaged: {error}") from error
