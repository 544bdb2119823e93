"""Processes of a run: their number, the plan of an update, and their launcher with its signals and failures."""

import os
import signal
import sys
import time
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from training import train
from training.data.collators import defer_stop_signals
from training.recipe.arguments import TrainingArguments
from training.run import distributed, hardware, training
from training.run.callbacks import StopOnSignal
from training.run.distributed import (
    STOP_SIGNALS,
    Launcher,
    count_cores,
    describe_plan,
    launch,
    launcher,
    resolve_num_processes,
)

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
            assert handlers == {number: signal.getsignal(number) for number in STOP_SIGNALS}
            assert len(started) == 2
            assert all(process.returncode is not None for process in started)

    return start


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


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_reports_a_killed_process(start, capfd):
    assert start(RANK_1.format("os.kill(os.getpid(), signal.SIGKILL)")) == 128 + signal.SIGKILL
    assert "process 1 of 2 was ended by SIGKILL. If memory is exhausted" in capfd.readouterr().err


def test_returns_0_if_all_processes_succeed(start):
    assert start("") == 0


CONNECT = """
import os, torch
torch.distributed.init_process_group("gloo")
ranks = torch.zeros(2, dtype=torch.long)
ranks[torch.distributed.get_rank()] = int(os.environ["LOCAL_RANK"]) + 1
torch.distributed.all_reduce(ranks)
torch.distributed.barrier()
os._exit(int(ranks.tolist() != [1, 2]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["linux", "win32"])
def test_processes_are_connected(start, monkeypatch, platform):
    """Windows builds of torch lack libuv."""
    monkeypatch.setattr("sys.platform", platform)
    assert start(CONNECT) == 0


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


@pytest.fixture
def simulate(monkeypatch):
    """Return the arguments of a run on a machine with a number of devices (cores of a CPU)."""

    def machine(device="cpu", devices=2, platform="linux", **keys):
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.setattr(distributed, "count_cores", lambda: devices)
        module = SimpleNamespace(device_count=lambda: devices)
        monkeypatch.setattr(torch, "get_device_module", lambda name: module)
        defaults = {"num_processes": "auto", "tokens_per_update": 2048, "gradient_accumulation_steps": 1}
        defaults |= {"world_size": 1, "precision": "bf16"}
        return SimpleNamespace(device=torch.device(device), **(defaults | keys))

    return machine


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        ({"devices": 2}, 2),
        ({"devices": 64}, 4),  # at least 500 tokens each
        ({"devices": 64, "tokens_per_update": 25_000}, 8),  # each has a copy of model and data
        ({"devices": 8, "tokens_per_update": 499}, 1),
        ({"devices": 8, "platform": "win32"}, 1),
        ({"devices": 1, "num_processes": 3}, 3),
        ({"devices": 8, "num_processes": 1}, 1),
        ({"device": "cuda", "devices": 8}, 8),
        ({"device": "cuda", "devices": 8, "num_processes": 1}, 1),
        ({"device": "cuda", "devices": 2, "platform": "win32"}, 1),
        ({"device": "xpu", "devices": 2}, 2),
        ({"device": "mps", "devices": 1, "platform": "darwin"}, 1),
    ],
)
def test_number_of_processes(simulate, machine, expected):
    assert resolve_num_processes(simulate(**machine)) == expected


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_rejects_more_processes_than_devices(simulate, device):
    with pytest.raises(ValueError, match=f"num_processes=2 requires 2 devices, but {device} has 1"):
        resolve_num_processes(simulate(device, 1, num_processes=2))


@pytest.mark.parametrize("is_launched", [False, True])
def test_accelerate_launch_decides_the_number_of_processes(recipe, accelerate_environment, monkeypatch, is_launched):
    for name, value in (accelerate_environment() if is_launched else {}).items():
        monkeypatch.setenv(name, value)
    calls = []
    monkeypatch.setattr(distributed, "launch", lambda processes, arguments: calls.append(processes))
    result = training.TrainingResult(recipe.parent, {}, signal.SIGTERM)
    monkeypatch.setattr(training, "run", lambda recipe, _: calls.append(recipe.training.world_size) or result)
    monkeypatch.setattr(hardware, "configure_malloc", lambda: None)
    monkeypatch.setattr(sys, "argv", ["training.train", str(recipe), "--num-processes", "2"])
    with suppress(SystemExit):
        train.main()
    assert calls == [1 if is_launched else 2]


def test_stop_agreement_has_the_timeout_of_the_run(monkeypatch):
    groups = []
    monkeypatch.setattr(torch.distributed, "new_group", lambda **options: groups.append(options))
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    monkeypatch.setattr(launcher, "on_signal", launcher.on_signal)
    StopOnSignal().on_train_begin(SimpleNamespace(ddp_timeout=9, world_size=2), None, None)
    assert groups == [{"backend": "gloo", "timeout": timedelta(seconds=9)}]


def test_describes_the_plan(simulate):
    expected = "2 processes x 1 batch of 1,024 tokens = 2,048 tokens per update (CPU, 2 cores, bf16)"
    assert describe_plan(simulate(world_size=2)) == expected
    expected = "1 process x 4 batches of 6,250 tokens = 25,000 tokens per update (CUDA, fp16)"
    keys = {"gradient_accumulation_steps": 4, "tokens_per_update": 25_000, "precision": "fp16"}
    assert describe_plan(simulate("cuda", **keys)) == expected


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        ({}, 2),  # a micro-batch has pairs of one group, and an update has two groups
        ({"tokens_per_update": 8192}, 2),  # at most 4,096 tokens on a CPU
        ({"tokens_per_update": 8193}, 4),
        ({"max_tokens": 300, "tokens_per_update": 1000}, 4),
        ({"max_tokens": 9000, "tokens_per_update": 8192}, 2),
        ({"max_tokens": 300, "gradient_accumulation_steps": 8}, 8),
        ({"max_tokens": 300, "gradient_accumulation_steps": 2}, 8),  # of 2,048 tokens
        ({"tokens_per_update": 50_000, "gradient_accumulation_steps": 1}, 2),
    ],
)
def test_accumulation_respects_max_tokens(tmp_path, keys, steps):
    assert TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **keys).gradient_accumulation_steps == steps


def test_accumulation_depends_on_processes_and_device(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "world_size", 3)
    assert TrainingArguments(output_dir=str(tmp_path), use_cpu=True).gradient_accumulation_steps == 2
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    keys = {"output_dir": str(tmp_path), "use_cpu": True, "tokens_per_update": 8192}
    assert TrainingArguments(**keys).gradient_accumulation_steps == 1
    monkeypatch.setattr(TrainingArguments, "device", torch.device("cuda"))
    assert TrainingArguments(**keys | {"tokens_per_update": 50_000}).gradient_accumulation_steps == 1
    assert TrainingArguments(**keys, max_tokens=2048).gradient_accumulation_steps == 2


def test_one_process_never_uses_several_devices(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", 3)
    assert TrainingArguments(output_dir=str(tmp_path), use_cpu=True)._n_gpu == 1


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="requires sched_getaffinity")
def test_counts_physical_cores(monkeypatch, tmp_path):
    """Two hardware threads of a core count once; without information each counts. A container may have fewer."""
    monkeypatch.setattr(distributed, "CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2})
    siblings = {"cpu0": "0-1", "cpu1": "0-1", "cpu2": "2-3"}
    for name, text in siblings.items():
        (tmp_path / name / "topology").mkdir(parents=True)
        (tmp_path / name / "topology" / "thread_siblings_list").write_text(text)
    monkeypatch.setattr(distributed, "CPU_TOPOLOGY", f"{tmp_path}/cpu{{}}/topology/thread_siblings_list")
    assert count_cores() == 2
    monkeypatch.setattr(distributed, "CPU_TOPOLOGY", f"{tmp_path}/none{{}}")
    assert count_cores() == 3
    for quota, cores in (("max 100000", 3), ("150000 100000", 2), ("50000 100000", 1), ("900000 100000", 3)):
        (tmp_path / "cpu.max").write_text(quota)
        assert count_cores() == cores
