"""Kills, Ctrl-C and full disks: no incomplete result has its final name."""

import json
import shutil
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

pytestmark = pytest.mark.slow
CTRL_C = """
from pathlib import Path
def replace(self, target, os=os, original=Path.replace):
    if self.name.endswith(".unfinished"):  # everything is written, before the final rename
        os.kill(os.getpid(), 2)
    return original(self, target)
Path.replace = replace
"""
FULL = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}))"


@pytest.fixture
def long_text(finished, tmp_path) -> tuple[Path, Path]:
    """The test set, repeated 40 times."""
    paths = []
    for language in ("en", "de"):
        path = tmp_path / f"long.{language}"
        path.write_text((finished.parent / "data" / f"test.{language}").read_text() * 40)
        paths.append(path)
    return paths[0], paths[1]


@pytest.fixture
def arguments_of(finished, long_text, tmp_path):
    """Return the arguments of a command that writes an output."""
    source, target = long_text
    pair = ("--source", source, "--target", target)

    def make(command: str, out: Path) -> tuple:
        return {
            "translate": (finished, "--input", source, "--output", out, "--num-beams", "1", "--batch-size", "2"),
            "diversify": (finished, finished / "checkpoint-4", *pair, "--output", out),
            "distill": (finished, *pair, "--output", out, "--batch-size", "2", "--keep-copies"),
            "average": (finished, "--last", "3", "--output", out),
            "score": (finished, "--source", source, "--reference", target, "--nll", "--per-pair-output", out),
        }[command]

    return make


def same(one: Path, other: Path) -> bool:
    if one.is_file():
        return one.read_bytes() == other.read_bytes()
    AutoTokenizer.from_pretrained(other)
    first, second = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    names = [{path.name for path in folder.iterdir()} for folder in (one, other)]
    return names[0] == names[1] and all(first[name].equal(second[name]) for name in first)


@pytest.mark.parametrize("command", ["translate", "distill", "average", "score"])
def test_results_are_complete_or_absent_after_kills(programs, arguments_of, kill_at_random_moments, tmp_path, command):
    expected = tmp_path / ("expected.tsv" if command == "distill" else "expected")
    programs.run(f"training.{command}", *arguments_of(command, expected))
    out = expected.with_stem("killed")

    def check() -> None:
        if out.exists():
            assert same(expected, out)
            shutil.rmtree(out) if out.is_dir() else out.unlink()

    kill_at_random_moments(lambda: programs.start(f"training.{command}", *arguments_of(command, out)), check)
    programs.run(f"training.{command}", *arguments_of(command, out))
    assert same(expected, out)
    assert not list(tmp_path.glob("*.unfinished")) + list(tmp_path.glob("*.parts"))


@pytest.mark.parametrize("command", ["translate", "distill", "average", "score"])
def test_ctrl_c_and_full_disk_leave_no_files(programs, arguments_of, tmp_path, command):
    out = tmp_path / "out.tsv"
    files_before = set(tmp_path.iterdir())
    size = 20_000 if command == "average" else 4_000
    process = programs.run(f"training.{command}", *arguments_of(command, out), setup_code=FULL.format(size), status=2)
    assert process.stderr.count(f"training.{command}: ") == 1
    assert f"{out} could not be written" in process.stderr
    assert "MiB are free" in process.stderr
    process = programs.run(f"training.{command}", *arguments_of(command, out), setup_code=CTRL_C, status=130)
    assert "Traceback" not in process.stderr
    parts = tmp_path / "out.tsv.parts"  # finished parts of a table are kept for resuming
    parts.exists() and shutil.rmtree(parts)
    assert set(tmp_path.iterdir()) == files_before


@pytest.mark.parametrize("command", ["translate", "score"])
def test_full_stdout_is_reported_in_one_line(programs, finished, test_files, command):
    arguments = {
        "translate": (finished, "--input", test_files[0]),
        "score": (finished, "--source", test_files[0], "--reference", test_files[1], "--nll"),
    }[command]
    full = "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)"
    process = programs.run(f"training.{command}", *arguments, setup_code=full, status=2)
    assert "No space left" in process.stderr
    assert "Traceback" not in process.stderr
    assert "Exception ignored" not in process.stderr


def test_full_disk_while_saving_the_final_model(programs, recipe, tmp_path):
    """The same command resumes from the last checkpoint."""
    arguments = (recipe, "--save-strategy", "no")
    process = programs.run("training.train", *arguments, setup_code=FULL.format(60_000), status=2)
    assert "could not be written" in process.stderr
    assert "Traceback" not in process.stderr
    programs.run("training.train", *arguments)
    assert json.loads((tmp_path / "out" / "all_results.json").read_text())["data"]["train"]["pairs"] == 120


@pytest.mark.parametrize("name", ["recipe.yaml", "tokenizer.json", "tokenizer_config.json", "all_results.json"])
def test_kill_while_writing_a_file_of_the_run(programs, recipe, tmp_path, name):
    """The file is complete or absent, and the same command resumes."""
    kill = (
        "from pathlib import Path\n"
        f"def cut(self, target, os=os, name={name!r}, replace=Path.replace):\n"
        "    os.kill(os.getpid(), 9) if str(target).endswith(name) else None\n"
        "    return replace(self, target)\nPath.replace = cut"
    )
    process = programs.start("training.train", recipe, setup_code=kill)
    assert process.status == -signal.SIGKILL
    assert not (tmp_path / "out" / name).exists()
    programs.run("training.train", recipe)
    assert (tmp_path / "out" / name).exists()
    assert not list((tmp_path / "out").glob("*.unfinished"))
