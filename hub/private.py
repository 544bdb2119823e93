"""What must not be uploaded: paths of the owner's machine, and whatever opens a door: tokens, keys, passwords."""

import json
import re
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
SENTENCES = (
    "README.md",
    "samples.tsv",
    "tokenizer.json",
    "source_tokenizer.json",
    "target_tokenizer.json",
    "vocab.json",
)
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
