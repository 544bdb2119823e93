"""Atomic writes of files and directories: a path is either complete or absent."""

import errno
import glob
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from safetensors import SafetensorError

try:
    import fcntl
except ImportError:  # Windows
    import msvcrt

    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("vanilla_transformer")
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
CAN_LOCK = fcntl is not None
LOCK = "unfinished.lock"  # file in a temporary directory, locked as long as the writing process runs
UPLOAD_PENDING = "upload_pending"  # marker file of a finished run that training has not uploaded
FREE_SPACE_HINT = "{free:,.0f} MiB are free on this disk"


@contextmanager
def atomic_write(out: Path) -> Iterator[Path]:
    """Context manager: yield a temporary path next to `out` for a file or a directory.

    It is renamed to `out` on success and deleted on failure. Leftovers of a killed process are deleted first. Raises
    OSError if the path cannot be written.
    """
    temporary = out.with_name(f"{out.name}.unfinished")
    with wrap_write_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        remove(temporary)
        try:
            yield temporary
            temporary.replace(out)
        finally:
            remove(temporary)


@contextmanager
def wrap_write_errors(
    out: Path, hint: str = FREE_SPACE_HINT + ". Delete files, or choose another path."
) -> Iterator[None]:
    """Context manager that converts disk errors into an `OSError` whose message contains `out`."""
    try:
        yield
    except Exception as error:  # libraries in Rust raise `Exception` and `SafetensorError`
        if get_errno(error) not in DISK_ERRORS and type(error) not in (Exception, SafetensorError):
            raise
        raise make_write_error(out, error, hint) from error


def make_write_error(out: Path, error: Exception, hint: str) -> OSError:
    """Build an error with `out`, the reason and the hint, in which `{free}` is replaced by the free MiB."""
    parent = next(folder for folder in out.absolute().parents if folder.exists())
    number, free = get_errno(error), shutil.disk_usage(parent).free / 2**20
    reason = os.strerror(number) if number else error
    return OSError(f"{out} could not be written: {reason}. {hint.format(free=free)}")


def get_errno(error: Exception) -> int | None:
    """Return the system's error number. Errors of libraries in Rust contain it only in their text."""
    match = re.search(r"\(os error ([0-9]+)\)", str(error))
    return int(match[1]) if match else getattr(error, "errno", None)


def lock(file: IO, wait: bool = True) -> None:
    """Lock an open file against other processes until it is closed. On Windows, does nothing if `wait` is True.

    Raises BlockingIOError if another process holds the lock and `wait` is False.
    """
    if CAN_LOCK:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    elif not wait:
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except OSError as error:
            raise BlockingIOError(*error.args) from error


@contextmanager
def lock_exclusively(path: Path, message: str) -> Iterator[None]:
    """Context manager that locks a file against other commands. Raises ValueError with `message` if one holds it."""
    with path.open("a") as file:
        try:
            lock(file, wait=False)
        except BlockingIOError as error:
            raise ValueError(message) from error
        except OSError:  # a file system without locks
            pass
        yield


def remove(path: Path) -> None:
    """Remove a file or a directory if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def validate_new_dir(out: Path) -> None:
    """Remove leftovers of killed runs, then raise ValueError if `out` exists or cannot be created."""
    for leftover in list(out.parent.glob(f"{glob.escape(out.name)}.unfinished-*")) if CAN_LOCK else []:
        if not (leftover / LOCK).is_file() and not (leftover.is_dir() and not any(leftover.iterdir())):
            continue  # another directory with such a name
        with suppress(BlockingIOError), (leftover / LOCK).open("w") as file:
            lock(file, wait=False)
            remove_temporary(leftover)
            logger.info(f"Removed {leftover}, which a killed run had left.")
    if os.path.lexists(out):
        raise ValueError(f"{out} already exists. Choose a directory that does not exist.")
    parent = next(each for each in out.absolute().parents if os.path.lexists(each))
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise ValueError(
            f"{out} cannot be created: {parent} is not a directory, or you have no write permission in it. Choose "
            f"another path."
        )


def remove_temporary(path: Path) -> None:
    """Remove a temporary directory, and its lock last, so that it is recognized if the process is killed."""
    shutil.rmtree(path / "result", ignore_errors=True)
    shutil.rmtree(path, ignore_errors=True)


def write_dir_atomically(out: Path, write: Callable[[Path], None]) -> None:
    """Create `out` atomically: `write` fills a temporary directory next to it, which is then renamed.

    Concurrent processes have separate temporary directories. Disk errors in `write` become OSError.
    """
    with wrap_write_errors(out, "No partial output was kept."), ExitStack() as stack:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f"{out.name}.unfinished-", dir=out.parent))
        stack.callback(remove_temporary, temporary)
        lock(stack.enter_context((temporary / LOCK).open("w")), wait=False)
        result = temporary / "result"
        result.mkdir()
        write(result)
        result.rename(out)
