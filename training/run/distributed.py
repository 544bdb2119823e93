"""Distributed runs on one machine: number, start, output and end of the processes."""

import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from datasets.utils.logging import disable_progress_bar
from torch import nn
from torch.distributed import TCPStore
from torch.nn.parallel import DistributedDataParallel

from vanilla_transformer.shared.command_line import LAUNCHED, logger

from .. import STARTED
from ..recipe.arguments import TrainingArguments

MIN_CPU_TOKENS = 500  # minimum per process, of the tokens of an update; `demo.yaml` has 512 in each of 2 processes
MAX_CPU_PROCESSES = 8  # each has its own copy of the model, the optimizer and the data; other cores run threads
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a Linux container: microseconds of CPU time per period, and the period
CPU_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"  # of Linux; hardware threads of a core
COMMAND = ("-m", __package__.removesuffix("run") + "train")
STOP_SIGNALS = signal.SIGINT, signal.SIGTERM
POLL_SECONDS = 0.1  # between checks of the processes
ERROR_DELAY_SECONDS = 2  # time for the main process to report the error


def resolve_num_processes(args: TrainingArguments) -> int:
    """Return the number of processes to start. Raises ValueError if there are fewer devices."""
    device, requested = args.device.type, args.num_processes
    devices = count_cores() if device == "cpu" else torch.get_device_module(device).device_count()
    if requested == "auto":
        most = devices
        if device == "cpu":
            most = min(MAX_CPU_PROCESSES, max(1, args.tokens_per_update // MIN_CPU_TOKENS))
        return 1 if sys.platform == "win32" else min(devices, most)
    if device != "cpu" and int(requested) > devices:
        raise ValueError(
            f"num_processes={requested} requires {requested} devices, but {device} has {devices}. Remove "
            f"num_processes, or set use_cpu."
        )
    return int(requested)


def count_cores() -> int:
    """Return the number of physical cores that this process may use, or of logical ones if these are unknown."""
    if not hasattr(os, "sched_getaffinity"):  # macOS and Windows
        return os.cpu_count() or 1
    paths = [Path(CPU_TOPOLOGY.format(number)) for number in os.sched_getaffinity(0)]
    cores = len({path.read_text(encoding="utf-8") if path.exists() else path for path in paths})
    quota = CPU_QUOTA.read_text(encoding="utf-8").split() if CPU_QUOTA.exists() else ["max"]
    return cores if quota[0] == "max" else min(cores, max(1, math.ceil(int(quota[0]) / int(quota[1]))))


def describe_plan(args: TrainingArguments) -> str:
    """Return how processes and micro-batches share the tokens of an update."""
    processes, batches, tokens = args.world_size, args.gradient_accumulation_steps, args.tokens_per_update
    cores = count_cores()
    machine = f"CPU, {cores} core{'s' * (cores > 1)}" if args.device.type == "cpu" else args.device.type.upper()
    return (
        f"{processes} process{'es' * (processes > 1)} x {batches} batch{'es' * (batches > 1)} of "
        f"{math.ceil(tokens / processes / batches):,} tokens = {tokens:,} tokens per update "
        f"({machine}, {args.precision})"
    )


def launch(processes: int, arguments: list[str], started: float = STARTED, output: int | None = None) -> int:
    """Run `training.train` in local processes, and return the exit status: 0, or that of a failed process.

    If one process fails, the others are killed. The first SIGINT or SIGTERM is forwarded to all processes through their
    stdin, because a terminal or a scheduler may also send it to them directly. The second one kills them.

    Args:
        processes: Number of processes. A single one is not distributed.
        started: Time from which the time of the run counts.
        output: Standard output of the processes, such as `subprocess.DEVNULL`.
    """
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, use_libuv=False)
    environment = {"OMP_NUM_THREADS": str(max(1, count_cores() // processes))} | os.environ
    environment |= {LAUNCHED: str(started), "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
    if processes > 1:
        environment |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
    environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "USE_LIBUV": "0"}  # the processes connect to `store`
    if sys.platform == "win32":  # without libuv, the store must be opened by the main process
        del store, environment["TORCHELASTIC_USE_AGENT_STORE"]
    command = [sys.executable, *COMMAND, *arguments]
    ranks: list[subprocess.Popen] = []
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if received or len(ranks) < processes:
            sys.exit(128 + number)
        received.append(number)
        for process in ranks:
            with suppress(OSError):  # it has ended
                os.write(process.stdin.fileno(), bytes([number]))  # type: ignore[union-attr]

    previous = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    try:
        for rank in map(str, range(processes)):
            variables = environment | ({"RANK": rank, "LOCAL_RANK": rank} if processes > 1 else {})
            ranks.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, env=variables))
        while not any(statuses := [process.poll() for process in ranks]) and None in statuses:
            time.sleep(POLL_SECONDS)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        for number, handler in previous.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: not installed from Python
    failed = [(status, index) for index, status in enumerate(statuses) if status]
    status, index = min(failed, default=(0, 0))  # signals (negative) first, because they make other processes fail
    if status < 0 and -status not in STOP_SIGNALS:
        name = signal.Signals(-status).name
        message = f"process {index} of {processes} was ended by {name}. If memory is exhausted, use fewer processes."
        print(f"training.train: {message}", file=sys.stderr)
    return 128 - status if status < 0 else status


def exit_with_signal_status(number: int) -> None:
    """End this process at once, with the exit status of a signal."""
    os._exit(128 + number)


class Launcher:
    """Connection of a process to `launch`, through stdin: it receives signals, and is closed when the launcher ends."""

    def __init__(self) -> None:
        self.on_signal: Callable[[int], None] = exit_with_signal_status

    def watch(self) -> None:
        """Start a thread that calls `on_signal`, and ends this process when the launcher ends."""
        if LAUNCHED in os.environ:
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while message := os.read(0, 1):
            self.on_signal(message[0])
        os._exit(1)


launcher = Launcher()


def mute_other_ranks(args: TrainingArguments) -> None:
    """Silence the messages of all ranks except the main process, and progress bars if messages are disabled."""
    rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if args.world_size != world_size:
        raise RuntimeError(f"this is process {rank} of {world_size}, but it is not connected to the others.")
    if args.process_index > 0:
        logger.setLevel(logging.ERROR)
    if not logger.isEnabledFor(logging.WARNING):
        disable_progress_bar()


@contextmanager
def main_process_reports_first(args: Any) -> Iterator[None]:
    """Context manager that delays user errors of other ranks: rank 0 usually reports the same error first.

    If a process ends, the connections of the others fail. This error is delayed, so that `launch` ends them before they
    report it.
    """
    try:
        yield
    except (ValueError, OSError, FloatingPointError, RuntimeError) as error:
        if args.process_index > 0 or (isinstance(error, RuntimeError) and LAUNCHED in os.environ):
            time.sleep(ERROR_DELAY_SECONDS)
        raise


def fix_bucket_order(model: nn.Module) -> None:
    """Give DDP's gradient buckets their final order before the first update.

    DDP sorts its buckets once, after the first backward pass. The sum over three or more processes depends on this
    order, so the first update of a resumed run would differ from that of an uninterrupted one. This function computes
    the gradients of a sum of all parameters, which orders the buckets by the reverse of `parameters()`.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    forward = vars(model.module).pop("forward", None)  # set by Accelerate for mixed precision
    model.module.forward = lambda: sum(weights.sum() for weights in model.parameters() if weights.requires_grad)
    try:
        model().backward()
    finally:
        del model.module.forward
        if forward is not None:
            model.module.forward = forward
    model.zero_grad()
