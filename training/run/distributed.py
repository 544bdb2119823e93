"""Several processes: starting them, letting one speak, and ending them together."""

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
ERROR_DELAY_SECONDS = 2  # seconds that the first process has to tell what is wrong


def launch(processes: int, arguments: list[str]) -> int:
    """Runs `python -m training.train` with the same arguments in several processes of this machine, which share its
    cores; the exit status of the first that fails, or 0."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the process itself has told
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=processes, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        max_restarts=0, monitor_interval=0.1,
    )  # fmt: skip
    os.environ[LAUNCHED] = "1"
    try:
        elastic_launch(config, sys.executable)("-m", "training.train", *arguments)
    except ChildFailedError as error:
        return error.get_first_failure()[1].exitcode
    except SignalException as error:  # which it has passed on
        return 128 + error.sigval
    return 0


def set_parent_death_signal() -> None:
    """In a process that `launch` started: a kill of the program, which it cannot pass on, ends this one as well."""
    if LAUNCHED in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def mute_other_ranks(args: TrainingArguments) -> None:
    """What the first process prints is there at once, and stays there after a kill; the others are silent.

    Raises:
        RuntimeError: the processes do not see each other.
    """
    rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if args.world_size != world_size:
        raise RuntimeError(f"this is process {rank} of {world_size}, but it does not see the others.")
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if args.process_index > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        disable_progress_bar()


@contextmanager
def main_process_reports_first(args: Any) -> Iterator[None]:
    """Within it the other processes wait before a user's mistake ends them: the first mostly tells the same, and takes
    them along. `args.process_index` is this one's number."""
    try:
        yield
    except (ValueError, OSError, FloatingPointError):
        if args.process_index > 0:
            time.sleep(ERROR_DELAY_SECONDS)
        raise


def exit_after_barrier(trainer: Any) -> None:
    """Ends the program; the destructors of gloo's groups now and then wait for a process that is gone."""
    trainer.accelerator.wait_for_everyone()
    sys.stdout.flush()
    os._exit(0)
