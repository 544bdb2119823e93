"""The command `training.distill` with multiple processes and an interruption."""

import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def test_resumes_after_kill_with_other_number_of_processes(programs, finished, repository, tmp_path):
    source = tmp_path / "text.en"
    source.write_text((finished.parent / "data" / "train.en").read_text() * 2)
    arguments = (finished, finished / "checkpoint-4", "--source", source, "--nbest", "2", "--batch-size", "2")
    programs.run("training.distill", *arguments, "--output", tmp_path / "single.tsv")
    process = programs.start("training.distill", *arguments, "--output", tmp_path / "shared.tsv")
    process.wait_for(lambda: len(list((tmp_path / "shared.tsv.parts").glob("0-*.json"))) >= 2)
    process.kill()
    assert process.status == -signal.SIGKILL
    assert not (tmp_path / "shared.tsv").exists()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "training.distill"]
    command += [*map(str, arguments), "--output", str(tmp_path / "shared.tsv")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=repository, env=environment, check=True, capture_output=True)
    assert (tmp_path / "shared.tsv").read_bytes() == (tmp_path / "single.tsv").read_bytes()
    assert not list(tmp_path.glob("*.parts"))
