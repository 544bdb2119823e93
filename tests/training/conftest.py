"""Fixtures for the tests of training: programs and a finished run."""

import socket
from pathlib import Path

import pytest

COMMANDS = ("train", "average", "score", "translate", "diversify", "distill")
SLOW_IMPORTS = (
    "inference.file_translation",
    "inference.scoring",
    "distillation.distilling",
    "run.training",
)  # by the commands


@pytest.fixture(scope="session")
def programs(start_programs):
    with start_programs(*(f"training.{name}" for name in (*COMMANDS, *SLOW_IMPORTS))) as programs:
        yield programs


@pytest.fixture(scope="session")
def finished(programs, make_recipe, tmp_path_factory) -> Path:
    """Output directory of a finished run with checkpoints 2, 4 and 6, next to its data."""
    folder = tmp_path_factory.mktemp("finished")
    arguments = ("--save-steps", "2", "--eval-steps", "2", "--save-total-limit", "9", "--learning-rate", "0.01")
    programs.run("training.train", make_recipe(folder), *arguments)
    return folder / "out"


@pytest.fixture(scope="session")
def test_files(finished) -> tuple[Path, Path]:
    return finished.parent / "data" / "test.en", finished.parent / "data" / "test.de"


@pytest.fixture(scope="session")
def start_ranks(programs):
    """Function that starts the processes of a run, as torchrun does."""

    def start(recipe: Path, *arguments: str | Path, processes: int = 2, setup_code: str = "") -> list:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        ranks = []
        for rank in range(processes):
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
            variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
            code = f"os.environ |= { ({name: str(value) for name, value in variables.items()}) }\n{setup_code}"
            ranks.append(programs.start("training.train", recipe, *arguments, setup_code=code))
        return ranks

    return start


@pytest.fixture(scope="session")
def run_ranks(start_ranks):
    """Function that starts the processes of a run, waits for them, and checks their exit status."""

    def run(recipe: Path, *arguments: str | Path, status: int = 0, **options) -> list:
        ranks = start_ranks(recipe, *arguments, **options)
        for rank in ranks:
            assert rank.status == status, rank.stdout[-2000:] + rank.stderr[-4000:]
        return ranks

    return run
