"""Sentence pairs in memory, and validation of rows of files and datasets."""

import hashlib
import re
import reprlib
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vanilla_transformer.shared.command_line import logger

from .analysis.languages import find_columns

MAX_LISTED_LINES = 3  # line numbers in a message
MAX_SENTENCE_CHARS = 20_000  # longer sentences take minutes to tokenize and terabytes for attention
INVALID_CHARACTERS = re.compile("[\0\ud800-\udfff]")  # NUL, as in UTF-16 read as UTF-8; surrogates, as in JSON


@dataclass
class ParallelText:
    """Sentence pairs of one split: `targets[i]` is the translation of `sources[i]`."""

    sources: list[str]
    targets: list[str]
    line_numbers: array = field(default_factory=lambda: array("q"))  # 1-based, in its file; by default 1, 2, ...
    references: list[list[str]] | None = None  # all accepted targets of each pair, if a file has several
    dropped: Counter = field(default_factory=Counter)  # number of dropped pairs by reason
    origin: dict[str, Any] = field(default_factory=dict)  # provenance of the split
    first_line: int = 1  # 1-based line of the first row in its file: 2 after a header

    def __post_init__(self):
        if not self.line_numbers:
            self.line_numbers = array("q", range(1, len(self.sources) + 1))

    def __len__(self) -> int:
        return len(self.sources)

    def select(self, indices: Iterable[int]) -> "ParallelText":
        """Return the pairs at `indices`, in that order."""
        indices = list(indices)
        references = self.references and [self.references[i] for i in indices]
        sources, targets = ([side[i] for i in indices] for side in (self.sources, self.targets))
        line_numbers = array("q", [self.line_numbers[i] for i in indices])
        return ParallelText(sources, targets, line_numbers, references, self.dropped, self.origin)

    def sha256(self) -> str:
        """Return the SHA-256 of the text. Runs of earlier versions contain it, so it must not change."""
        digest = hashlib.sha256()
        for source, target in zip(self.sources, self.targets, strict=True):
            digest.update(f"{source}\t{target}\n".encode())
            if re.search("[\t\n]", source + target):  # ambiguous without the lengths
                digest.update(f"\0{len(source)}\0{len(target)}\n".encode())
        return digest.hexdigest()


def pair_of_row(row: Any, languages: tuple[str, str], name: str) -> tuple[str, str]:
    """Return source and target of a row {"en": ..., "de": ...} or {"translation": {"en": ..., "de": ...}}.

    The columns can also have other names of the languages, or names such as source and target, see `find_columns`.
    """
    fields = row
    if isinstance(row, dict) and "translation" in row and "translation" not in languages:
        has_columns = {*languages} <= row.keys() or find_columns([*map(str, row)], languages)
        is_nested = isinstance(row["translation"], dict) or not has_columns
        fields = row["translation"] if is_nested else row  # else a further column, such as a machine translation
    if fields is None:  # null counts as blank, as in a single field
        return "", ""
    if not isinstance(fields, dict):
        raise ValueError(f"{name}: expected a text for each of {languages}, got {reprlib.repr(fields)}.")
    if not fields.keys() >= set(languages) and (columns := find_columns([*map(str, fields)], languages)):
        languages = (list(fields)[columns[0]], list(fields)[columns[1][0]])
    for language in languages:
        if language not in fields:
            found = ", ".join(map(str, fields))[:200] or "nothing"
            remedy = "Set --source-lang and --target-lang to the names of the columns."
            raise ValueError(f"{name}: no column {language!r} (found: {found}). {remedy}")
        if not isinstance(fields[language], str | None):
            raise ValueError(f"{name}: {language!r} must be a text, got {reprlib.repr(fields[language])}.")
    source, target = ((fields[language] or "").strip() for language in languages)
    return source, target


def invalid_pair_reason(row: tuple) -> str | None:
    """Return why a row of texts is invalid, or None. In a row, None means text that is not UTF-8."""
    if None in row:
        return "not UTF-8"
    if any(map(INVALID_CHARACTERS.search, row)):
        return "with NUL or surrogate characters (as in UTF-16)"
    if not all(row[:2]):
        return "blank"
    return f"of more than {MAX_SENTENCE_CHARS:,} characters" if max(map(len, row)) > MAX_SENTENCE_CHARS else None


def collect_valid_pairs(rows: Iterable[tuple], name: str, on_bad_lines: str | None) -> ParallelText:
    """Return the valid pairs of rows. Raises ValueError for invalid ones unless `on_bad_lines` is "drop"."""
    text = ParallelText([], [])
    references: list[list[str]] = []
    invalid: dict[str, array] = {}
    for number, row in enumerate(rows, start=1):
        if not row:  # a header, or a blank line before it
            text.first_line = number + 1
        elif reason := invalid_pair_reason(row):
            invalid.setdefault(reason, array("q")).append(number)
        else:
            text.sources.append(row[0])
            text.targets.append(row[1])
            text.line_numbers.append(number)
            references.append([cell for cell in row[1:] if cell])
    if any(len(row) > 1 for row in references):
        text.references = references
    for reason, line_numbers in invalid.items():
        message = f"{name}: {len(line_numbers)} lines {reason}, at {format_line_numbers(line_numbers)}"
        if on_bad_lines != "drop":
            is_utf_8 = reason != "not UTF-8"
            remedy = "Correct the file" if is_utf_8 else "Convert the file from its encoding, probably Latin-1"
            remedy += ", or drop such pairs with --on-bad-lines drop" if on_bad_lines else ""
            raise ValueError(f"{message}. {remedy}.")
        logger.info(f"{message}: dropped")
        text.dropped[reason] += len(line_numbers)
    return text


def format_line_numbers(line_numbers: Iterable[int]) -> str:
    line_numbers = list(line_numbers)
    more = f" and {len(line_numbers) - MAX_LISTED_LINES} more" if len(line_numbers) > MAX_LISTED_LINES else ""
    return f"line{'s' * (len(line_numbers) > 1)} {', '.join(map(str, line_numbers[:MAX_LISTED_LINES]))}{more}"
