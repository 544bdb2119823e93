"""Atomic writes."""

from types import SimpleNamespace

import pytest

from vanilla_transformer.shared import atomic_io
from vanilla_transformer.shared.atomic_io import atomic_write, lock


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
