import os
import signal
import subprocess
import sys

import pytest

OTHERS = (
    *("training.train", "training.score", "training.average", "training.diversify", "training.benchmark"),
    *("hub.import_checkpoint", "hub.export", "hub.model_card", "hub.decoding", "hub.space"),
)
VERBS = ("training.translate", "hub.push", *(pytest.param(verb, marks=pytest.mark.slow) for verb in OTHERS))
SLOW_TORCH = "import time; print('importing', flush=True); time.sleep(600)"


@pytest.mark.parametrize("verb", VERBS)
def test_ctrl_c_while_a_verb_is_imported_is_quiet(repository, tmp_path, verb):
    """A torch whose import goes on and on stands before the other."""
    (tmp_path / "torch.py").write_text(SLOW_TORCH)
    with subprocess.Popen(
        [sys.executable, "-m", verb, "--help"], cwd=repository, env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == -signal.SIGINT  # which a shell calls status 130
    assert errors == ""


def test_importing_the_folders_leaves_ctrl_c_alone(repository):
    code = "import signal, training, hub; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    process = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=True)
    assert process.stdout == "True\n"


INTERRUPTED = """
import os, signal, sys
sys.argv = ["-m"]
import training
assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
from vanilla_transformer.shared.command_line import exit_on_user_error
with exit_on_user_error("verb"):
    os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.slow
def test_ctrl_c_in_a_verb_is_pythons_own_again(repository):
    """So that what is half written is removed."""
    process = subprocess.run([sys.executable, "-c", INTERRUPTED], cwd=repository, capture_output=True, check=False)
    assert process.returncode == 130
    assert b"Traceback" not in process.stderr
