"""What every command promises for whatever it is given, and trying it some thousand times.

Whatever comes in, a command ends with status 0; or with status 2 (a mistake of the user's), 1 (something was found) or
130 (Ctrl-C), and then with one line on stderr that begins with its name. It never shows a traceback, never changes a
file that was there, and leaves no half-written result.

    VT_FUZZ_SECONDS=600 make fuzz      # as long as one likes, for each family of inputs

Each family draws its inputs from `random.Random(seed)`, so that a breach is found again by its number.
"""

import contextlib
import hashlib
import io
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

SECONDS = float(os.environ.get("VT_FUZZ_SECONDS", "20"))  # a family
MAX_SENTENCE_CHARS = 60  # seconds that one input may take, on whatever machine
STATUSES = (0, 1, 2, 130)


class TooLong(BaseException):
    """An input that hangs; no `except Exception` catches it."""


def call(main: Callable[[], None], prog: str, arguments: list[str], standard_input: bytes = b"") -> tuple[int, str]:
    """Runs a command in this process: its status and what it wrote to stderr.

    Raises:
        AssertionError: the contract is broken; says how, with the traceback where there was one.
    """
    shown = " ".join(map(str, arguments))[:500]
    errors = io.StringIO()
    before = sys.argv, sys.stdin, signal.getsignal(signal.SIGALRM)
    sys.argv = [prog, *map(str, arguments)]
    sys.stdin = io.TextIOWrapper(io.BytesIO(standard_input))

    def stop(*_):
        raise TooLong

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(MAX_SENTENCE_CHARS)
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except TooLong:
        raise AssertionError(f"{prog} {shown}: took longer than {MAX_SENTENCE_CHARS} s") from None
    except BaseException as error:
        where = "".join(traceback.format_exception(error)[-3:])
        raise AssertionError(f"{prog} {shown}: {type(error).__name__}\n{where}") from None
    finally:
        signal.alarm(0)
        sys.argv, sys.stdin = before[:2]
        signal.signal(signal.SIGALRM, before[2])
    told = errors.getvalue()
    assert status in STATUSES, f"{prog} {shown}: status {status}"
    if status == 2:
        lines = [line for line in told.splitlines() if line.strip()]
        assert len(lines) == 1, f"{prog} {shown}: {len(lines)} lines instead of one: {told[:1000]}"
        assert lines[0].startswith(f"{prog}: "), f"{prog} {shown}: {lines[0]}"
    return status, told


def fingerprint(folder: Path) -> dict[str, str]:
    """Every file below a folder with its hash."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def fuzz(name: str, try_one: Callable[[random.Random, Path], object], tmp_path: Path, seconds: float = SECONDS) -> int:
    """Calls `try_one(random, folder)` with fresh numbers and an empty folder until the time is over.

    Returns how many inputs were tried, and prints it.

    Raises:
        AssertionError: some inputs broke the contract; tells the first ten with their numbers.
    """
    breaches, tried, end = [], 0, time.monotonic() + seconds
    while time.monotonic() < end:
        folder = tmp_path / "try"
        folder.mkdir()
        try:
            try_one(random.Random(f"{name} {tried}"), folder)
        except AssertionError as error:
            breaches.append(f"[{name} {tried}] {error}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        tried += 1
    print(f"{name}: {tried:,} inputs tried, {len(breaches)} breaches")
    assert not breaches, f"{len(breaches)} of {tried:,} inputs:\n" + "\n".join(breaches[:10])
    return tried
