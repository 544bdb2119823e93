"""The benchmark of a complete recipe."""

import json
from types import SimpleNamespace

import pytest

from training.benchmarks import recipe
from training.recipe.reading import read_recipe


@pytest.mark.parametrize("status", [0, 2])
@pytest.mark.parametrize("name", ["iwslt14_de_en", "wmt14_en_de_base", "minutes"])
def test_trains_any_recipe(tmp_path, monkeypatch, repository, name, status):
    """The benchmark saves no checkpoints, so it must not average any. Its updates replace the time of the recipe."""
    path = repository / "training" / "recipes" / f"{name}.yaml"
    if name == "minutes":
        path = tmp_path / "minutes.yaml"
        path.write_text("minutes: 3\nlearning_rate: 0.001\ntarget_lang: no\n")

    def train(command: list[str], **options) -> SimpleNamespace:
        keys = read_recipe(command[3:]).to_dict()
        assert keys["target_lang"] == {"iwslt14_de_en": "en", "minutes": "no"}.get(name, "de")
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "all_results.json").write_text(json.dumps({"updates": keys["max_steps"]}))
        return SimpleNamespace(returncode=status)

    monkeypatch.setattr(recipe.subprocess, "run", train)
    arguments = recipe.make_arguments(path, tmp_path, tmp_path / "run")
    if status:
        with pytest.raises(ValueError, match=f"training with {path} ended with status 2"):
            recipe.train_recipe(arguments)
    else:
        assert recipe.train_recipe(arguments) == {"updates": recipe.UPDATES}


@pytest.mark.parametrize(("use_cpu", "norm_position", "peer"), [(False, "pre", "pegasus"), (True, "post", "marian")])
def test_baseline_has_data_device_and_architecture_of_the_recipe(
    tmp_path, monkeypatch, make_tokenizer, make_config, sentences, use_cpu, norm_position, peer
):
    tokenizer, sizes = make_tokenizer(True)
    run = tmp_path / "run"
    for each in (tokenizer, make_config(**sizes, norm_position=norm_position)):
        each.save_pretrained(run)
    pairs = list(zip(sentences["en"], sentences["de"], strict=True))
    (tmp_path / "train.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    keys = {"data_dir": str(tmp_path), "train_file": "train.tsv", "validation_file": None, "use_cpu": use_cpu}
    run.with_suffix(".yaml").write_text(json.dumps(keys | {"output_dir": str(run), "learning_rate": 0.001}))
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)  # otherwise, `read_recipe` sets `use_cpu`
    trainers = []

    def make_trainer(model, args, train_dataset, **keys):
        trainers.append((model.config.model_type, args.use_cpu, len(train_dataset)))
        return SimpleNamespace(train=lambda: SimpleNamespace(metrics={"train_runtime": 1}), target_tokens=5)

    monkeypatch.setattr(recipe, "BaselineTrainer", make_trainer)
    recipe.train_baseline([str(run.with_suffix(".yaml"))])
    assert trainers == [(peer, use_cpu, len(pairs))]


def test_baseline_counts_the_tokens_of_its_updates(tmp_path, monkeypatch, make_tokenizer, make_config):
    tokenizer, sizes = make_tokenizer(True)
    run = tmp_path / "run"
    for each in (tokenizer, make_config(**sizes)):
        each.save_pretrained(run)
    (tmp_path / "train.tsv").write_text("the dog runs\tder Hund rennt\n" * 40)
    keys = {"data_dir": str(tmp_path), "train_file": "train.tsv", "validation_file": None, "use_cpu": True}
    run.with_suffix(".yaml").write_text(json.dumps(keys | {"output_dir": str(run), "learning_rate": 0.001}))
    monkeypatch.setattr(recipe, "UPDATES", 2)
    monkeypatch.setattr(recipe, "SENTENCES", 4)
    result = recipe.train_baseline([str(run.with_suffix(".yaml"))])
    assert result["train_target_tokens"] == 2 * 4 * len(tokenizer(text_target="der Hund rennt")["input_ids"])
    assert result["train_runtime"] > 0
