"""What must not be uploaded: paths of the owner's machine, and whatever opens a door: tokens, keys, passwords."""

import contextlib
import json
import os
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import get_token

TOKENS = re.compile(
    "|".join(
        (
            r"\b(?:hf|api_org|npm|gsk|gh[pousr]|[rs]k_live|dop_v1)_[A-Za-z0-9]{20,}",
            r"\b(?:github_pat_|wandb_v1_|glpat-|nvapi-)[A-Za-z0-9_-]{20,}",
            r"\bsk-(?=[A-Za-z_-]*\d)[A-Za-z0-9_-]{20,}",  # OpenAI, Anthropic and those that write theirs alike
            r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",  # Amazon
            r"\bAIza[A-Za-z0-9_-]{35}",  # Google
            r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}",  # Slack
            r"\bpypi-[A-Za-z0-9_-]{40,}",
            r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}",  # JSON web tokens
            r"-----BEGIN [A-Z ]*PRIVATE KEY",
            r"\b[a-z][a-z0-9+]{1,9}://[^\s/:@]+:[^\s/:@]+@",  # an address with a password
        )
    )
)
SECRET_KEYS = re.compile(
    r"(?i)(?:^|[_-])(?:api_?key|secret(?:_key)?|access_key|private_key|password|passwd|"
    r"(?:hub|hf|auth|access|api|bearer)_token)$"
)
ROOTS = "|".join(
    (
        "home|root|tmp|Users|work|mnt|data|srv|scratch|var|opt|etc|usr|media|nfs|lustre|gpfs|export|private|Volumes",
        "workspace|workspaces|content|kaggle|projects?|storage|shared?|cluster|dev|proc|run|app|mount|datasets?|disks?",
        r"net|afs|fsx|efs|beegfs|localhome|local|global|user|homes|c|d|disk\d+|data\d+|nvme\d*|ssd\d*|vol\d*|hdd\d*",
    )
)
PATHS = re.compile(  # in running text
    r"(?<![\w/.:<~@-])/(?:" + ROOTS + r")/[\w.-][\w./-]*"
    r"|(?<![A-Za-z0-9_])[A-Za-z]:(?:\\+|/(?!/))[\w.\\/-]*"  # C:\Users, D:/
    r"|\bfile:/[\w./-]*"
    r"|(?<![\w/.~])~[\w.-]*/[\w./-]*"
    r"|(?<![\w/.])\.\.[/\\][\w./\\-]*"
    r"|(?<![\\\w])\\\\[\w.-]+\\[\w.\\$-]+"  # \\server\share
)
SENTENCES = {  # files of sentences and words, in which a slash is no path
    *("README.md", "samples.tsv", "vocab.json"),
    *("tokenizer.json", "source_tokenizer.json", "target_tokenizer.json"),
}
LONGEST_HEAD = 100_000_000  # bytes, as in safetensors
LONGEST_TEXT = 1_000_000  # bytes of a picture's text that are looked at
OF_THE_PICTURE = (b"IDAT", b"IHDR", b"PLTE", b"tRNS", b"pHYs", b"sBIT")
WHOLE_PATH = re.compile(r"/{1,2}[^/\s][^/]*(?:/[^/]*)+")  # what is nothing else than a path from the root


def places_of(checkpoint: Path) -> tuple[str, ...]:
    """Paths of this very machine: the user's home, and where the checkpoint lies."""
    found = {str(Path.home()), str(checkpoint.resolve()), str(checkpoint.resolve().parent)}
    return tuple(sorted(place for place in found if len(place) > 5))


def find_token(text: str) -> tuple[int, str] | None:
    """Where in a text something stands that opens a door, and its first letters."""
    if found := TOKENS.search(text):
        return found.start(), f"{found[0][:6]}..."
    own = get_token()
    if own and len(own) >= 8 and own in text:
        return text.index(own), f"{own[:3]}..."
    return None


def find_path(text: str, places: tuple[str, ...] = ()) -> str | None:
    """The path of this machine that a text holds; `places` are such as nobody could know in general."""
    if WHOLE_PATH.fullmatch(text):
        return text
    found = PATHS.search(text)
    return found[0] if found else find_place(text, places)


def find_place(text: str, places: tuple[str, ...]) -> str | None:
    return next((place for place in places if place in text), None)


