"""Errors of damaged checkpoints: one line with the checkpoint, the file and a suggested action."""

import json
import os
import sys
import threading
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import (
    BigBirdPegasusConfig,
    BigBirdPegasusForConditionalGeneration,
    FSMTConfig,
    FSMTForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    PegasusConfig,
    PegasusForConditionalGeneration,
)

from training.inference.translators import load_translator
from training.recipe.reading import read_recipe
from training.run.checkpoints import average_checkpoints
from training.run.factories import load_base_model
from vanilla_transformer.shared.loading import load_model, load_tokenizer, rust_panics_as_errors

# tokenizers that make the tokenizers library panic
CONTINUED = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
CONTINUED["continuing_subword_prefix"] = "much longer than any token"
NAMELESS = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "</s>", "type_id": 0}}], "pair": []}
NAMELESS["special_tokens"] = {}


@pytest.fixture
def checkpoint(tmp_path, make_model, make_tokenizer) -> Path:
    tokenizer, sizes = make_tokenizer(True)
    folder = tmp_path / "mine"
    make_model(**sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_loads_valid_checkpoint(checkpoint):
    model = load_model(checkpoint, dropout=0.3)
    assert (model.config.dropout, model.training) == (0.3, False)
    assert load_tokenizer(checkpoint)("the dog runs")["input_ids"]
    assert load_translator(str(checkpoint))("the dog runs")


@pytest.mark.parametrize(
    ("model_class", "config_class", "is_valid"),
    [
        (MarianMTModel, MarianConfig, True),
        (PegasusForConditionalGeneration, PegasusConfig, True),
        (FSMTForConditionalGeneration, FSMTConfig, True),
        (BigBirdPegasusForConditionalGeneration, BigBirdPegasusConfig, False),  # learned positions
    ],
)
def test_checkpoint_without_position_tables(tmp_path, model_class, config_class, is_valid):
    """Published checkpoints of Pegasus and FSMT have no sinusoids. The classes compute them."""
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 32}
    sizes |= {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    is_fsmt = config_class is FSMTConfig
    sizes |= {"src_vocab_size": 40, "tgt_vocab_size": 40} if is_fsmt else {"vocab_size": 40}
    model = model_class(config_class(**sizes))
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if "embed_positions" not in name}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    if is_valid:
        for name, tensor in load_model(tmp_path).state_dict().items():
            assert torch.equal(tensor, model.state_dict()[name]), name
    else:
        with pytest.raises(ValueError, match="missing weights: model.decoder.embed_positions.weight and 1 more"):
            load_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("config.json", {"d_model": "x"}, "config.json cannot be used .*d_model"),
        ("config.json", {"d_model": 64}, r"the weights cannot be used .* is \(.*\), but config.json requires \("),
        ("config.json", {"encoder_layers": 3}, "missing weights: model.encoder.layers.2.* and 15 more"),
        ("config.json", {"encoder_layers": 1}, "unexpected weights: model.encoder.layers.1"),
        ("config.json", {"encoder_layers": 10**9}, "encoder_layers=1000000000 must be at most"),
        ("config.json", {"model_type": "nothing"}, "config.json cannot be used"),
        ("config.json", b"\xff\xfe{", "config.json cannot be used"),
        ("config.json", None, "is not a checkpoint directory: config.json is missing"),
        ("generation_config.json", {"num_beams": "x"}, "generation_config.json .*cannot be used"),
        ("generation_config.json", b"{", "generation_config.json cannot be used"),
        ("generation_config.json", {"max_length": 2**63}, "max_length=9223372036854775808 must be at most 100000"),
        ("tokenizer.json", {"model": 3}, "the tokenizer cannot be used"),
        ("tokenizer.json", b"<html>", "the tokenizer cannot be used"),
        ("tokenizer.json", {"model": CONTINUED}, "the tokenizer cannot be used .*out of range"),
        ("tokenizer.json", {"post_processor": NAMELESS}, "the tokenizer cannot be used .*no entry found"),
        ("tokenizer.json", None, "the tokenizer cannot be used"),
        ("tokenizer_config.json", {"pad_token": None}, "cannot be used .*pad"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1", "the weights cannot be used"),
        ("model.safetensors", None, "the weights cannot be used"),
    ],
)
def test_damaged_file_is_reported_in_one_line(checkpoint, capfd, name, damage, message):
    path = checkpoint / name
    if isinstance(damage, dict):
        path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    elif damage is None:
        path.unlink()
    else:
        path.write_bytes(damage)
    capfd.readouterr()
    with pytest.raises(ValueError, match=message) as error:
        load_translator(str(checkpoint))
    assert str(error.value).startswith(str(checkpoint))
    assert len(str(error.value).splitlines()) == 1
    assert capfd.readouterr().err == ""


