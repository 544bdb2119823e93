"""Programs of `training` as processes that start at once: forked from one that has imported everything."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

SERVER = """
import importlib, json, os, sys, traceback
for name in ("train", "average", "score", "translate"):
    importlib.import_module(f"training.{name}")

def child(request):
    os.setsid()
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(request["stdin"], os.O_RDONLY), 0)
    sys.stdin = open(0)
    sys.stdout, sys.stderr = open(1, "w"), open(2, "w", buffering=1)
    sys.argv = [request["program"], *request["arguments"]]
    exec(request["before"])
    status = 0
    try:
        importlib.import_module(request["program"]).main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    os._exit(status)

print("ready", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if "wait" in request:
        print(os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1]), flush=True)
    elif (pid := os.fork()) == 0:
        child(request)
    else:
        print(pid, flush=True)
"""


@dataclass
class Program:
    """A running program; `status` waits for it."""

    server: "Server"
    pid: int
    files: dict[str, Path]

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.killpg(self.pid, number)

    @property
    def status(self) -> int:
        if not hasattr(self, "_status"):
            self._status = int(self.server.ask({"wait": self.pid}))
        return self._status

    @property
    def stdout(self) -> str:
        return self.files["stdout"].read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self.files["stderr"].read_text(errors="replace")

    def wait_for(self, condition, seconds: float = 120) -> None:
        """Until `condition()`; fails where the program ends before, or it takes too long."""
        end = time.monotonic() + seconds
        while not condition():
            zombie = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
            assert not zombie, self.stdout[-2000:] + self.stderr[-3000:]
            assert time.monotonic() < end, f"still waiting after {seconds} s"
            time.sleep(0.01)


class Server:
    def __init__(self, folder: Path, repository: Path):
        self.folder, self.count = folder, 0
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
        environment |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(repository)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER], cwd=repository, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        while (line := self.process.stdout.readline()) != "ready\n":
            assert line, "the server of programs did not start"

    def ask(self, request: dict) -> str:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()

    def start(self, program: str, *arguments: str | Path, stdin: str = os.devnull, before: str = "") -> Program:
        """Runs `python -m <program> <arguments>`; `before` is code that runs first in its process."""
        self.count += 1
        files = {name: self.folder / f"{self.count}.{name}" for name in ("stdout", "stderr")}
        for path in files.values():
            path.touch()
        request = {"program": program, "arguments": list(map(str, arguments)), "before": before, "stdin": str(stdin)}
        pid = self.ask(request | {name: str(path) for name, path in files.items()})
        return Program(self, int(pid), files)

    def run(self, program: str, *arguments: str | Path, status: int = 0, **options: str) -> Program:
        """To its end, which must have that exit status."""
        process = self.start(program, *arguments, **options)
        assert process.status == status, process.stdout[-2000:] + process.stderr[-4000:]
        return process


@pytest.fixture(scope="session")
def programs(tmp_path_factory, request) -> Server:
    server = Server(tmp_path_factory.mktemp("programs"), Path(__file__).parents[2])
    yield server
    server.process.stdin.close()
    server.process.wait()


RECIPE = """
tokenizer_size: 300
d_model: 32
encoder_layers: 1
decoder_layers: 1
encoder_attention_heads: 2
decoder_attention_heads: 2
encoder_ffn_dim: 64
decoder_ffn_dim: 64
max_tokens: 256
max_steps: 6
learning_rate: 1.0e-3
warmup_steps: 2
logging_steps: 2
eval_strategy: steps
eval_steps: 3
save_steps: 3
precision: fp32
attention: sdpa
use_cpu: true
num_beams: 2
max_new_tokens: 12
test_file: test
disable_tqdm: true
"""


@pytest.fixture(scope="session")
def make_recipe():
    """Writes 120 training pairs, 10 each to validate and test, and a recipe of a second; its output folder is "out"."""
    from training.demo_corpus import generate

    def make(folder: Path) -> Path:
        data = folder / "data"
        data.mkdir()
        for split, pairs in generate(train=120, validation=10, test=10).items():
            for side, language in enumerate(("en", "de")):
                path = data / f"{'val' if split == 'validation' else split}.{language}"
                path.write_text("".join(pair[side] + "\n" for pair in pairs), encoding="utf-8")
        path = folder / "small.yaml"
        path.write_text(f"data_dir: {data}\noutput_dir: {folder / 'out'}\n{RECIPE}")
        return path

    return make


@pytest.fixture
def recipe(tmp_path, make_recipe) -> Path:
    return make_recipe(tmp_path)
