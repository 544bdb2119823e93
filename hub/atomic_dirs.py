"""Folders that are whole or not there."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from vanilla_transformer.shared.atomic_io import CAN_LOCK, lock, wrap_write_errors

LOCK = "unfinished.lock"  # in the folder that is being made; held by the process that makes it, so free after a kill


def validate_new_dir(out: Path) -> None:
    """Removes what killed runs left beside `out`. Raises ValueError where `out` exists, or cannot be made."""
    for left in unfinished(out):
        with contextlib.suppress(BlockingIOError), (left / LOCK).open("w") as file:
            lock(file, wait=False)
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
    if not CAN_LOCK or not out.parent.is_dir():
        return []
    prefix = f"{out.name}.unfinished-"
    return [path for path in out.parent.iterdir() if path.name.startswith(prefix) and (path / LOCK).is_file()]


def write_dir_atomically(out: Path, write: Callable[[Path], None]) -> None:
    """Calls `write` with a fresh folder beside `out`, which becomes `out` when it is done.

    Raises:
        OSError: what `write` raises where the disk is full, which the libraries in Rust tell by types of their own.
    """
    made = [parent for parent in out.parents if not parent.exists()]
    with wrap_write_errors(out, "Nothing of it is left."), contextlib.ExitStack() as stack:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            place = Path(tempfile.mkdtemp(prefix=f"{out.name}.unfinished-", dir=out.parent))
            stack.callback(shutil.rmtree, place, ignore_errors=True)
            lock(stack.enter_context((place / LOCK).open("w")), wait=False)
            result = place / "result"
            result.mkdir()
            write(result)
            result.rename(out)
        except BaseException:
            stack.close()
            for parent in made:
                with contextlib.suppress(OSError):
                    parent.rmdir()
            raise
