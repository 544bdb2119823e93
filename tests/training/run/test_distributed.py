"""The launcher of multiple processes: forwarded signals, failures, and its end."""

import os
import signal
import sys
import time

import pytest
from torch.utils.data import DataLoader

from training.data.collators import defer_stop_signals
from training.run import distributed
from training.run.distributed import STOP_SIGNALS, Launcher, launch

WAIT = "import os, sys; message = os.read(0, 1); sys.exit(128 + message[0])"
RANK_1 = "import os, signal, time; {} if os.environ['RANK'] == '1' else time.sleep(500)"


@pytest.fixture
def start(monkeypatch):
    """Return a function that launches two processes of a Python script. The launcher receives the given signals."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    started = []

    class Listed(distributed.subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)

    def start(script: str, *signals: int) -> int:
        pending = list(signals)

        def sleep(seconds, original=time.sleep):
            if pending:
                signal.raise_signal(pending.pop(0))
            original(seconds)

        monkeypatch.setattr(distributed, "COMMAND", ("-c", script))
        monkeypatch.setattr(distributed.time, "sleep", sleep)
        monkeypatch.setattr(distributed.subprocess, "Popen", Listed)
        try:
            return launch(2, [])
        finally:
            monkeypatch.undo()
            assert len(started) == 2
            assert all(process.returncode is not None for process in started)

    yield start
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_forwards_the_first_signal(start, number):
    assert start(WAIT, number) == 128 + number


def test_second_signal_kills_the_processes(start):
    with pytest.raises(SystemExit) as end:
        start("import time; time.sleep(500)", signal.SIGINT, signal.SIGTERM)
    assert end.value.code == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("action", "status"), [("os._exit(3)", 3), ("os.kill(os.getpid(), signal.SIGTERM)", 128 + signal.SIGTERM)]
)
def test_a_failed_process_ends_the_others(start, action, status):
    if sys.platform == "win32" and status > 128:
        pytest.skip("Windows has no signals of other processes")
    assert start(RANK_1.format(action)) == status


def test_returns_0_if_all_processes_succeed(start):
    assert start("") == 0


def test_passes_the_addresses_of_the_processes(start):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    assert start(f"import os; [int(os.environ[name]) for name in {names} if name != 'MASTER_ADDR']") == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="requires fork")
@pytest.mark.parametrize(("message", "status"), [(bytes([signal.SIGTERM]), 143), (b"", 1)])
def test_launcher_ends_a_process_outside_of_training(message, status):
    """The process also ends at the end of the pipe, which means that the launcher was killed."""
    read_end, write_end = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(write_end)
        os.dup2(read_end, 0)
        Launcher()._read()
    os.write(write_end, message)
    os.close(write_end)
    os.close(read_end)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == status


class Interrupting:
    """Dataset that sends the stop signals to its worker."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        signal.raise_signal(STOP_SIGNALS[index])
        return index


def test_loader_workers_survive_stop_signals(make_trainer):
    """Ctrl-C reaches all processes, and the main process needs the batches of the workers to finish an update."""
    loader = make_trainer(dataloader_num_workers=1).get_train_dataloader()
    assert loader.worker_init_fn is defer_stop_signals
    data = DataLoader(Interrupting(), num_workers=1, worker_init_fn=defer_stop_signals, batch_size=None)
    assert list(data) == [0, 1]
