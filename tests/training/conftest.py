"""Fixtures for the tests of training: programs and a finished run."""

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
