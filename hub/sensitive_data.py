"""Search for what must not be uploaded: local paths, and credentials such as tokens, keys and passwords."""

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import get_token
from safetensors import SafetensorError, safe_open

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
PATHS = re.compile(  # in running text
    r"(?<![\w/.:<~@-])/[\w.-]+/[\w./-]*"
    r"|(?<![A-Za-z0-9_])[A-Za-z]:(?:\\+|/(?!/))[\w.\\/-]*"  # C:\Users, D:/
    r"|\bfile:/[\w./-]*"
    r"|(?<![\w/.~])~[\w.-]*/[\w./-]*"
    r"|(?<![\w/.])\.\.[/\\][\w./\\-]*"
    r"|(?<![\\\w])\\\\[\w.-]+\\[\w.\\$-]+"  # \\server\share
)
TEXT_DATA_FILES = (
    "README.md",
    "samples.tsv",
    "vocab.json",
    "merges.txt",
    "tokenizer.json",
)  # names whose texts have slashes
BINARY = (".png", ".spm", ".model", ".onnx")  # searched as text
IMAGE_CHUNKS = (b"IHDR", b"PLTE", b"tRNS", b"pHYs", b"sBIT", b"IDAT", b"IEND")


def find_token(text: str) -> str | None:
    """Return the first letters of the first credential in a text."""
    own = get_token()
    found = TOKENS.search(text)
    return f"{found[0][:6]}..." if found else f"{own[:3]}..." if own and len(own) >= 8 and own in text else None


def find_path(text: str, places: tuple[str, ...] = ()) -> str | None:
    """Return the first local path in a text: of a common form, or one of the exact paths in `places`."""
    found = PATHS.search(text)
    return found[0] if found else find_local_path(text, places)


def find_local_path(text: str, places: tuple[str, ...]) -> str | None:
    """Return the first of the exact paths that appears in a text, except within a longer name or an address."""
    found = (place for place in places if place in text)
    return next((place for place in found if re.search(rf"(?<![\w.]){re.escape(place)}(?![\w-])", text)), None)


def find_place_in_binary(text: str, places: tuple[str, ...]) -> str | None:
    """Return the first of the exact paths that appears in a binary file; short ones appear there by chance."""
    return next((place for place in places if len(place) > 5 and place in text), None)


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


def read_safetensors(path: Path) -> tuple[dict[str, str], dict[str, list[int]]]:
    """Return the metadata of a file, and the shapes of its tensors by name. Raises ValueError if it is broken."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}, {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path.name} is no safetensors file, or broken: copy it again. Nothing was uploaded."
        ) from error


def without_metadata(name: str, content: bytes) -> bytes:
    """Return a PNG or SentencePiece file without metadata, another file as it is. Raises ValueError if it is broken."""
    strip = {".png": png_image, ".spm": sentencepiece_model, ".model": sentencepiece_model}.get(Path(name).suffix)
    return strip(name, content) if strip else content


def png_image(name: str, content: bytes) -> bytes:
    """Return a PNG file with only the chunks of the image."""
    if not content.startswith(b"\x89PNG\r\n\x1a\n"):
        raise ValueError(f"{name} is not a PNG image: remove it. Nothing was uploaded.")
    kept, kind, start = content[:8], b"", 8
    while len(content) >= start + 8 and kind != b"IEND":
        size, kind = struct.unpack_from(">I4s", content, start)
        end = start + size + 12  # length, kind and checksum
        kept, start = kept + content[start:end] if kind in IMAGE_CHUNKS else kept, end
    return kept


def sentencepiece_model(name: str, content: bytes) -> bytes:
    """Return a SentencePiece model without the paths of its training data. It tokenizes as before."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    try:
        model = ModelProto.FromString(content)
    except DecodeError:
        model = ModelProto()
    if not model.pieces:
        raise ValueError(f"{name} is not a SentencePiece model: remove it. Nothing was uploaded.")
    for field in ("input", "model_prefix", "seed_sentencepieces_file"):
        model.trainer_spec.ClearField(field)
    model.normalizer_spec.ClearField("normalization_rule_tsv")
    model.denormalizer_spec.ClearField("normalization_rule_tsv")
    return model.SerializeToString()


def find_sensitive_text(name: str, content: bytes | Path, places: tuple[str, ...] = ()) -> str | None:
    """Return what a file contains that must not be uploaded, as a message; None if it may be uploaded.

    In sentences and vocabularies a path is a word as any other: only tokens and `places` are searched for there.

    Raises:
        ValueError: the file cannot be read.
    """
    value, kind = None, Path(name).suffix
    if kind == ".safetensors" and isinstance(content, Path):
        text, value = "", read_safetensors(content)
    else:
        data = content.read_bytes() if isinstance(content, Path) else content
        try:
            text = data.decode("utf-8", errors="replace" if kind in BINARY else "strict")
            value = json.loads(text) if kind == ".json" else yaml.safe_load(text) if kind == ".yaml" else None
        except (ValueError, yaml.YAMLError, RecursionError) as error:
            raise ValueError(
                f"{name} cannot be read ({error or type(error).__name__}). Nothing was uploaded."
            ) from error
    find = find_place_in_binary if kind in BINARY else find_local_path if name.endswith(TEXT_DATA_FILES) else find_path
    for key, each in [("", text), *strings_in(value)]:
        where = f"{name}{f', {key},' if key else ''}"
        if (token := find_token(each)) or (each.strip() and SECRET_KEYS.search(key)):
            return f"{where} holds a token ({token or f'{each[:3]}...'})"
        if (value is None or each is not text) and (path := find(each, places)):
            return f"{where} holds a path of this machine ({path})"
    return None


def validate_private(files: dict[str, Path | bytes], places: tuple[str, ...]) -> None:
    """Raise ValueError if a file, of which the path or the content is given, contains a local path or a credential."""
    for name, content in files.items():
        if found := find_sensitive_text(name, content, places):
            raise ValueError(f"{found}: remove it. Nothing was uploaded.")
