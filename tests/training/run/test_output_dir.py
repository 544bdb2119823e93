"""The folder of a run: which commands go on with it."""

import pytest

from training.recipe import read_recipe
from training.run.output_dir import prepare_output_dir


@pytest.fixture
def read(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"output_dir: {tmp_path / 'out'}\nmax_steps: 3\nreport_to: none\nuse_cpu: true\n")
    return lambda *arguments: read_recipe([str(path), *arguments])


@pytest.mark.parametrize("key", ["torch_compile", "moses", "d_model", "on_eval_overlap"])
def test_a_recipe_of_before_a_key_goes_on_with_the_keys_default(read, tmp_path, key):
    """Each was none of the keys once; a run begun then is finished by a later version."""
    out = tmp_path / "out"
    prepare_output_dir(read(), out)
    lines = (out / "recipe.yaml").read_text().splitlines()
    left = [line for line in lines if not line.startswith(f"{key}:")]
    assert len(left) == len(lines) - 1
    (out / "recipe.yaml").write_text("\n".join(left) + "\n")
    prepare_output_dir(read(), out)
    others = {"torch_compile": "true", "moses": "true", "d_model": "64", "on_eval_overlap": "drop"}
    defaults = {"torch_compile": "False", "moses": "False", "d_model": "512", "on_eval_overlap": "keep"}
    with pytest.raises(ValueError, match=f"{key} was {defaults[key]}, now it is (?i:{others[key]})"):
        prepare_output_dir(read(f"--{key}", others[key]), out)
