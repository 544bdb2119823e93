"""Training and decoding on simulated CUDA and MPS devices, each in a separate process."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="simulated devices require Linux"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="simulated devices require g++"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="simulated devices require a CPU build of torch"),
]


@pytest.mark.parametrize(
    ("device", "programs"),
    [
        (["simulated_cuda.py", "--devices", "2"], ["cuda_decoding.py", "cuda_training.py"]),
        (["simulated_mps.py"], ["mps_training.py"]),
    ],
    ids=["cuda", "mps"],
)
def test_programs_pass_on_simulated_devices(device, programs):
    script, *options = device
    command = [sys.executable, str(FOLDER / script), *options, "-m", "pytest", "-q", "-n", "0", "--log-level=INFO"]
    command += [str(FOLDER / program) for program in programs]
    process = subprocess.run(command, cwd=FOLDER.parents[1], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout[-8000:] + process.stderr[-2000:]
