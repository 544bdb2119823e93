"""Atomic writes of files and directories."""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from vanilla_transformer.shared import atomic_io
from vanilla_transformer.shared.atomic_io import (
    CAN_LOCK,
    atomic_write,
    lock,
    validate_new_dir,
    write_dir_atomically,
)


def test_atomic_write_leaves_complete_file_or_none(tmp_path):
    path = tmp_path / "a"

    def fail():
        with atomic_write(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert not list(tmp_path.iterdir())
    with atomic_write(path) as temporary:
        temporary.write_text("complete")
    assert path.read_text() == "complete"
    assert list(tmp_path.iterdir()) == [path]


def test_lock_on_windows(tmp_path, monkeypatch):
    locked = []

    def locking(descriptor, mode, size):
        if locked:
            raise PermissionError(13, "Permission denied")
        locked.append((mode, size))

    monkeypatch.setattr(atomic_io, "CAN_LOCK", False)
    monkeypatch.setattr(atomic_io, "msvcrt", SimpleNamespace(locking=locking, LK_NBLCK=2), raising=False)
    with (tmp_path / "lock").open("a") as file:
        lock(file, wait=False)
        with pytest.raises(BlockingIOError):
            lock(file, wait=False)
    assert locked == [(2, 1)]


def test_creates_complete_directory_or_none(tmp_path):
    other = tmp_path / "out.unfinished"
    other.mkdir()

    def fail(folder):
        (folder / "half").write_text("x")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_dir_atomically(tmp_path / "out", fail)
    assert list(tmp_path.iterdir()) == [other]
    write_dir_atomically(tmp_path / "deep" / "out", lambda folder: (folder / "file").write_text("x"))
    assert (tmp_path / "deep" / "out" / "file").read_text() == "x"
    assert list((tmp_path / "deep").iterdir()) == [tmp_path / "deep" / "out"]


WRITERS = {
    "Python": lambda folder: (folder / "x").write_bytes(bytes(20_000)),
    "safetensors": lambda folder: save_file({"x": torch.zeros(20_000)}, folder / "x"),
    "tokenizers": lambda folder: Tokenizer(models.WordLevel({str(i): i for i in range(9999)})).save(str(folder / "x")),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_reports_full_disk_and_removes_partial_output(tmp_path, full_disk, writer):
    with (
        full_disk(),
        pytest.raises(OSError, match=r"out could not be written: File too large. No partial output was kept"),
    ):
        write_dir_atomically(tmp_path / "out", WRITERS[writer])
    assert list(tmp_path.iterdir()) == []


def test_does_not_change_other_errors(tmp_path):
    def fail(folder):
        raise KeyError("name")

    with pytest.raises(KeyError):
        write_dir_atomically(tmp_path / "out", fail)


WRITE = """
import sys, time
from pathlib import Path
from vanilla_transformer.shared.atomic_io import write_dir_atomically
def write(folder):
    (folder / "half").write_text("x")
    print("writing", flush=True)
    time.sleep(60)
write_dir_atomically(Path(sys.argv[1]), write)
"""


@pytest.mark.skipif(not CAN_LOCK, reason="Windows has no file locks")
def test_removes_leftovers_of_killed_runs(tmp_path, repository, caplog):
    """Directories of running processes, and others with such a name, are kept."""
    caplog.set_level("INFO", logger="vanilla_transformer")
    other = tmp_path / "out.unfinished-other"
    other.mkdir()
    (other / "file").write_text("x")
    command = [sys.executable, "-c", WRITE, tmp_path / "out"]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, cwd=repository)
    try:
        process.stdout.readline()
        validate_new_dir(tmp_path / "out")
        (leftover,) = set(tmp_path.iterdir()) - {other}
        assert (leftover / "result" / "half").exists()
        assert not caplog.messages
        process.send_signal(signal.SIGKILL)
        process.wait()
        validate_new_dir(tmp_path / "out")
        assert list(tmp_path.iterdir()) == [other]
        assert f"Removed {leftover}" in caplog.text
        assert (other / "file").read_text() == "x"
    finally:
        process.kill()
        process.stdout.close()


def test_removes_leftovers_of_every_moment(tmp_path):
    """A run killed before any of its operations on files leaves nothing that the next run does not remove."""
    if not hasattr(os, "fork"):
        pytest.skip("Windows has no fork")
    out, complete = tmp_path / "out", False
    for operations in itertools.count():
        child = os.fork()
        if not child:
            sys.addaudithook(KillBeforeOperation(operations))
            with contextlib.suppress(BaseException):
                write_dir_atomically(out, lambda folder: (folder / "file").write_text("x"))
                os._exit(0)
            os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, -signal.SIGKILL)
        if out.exists():
            complete = True
            assert (out / "file").read_text() == "x"
            shutil.rmtree(out)
        validate_new_dir(out)
        assert list(tmp_path.iterdir()) == []
        if status == 0:
            break
    assert complete
    assert operations > 8


class KillBeforeOperation:
    """Audit hook that kills the process before its (`remaining` + 1)-th operation on files."""

    def __init__(self, remaining: int) -> None:
        self.remaining = remaining

    def __call__(self, event: str, arguments: tuple) -> None:
        if event == "open" or event.startswith(("os.", "shutil.", "tempfile.", "fcntl.")):
            self.remaining -= 1  # before `os.kill`, which is an event itself
            if self.remaining == -1:
                os.kill(os.getpid(), signal.SIGKILL)


def test_rejects_paths_that_cannot_be_created(tmp_path):
    (tmp_path / "file").write_text("x")
    try:
        (tmp_path / "link").symlink_to(tmp_path / "missing")
    except OSError:
        pytest.skip("Windows allows links only with a privilege")
    with pytest.raises(ValueError, match=r"file is not a directory, or you have no write"):
        validate_new_dir(tmp_path / "file" / "deep" / "out")
    for name in ("file", "link"):
        with pytest.raises(ValueError, match="already exists"):
            validate_new_dir(tmp_path / name)
    validate_new_dir(tmp_path / "deep" / "out")
    validate_new_dir(Path("deep") / "out")
    assert not (tmp_path / "deep").exists()
