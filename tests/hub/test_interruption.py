"""Imports, exports and pushes that are killed at random moments give complete results or none."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM

pytestmark = pytest.mark.slow


def test_killed_import_is_complete_or_absent(start_programs, kill_at_random_moments, make_reference, save_as, tmp_path):
    """The directory loads or does not exist. The next run removes leftovers."""
    _, state, _, _, _ = make_reference("notebook")
    path, out = save_as("bare", state, tmp_path), tmp_path / "out"
    names: set[tuple[str, ...]] = set()

    def check() -> None:
        if out.exists():
            names.add(tuple(sorted(path.name for path in out.iterdir())))
            AutoModelForSeq2SeqLM.from_pretrained(out)
            shutil.rmtree(out)

    with start_programs("hub.import_checkpoint") as programs:
        arguments = ("hub.import_checkpoint", path, out, "--num-heads", 4)
        kill_at_random_moments(lambda: programs.start(*arguments), check)
        programs.run(*arguments)
        check()
    assert len(names) == 1
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("target", ["transformers", "ctranslate2"])
def test_killed_export_is_complete_or_absent(start_programs, kill_at_random_moments, save_checkpoint, tmp_path, target):
    """The files equal those of a run without kills, or do not exist. The next run removes leftovers."""
    _, _, checkpoint = save_checkpoint()
    out, complete = tmp_path / "out", tmp_path / "complete"

    def check() -> None:
        if out.exists():
            assert content(out) == content(complete)
            shutil.rmtree(out)

    with start_programs("hub.export") as programs:
        programs.run("hub.export", checkpoint, complete, "--to", target)
        kill_at_random_moments(lambda: programs.start("hub.export", checkpoint, out, "--to", target), check)
        programs.run("hub.export", checkpoint, out, "--to", target)
        check()
    assert sorted(tmp_path.iterdir()) == sorted((checkpoint, complete))


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_killed_push_commits_all_or_nothing(start_programs, kill_at_random_moments, save_checkpoint, hub, tmp_path):
    """The repository is unchanged or complete after a kill, and the next push succeeds."""
    _, _, folder = save_checkpoint()
    first, second = folder.rename(tmp_path / "first"), tmp_path / "second"
    shutil.copytree(first, second)
    state = load_file(first / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in state.items()}, second / "model.safetensors", {"format": "pt"})
    (second / "config.json").write_text((second / "config.json").read_text() + "\n")
    without_smoke_test = "from hub.publishing import upload; upload.smoke_test_upload = lambda *_: ''"
    with start_programs("hub.push", **hub.environment) as programs:
        programs.run("hub.push", first, "user/killed", setup_code=without_smoke_test)
        repository = hub.repositories["user/killed"]
        files_before = repository.files("main")

        def check() -> None:
            files = repository.files("main")
            if files != files_before:
                for name in ("model.safetensors", "config.json"):
                    assert files[name] == (second / name).read_bytes()
                assert files.keys() == files_before.keys()
                del repository.branches["main"][-1]
                assert repository.files("main") == files_before
            hub.objects.clear()  # so that the next push uploads all files again

        kill_at_random_moments(
            lambda: programs.start("hub.push", second, "user/killed", setup_code=without_smoke_test), check
        )
        programs.run("hub.push", second, "user/killed", setup_code=without_smoke_test)
        assert repository.files("main")["config.json"] == (second / "config.json").read_bytes()
