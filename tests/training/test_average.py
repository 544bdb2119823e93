"""The command `training.average`."""

import json
from argparse import Namespace

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoTokenizer

from training.average import run
from training.inference.translators import read_run_recipe


@pytest.mark.slow
def test_averages_weights(programs, finished, tmp_path):
    programs.run("training.average", tmp_path / "mean", finished, "--last", "2")
    folders = (tmp_path / "mean", finished / "checkpoint-4", finished / "checkpoint-6")
    mean, first, second = (load_file(folder / "model.safetensors") for folder in folders)
    for name, tensor in mean.items():
        torch.testing.assert_close(tensor, (first[name] + second[name]) / 2)
    AutoTokenizer.from_pretrained(tmp_path / "mean")
    listed = ("training.average", tmp_path / "same", finished / "checkpoint-4", finished / "checkpoint-6")
    programs.run(*listed)
    assert (tmp_path / "same" / "model.safetensors").read_bytes() == (folders[0] / "model.safetensors").read_bytes()
    assert "checkpoint-" in programs.run("training.average", tmp_path / "best", finished, "--best", "2").stdout
    settings = read_run_recipe(finished)
    assert read_run_recipe(tmp_path / "mean") == {key: settings[key] for key in settings if key != "output_dir"}


@pytest.fixture
def make_checkpoint(tmp_path, make_model, make_tokenizer, sentences):
    def make(name: str, shared: bool = True, **recipe) -> str:
        tokenizer, sizes = make_tokenizer(shared)
        model = make_model(1, **sizes)
        for each in (model, tokenizer):
            each.save_pretrained(tmp_path / name)
        if recipe:
            (tmp_path / name / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        return tmp_path / name

    return make


def average(out, *checkpoints) -> None:
    run(Namespace(out=out, checkpoints=list(checkpoints), last=None, best=None))


def test_output_has_the_common_settings(make_checkpoint, tmp_path):
    """Otherwise `training.score` would compute BLEU for a model that generates sequences."""
    common = {"metric": "sequence", "target_lang": "ipa"}
    one, two = (make_checkpoint(f"run_{seed}", **common, seed=seed, output_dir="runs/x") for seed in (1, 2))
    average(tmp_path / "mean", one, two)
    assert read_run_recipe(tmp_path / "mean") == common
    average(tmp_path / "other", one, make_checkpoint("run_3"))
    assert not (tmp_path / "other" / "recipe.yaml").exists()


def test_run_without_final_model_requires_a_selection(make_checkpoint, tmp_path):
    make_checkpoint("run/checkpoint-2")
    with pytest.raises(ValueError, match="is a run without a final model. Add --last N"):
        average(tmp_path / "mean", tmp_path / "run")


def test_rejects_different_tokenizers(make_checkpoint, tmp_path):
    one, two = make_checkpoint("one"), make_checkpoint("two")
    path = two / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": {"type": "Lowercase"}}))
    with pytest.raises(
        ValueError, match=r"two has another tokenizer than .*one: the same vocabulary, but it splits text"
    ):
        average(tmp_path / "mean", one, two)
    assert not (tmp_path / "mean").exists()
