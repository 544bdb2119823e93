"""Training and decoding on simulated CUDA devices, each in a separate process."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="simulated CUDA devices require Linux"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="simulated CUDA devices require g++"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="simulated CUDA devices require a CPU build of torch"),
]


@pytest.mark.parametrize("program", sorted(path.name for path in FOLDER.glob("on_device_*.py")))
def test_program_passes_on_simulated_devices(program):
    command = [sys.executable, str(FOLDER / "simulated_cuda.py"), "--devices", "2", "-m", "pytest", "-q", "-n", "0"]
    process = subprocess.run(
        [*command, str(FOLDER / program)], cwd=FOLDER.parents[1], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout[-8000:] + process.stderr[-2000:]
