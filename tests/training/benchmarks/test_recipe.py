"""The benchmark of a complete recipe."""

import json

import pytest

from training.benchmarks import recipe
from training.recipe.reading import read_recipe


@pytest.mark.parametrize("name", ["iwslt14_de_en", "wmt14_en_de_base"])
def test_recipes_that_average_checkpoints(tmp_path, monkeypatch, repository, name):
    """The benchmark saves no checkpoints, so it must not average any."""

    def train(command: list[str], **options) -> None:
        keys = read_recipe(command[3:]).to_dict()
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "all_results.json").write_text(json.dumps({"updates": keys["max_steps"]}))

    monkeypatch.setattr(recipe.subprocess, "run", train)
    path = repository / "training" / "recipes" / f"{name}.yaml"
    assert recipe.train_recipe(path, tmp_path, tmp_path / "run") == {"updates": recipe.UPDATES}
