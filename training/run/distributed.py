"""Distributed runs on one machine: start, output and end of the processes."""

import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from datasets.utils.logging import disable_progress_bar
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from training.arguments import TrainingArguments

LAUNCHED = "VANILLA_TRANSFORMER_LAUNCHED"  # set in the processes that `launch` starts
PR_SET_PDEATHSIG = 1  # prctl.h of Linux
ERROR_DELAY_SECONDS = 2  # time for the main process to report the error


def launch(processes: int, arguments: list[str]) -> int:
    """Run `training.train` in multiple local processes, and return the exit status of the first failure, or 0."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the process reports its error itself
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=processes, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        max_restarts=0, monitor_interval=0.1,
    )  # fmt: skip
    os.environ[LAUNCHED] = "1"
    try:
        elastic_launch(config, sys.executable)("-m", "training.train", *arguments)
    except ChildFailedError as error:
        return error.get_first_failure()[1].exitcode
    except SignalException as error:  # already forwarded to the processes
        return 128 + error.sigval
    return 0


def set_parent_death_signal() -> None:
    """Let Linux kill this process when its launcher dies: a killed launcher cannot forward the signal."""
    if LAUNCHED in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def mute_other_ranks(args: TrainingArguments) -> None:
    """Flush stdout of the main process after every line, and silence all other ranks."""
    rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if args.world_size != world_size:
        raise RuntimeError(f"this is process {rank} of {world_size}, but it is not connected to the others.")
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if args.process_index > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        disable_progress_bar()


@contextmanager
def main_process_reports_first(args: Any) -> Iterator[None]:
    """Context manager that delays user errors of other ranks: rank 0 usually reports the same error first."""
    try:
        yield
    except (ValueError, OSError, FloatingPointError):
        if args.process_index > 0:
            time.sleep(ERROR_DELAY_SECONDS)
        raise


def exit_after_barrier(trainer: Any) -> None:
    """End all processes together, without the destructors of gloo, which may wait for a process that has exited."""
    trainer.accelerator.wait_for_everyone()
    sys.stdout.flush()
    os._exit(0)
