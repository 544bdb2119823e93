"""CUDA devices without a GPU: on PyTorch's CPU build, tensors on "cuda:0", "cuda:1", ... compute on the CPU.

    import simulated_cuda  # before torch, which detects accelerators only once
    simulated_cuda.install(devices=1, capability=(8, 0))
    with simulated_cuda.count_synchronizations() as counter:
        ...

    python tests/simulated_devices/simulated_cuda.py --capability 7.5 -m training.train training/recipes/demo.yaml

Simulated: errors for tensors on different devices, host-device synchronizations and their number, several devices,
compute capability, pinned memory, and `torch.OutOfMemoryError` for embedding lookups of more than `max_tokens` tokens.

Not simulated: time and races (all work is done immediately), CUDA graphs (a capture raises RuntimeError), memory sizes,
Triton, and NCCL. Results and random numbers are those of the CPU.
"""

import argparse
import ctypes
import hashlib
import importlib.util
import os
import runpy
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = Path(__file__).with_name("device.cpp")
REPOSITORY = Path(__file__).parents[2]
MEMORY = 16 * 2**30  # bytes that a device reports

synchronizations: Counter[tuple[str, str]] = Counter()  # operation, "file:line" of this repository -> number
_installed: dict[str, Any] = {}  # objects that C++ uses


def load(device: str) -> None:
    """Compile `device.cpp` for the installed torch, unless the cache has it, and load it, without importing torch."""
    assert "torch" not in sys.modules, "a simulated device must be installed before torch is imported"
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    torch = Path(spec.submodule_search_locations[0])
    key = hashlib.sha256(SOURCE.read_bytes() + (torch / "version.py").read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), "simulated_devices")
    library = folder / f"{device}_{key}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f"{library.name}.{os.getpid()}"
        includes = [f"-I{torch / name}" for name in ("include", "include/torch/csrc/api/include")]
        command = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-w", f"-DDEVICE={device}", str(SOURCE), *includes]
        libraries = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
        subprocess.run([*command, "-o", str(unfinished), *libraries], check=True)
        unfinished.replace(library)
    for path in (torch / "lib/libc10.so", torch / "lib/libtorch_cpu.so", library):
        ctypes.CDLL(str(path))


def install(devices: int = 1, capability: tuple[int, int] = (8, 0), max_tokens: int = 0) -> None:
    """Create the devices, or change the settings of existing ones.

    Args:
        devices: Number of devices.
        capability: Compute capability. From (8, 0) on, devices support bf16.
        max_tokens: An embedding lookup of more tokens raises `torch.OutOfMemoryError`. 0: no limit.
    """
    if not _installed:
        load("CUDA")
    import torch

    ops: Any = torch.ops.simulated_device
    if not _installed:
        _installed["callback"] = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_record)
        _patch(torch, ops)
    _installed["capability"], _installed["devices"] = capability, devices
    ops.configure(devices, max_tokens, ctypes.cast(_installed["callback"], ctypes.c_void_p).value)
    torch.cuda.default_generators = tuple(_Generator(torch, i) for i in range(devices))


def _record(operation: bytes) -> None:
    """Count a synchronization at the innermost line of this repository, or of any library if there is none."""
    frame: Any = sys._getframe()  # without a caller in a thread of autograd
    location = "backward pass"
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(REPOSITORY) and path != Path(__file__) and ".venv" not in path.parts:
            location = f"{path.relative_to(REPOSITORY)}:{frame.f_lineno}"
            break
        frame = frame.f_back
    synchronizations[operation.decode(), location] += 1


@contextmanager
def count_synchronizations() -> Iterator[Counter[tuple[str, str]]]:
    """Context manager that yields a counter, which contains the synchronizations after its end."""
    before, counter = Counter(synchronizations), Counter[tuple[str, str]]()
    yield counter
    counter.update(synchronizations - before)


class _Generator:
    """The default generator of a device. It is that of the CPU."""

    def __init__(self, torch: Any, index: int):
        self.torch, self.device = torch, torch.device("cuda", index)

    def manual_seed(self, seed: int) -> "_Generator":
        return self  # `torch.manual_seed` also seeds the generator of the CPU

    def initial_seed(self) -> int:
        return self.torch.initial_seed()

    def get_state(self) -> Any:
        return self.torch.get_rng_state()

    def set_state(self, state: Any) -> "_Generator":
        self.torch.set_rng_state(state)
        return self


