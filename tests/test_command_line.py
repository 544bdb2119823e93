import argparse
import os
import signal
import subprocess
import sys

import pytest
import torch

from vanilla_transformer.shared.command_line import checkpoint_name, exit_on_user_error

COMMANDS = ("training.translate .", "hub.push . user/name")
SLOW_COMMANDS = (
    *("training.train demo", "training.score . --source README.md", "training.average . --output NEW"),
    *("training.diversify . . --source README.md --target README.md --output NEW", "training.benchmark"),
    *("training.distill . --source README.md --output NEW", "hub.import_checkpoint README.md NEW"),
    *("hub.export . NEW --to onnx", "hub.space ."),
)
SLOW_TORCH = "import time; print('importing', flush=True); time.sleep(600)"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends Ctrl-C only to all processes of a console")
@pytest.mark.parametrize(
    "command", [*COMMANDS, *(pytest.param(command, marks=pytest.mark.slow) for command in SLOW_COMMANDS)]
)
def test_ctrl_c_during_imports_prints_nothing(repository, tmp_path, command):
    """A module `torch` whose import never ends is first on the path."""
    (tmp_path / "torch.py").write_text(SLOW_TORCH)
    words = command.replace("NEW", str(tmp_path / "new")).split()
    with subprocess.Popen(
        [sys.executable, "-m", *words], cwd=repository, env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode in (-signal.SIGINT, 130)  # both are status 130 in a shell
    assert errors == ""


def test_imports_keep_the_sigint_handler(repository):
    code = "import signal, training, hub; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    process = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=True)
    assert process.stdout == "True\n"


def test_too_little_memory_is_a_user_error(capsys):
    for allocate in (lambda: torch.empty(10**15), lambda: bytes(10**18)):
        with pytest.raises(SystemExit, match="2"), exit_on_user_error("command"):
            allocate()
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("command: Out of memory. Use smaller batches: with --max-tokens in training")
    with pytest.raises(RuntimeError, match="different"), exit_on_user_error("command"):
        raise RuntimeError("different")


INTERRUPTED = """
import os, signal, sys
sys.argv = ["-m"]
import training
assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
from vanilla_transformer.shared.command_line import exit_on_user_error
with exit_on_user_error("command"):
    os.kill(os.getpid(), signal.SIGINT)
"""


def test_missing_run_is_not_a_name_on_the_hub(monkeypatch, tmp_path):
    """A missing directory in `runs` is reported, even if `runs` does not exist."""
    monkeypatch.chdir(tmp_path)
    assert checkpoint_name("user/name") == "user/name"
    for name in ("runs/demo", "runs", "./user/name"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"{name} does not exist"):
            checkpoint_name(name)
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    assert checkpoint_name("runs/demo") == "runs/demo"


def test_windows_prints_utf_8(monkeypatch, tmp_path):
    with (tmp_path / "out").open("w", encoding="cp1252") as output:
        monkeypatch.setattr("sys.stdout", output)
        monkeypatch.setattr("sys.platform", "win32")
        with exit_on_user_error("command"):
            print("Łódź, 東京")
    assert (tmp_path / "out").read_text(encoding="utf-8") == "Łódź, 東京\n"


@pytest.mark.slow
def test_ctrl_c_in_a_command_raises_keyboard_interrupt(repository):
    """KeyboardInterrupt lets context managers remove incomplete files."""
    process = subprocess.run([sys.executable, "-c", INTERRUPTED], cwd=repository, capture_output=True, check=False)
    assert process.returncode == 130
    assert b"Traceback" not in process.stderr
