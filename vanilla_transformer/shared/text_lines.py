"""The lines of a text file as the training data's are read: only "\\n" ends one.

`str.splitlines` also splits at form feeds, U+0085, U+2028 and others, and `read_text` takes a "\\r" for an end; all of
these occur inside sentences.
"""

from pathlib import Path


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file without their "\\n". Raises ValueError, with the file's name, where it is not UTF-8."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}): convert it to UTF-8.") from error
    return text.removesuffix("\n").split("\n") if text else []


def sanitize_tsv_cell(text: str) -> str:
    """A text that fits into a column of a table with a row a line."""
    return text.replace("\t", " ").replace("\n", " ")
