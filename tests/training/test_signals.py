"""Ctrl-C and SIGTERM with multiple processes: one complete checkpoint, and the same results after resuming."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
KEYS = ("--max-steps", "60", "--save-steps", "25", "--eval-steps", "20", "--logging-steps", "1")
HOLD = """
import time
from training.run import trainer
def hold(folder, time=time, original=trainer.write_manifest):
    while folder.name == "checkpoint-10":
        print("holding", flush=True)
        time.sleep(0.01)
    original(folder)
trainer.write_manifest = hold
"""


def result(folder: Path) -> tuple[bytes, list[dict]]:
    """Return the final weights, and the loss and gradient norm of all updates."""
    last = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    history = json.loads((last / "trainer_state.json").read_text())["log_history"]
    names = ("step", "loss", "grad_norm", "eval_loss")
    curve = [{name: entry[name] for name in names if name in entry} for entry in history]
    return (folder / "model.safetensors").read_bytes(), curve


def validate_stop(process, number: int, folder: Path) -> None:
    """Check that the command names a checkpoint of the last update with the files of both processes."""
    assert process.status == 128 + number, process.stderr[-3000:]
    assert "Traceback" not in process.stderr
    pattern = r"stopped at update (\d+) of 60. The same command resumes from checkpoint-(\d+)\."
    found = re.search(pattern, process.stderr)
    assert found, process.stderr[-2000:]
    assert found[1] == found[2]
    names = json.loads((folder / f"checkpoint-{found[1]}" / "files.json").read_text())
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= set(names)


def test_two_processes_stop_at_any_signal_and_resume_bit_for_bit(programs, recipe, start_ranks, run_ranks, tmp_path):
    """The signal reaches the group, the launcher only, or one of the processes."""
    run_ranks(recipe, *KEYS, "--output-dir", tmp_path / "expected")
    out = tmp_path / "out"
    for send, number in ((os.killpg, signal.SIGINT), (os.kill, signal.SIGTERM)):
        process = programs.start("training.train", recipe, *KEYS, "--num-processes", "2")
        process.wait_for(lambda process=process: "'loss'" in process.stderr)
        send(process.pid, number)
        validate_stop(process, number, out)
    for index, number in ((0, signal.SIGTERM), (1, signal.SIGINT)):
        ranks = start_ranks(recipe, *KEYS)
        ranks[0].wait_for(lambda ranks=ranks: "'loss'" in ranks[0].stderr)
        ranks[index].kill(number)
        validate_stop(ranks[0], number, out)
        assert ranks[1].status == 128 + number, ranks[1].stderr[-3000:]
        assert "resuming from" in ranks[0].stderr
    run_ranks(recipe, *KEYS)
    assert result(out) == result(tmp_path / "expected")


def test_three_processes_resume_bit_for_bit(start_ranks, run_ranks, recipe, tmp_path):
    """The sum of three gradients depends on their order in the buckets of DDP."""
    run_ranks(recipe, *KEYS, "--output-dir", tmp_path / "expected", processes=3)
    ranks = start_ranks(recipe, *KEYS, processes=3)
    ranks[0].wait_for(lambda: "'loss'" in ranks[0].stderr)
    ranks[2].kill(signal.SIGTERM)
    assert [rank.status for rank in ranks] == [128 + signal.SIGTERM] * 3
    run_ranks(recipe, *KEYS, processes=3)
    assert result(tmp_path / "out") == result(tmp_path / "expected")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_ends_the_run_at_once(programs, recipe, tmp_path, number):
    """The last complete checkpoint is still valid."""
    keys = (*KEYS, "--save-steps", "5", "--max-steps", "12")
    process = programs.start("training.train", recipe, *keys, setup_code=HOLD)
    process.wait_for(lambda: "holding" in process.stdout)
    process.kill(number)
    process.wait_for(lambda: "Send it again to stop at once" in process.stderr)
    process.kill(number)
    assert process.status in (-number, 128 + number)
    assert not (tmp_path / "out" / "checkpoint-10" / "files.json").exists()
    assert "checkpoint-5\n" in programs.run("training.train", recipe, *keys).stderr
