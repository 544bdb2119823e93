"""Word tables of the built-in English-German corpus, which are in `lexicon.txt`."""

import functools
from pathlib import Path

Row = list[list[str]]  # columns, each a list of forms


class Table(list[Row]):
    """Rows of words, hashed by identity."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    @functools.cache  # noqa: B019  # tables are constants
    def rows_with(self, column: int, *classes: str) -> list[Row]:
        """Return the rows with at least one of the classes in a column."""
        return [row for row in self if set(row[column]) & set(classes)]


def parse(text: str) -> dict[str, Table]:
    """Return the tables by their names, which are in brackets."""
    tables = {}
    for line in text.splitlines():
        if line.startswith("["):
            tables[line.strip("[]")] = table = Table()
        elif line and not line.startswith("#"):
            table.append([[form.replace("_", " ") for form in column.split()] for column in line.split("|")])
    return tables


TABLES = parse(Path(__file__).with_name("lexicon.txt").read_text(encoding="utf-8"))
NOUNS, VERBS, MODALS, CLAUSE_VERBS, ADJECTIVES, TIMES, MANNERS, PLACES, PREPOSITIONS = TABLES.values()
