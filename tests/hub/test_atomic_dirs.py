import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from hub.atomic_dirs import validate_new_dir, write_dir_atomically


def test_a_folder_is_whole_or_not_there(tmp_path):
    mine = tmp_path / "out.unfinished"
    mine.mkdir()

    def breaks(folder):
        (folder / "half").write_text("x")
        raise OSError("disk full")

    for out in (tmp_path / "out", tmp_path / "deep" / "er" / "out"):
        with pytest.raises(OSError, match="disk full"):
            write_dir_atomically(out, breaks)
        assert list(tmp_path.iterdir()) == [mine]
    write_dir_atomically(tmp_path / "deep" / "out", lambda folder: (folder / "file").write_text("x"))
    assert (tmp_path / "deep" / "out" / "file").read_text() == "x"
    assert list((tmp_path / "deep").iterdir()) == [tmp_path / "deep" / "out"]


WRITERS = {
    "Python": lambda folder: (folder / "x").write_bytes(bytes(20_000)),
    "safetensors": lambda folder: save_file({"x": torch.zeros(20_000)}, folder / "x"),
    "tokenizers": lambda folder: Tokenizer(models.WordLevel({str(i): i for i in range(9999)})).save(str(folder / "x")),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_told_and_leaves_nothing(tmp_path, full_disk, writer):
    with (
        full_disk(),
        pytest.raises(OSError, match=r"out could not be written: File too large. Nothing of it is left"),
    ):
        write_dir_atomically(tmp_path / "out", WRITERS[writer])
    assert list(tmp_path.iterdir()) == []


def test_other_errors_stay_as_they_are(tmp_path):
    def breaks(folder):
        raise KeyError("mine")

    with pytest.raises(KeyError):
        write_dir_atomically(tmp_path / "out", breaks)


WRITE = """
import sys, time
from pathlib import Path
from hub.atomic_dirs import write_dir_atomically
def write(folder):
    (folder / "half").write_text("x")
    print("writing", flush=True)
    time.sleep(60)
write_dir_atomically(Path(sys.argv[1]), write)
"""


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path, repository, capsys):
    """And nothing that is another's: of a run that goes on, or of a name like that."""
    mine = tmp_path / "out.unfinished-mine"
    mine.mkdir()
    (mine / "file").write_text("x")
    command = [sys.executable, "-c", WRITE, tmp_path / "out"]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, cwd=repository)
    try:
        process.stdout.readline()
        validate_new_dir(tmp_path / "out")
        (left,) = set(tmp_path.iterdir()) - {mine}
        assert (left / "result" / "half").exists()
        assert capsys.readouterr().out == ""
        process.send_signal(signal.SIGKILL)
        process.wait()
        validate_new_dir(tmp_path / "out")
        assert list(tmp_path.iterdir()) == [mine]
        assert f"removed {left}" in capsys.readouterr().out
        assert (mine / "file").read_text() == "x"
    finally:
        process.kill()
        process.stdout.close()


def test_places_that_cannot_be_made_are_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="file is not a folder: give another place"):
        validate_new_dir(tmp_path / "file" / "deep" / "out")
    for name in ("file", "link"):
        with pytest.raises(ValueError, match="exists already"):
            validate_new_dir(tmp_path / name)
    validate_new_dir(tmp_path / "deep" / "out")
    validate_new_dir(Path("deep") / "out")
    assert not (tmp_path / "deep").exists()
