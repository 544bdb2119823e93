"""Kills at random moments of what brings checkpoints in and sends them out: whole results, or none."""

import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
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


@pytest.mark.parametrize("target", ["marian", "ctranslate2"])
def test_killed_exports_leave_nothing_or_all(start_programs, kill_at_random_moments, save_checkpoint, tmp_path, target):
    """The same bytes as without kills, or no folder; the next run removes what was left."""
    _, _, checkpoint = save_checkpoint()
    out, whole = tmp_path / "out", tmp_path / "whole"

    def look() -> None:
        if out.exists():
            assert content(out) == content(whole)
            shutil.rmtree(out)

    with start_programs("hub.export") as programs:
        programs.run("hub.export", checkpoint, whole, "--to", target)
        kill_at_random_moments(lambda: programs.start("hub.export", checkpoint, out, "--to", target), look)
        programs.run("hub.export", checkpoint, out, "--to", target)
        look()
    assert sorted(tmp_path.iterdir()) == sorted((checkpoint, whole))


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_killed_pushes_leave_one_model_or_the_other(
    start_programs, kill_at_random_moments, save_checkpoint, hub, tmp_path
):
    """The repository is as it was, or as it is after the push, never in between; and the next push goes through."""
    _, _, folder = save_checkpoint()
    first, second = folder.rename(tmp_path / "first"), tmp_path / "second"
    shutil.copytree(first, second)
    state = load_file(first / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in state.items()}, second / "model.safetensors", {"format": "pt"})
    (second / "config.json").write_text((second / "config.json").read_text() + "\n")
    fast = "import hub.push; hub.push.smoke_test_upload = lambda *_: ''"  # it is looked at in other tests
    with start_programs("hub.push", **hub.environment) as programs:
        programs.run("hub.push", first, "user/killed", before=fast)
        repository = hub.repositories["user/killed"]
        before = repository.files("main")

        def look() -> None:
            files = repository.files("main")
            if files != before:
                for name in ("model.safetensors", "config.json"):
                    assert files[name] == (second / name).read_bytes()
                assert files.keys() == before.keys()
                del repository.branches["main"][-1]
                assert repository.files("main") == before
            hub.objects.clear()  # or files that an earlier one has uploaded would not be sent

        kill_at_random_moments(lambda: programs.start("hub.push", second, "user/killed", before=fast), look)
        programs.run("hub.push", second, "user/killed", before=fast)
        assert repository.files("main")["config.json"] == (second / "config.json").read_bytes()
