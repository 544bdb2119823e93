"""Detection of data that must not be uploaded: local paths and credentials (access tokens, keys, passwords)."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import get_token
from safetensors import SafetensorError, safe_open

CREDENTIALS = re.compile(
    r"\b(?:hf|api_org|npm|gsk|gh[pousr]|[rs]k_live|dop_v1)_[A-Za-z0-9]{20,}"
    r"|\b(?:github_pat_|wandb_v1_|glpat-|nvapi-)[A-Za-z0-9_-]{20,}"
    r"|\bsk-(?=[A-Za-z_-]*\d)[A-Za-z0-9_-]{20,}"  # OpenAI, Anthropic and others
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"  # Amazon
    r"|\b(?:AIza[A-Za-z0-9_-]{35}|ya29\.[A-Za-z0-9_-]{20,})"  # Google
    r"|\bxox[abeoprs]-[A-Za-z0-9-]{10,}"  # Slack
    r"|\bpypi-[A-Za-z0-9_-]{40,}"
    r"|\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}"  # JSON web tokens
    r"|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|\b[A-Za-z][A-Za-z0-9+]{1,9}://[^\s/:@]*:[!-.0-?A-~]+@"  # URL with a password
    r"|(?i:[?&](?:(?:access|api|auth)[_-]?)?(?:token|key|secret)=)[\w.%~+/-]{8,}"  # URL parameter
)
SECRET_KEYS = re.compile(
    r"(?i)(?:^|[._-])(?:api_?key|secret(?:_key)?|access_key|private_key|password|passwd|"
    r"passphrase|credentials?|(?:hub|hf|auth|access|api|bearer|refresh|private|session)_token)$"
)
SERVICE_KEYS = re.compile(  # secrets if the value looks random
    r"(?i)(?:^token|(?:^|[._-])(?:wandb|comet|neptune|openai|anthropic|deepl|aws|azure|google|github|hf|hub|auth)_key)$"
)
RANDOM_VALUE = re.compile(r"(?=.*\d)[\w+/=-]{8,}")
PATHS = re.compile(  # in running text
    r"(?<![\w/.:<~@-])/[\w.-]+/[\w./-]*"
    r"|(?<![A-Za-z0-9_])[A-Za-z]:(?:\\+|/(?!/))[\w.\\/-]*"  # C:\Users, D:/
    r"|\bfile:/[\w./-]*"
    r"|(?<![\w/.~])~[\w.-]*/[\w./-]*"
    r"|(?<![\w/.])\.\.[/\\][\w./\\-]*"
    r"|(?<![\\\w])\\\\[\w.-]+\\[\w.\\$-]+"  # \\server\share
)
# `PATHS` is not searched for in these files, because it matches words that contain slashes.
TEXT_DATA = (
    *("README.md", "samples.tsv"),
    *("vocab.json", "vocab.txt", "dict.txt", "merges.txt", "bpe.codes", "tokenizer.json", "added_tokens.json"),
)
BINARY = (".png", ".spm", ".model", ".onnx")  # searched as text


def find_credential(text: str) -> str | None:
    """Return a redacted prefix of the first credential in a text, or None."""
    login = get_token()
    match = CREDENTIALS.search(text)
    return f"{match[0][:6]}..." if match else f"{login[:3]}..." if login and len(login) >= 8 and login in text else None


def is_secret(key: str, value: str) -> bool:
    """Return whether the value of a key, in snake case or camel case, is a credential."""
    key, value = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key), value.strip()
    return bool(value and SECRET_KEYS.search(key) or SERVICE_KEYS.search(key) and RANDOM_VALUE.fullmatch(value))


def find_local_path(text: str, paths: tuple[str, ...] = ()) -> str | None:
    """Return the first local path in a text: a match of `PATHS`, or else an occurrence of one of `paths`."""
    match = PATHS.search(text)
    return match[0] if match else find_exact_path(text, paths)


def find_exact_path(text: str, paths: tuple[str, ...]) -> str | None:
    """Return the first of the exact `paths` that a text contains, except within a longer name or a URL."""
    matches = (path for path in paths if path in text)
    return next((path for path in matches if re.search(rf"(?<![\w.]){re.escape(path)}(?![\w-])", text)), None)


def find_path_in_binary(text: str, paths: tuple[str, ...]) -> str | None:
    """Return the first of the exact `paths` in a binary file. Short ones are ignored: they occur by chance."""
    return next((path for path in paths if len(path) > 5 and path in text), None)


def iter_strings(value: Any) -> Iterator[tuple[str, str]]:
    """Yield (key, string) for all strings in parsed JSON or YAML, including keys, and for secret numbers.

    Items have the key of their list.
    """
    stack, seen = [("", value)], set()  # YAML aliases may be cyclic
    while stack:
        key, each = stack.pop()
        if isinstance(each, str) or (type(each) in (int, float) and is_secret(key, str(each))):
            yield key, str(each)
        elif isinstance(each, (dict, list, tuple, set)) and id(each) not in seen:
            seen.add(id(each))
            if isinstance(each, dict):
                stack += [("", name) for name in each] + [(str(name), inner) for name, inner in each.items()]
            else:
                stack += [(key, inner) for inner in each]


def read_safetensors(path: Path) -> tuple[dict[str, str], dict[str, list[int]]]:
    """Return the metadata of a file and the shapes of its tensors by name. Raise ValueError if it is corrupt."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}, {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        message = f"{path.name} is not a valid safetensors file. Copy it again. Nothing was uploaded."
        raise ValueError(message) from error


