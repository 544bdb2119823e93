"""Files and folders that are whole, or not there under their name."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from safetensors import SafetensorError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
CAN_LOCK = fcntl is not None
FREE_SPACE = "{free:,.0f} MiB are free there"


@contextmanager
def atomic_write(out: Path) -> Iterator[Path]:
    """A path beside `out` to write a file or a folder to. It becomes `out` when all is written; what was written is
    removed where that fails, and what a kill left is written over.

    Raises:
        OSError: it cannot be written.
    """
    unfinished = out.with_name(f"{out.name}.unfinished")
    with wrap_write_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        remove(unfinished)
        try:
            yield unfinished
            unfinished.replace(out)
        finally:
            remove(unfinished)


@contextmanager
def wrap_write_errors(out: Path, remark: str = FREE_SPACE + ": make room, or give another place.") -> Iterator[None]:
    """Within it an error of the disk becomes an `OSError` that names `out`."""
    try:
        yield
    except Exception as error:
        if get_errno(error) not in DISK_ERRORS and type(error) not in (Exception, SafetensorError):  # of Rust
            raise
        raise make_write_error(out, error, remark) from error


def make_write_error(out: Path, error: Exception, remark: str) -> OSError:
    """Returns the error that names `out`, the reason and the remark, in which `{free}` are the free MiB."""
    parent = next(folder for folder in out.absolute().parents if folder.exists())
    number, free = get_errno(error), shutil.disk_usage(parent).free / 2**20
    reason = os.strerror(number) if number else error
    return OSError(f"{out} could not be written: {reason}. {remark.format(free=free)}")


def get_errno(error: Exception) -> int | None:
    """The system's number of an error, which libraries in Rust have only in the text."""
    found = re.search(r"\(os error ([0-9]+)\)", str(error))
    return int(found[1]) if found else getattr(error, "errno", None)


def lock(file: IO, wait: bool = True) -> None:
    """Locks an open file against other processes until it is closed; on Windows does nothing.

    Raises:
        BlockingIOError: another process holds the lock, and `wait` is False.
    """
    if CAN_LOCK:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def remove(path: Path) -> None:
    """A file or a folder, or nothing."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
