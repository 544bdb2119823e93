"""Results that are whole or not there."""

import pytest

from vanilla_transformer.shared.outputs import whole


def test_a_file_is_whole_or_not_there(tmp_path):
    path = tmp_path / "a"

    def fail():
        with whole(path) as unfinished:
            unfinished.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert not list(tmp_path.iterdir())
    with whole(path) as unfinished:
        unfinished.write_text("whole")
    assert path.read_text() == "whole"
    assert list(tmp_path.iterdir()) == [path]
