"""Output directory of a run: which commands can resume it."""

import os
import signal
import sys
from contextlib import nullcontext

import pytest

from training.recipe.reading import read_recipe
from training.run.output_dir import lock_output_dir, prepare_output_dir


@pytest.fixture
def read(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"output_dir: {tmp_path / 'out'}\nmax_steps: 3\nreport_to: none\nuse_cpu: true\n")
    return lambda *arguments: read_recipe([str(path), *arguments])


@pytest.mark.parametrize("key", ["torch_compile", "moses", "d_model", "on_eval_overlap"])
def test_resumes_recipe_without_a_newer_key(read, tmp_path, key):
    """Earlier versions did not have these keys."""
    out = tmp_path / "out"
    prepare_output_dir(read(), out)
    (out / "model.safetensors").write_bytes(b"")
    lines = (out / "recipe.yaml").read_text().splitlines()
    remaining = [line for line in lines if not line.startswith(f"{key}:")]
    assert len(remaining) == len(lines) - 1
    (out / "recipe.yaml").write_text("\n".join(remaining) + "\n")
    prepare_output_dir(read(), out)
    others = {"torch_compile": "true", "moses": "true", "d_model": "64", "on_eval_overlap": "drop"}
    defaults = {"torch_compile": "False", "moses": "False", "d_model": "512", "on_eval_overlap": "keep"}
    with pytest.raises(ValueError, match=f"{key} was {defaults[key]}, now it is (?i:{others[key]})"):
        prepare_output_dir(read(f"--{key}", others[key]), out)


def test_rejects_recipe_of_the_user_in_the_output_directory(tmp_path):
    """The run would overwrite it."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "recipe.yaml").write_text(f"output_dir: {out}\nmax_steps: 3\nreport_to: none\nuse_cpu: true\n")
    recipe = read_recipe([str(out / "recipe.yaml")])
    with pytest.raises(ValueError, match=r"recipe.yaml is not from a run.* Move it, or choose another --output-dir"):
        prepare_output_dir(recipe, out)


@pytest.mark.parametrize("has_read_data", [False, True])
def test_run_that_failed_before_training_can_be_started_again(read, tmp_path, has_read_data):
    out = tmp_path / "out"
    assert prepare_output_dir(read("--target-lang", "de"), out) is None
    if has_read_data:
        (out / "run.json").write_text("{}")
    assert prepare_output_dir(read("--target-lang", "iso"), out) is None
    assert "target_lang: iso" in (out / "recipe.yaml").read_text()


def test_lock_excludes_a_second_command(tmp_path):
    out = tmp_path / "new" / "out"
    with lock_output_dir(out):
        with pytest.raises(ValueError, match=r"another command trains in .*out. Wait until it ends"):  # noqa: SIM117
            with lock_output_dir(out):
                pass
        with lock_output_dir(tmp_path / "other"):
            pass
    with lock_output_dir(out):
        pass


@pytest.mark.parametrize("has_parts", [False, True])
def test_lock_of_a_finished_run_with_parts(tmp_path, has_parts):
    (tmp_path / "all_results.json").touch()
    expected = pytest.raises(ValueError, match="another command trains") if has_parts else nullcontext()
    with lock_output_dir(tmp_path, has_parts), expected, lock_output_dir(tmp_path, has_parts):
        pass


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_lock_ends_with_a_killed_process(tmp_path):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with lock_output_dir(tmp_path):
            os.write(writing, b"x")
            signal.pause()
    try:
        os.read(reading, 1)
        with pytest.raises(ValueError, match="another command trains in"):  # noqa: SIM117
            with lock_output_dir(tmp_path):
                pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
    with lock_output_dir(tmp_path):
        pass