def test_rejects_truncated_missing_and_nonfinite_weights(checkpoint):
    path = checkpoint / "model.safetensors"
    content, state = path.read_bytes(), load_file(path)
    name = "model.encoder.layers.0.feed_forward.fc1.weight"
    for change, message in (
        (lambda: path.write_bytes(content[:-9]), "the weights cannot be used"),
        (lambda: save_file({key: state[key] for key in state if key != name}, path, {"format": "pt"}), name),
        (lambda: save_file(state | {name: state[name] * torch.nan}, path, {"format": "pt"}), "not finite"),
    ):
        change()
        with pytest.raises(ValueError, match=message):
            load_model(checkpoint)


def test_lora_adapter_is_named(checkpoint):
    """A checkpoint of a run with `lora_rank` contains only the adapter."""
    (checkpoint / "config.json").rename(checkpoint / "adapter_config.json")
    with pytest.raises(ValueError, match="It is a LoRA adapter .* Pass the output directory of the run"):
        load_model(checkpoint)


def test_adapter_with_its_model_is_rejected(checkpoint, tmp_path, any_peft_version):
    """Transformers loads it with the model."""
    model = load_model(checkpoint)
    model.add_adapter(LoraConfig(target_modules=["q_proj"], r=1))
    model.save_pretrained(checkpoint)
    message = "has a PEFT adapter. Call merge_and_unload()"
    with pytest.raises(ValueError, match=f"{checkpoint} {message}"):
        average_checkpoints([checkpoint, checkpoint])
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"base_model: {checkpoint}\noutput_dir: {tmp_path}\nlearning_rate: 0.1\n")
    with pytest.raises(ValueError, match=message):
        load_base_model(read_recipe([str(recipe)]))


def test_rejects_tokenizer_of_another_model(checkpoint, make_model):
    make_model(vocab_size=20).save_pretrained(checkpoint)
    with pytest.raises(ValueError, match=r"the tokenizer has \d+ tokens, but the model only 20"):
        load_translator(str(checkpoint))


def test_keeps_stderr_of_other_libraries_while_loading(capfd):
    for write in (lambda: os.write(2, b"below Python\n"), lambda: print("by Python", file=sys.stderr)):
        with rust_panics_as_errors():
            write()
    with pytest.raises(KeyError), rust_panics_as_errors():
        {}[os.write(2, b"before an error\n")]
    assert sorted(capfd.readouterr().err.splitlines()) == ["before an error", "below Python", "by Python"]


def test_keeps_stderr_while_two_threads_load(capfd):
    second_entered = threading.Event()

    def load_second() -> None:
        with rust_panics_as_errors():
            second_entered.set()
            first_left.wait(10)

    first_left = threading.Event()
    thread = threading.Thread(target=load_second)
    with rust_panics_as_errors():
        thread.start()
        second_entered.wait(0.2)  # without a lock, it takes the file of the first thread for stderr
    first_left.set()
    thread.join()
    os.write(2, b"after loading\n")
    assert "after loading" in capfd.readouterr().err
