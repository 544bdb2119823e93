"""Results that are whole or not there."""

import pytest

from vanilla_transformer.shared.atomic_io import atomic_write


def test_a_file_is_whole_or_not_there(tmp_path):
    path = tmp_path / "a"

    def fail():
        with atomic_write(path) as unfinished:
            unfinished.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert not list(tmp_path.iterdir())
    with atomic_write(path) as unfinished:
        unfinished.write_text("atomic_write")
    assert path.read_text() == "atomic_write"
    assert list(tmp_path.iterdir()) == [path]
