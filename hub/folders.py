"""Folders that are whole or not there."""

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: what a killed run left stays there
    fcntl = None  # type: ignore[assignment]

LOCK = "unfinished.lock"  # in the folder that is being made; held by the process that makes it, so free after a kill


def refuse_existing(out: Path) -> None:
    """Removes what killed runs left beside `out`. Raises ValueError where `out` exists, or cannot be made."""
    for left in unfinished(out):
        with contextlib.suppress(BlockingIOError), locked(left / LOCK):
            shutil.rmtree(left)
            print(f"removed {left}, which a run that was killed had left")
    if os.path.lexists(out):
        raise ValueError(f"{out} exists already: give a folder that does not.")
    above = next(parent for parent in out.absolute().parents if os.path.lexists(parent))
    if not above.is_dir():
        raise ValueError(f"{out} cannot be made, since {above} is not a folder: give another place.")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"{out} cannot be made, since you may not write into {above}: give another place.")


def unfinished(out: Path) -> list[Path]:
    """What killed and running processes have made of `out`; a folder that only has such a name is not among them."""
    if fcntl is None or not out.parent.is_dir():
        return []
    prefix = f"{out.name}.unfinished-"
    return [path for path in out.parent.iterdir() if path.name.startswith(prefix) and (path / LOCK).is_file()]


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Raises BlockingIOError where another process holds it."""
    with path.open("w") as file:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def write_whole(out: Path, write: Callable[[Path], None]) -> None:
    """Calls `write` with a fresh folder beside `out`, which becomes `out` when it is done.

    Raises:
        OSError: what `write` raises where the disk is full, which the libraries in Rust tell by types of their own.
    """
    made = [parent for parent in out.parents if not parent.exists()]
    with contextlib.ExitStack() as stack:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            place = Path(tempfile.mkdtemp(prefix=f"{out.name}.unfinished-", dir=out.parent))
            stack.callback(shutil.rmtree, place, ignore_errors=True)
            stack.enter_context(locked(place / LOCK))
            result = place / "result"
            result.mkdir()
            write(result)
            result.rename(out)
        except BaseException as error:
            stack.close()
            for parent in made:
                with contextlib.suppress(OSError):
                    parent.rmdir()
            if isinstance(error, Exception) and (reason := of_the_disk(error)):
                raise OSError(f"{out} could not be written: {reason}. Nothing of it is left.") from error
            raise


def of_the_disk(error: Exception) -> str | None:
    """Why the disk did not take it; None: it is an error of another kind."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
        return os.strerror(error.errno)
    found = re.search(r"\(os error ([0-9]+)\)", str(error))  # as safetensors and tokenizers tell it
    return os.strerror(int(found[1])) if found else None