def strip_metadata(name: str, content: bytes) -> bytes:
    """Return a SentencePiece model without the paths of its training data, and other files unchanged.

    Raises ValueError if an image is not a PNG file, or a tokenizer is not a SentencePiece model.
    """
    if name.endswith(".png") and not content.startswith(b"\x89PNG\r\n\x1a\n"):
        raise ValueError(f"{name} is not a PNG image. Remove it. Nothing was uploaded.")
    if not name.endswith((".spm", ".model")):
        return content
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    try:
        model = ModelProto.FromString(content)
    except DecodeError:
        model = ModelProto()
    if not model.pieces:
        raise ValueError(f"{name} is not a SentencePiece model. Remove it. Nothing was uploaded.")
    for field in ("input", "model_prefix", "seed_sentencepieces_file"):
        model.trainer_spec.ClearField(field)
    model.normalizer_spec.ClearField("normalization_rule_tsv")
    model.denormalizer_spec.ClearField("normalization_rule_tsv")
    return model.SerializeToString()


def find_sensitive_text(name: str, content: bytes | Path, paths: tuple[str, ...] = ()) -> str | None:
    """Return a message about the first local path or credential in a file, or None.

    Sentences and vocabularies (`TEXT_DATA`) are searched for credentials and the exact `paths` only. Raises ValueError
    if the file cannot be read.
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
            message = f"{name} cannot be read ({error or type(error).__name__}). Nothing was uploaded."
            raise ValueError(message) from error
    is_text = name.endswith(TEXT_DATA)  # keys are words, such as "secret"
    find = find_path_in_binary if kind in BINARY else find_exact_path if is_text else find_local_path
    for key, each in [("", text), *iter_strings(value)]:
        location = f"{name}, {key}," if key else name
        if (credential := find_credential(each)) or (not is_text and is_secret(key, each)):
            return f"{location} contains a credential ({credential or f'{each[:3]}...'})"
        if (value is None or each is not text) and (path := find(each, paths)):
            return f"{location} contains a local path ({path})"
    return None


def validate_no_sensitive_data(files: dict[str, Path | bytes], paths: tuple[str, ...]) -> None:
    """Raise ValueError if a file, given by its path or content, contains a credential or a local path."""
    for name, content in files.items():
        if message := find_sensitive_text(name, content, paths):
            raise ValueError(f"{message}. Remove it. Nothing was uploaded.")
