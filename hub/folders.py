"""Folders that are whole or not there."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_whole(out: Path, write: Callable[[Path], None]) -> None:
    """Calls `write` with a fresh folder beside `out`, which becomes `out` when it is done."""
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f"{out.name}.unfinished-", dir=out.parent))
    try:
        write(unfinished)
        unfinished.chmod(0o755)  # mkdtemp's are for their owner alone
        unfinished.replace(out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
