"""Sentence pairs in memory, and the check that rows of a file or a dataset are such."""

import hashlib
import re
import reprlib
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

MAX_LISTED_LINES = 3  # line numbers in a message
MAX_SENTENCE_CHARS = 20_000  # characters of a sentence: more take a tokenizer minutes and attention terabytes
INVALID_CHARACTERS = re.compile(
    "[\0\ud800-\udfff]"
)  # NUL, which UTF-16 read as UTF-8 is full of; halves of characters in JSON


@dataclass
class ParallelText:
    """Sentence pairs of one split: `sources[i]` and `targets[i]` belong together.

    `numbers[i]` is the pair's line in its file, from 1 (without: i + 1), `references[i]` every accepted target where a
    file has several, `dropped` counts what was left out, by reason, and `origin` tells what was read.
    """

    sources: list[str]
    targets: list[str]
    line_numbers: array = field(default_factory=lambda: array("q"))
    references: list[list[str]] | None = None
    dropped: Counter = field(default_factory=Counter)
    origin: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if not self.line_numbers:
            self.line_numbers = array("q", range(1, len(self.sources) + 1))

    def __len__(self) -> int:
        return len(self.sources)

    def select(self, indices: Iterable[int]) -> "ParallelText":
        """The pairs at `indices`, in that order, with their line numbers."""
        indices = list(indices)
        references = self.references and [self.references[i] for i in indices]
        sources, targets = ([side[i] for i in indices] for side in (self.sources, self.targets))
        line_numbers = array("q", [self.line_numbers[i] for i in indices])
        return ParallelText(sources, targets, line_numbers, references, self.dropped, self.origin)

    def sha256(self) -> str:
        """SHA-256 of the text, for the record of a run. Runs of earlier versions hold it, so it must not change."""
        digest = hashlib.sha256()
        for source, target in zip(self.sources, self.targets, strict=True):
            digest.update(f"{source}\t{target}\n".encode())
            if re.search("[\t\n]", source + target):  # only then the line above does not tell where a side ends
                digest.update(f"\0{len(source)}\0{len(target)}\n".encode())
        return digest.hexdigest()


def pair_of_row(row: Any, languages: tuple[str, str], place: str) -> tuple[str, str]:
    """Source and target of a row {"en": ..., "de": ...} or {"translation": {"en": ..., "de": ...}}."""
    fields = row.get("translation", row) if isinstance(row, dict) else row
    if not isinstance(fields, dict):
        raise ValueError(f"{place}: {reprlib.repr(fields)}, where a text for each of {languages} should stand.")
    for language in languages:
        if language not in fields:
            found = ", ".join(map(str, fields))[:200] or "nothing"
            raise ValueError(
                f"{place}: no text named {language!r} (there is: {found}): give the columns' names with --source_lang "
                f"and --target_lang."
            )
        if not isinstance(fields[language], str | None):
            raise ValueError(f"{place}: {language!r} is {reprlib.repr(fields[language])}, where a text should stand.")
    source, target = ((fields[language] or "").strip() for language in languages)  # null is as good as blank
    return source, target


def invalid_pair_reason(row: tuple) -> str | None:
    """Why a row (source, target, further targets ...), or (source) alone, is of no use, where None is a cell that is
    not UTF-8; None: it is of use."""
    if None in row:
        return "not UTF-8"
    if any(map(INVALID_CHARACTERS.search, row)):
        return "with NUL or half characters, as in UTF-16,"
    if not all(row[:2]):
        return "blank"
    return f"of more than {MAX_SENTENCE_CHARS:,} characters" if max(map(len, row)) > MAX_SENTENCE_CHARS else None


def collect_valid_pairs(rows: Iterable[tuple], place: str, on_bad_lines: str | None) -> ParallelText:
    """Return the valid pairs of rows. Raises ValueError for invalid ones unless `on_bad_lines` is "drop".

    Args:
        on_bad_lines: value of the option --on_bad_lines; None if the program has no such option.
    """
    text = ParallelText([], [])
    references: list[list[str]] = []
    bad: dict[str, array] = {}
    for number, row in enumerate(rows, start=1):
        if reason := invalid_pair_reason(row):
            bad.setdefault(reason, array("q")).append(number)
        else:
            text.sources.append(row[0])
            text.targets.append(row[1])
            text.line_numbers.append(number)
            references.append([cell for cell in row[1:] if cell])
    if any(len(row) > 1 for row in references):
        text.references = references
    for reason, line_numbers in bad.items():
        if line_numbers:
            told = f"{place}: {len(line_numbers)} lines {reason}, at {some_lines(line_numbers)}"
            if on_bad_lines != "drop":
                remedy = "Correct the file" + (
                    ", or leave such pairs out with --on_bad_lines drop." if on_bad_lines else "."
                )
                raise ValueError(f"{told}. {remedy}")
            print(f"{told}: left out")
            text.dropped[reason] += len(line_numbers)
    return text


def some_lines(line_numbers: Iterable[int]) -> str:
    """The first few of many line numbers, as words."""
    line_numbers = list(line_numbers)
    more = f" and {len(line_numbers) - MAX_LISTED_LINES} more" if len(line_numbers) > MAX_LISTED_LINES else ""
    return f"line{'s' * (len(line_numbers) > 1)} {', '.join(map(str, line_numbers[:MAX_LISTED_LINES]))}{more}"
