"""Unpickling of untrusted files. A separate process with time and memory limits loads each file first.

`weights_only=True` executes no functions from the file. A small pickle can still take unbounded time or memory. An
example is a dictionary key of nested tuples that each contain another tuple twice.
"""

import io
import json
import pickletools
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from .pickle_stubs import PICKLE_STUBS, TOOLKITS, ObjectStub

try:
    import resource
except ImportError:  # Windows: only the elapsed time is limited
    resource = None  # type: ignore[assignment]

MAX_CPU_SECONDS = 30  # plus one second per 4 MiB of the file
ELAPSED_RATIO = 4  # allowed elapsed time per CPU time, for busy machines
MAX_MEMORY_BYTES = 2**31  # of the process, plus the bytes of the tensors
NO_MEMORY = "no memory"
ALLOCATION_ERRORS = ("allocate memory", "bad_alloc")  # in messages of torch
NUM_LEGACY_PICKLES = 4  # before PyTorch 1.6: magic number, version, system info, content


def load_pickle(path: Path) -> Any:
    """Load a file with the restricted unpickler of torch."""
    names = {name for name in find_pickled_names(path) if name.split(".")[0] in TOOLKITS}
    known = [*PICKLE_STUBS, *((ObjectStub, name) for name in names)]
    with torch.serialization.safe_globals(known), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about old formats
        return torch.load(path, map_location="cpu", weights_only=True)


def try_load(path: Path) -> str | None:
    """Return the error message of loading a file, or None if it loads or the system denies access."""
    try:
        load_pickle(path)
    except OSError:
        return None
    except MemoryError:
        return NO_MEMORY
    except Exception as error:  # a corrupt pickle can raise any exception
        return NO_MEMORY if any(phrase in str(error) for phrase in ALLOCATION_ERRORS) else str(error)
    return None


def try_load_in_process(path: Path, size: int) -> str | None:
    """Call `try_load` in a process with limits of time and memory, where the tensors may have `size` bytes.

    Raises ValueError if the process exceeds a limit or crashes.
    """
    seconds, memory = MAX_CPU_SECONDS + path.stat().st_size // 2**22, MAX_MEMORY_BYTES + size
    command = [sys.executable, "-m", __name__, str(path.absolute()), str(seconds), str(memory)]
    root, timeout = Path(__file__).parents[__name__.count(".")], seconds * ELAPSED_RATIO
    too_long = f"{path} is rejected: reading it takes more than {seconds} s of CPU time, or crashes Python"
    try:
        process = subprocess.run(command, cwd=root, timeout=timeout, capture_output=True, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(f"{too_long}.") from None
    if process.returncode:
        raise ValueError(f"{too_long} (status {process.returncode}).")
    reason = json.loads(process.stdout)
    if reason == NO_MEMORY:
        raise ValueError(f"{path} is rejected: reading it takes more than {memory:,} bytes of memory.")
    return reason


def find_pickled_names(path: Path) -> list[str]:
    """Return the names that the pickles in a file reference, as far as the opcodes show them."""
    names, strings = [], ["", ""]
    try:
        with open_pickles(path) as file:
            for _ in range(NUM_LEGACY_PICKLES):
                for operation, argument, _ in pickletools.genops(file):
                    if operation.name in ("GLOBAL", "INST"):
                        names.append(str(argument).replace(" ", "."))
                    elif operation.name == "STACK_GLOBAL":
                        names.append(".".join(strings[-2:]))
                    elif isinstance(argument, str):
                        strings = [strings[-1], argument]
    except Exception:  # pickletools can raise any exception for invalid bytes
        pass
    return names


def open_pickles(path: Path) -> IO[bytes]:
    """Open the pickles of a file: the pickle in an archive, or the file itself (before PyTorch 1.6)."""
    if not zipfile.is_zipfile(path):
        return path.open("rb")
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        return io.BytesIO(archive.read(name))


def main() -> None:
    """Print the result of `try_load` as JSON, with the limits from the command line."""
    path, seconds, memory = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    if resource:
        limits = ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_DATA, memory))
        for kind, limit in limits:
            hard = resource.getrlimit(kind)[1]
            resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    print(json.dumps(try_load(path)))


if __name__ == "__main__":
    main()
