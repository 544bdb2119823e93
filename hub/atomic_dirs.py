"""Atomic creation of directories: a directory is complete or does not exist."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from vanilla_transformer.shared.atomic_io import CAN_LOCK, lock, wrap_write_errors

LOCK = "unfinished.lock"  # file in a temporary directory, locked as long as the writing process runs


def validate_new_dir(out: Path) -> None:
    """Remove leftovers of killed runs, then raise ValueError if `out` exists or cannot be created."""
    for leftover in find_unfinished(out):
        with contextlib.suppress(BlockingIOError), (leftover / LOCK).open("w") as file:
            lock(file, wait=False)
            remove_temporary(leftover)
            print(f"Removed {leftover}, which a killed run had left.")
    if os.path.lexists(out):
        raise ValueError(f"{out} already exists. Choose a directory that does not exist.")
    parent = next(each for each in out.absolute().parents if os.path.lexists(each))
    if not parent.is_dir():
        raise ValueError(f"{out} cannot be created: {parent} is not a directory. Choose another path.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"{out} cannot be created: you have no write permission in {parent}. Choose another path.")


def find_unfinished(out: Path) -> list[Path]:
    """Return the temporary directories of running and killed processes that write `out`."""
    if not CAN_LOCK or not out.parent.is_dir():
        return []
    paths = [path for path in out.parent.iterdir() if path.name.startswith(f"{out.name}.unfinished-")]
    return [path for path in paths if (path / LOCK).is_file() or (path.is_dir() and not any(path.iterdir()))]


def remove_temporary(path: Path) -> None:
    """Remove a temporary directory, and its lock last, so that `find_unfinished` finds it if the process is killed."""
    shutil.rmtree(path / "result", ignore_errors=True)
    shutil.rmtree(path, ignore_errors=True)


def write_dir_atomically(out: Path, write: Callable[[Path], None]) -> None:
    """Create `out` atomically: `write` fills a temporary directory next to it, which is then renamed.

    Raises:
        OSError: A disk error in `write`, also if a Rust library raises it as an exception of another type.
    """
    new_parents = [parent for parent in out.parents if not parent.exists()]
    with wrap_write_errors(out, "No partial output was kept."), contextlib.ExitStack() as stack:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=f"{out.name}.unfinished-", dir=out.parent))
            stack.callback(remove_temporary, temporary)
            lock(stack.enter_context((temporary / LOCK).open("w")), wait=False)
            result = temporary / "result"
            result.mkdir()
            write(result)
            result.rename(out)
        except BaseException:
            stack.close()
            for parent in new_parents:
                with contextlib.suppress(OSError):
                    parent.rmdir()
            raise
