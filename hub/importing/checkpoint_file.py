"""A checkpoint file's tensors; nothing in it is run."""

import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from hub.importing.layout import State
from hub.importing.pickle_stubs import told
from hub.importing.toolkits import parse_checkpoint
from hub.importing.unpickling import load, names_in_pickle, try_load_in_process

WRAPPERS = ("model_state_dict", "state_dict", "model_state", "model", "net", "weights")
PREFIXES = ("module.", "_orig_mod.", "model.", "net.")  # DDP, torch.compile, Lightning, one's own
MAX_SIZE_RATIO, SIZE_SLACK = (
    16,
    2**26,
)  # how much larger than their file tensors may be: they may share memory, or repeat a row
RESAVE_HINT = (
    "If it is yours, load it with your own code and save the tensors alone: torch.save(model.state_dict(), FILE)."
)
FIRST_BYTES = {  # how files begin that are often taken for a checkpoint
    "a pointer of Git LFS, without the file itself: run `git lfs pull`": rb"version https://git-lfs",
    "a web page: download the file itself": rb"\s*<(!doctype|html|\?xml|head|!--)",
    "a picture": rb"\x89PNG|\xff\xd8\xff|GIF8|RIFF....WEBP|BM",
    "a PDF": rb"%PDF",
    "compressed: unpack it first": rb"\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd|7z\xbc\xaf|Rar!",
    "an HDF5 file, as Keras writes": rb"\x89HDF",
    "JSON": rb"\s*[{\[]\s*[\"\]}{\[0-9]",
}


def read(path: Path) -> tuple[State, dict[str, Any]]:
    """The tensors of a file, freed of wrappers and prefixes, and its other entries.

    Raises:
        ValueError: no such file, not a checkpoint, or one that would run code when it is unpickled.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist.")
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the file in it that has the weights.")
    if not path.is_file():
        raise ValueError(f"{path} is no file.")
    if path.suffix == ".safetensors":
        try:
            content: Any = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is {detect_file_type(path) or f'no safetensors file ({error})'}.") from error
    else:
        content = unpickle(path)
    try:
        found = parse_checkpoint(content)
    except ValueError as error:
        raise ValueError(f"{path} {error}") from error
    state, metadata = found or unwrap(path, content)
    return without_prefixes(check(path, state)), metadata


def unpickle(path: Path) -> Any:
    """Loads what the file holds; executes nothing that it names."""
    refuse_bombs(path)
    reason = try_load_in_process(path, limit(path))
    if reason is not None:
        raise ValueError(f"{path} {unreadable_reason(path, reason)}")
    return load(path)


def refuse_bombs(path: Path) -> None:
    """Archives that unpack to much more than their size."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, UnicodeError):
        return  # the old format, or torch tells what is wrong
    if size > limit(path):
        raise ValueError(f"{path} is refused: it is an archive of {path.stat().st_size:,} bytes for {size:,}.")


def limit(path: Path) -> int:
    return MAX_SIZE_RATIO * path.stat().st_size + SIZE_SLACK


def unreadable_reason(path: Path, reason: str) -> str:
    """What is wrong with a file that torch refuses, and the cure. Not in torch's words, which advise to run it."""
    kind = detect_file_type(path)
    if kind:
        return f"is {kind}."
    if "TorchScript" in reason or ".tar format" in reason:
        what = "a TorchScript archive" if "TorchScript" in reason else "in a format of before PyTorch 1.6"
        return f"is {what}, which is not read here. {RESAVE_HINT}"
    found = re.search(r"(?:GLOBAL|global|class|function) `?([\w.]+)`?", reason)
    named = found[1] if found else next(iter(names_in_pickle(path)), None)
    if named:
        return f"is refused: to read it, Python would have to run what it names ({named}), which may be anything. " + (
            RESAVE_HINT
        )
    if path.stat().st_size == 0:
        return "is no checkpoint that torch can read: it is empty."
    return "is no checkpoint that torch can read: it is broken, or of another kind. Copy or download it once more."


def detect_file_type(path: Path) -> str | None:
    """What a file is that cannot be a checkpoint, by its first bytes."""
    with path.open("rb") as file:
        begin = file.read(200)
    return next((kind for kind, pattern in FIRST_BYTES.items() if re.match(pattern, begin, re.I | re.S)), None)


def unwrap(path: Path, content: Any) -> tuple[dict, dict[str, Any]]:
    """The state in what training code has saved, and what else that tells."""
    metadata: dict[str, Any] = {}
    parse_checkpoint: list[int] = []
    while isinstance(content, dict) and not is_state(content):
        if id(content) in parse_checkpoint:
            raise ValueError(f"{path} is refused: what it holds contains itself.")
        parse_checkpoint.append(id(content))
        metadata |= told(content)
        inner = next((name for name in WRAPPERS if isinstance(content.get(name), dict)), None)
        if inner is None:
            if any(isinstance(value, torch.Tensor) for value in content.values()):
                break
            keys = ", ".join(map(shown, list(content)[:5])) or "none"
            raise ValueError(f"{path} holds no tensors under {', '.join(WRAPPERS)}: its entries are {keys}.")
        content = content[inner]
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not the state of a model. {RESAVE_HINT}")
    return content, metadata


def is_state(content: dict) -> bool:
    return bool(content) and all(isinstance(value, torch.Tensor) for value in content.values())


def shown(key: Any) -> str:
    """A key in a message. What is no text may be endless as text."""
    return key[:80] if isinstance(key, str) else f"a {type(key).__name__}"


def check(path: Path, state: dict) -> State:
    """The state, where it is what one is: tensors by name, no larger than their file makes likely."""
    for name, tensor in state.items():
        if not isinstance(name, str):
            raise ValueError(f"{path} holds a tensor whose name is {shown(name)}, not text.")
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{path}: {shown(name)} is a {type(tensor).__name__}, not a tensor. {RESAVE_HINT}")
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_nested:
            raise ValueError(f"{path}: {shown(name)} is sparse, nested, quantized or without data. {RESAVE_HINT}")
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    if size > limit(path):
        raise ValueError(f"{path} is refused: its {path.stat().st_size:,} bytes hold tensors of {size:,} bytes.")
    return {name: tensor.detach() for name, tensor in state.items()}


def without_prefixes(state: State) -> State:
    changed = bool(state)
    while changed:
        changed = False
        for prefix in PREFIXES:
            if all(key.startswith(prefix) for key in state):
                state, changed = {key.removeprefix(prefix): value for key, value in state.items()}, True
    return state