def strings_in(value: Any) -> Iterator[tuple[str, str]]:
    """(key, text) of all texts within what JSON or YAML is read into, keys themselves among them; a list's items have
    its key. What holds itself is looked at once."""
    waiting, seen = [("", value)], set()
    while waiting:
        key, each = waiting.pop()
        if isinstance(each, str):
            yield key, each
        elif isinstance(each, (dict, list, tuple, set)) and id(each) not in seen:
            seen.add(id(each))
            if isinstance(each, dict):
                waiting += [("", name) for name in each] + [(str(name), inner) for name, inner in each.items()]
            else:
                waiting += [(key, inner) for inner in each]


def find_private_in_binary(path: Path, places: tuple[str, ...] = ()) -> str | None:
    """As `find_private` does, of what weights and pictures say in words: the head of a safetensors file, with names and
    metadata, and the texts of a PNG file, its EXIF and XMP data among them."""
    if path.suffix in (".spm", ".model"):  # SentencePiece's: pieces of words alone
        return None
    if path.suffix == ".safetensors":
        texts = list(strings_in(safetensors_head(path)))
    else:
        texts = [("", text) for text in texts_of_png(path)]
    for key, text in texts:
        if (found := find_token(text)) or (text.strip() and SECRET_KEYS.search(key)):
            return f"{path.name}{f', {key},' if key else ''} holds a token ({found[1] if found else f'{text[:3]}...'})"
        if place := find_path(text, places):
            return f"{path.name}{f', {key},' if key else ''} holds a path of this machine ({place})"
    return None


def safetensors_head(path: Path) -> dict[str, Any]:
    """What such a file begins with: tensors by name, and `__metadata__`. Raises ValueError where it does not."""
    with path.open("rb") as file:
        start = file.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else LONGEST_HEAD + 1
        try:
            head = json.loads(file.read(size)) if size <= LONGEST_HEAD else None
        except (ValueError, RecursionError):
            head = None
    if not isinstance(head, dict):
        raise ValueError(f"{path.name} is no safetensors file, or broken: copy it anew. Nothing was uploaded.")
    return head


def texts_of_png(path: Path) -> Iterator[str]:
    """All that such a file holds besides the picture, as text; what stands behind the picture, too.

    Raises:
        ValueError: it is no PNG file.
    """
    with path.open("rb") as file:
        if file.read(8) != b"\x89PNG\r\n\x1a\n":
            raise ValueError(f"{path.name} is no PNG picture: remove it. Nothing was uploaded.")
        while len(start := file.read(8)) == 8:
            size, kind = struct.unpack(">I4s", start)
            if kind in OF_THE_PICTURE:
                file.seek(size + 4, os.SEEK_CUR)  # and its check sum
                continue
            content = file.read(min(size, LONGEST_TEXT))
            file.seek(size - len(content) + 4, os.SEEK_CUR)
            zeros = re.finditer(rb"\0", content[:1000]) if kind in (b"zTXt", b"iTXt") else ()
            for at in (zero.end() for zero in zeros):  # what is packed begins behind one
                with contextlib.suppress(zlib.error):
                    content += b"\n" + zlib.decompressobj().decompress(content[at + (kind == b"zTXt") :], LONGEST_TEXT)
            yield content.decode("utf-8", errors="replace")
            if kind == b"IEND":
                yield file.read(LONGEST_TEXT).decode("utf-8", errors="replace")


def find_private(name: str, content: bytes, places: tuple[str, ...] = ()) -> str | None:
    """What a text file holds that must not be uploaded, in words; None where it may go up.

    In sentences and vocabularies a path is a word as any other: they are searched for tokens and for `places` alone.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        text = content.decode("utf-8")
        value = json.loads(text) if name.endswith(".json") else yaml.safe_load(text) if name.endswith(".yaml") else None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{name} cannot be read: {error or type(error).__name__}. Nothing was uploaded.") from error
    if found := find_token(text):
        return f"{name}, line {text.count(chr(10), 0, found[0]) + 1} holds a token ({found[1]})"
    texts = [("", text)] if value is None else list(strings_in(value))
    find = find_place if name in SENTENCES else find_path
    for key, each in texts:
        if (found := find_token(each)) or (value is not None and each.strip() and SECRET_KEYS.search(key)):
            return f"{name}{f', {key},' if key else ''} holds a token ({found[1] if found else f'{each[:3]}...'})"
        if path := find(each, places):
            return f"{name}{f', {key},' if key else ''} holds a path of this machine ({path})"
    return None
