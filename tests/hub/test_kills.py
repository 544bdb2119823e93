"""Kills at random moments of what brings checkpoints in and sends them out: whole results, or none."""

import os
import shutil

import pytest
from transformers import AutoModelForSeq2SeqLM

pytestmark = pytest.mark.slow


def test_killed_imports_leave_nothing_or_all(start_programs, kill_at_random_moments, make_reference, save_as, tmp_path):
    """The folder loads, or is not there; the next run removes what was left."""
    _, state, _, _, _ = make_reference("notebook")
    path, out = save_as("bare", state, tmp_path), tmp_path / "out"
    names: set[tuple[str, ...]] = set()

    def look() -> None:
        if out.exists():
            names.add(tuple(sorted(os.listdir(out))))
            AutoModelForSeq2SeqLM.from_pretrained(out)
            shutil.rmtree(out)

    with start_programs("hub.import_checkpoint") as programs:
        arguments = ("hub.import_checkpoint", path, out, "--num_heads", 4)
        kill_at_random_moments(lambda: programs.start(*arguments), look)
        programs.run(*arguments)
        look()
    assert len(names) == 1
    assert list(tmp_path.iterdir()) == [path]
