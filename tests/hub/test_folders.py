import pytest

from hub.folders import write_whole


def test_a_folder_is_whole_or_not_there(tmp_path):
    mine = tmp_path / "out.unfinished"
    mine.mkdir()

    def breaks(folder):
        (folder / "half").write_text("x")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_whole(tmp_path / "out", breaks)
    assert list(tmp_path.iterdir()) == [mine]
    write_whole(tmp_path / "deep" / "out", lambda folder: (folder / "file").write_text("x"))
    assert (tmp_path / "deep" / "out" / "file").read_text() == "x"
