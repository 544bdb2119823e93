"""Reading of the tensors of a checkpoint file, without executing code from it."""

import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from .layout import State
from .pickle_stubs import extract_metadata
from .toolkits import fairseq, opennmt
from .unpickling import find_pickled_names, load_pickle, try_load_in_process

WRAPPERS = ("model_state_dict", "state_dict", "model_state", "model", "net", "weights")
PREFIXES = ("module.", "_orig_mod.", "model.", "net.")  # of DDP, torch.compile, Lightning and user code
MAX_SIZE_RATIO, SIZE_SLACK = 16, 2**26  # tensors may be larger than the file, because they may share memory
RESAVE_HINT = "If you trust the file, load it with your own code and run torch.save(model.state_dict(), FILE)."
FIRST_BYTES = {  # of files that are often mistaken for checkpoints
    "a Git LFS pointer without the content. Run `git lfs pull`": rb"version https://git-lfs",
    "a web page. Download the file itself": rb"\s*<(!doctype|html|\?xml|head|!--)",
    "an image": rb"\x89PNG|\xff\xd8\xff|GIF8|RIFF....WEBP|BM",
    "a PDF": rb"%PDF",
    "compressed. Unpack it first": rb"\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd|7z\xbc\xaf|Rar!",
    "an HDF5 file, as written by Keras": rb"\x89HDF",
    "JSON": rb"\s*[{\[]\s*[\"\]}{\[0-9]",
}


def read_checkpoint(path: Path) -> tuple[State, dict[str, Any]]:
    """Return the tensors of a file without wrappers and prefixes, and its other entries.

    Raises ValueError if the file does not exist, is not a checkpoint, or would execute code when it is unpickled.
    """
    if not path.is_file():
        problem = "is a directory. Pass the file with the weights" if path.is_dir() else "does not exist"
        raise ValueError(f"{path} {problem}.")
    if path.suffix == ".safetensors":
        try:
            content: Any = load_file(path)
        except SafetensorError as error:
            kind = detect_file_type(path) or f"not a valid safetensors file ({error})"
            raise ValueError(f"{path} is {kind}.") from error
    else:
        content = unpickle(path)
    with prefix_errors_with(f"{path} "):
        parsed = fairseq.parse_checkpoint(content) or opennmt.parse_checkpoint(content)
    state, metadata = parsed or unwrap(path, content)
    return strip_prefixes(validate_state(path, state)), metadata


@contextmanager
def prefix_errors_with(prefix: str) -> Iterator[None]:
    """Context manager that puts `prefix`, the name of a file, before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from error


def unpickle(path: Path) -> Any:
    """Unpickle a file without executing functions that it references."""
    validate_archive_size(path)
    if (reason := try_load_in_process(path, max_tensor_bytes(path))) is not None:
        raise ValueError(f"{path} {unreadable_reason(path, reason)}")
    return load_pickle(path)


def validate_archive_size(path: Path) -> None:
    """Raise ValueError if an archive unpacks to much more than its size."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, UnicodeError):
        return  # old format, or an error that torch reports
    if size > max_tensor_bytes(path):
        raise ValueError(f"{path} is rejected: {path.stat().st_size:,} bytes unpack to {size:,} bytes.")


def max_tensor_bytes(path: Path) -> int:
    return MAX_SIZE_RATIO * path.stat().st_size + SIZE_SLACK


def unreadable_reason(path: Path, reason: str) -> str:
    """Return a message for a file that torch rejects. The message of torch would advise to execute it."""
    if kind := detect_file_type(path):
        return f"is {kind}."
    if "TorchScript" in reason or ".tar format" in reason:
        unsupported = "TorchScript archives are" if "TorchScript" in reason else "The tar format before PyTorch 1.6 is"
        return f"cannot be read. {unsupported} not supported. {RESAVE_HINT}"
    match = re.search(r"(?:GLOBAL|global|class|function) `?([\w.]+)`?", reason)
    name = match[1] if match else next(iter(find_pickled_names(path)), None)
    if name:
        return f"is rejected, because reading it would execute code from the file ({name}). {RESAVE_HINT}"
    if path.stat().st_size == 0:
        return "is not a valid checkpoint: it is empty."
    return "is not a valid checkpoint: it is corrupt or has another format. Copy or download it again."


def detect_file_type(path: Path) -> str | None:
    """Return the type of a file that cannot be a checkpoint, or None."""
    with path.open("rb") as file:
        first_bytes = file.read(200)
    return next((kind for kind, pattern in FIRST_BYTES.items() if re.match(pattern, first_bytes, re.I | re.S)), None)


def unwrap(path: Path, content: Any) -> tuple[dict, dict[str, Any]]:
    """Return the state dict inside the content of a training file, and the simple values next to it."""
    metadata: dict[str, Any] = {}
    visited: list[int] = []
    while isinstance(content, dict) and not (content and all(map(torch.is_tensor, content.values()))):
        if id(content) in visited:
            raise ValueError(f"{path} is rejected: its content contains itself.")
        visited.append(id(content))
        metadata |= extract_metadata(content)
        inner = next((name for name in WRAPPERS if isinstance(content.get(name), dict)), None)
        if inner is None:
            if any(isinstance(value, torch.Tensor) for value in content.values()):
                break
            keys = ", ".join(map(format_key, list(content)[:5])) or "none"
            raise ValueError(f"{path} has no tensors in {', '.join(WRAPPERS)}; its entries are {keys}.")
        content = content[inner]
    if not isinstance(content, dict):
        raise ValueError(f"{path} contains a {type(content).__name__}, expected a state dict. {RESAVE_HINT}")
    return content, metadata


def format_key(key: Any) -> str:
    """Format a key for a message. For other objects than strings, only the type is printed."""
    return key[:80] if isinstance(key, str) else f"a {type(key).__name__}"


def validate_state(path: Path, state: dict) -> State:
    """Return the state dict. Raise ValueError if an entry is not a dense tensor of a plausible size."""
    for name, tensor in state.items():
        key = format_key(name)
        if not isinstance(name, str):
            raise ValueError(f"{path} has a tensor whose name is {key}, expected a string.")
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{path}: {key} is a {type(tensor).__name__}, expected a tensor. {RESAVE_HINT}")
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_nested:
            raise ValueError(f"{path}: {key} is sparse, nested, quantized or without data. {RESAVE_HINT}")
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    if size > max_tensor_bytes(path):
        raise ValueError(f"{path} is rejected: {path.stat().st_size:,} bytes contain tensors of {size:,} bytes.")
    return {name: tensor.detach() for name, tensor in state.items()}


def strip_prefixes(state: State) -> State:
    while state and (prefix := next((each for each in PREFIXES if all(key.startswith(each) for key in state)), None)):
        state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state
