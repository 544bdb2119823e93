"""Lines of a text file, split as in the training data: only a newline (U+000A) ends a line.

`str.splitlines` also splits at form feeds, U+0085, U+2028 and others, and `read_text` at carriage returns. All of these
occur inside sentences.
"""

from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from pathlib import Path


def read_lines(path: Path) -> list[str]:
    """Return the lines of a UTF-8 file without newlines. Raises ValueError if the file is not UTF-8."""
    content = path.read_bytes()
    validate_not_utf_16(content, str(path))
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}): convert it to UTF-8.") from error
    return text.removesuffix("\n").split("\n") if text else []


def validate_not_utf_16(start: bytes, name: str) -> None:
    """Raise ValueError if a text starts as in UTF-16 or UTF-32. Without a byte-order mark, it would have NULs."""
    if start.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) or b"\0" in start[:2]:
        raise ValueError(f"{name} is in UTF-16 or UTF-32. Convert it to UTF-8.")


def sanitize_tsv_cell(text: str) -> str:
    """Replace tabs and newlines by spaces, so that the text fits into one cell."""
    return text.replace("\t", " ").replace("\n", " ")
