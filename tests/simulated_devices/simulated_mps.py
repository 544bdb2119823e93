"""The MPS device of a Mac without a Mac: on PyTorch's CPU build, tensors on "mps" compute on the CPU.

    import simulated_mps  # before torch, which detects accelerators only once
    simulated_mps.install()

    python tests/simulated_devices/simulated_mps.py -m training.train training/recipes/demo.yaml

Simulated: the detection of the device, TypeError for tensors of `REJECTED_DTYPES`, NotImplementedError for operators
without a kernel for MPS in the installed torch, errors for tensors on different devices, and no pinned memory.

Not simulated: macOS, time and races (all work is done immediately), memory sizes, and errors of the kernels of MPS.
Results and random numbers are those of the CPU.
"""

import argparse
import re
import runpy
import sys
from importlib import resources
from pathlib import Path

import simulated_cuda

# MPS lacks the first two. From macOS 14 on, which torch requires, it has the others, but only on request.
REJECTED_DTYPES = ["Double", "ComplexDouble", "BFloat16", "Half"]


def install() -> None:
    """Create the device."""
    simulated_cuda.load("MPS")
    import torch

    torch._C._has_mps = True
    restrict()


def restrict(dtypes: list[str] = REJECTED_DTYPES) -> None:
    """Let the device reject tensors of these types, and operators without a kernel."""
    import torch

    torch.ops.simulated_device.restrict(dtypes, find_operators())


def find_operators() -> list[str]:
    """Return the operators of the installed torch that have a kernel for MPS, according to `native_functions.yaml`."""
    text = (resources.files("torchgen") / "packaged/ATen/native/native_functions.yaml").read_text(encoding="utf-8")
    entries = {entry.partition("(")[0]: entry for entry in text.split("\n- func: ")[1:]}
    found = {name for name, entry in entries.items() if re.search(r"^ +[\w, ]*\bMPS\b[\w, ]*:", entry, re.MULTILINE)}
    delegates = {name: re.search(r"structured_delegate: (\S+)", entry) for name, entry in entries.items()}
    found |= {name for name, delegate in delegates.items() if delegate and delegate[1] in found}
    return [f"aten::{name}" for name in sorted(found)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a module with a simulated MPS device.")
    parser.add_argument("-m", dest="program", nargs=argparse.REMAINDER, required=True)
    sys.argv = parser.parse_args().program
    sys.modules["simulated_mps"] = sys.modules["__main__"]  # one copy, also if the program imports it
    install()
    sys.path[0] = str(Path.cwd())
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
