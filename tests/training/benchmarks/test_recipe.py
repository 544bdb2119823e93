"""The benchmark of a complete recipe."""

import json
from types import SimpleNamespace

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


@pytest.mark.parametrize("use_cpu", [False, True])
def test_baseline_uses_the_device_of_the_recipe(tmp_path, monkeypatch, make_tokenizer, make_config, sentences, use_cpu):
    tokenizer, sizes = make_tokenizer(True)
    for each in (tokenizer, make_config(**sizes)):
        each.save_pretrained(tmp_path)
    for language, lines in sentences.items():
        (tmp_path / f"train.{language}").write_text("".join(f"{line}\n" for line in lines))
    (tmp_path / "mine.yaml").write_text(json.dumps({"use_cpu": True} if use_cpu else {}))
    devices = []

    def make_trainer(args, **keys):
        devices.append(args.use_cpu)
        return SimpleNamespace(train=lambda: SimpleNamespace(metrics={"train_runtime": 1}))

    monkeypatch.setattr(recipe, "Seq2SeqTrainer", make_trainer)
    recipe.train_baseline(tmp_path / "mine.yaml", tmp_path, tmp_path)
    assert devices == [use_cpu]
