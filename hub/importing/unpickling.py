"""Untrusted pickles, read by a process with limits before this one reads them.

`weights_only=True` executes nothing that a file names. A small pickle can still keep torch busy for years or fill the
memory, for example with a dictionary key of nested tuples that each contain another tuple twice.
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

from hub.importing.pickle_stubs import PICKLE_STUBS, records

try:
    import resource
except ImportError:  # Windows: only the elapsed time is limited
    resource = None  # type: ignore[assignment]

SECONDS = 30  # of CPU time per file, plus one for each 4 MiB of it
ELAPSED = 4  # seconds per second of CPU time, on a busy machine
MEMORY = 2**31  # bytes of the process, plus those that the file's tensors may occupy
NO_MEMORY = "no memory"
ALLOCATION = ("allocate memory", "bad_alloc")  # in errors of torch
PICKLES = 4  # of a file of before PyTorch 1.6: a number, a version, the machine, the content


def load(path: Path) -> Any:
    """Loads a file with torch's unpickler that executes nothing."""
    known = [*PICKLE_STUBS, *records(names_in_pickle(path))]
    with torch.serialization.safe_globals(known), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of old formats
        return torch.load(path, map_location="cpu", weights_only=True)


def try_load(path: Path) -> str | None:
    """Returns why a file cannot be loaded; None if it can, or if the system does not allow to read it."""
    try:
        load(path)
    except OSError:
        return None
    except MemoryError:
        return NO_MEMORY
    except Exception as error:  # whatever a broken pickle leads to; torch has no type for it
        return NO_MEMORY if any(phrase in str(error) for phrase in ALLOCATION) else str(error)
    return None


def try_load_in_process(path: Path, size: int) -> str | None:
    """Calls `try_load` in a new process with limits.

    Args:
        size: bytes that the tensors of the file may occupy.

    Raises:
        ValueError: the process needs more time or memory than a checkpoint does, or crashes.
    """
    seconds, memory = SECONDS + path.stat().st_size // 2**22, MEMORY + size
    command = [sys.executable, "-m", __name__, str(path.absolute()), str(seconds), str(memory)]
    root, timeout = Path(__file__).parents[2], seconds * ELAPSED
    too_long = f"{path} is refused: to read it takes more than {seconds} s of computing, or ends Python"
    try:
        process = subprocess.run(command, cwd=root, timeout=timeout, capture_output=True, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(f"{too_long}.") from None
    if process.returncode:
        raise ValueError(f"{too_long} (status {process.returncode}).")
    reason = json.loads(process.stdout)
    if reason == NO_MEMORY:
        raise ValueError(f"{path} is refused: to read it takes more than {memory:,} bytes of memory.")
    return reason


def names_in_pickle(path: Path) -> list[str]:
    """What a file's pickles would import, as far as they can be followed without running them."""
    found, strings = [], ["", ""]
    try:
        with pickles(path) as file:
            for _ in range(PICKLES):
                for operation, argument, _ in pickletools.genops(file):
                    if operation.name in ("GLOBAL", "INST"):
                        found.append(str(argument).replace(" ", "."))
                    elif operation.name == "STACK_GLOBAL":
                        found.append(".".join(strings[-2:]))
                    elif isinstance(argument, str):
                        strings = [strings[-1], argument]
    except Exception:  # of bytes that are no pickle; pickletools has no type for it
        pass
    return found


def pickles(path: Path) -> IO[bytes]:
    """The bytes of a bare pickle, of those that PyTorch wrote one behind the other before 1.6, or of an archive's."""
    if not zipfile.is_zipfile(path):
        return path.open("rb")
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        return io.BytesIO(archive.read(name))


def main() -> None:
    """Prints the result of `try_load` as JSON, within the limits given on the command line."""
    path, seconds, memory = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    if resource:
        limits = ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_DATA, memory))
        for kind, limit in limits:
            hard = resource.getrlimit(kind)[1]
            resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    print(json.dumps(try_load(path)))


if __name__ == "__main__":
    main()
