"""The contract of all commands for arbitrary input, and a loop that tests it on random input.

A command ends with status 0, 2 (user error), 1 (findings) or 130 (Ctrl-C). With status 2, the last line on stderr,
after messages, is the only one that starts with its name. It never shows a traceback, never changes an existing file,
and leaves no partial results.

    VT_FUZZ_SECONDS=600 make fuzz      # seconds per family of inputs

The inputs of a family are sampled with `random.Random(seed)`. The number of an input reproduces a failure.
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

SECONDS = float(os.environ.get("VT_FUZZ_SECONDS", "10"))  # per family
TIMEOUT_SECONDS = 60  # per input
STATUSES = (0, 1, 2, 130)


class InputTimeout(BaseException):
    """Timeout of one input. It is not an Exception, so that no `except Exception` catches it."""


def call(main: Callable[[], None], prog: str, arguments: list[str], standard_input: bytes = b"") -> tuple[int, str]:
    """Run a command in this process, and return its status and its stderr.

    Raises:
        AssertionError: The command violates the contract.
    """
    shown = " ".join(map(str, arguments))[:500]
    errors = io.StringIO()
    before = sys.argv, sys.stdin, signal.getsignal(signal.SIGALRM)
    sys.argv = [prog, *map(str, arguments)]
    sys.stdin = io.TextIOWrapper(io.BytesIO(standard_input))

    def stop(*_):
        raise InputTimeout

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(TIMEOUT_SECONDS)
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except InputTimeout:
        raise AssertionError(f"{prog} {shown}: took longer than {TIMEOUT_SECONDS} s") from None
    except BaseException as error:
        where = "".join(traceback.format_exception(error)[-3:])
        raise AssertionError(f"{prog} {shown}: {type(error).__name__}\n{where}") from None
    finally:
        signal.alarm(0)
        sys.argv, sys.stdin = before[:2]
        signal.signal(signal.SIGALRM, before[2])
    stderr = errors.getvalue()
    assert status in STATUSES, f"{prog} {shown}: status {status}"
    if status == 2:
        lines = [line for line in stderr.splitlines() if line.strip()]
        is_error = [line.startswith(f"{prog}: ") for line in lines]
        assert is_error == [False] * (len(lines) - 1) + [True], f"{prog} {shown}: {stderr[:1000]}"
        assert "Traceback" not in stderr, f"{prog} {shown}: {stderr[:1000]}"
    return status, stderr


def fingerprint(folder: Path) -> dict[str, str]:
    """Return the hash of every file below a directory."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def fuzz(name: str, try_one: Callable[[random.Random, Path], object], tmp_path: Path, seconds: float = SECONDS) -> int:
    """Call `try_one(random, directory)` with new random numbers and an empty directory until the time is over.

    Returns:
        The number of inputs.

    Raises:
        AssertionError: Inputs violate the contract. The message contains the first ten with their numbers.
    """
    violations, tried, end = [], 0, time.monotonic() + seconds
    while time.monotonic() < end:
        folder = tmp_path / "try"
        folder.mkdir()
        try:
            try_one(random.Random(f"{name} {tried}"), folder)
        except AssertionError as error:
            violations.append(f"[{name} {tried}] {error}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        tried += 1
    print(f"{name}: {tried:,} inputs tried, {len(violations)} violations")
    assert not violations, f"{len(violations)} of {tried:,} inputs:\n" + "\n".join(violations[:10])
    return tried
