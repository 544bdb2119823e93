"""Output directory of a run: which commands can resume it."""

import pytest

from training.recipe import read_recipe
from training.run.output_dir import prepare_output_dir


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
    lines = (out / "recipe.yaml").read_text().splitlines()
    remaining = [line for line in lines if not line.startswith(f"{key}:")]
    assert len(remaining) == len(lines) - 1
    (out / "recipe.yaml").write_text("\n".join(remaining) + "\n")
    prepare_output_dir(read(), out)
    others = {"torch_compile": "true", "moses": "true", "d_model": "64", "on_eval_overlap": "drop"}
    defaults = {"torch_compile": "False", "moses": "False", "d_model": "512", "on_eval_overlap": "keep"}
    with pytest.raises(ValueError, match=f"{key} was {defaults[key]}, now it is (?i:{others[key]})"):
        prepare_output_dir(read(f"--{key}", others[key]), out)
