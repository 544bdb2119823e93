"""Files and folders that are whole, or not there under their name."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


@contextmanager
def whole(out: Path) -> Iterator[Path]:
    """A path beside `out` to write a file or a folder to. It becomes `out` when all is written; what was written is
    removed where that fails, and what a kill left is written over.

    Raises:
        OSError: it cannot be written.
    """
    unfinished = out.with_name(f"{out.name}.unfinished")
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        remove(unfinished)
        try:
            yield unfinished
            unfinished.replace(out)
        finally:
            remove(unfinished)


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Within it an error of the disk becomes an `OSError` that names `out` and how much room there is."""
    try:
        yield
    except Exception as error:
        if type(error) is not Exception and not isinstance(error, OSError | SafetensorError):  # tokenizers, safetensors
            raise
        parent = next(folder for folder in out.absolute().parents if folder.exists())
        free = shutil.disk_usage(parent).free / 2**20
        raise OSError(
            f"{out} could not be written ({error}); {free:,.0f} MiB are free there: make room, or give another place."
        ) from error


def remove(path: Path) -> None:
    """A file or a folder, or nothing."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
