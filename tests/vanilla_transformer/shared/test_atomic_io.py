"""Atomic writes."""

import pytest

from vanilla_transformer.shared.atomic_io import atomic_write


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