def _patch(torch: Any, ops: Any) -> None:
    """Replace the functions of `torch.cuda` that the CPU build lacks."""
    cuda, binding = torch.cuda, torch._C

    def exchange_device(device: int) -> int:
        before = ops.get_device()
        ops.set_device(device)
        return before

    def get_properties(device: Any) -> SimpleNamespace:
        major, minor = _installed["capability"]
        return SimpleNamespace(
            name="Simulated GPU", major=major, minor=minor, total_memory=MEMORY, multi_processor_count=1, warp_size=32
        )

    def synchronize(device: Any = None) -> None:
        binding._accelerator_synchronizeDevice(cuda._utils._get_device_index(device, optional=True))

    class Stream:
        """All streams are the same."""

        def __init__(self, *args: Any, **kwargs: Any):
            self.device, self.stream_id, self.cuda_stream = torch.device("cuda", ops.get_device()), 0, 0

        def wait_stream(self, stream: Any) -> None:
            pass

        def synchronize(self) -> None:
            synchronize()

        def __eq__(self, other: Any) -> bool:
            return isinstance(other, Stream) and self.device == other.device

        def __hash__(self) -> int:
            return hash(self.device)

    class CUDAGraph:
        def capture_begin(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("the simulated device has no CUDA graphs")

        def capture_end(self) -> None:
            pass

    binding._has_cuda = True
    torch.version.cuda = "12.8"
    cuda._initialized = True
    for name, function in {
        "_cuda_getDeviceCount": lambda: _installed["devices"],
        "_cuda_init": lambda: None,
        "_cuda_getDevice": lambda: ops.get_device(),
        "_cuda_setDevice": lambda index: ops.set_device(index),
        "_cuda_exchangeDevice": exchange_device,
        "_cuda_maybeExchangeDevice": lambda device: exchange_device(device),
        "_cuda_synchronize": synchronize,
        "_cuda_getCurrentRawStream": lambda index: 0,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_CUDAAllocator_AllocatorState": type("AllocatorState", (), {}),  # `torch.compile` imports it
        "_cuda_emptyCache": lambda: None,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_getArchFlags": lambda: "sm_75 sm_80",
    }.items():
        setattr(binding, name, function)
    for name, value in {
        "_lazy_init": lambda: None,
        "is_available": lambda: _installed["devices"] > 0,
        "device_count": lambda: _installed["devices"],
        "_is_in_bad_fork": lambda: False,
        "get_device_properties": get_properties,
        "get_device_capability": lambda device=None: _installed["capability"],
        "get_device_name": lambda device=None: "Simulated GPU",
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": lambda device: exchange_device(device),  # `torch.compile` lists both functions
        "synchronize": synchronize,
        "mem_get_info": lambda device=None: (MEMORY, MEMORY),
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "current_stream": lambda device=None: Stream(),
        "stream": lambda stream: cuda.device(stream.device),
        "is_current_stream_capturing": lambda: False,
        "Stream": Stream,
        "CUDAGraph": CUDAGraph,
    }.items():
        for module in (cuda, cuda.streams, cuda.graphs, cuda.memory, cuda.random):
            if module is cuda or hasattr(module, name):
                setattr(module, name, value)
    new_storage = torch.UntypedStorage.__new__

    def make_storage(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        """Replace the constructor of the CPU build, which rejects the device "cuda"; `torch.load` calls it."""
        if device is None:
            return new_storage(cls, *args, **kwargs)
        if torch.device(device).type != "cuda":
            return new_storage(cls, *args, device=device, **kwargs)
        return torch.empty(args[0] if args else 0, dtype=torch.uint8, device=device).untyped_storage()

    torch.UntypedStorage.__new__ = make_storage


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a module with simulated CUDA devices.")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--capability", default="8.0")
    parser.add_argument(
        "--max-tokens", type=int, default=0, help="An embedding lookup of more tokens is out of memory."
    )
    parser.add_argument(
        "-m", dest="program", nargs=argparse.REMAINDER, required=True, help="A module and its arguments."
    )
    arguments = parser.parse_args()
    sys.modules["simulated_cuda"] = module = sys.modules["__main__"]  # one copy, also if the program imports it
    major, minor = map(int, arguments.capability.split("."))
    module.install(arguments.devices, (major, minor), arguments.max_tokens)
    sys.path[0], sys.argv = str(Path.cwd()), arguments.program
    runpy.run_module(arguments.program[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
