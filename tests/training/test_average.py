"""The command `training.average`."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoTokenizer

from training.average import main
from training.inference.translators import read_run_recipe
from training.run.checkpoints import average


@pytest.mark.slow
def test_averages_weights(programs, finished, tmp_path):
    programs.run("training.average", finished, "--last", "2", "--output", tmp_path / "mean")
    folders = (tmp_path / "mean", finished / "checkpoint-4", finished / "checkpoint-6")
    mean, first, second = (load_file(folder / "model.safetensors") for folder in folders)
    for name, tensor in mean.items():
        torch.testing.assert_close(tensor, (first[name] + second[name]) / 2)
    AutoTokenizer.from_pretrained(tmp_path / "mean")
    listed = [finished / "checkpoint-4", finished / "checkpoint-6"]
    process = programs.run("training.average", *listed, "--output", tmp_path / "same", "--json")
    assert json.loads(process.stdout) == {"output": str(tmp_path / "same"), "checkpoints": list(map(str, listed))}
    assert (tmp_path / "same" / "model.safetensors").read_bytes() == (folders[0] / "model.safetensors").read_bytes()
    process = programs.run("training.average", finished, "--best", "2", "--output", tmp_path / "best")
    assert f"mean of {finished}/checkpoint-" in process.stdout
    settings = read_run_recipe(finished)
    assert read_run_recipe(tmp_path / "mean") == {key: settings[key] for key in settings if key != "output_dir"}


@pytest.fixture
def make_checkpoint(tmp_path, make_model, make_tokenizer, sentences):
    def make(name: str, shared: bool = True, architecture: dict | None = None, **recipe) -> str:
        tokenizer, sizes = make_tokenizer(shared)
        model = make_model(1, **sizes | (architecture or {}))
        for each in (model, tokenizer):
            each.save_pretrained(tmp_path / name)
        if recipe:
            (tmp_path / name / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        return tmp_path / name

    return make


def test_output_has_the_common_settings(make_checkpoint, tmp_path):
    """Otherwise `training.score` would compute BLEU for a model that generates sequences."""
    common = {"metric": "sequence", "target_lang": "ipa"}
    one, two = (make_checkpoint(f"run_{seed}", **common, seed=seed, output_dir="runs/x") for seed in (1, 2))
    assert average([one, two], tmp_path / "mean") == tmp_path / "mean"
    assert read_run_recipe(tmp_path / "mean") == common
    average([one, make_checkpoint("run_3")], tmp_path / "other")
    assert not (tmp_path / "other" / "recipe.yaml").exists()


@pytest.mark.parametrize("name", ["checkpoint-best", "other/checkpoint-10"])
def test_models_of_other_programs_need_no_manifest(make_checkpoint, tmp_path, name):
    average([make_checkpoint(name)], tmp_path / "mean")


def test_checkpoint_of_a_run_needs_its_manifest(make_checkpoint, tmp_path):
    make_checkpoint("run", metric="sequence")
    with pytest.raises(ValueError, match="cannot be averaged: it is incomplete"):
        average([make_checkpoint("run/checkpoint-10")], tmp_path / "mean")


def test_run_without_final_model_requires_a_selection(make_checkpoint, tmp_path):
    make_checkpoint("run/checkpoint-2")
    with pytest.raises(ValueError, match="is a run without a final model. Add --last N"):
        average(tmp_path / "run", tmp_path / "mean")


@pytest.mark.parametrize("exists", [True, False])
def test_former_order_names_the_new_command(make_checkpoint, tmp_path, monkeypatch, capsys, exists):
    run = make_checkpoint("run")
    if exists:
        (tmp_path / "my mean").mkdir()
    monkeypatch.setattr("sys.argv", ["average", str(tmp_path / "my mean"), str(run), "--last", "2"])
    with pytest.raises(SystemExit, match="2"):
        main()
    command = f"vanilla-transformer average {run} --last 2 --output '{tmp_path / 'my mean'}'"
    assert capsys.readouterr().err == f"training.average: the output is now an option. Run: {command}\n"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("decoder_attention_heads", 1),
        ("activation_function", "gelu"),
        ("tie_word_embeddings", False),
        ("share_encoder_decoder_embeddings", False),
        ("d_model", 8),
    ],
)
def test_rejects_different_architectures(make_checkpoint, tmp_path, key, value):
    """Weights of the same shapes can belong to different models."""
    one, two = make_checkpoint("one"), make_checkpoint("two", architecture={key: value})
    name = "model.encoder.embed_tokens.weight" if key == "d_model" else key
    with pytest.raises(ValueError, match=f"one and .*two are different models: {name} differs"):
        average([one, two], tmp_path / "mean")


def test_rejects_different_tokenizers(make_checkpoint, tmp_path):
    one, two = make_checkpoint("one"), make_checkpoint("two")
    path = two / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": {"type": "Lowercase"}}))
    with pytest.raises(
        ValueError, match=r"two has another tokenizer than .*one: the same vocabulary, but it splits text"
    ):
        average([one, two], tmp_path / "mean")
    assert not (tmp_path / "mean").exists()
