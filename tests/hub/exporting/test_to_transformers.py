"""`--to transformers` writes a checkpoint of the native class that fits the model."""

import json
from functools import partial

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hub.export import main

CLASSES = {
    "MarianMTModel": {},
    "PegasusForConditionalGeneration": {"norm_position": "pre", "encoder_attention_heads": 2},
    "BartForConditionalGeneration": {"embedding_norm": True, "position_embedding_type": "learned"},
    "MBartForConditionalGeneration": {"embedding_norm": True, "norm_position": "pre", "tie_word_embeddings": False},
    "BlenderbotForConditionalGeneration": {"norm_position": "pre", "position_embedding_type": "learned"},
}


@pytest.fixture
def command(run_main):
    return partial(run_main, main)


@pytest.mark.parametrize("name", CLASSES)
def test_native_class_generates_the_same(save_checkpoint, command, tmp_path, sentences, name):
    """Check saved and other generation settings, and the ids of the tokenizer."""
    model, tokenizer, folder = save_checkpoint(**CLASSES[name])
    command(folder, tmp_path / "native", "--to", "transformers")
    native, fast = (auto.from_pretrained(tmp_path / "native") for auto in (AutoModelForSeq2SeqLM, AutoTokenizer))
    assert type(native).__name__ == name
    batch = tokenizer(sentences["en"], return_tensors="pt", padding=True)
    assert torch.equal(fast(sentences["en"], return_tensors="pt", padding=True)["input_ids"], batch["input_ids"])
    assert native.generation_config.num_beams == 5
    for options in ({}, {"num_beams": 1}, {"num_beams": 4, "length_penalty": 0.6, "early_stopping": True}):
        assert torch.equal(native.generate(**batch, **options), model.generate(**batch, **options))


def test_writes_default_limit_of_new_tokens(save_checkpoint, command, tmp_path):
    model, _, folder = save_checkpoint()
    path = folder / "generation_config.json"
    settings = json.loads(path.read_text())
    del settings["max_new_tokens"]
    path.write_text(json.dumps(settings))
    command(folder, tmp_path / "native", "--to", "transformers")
    settings = json.loads((tmp_path / "native" / "generation_config.json").read_text())
    assert settings["max_new_tokens"] == 20
    assert not settings.get("_from_model_config")  # transformers 4 would replace them
    source = torch.tensor([[5, 6, 7, 2]])
    model.generation_config.max_new_tokens = None
    native = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "native")
    assert torch.equal(native.generate(source), model.generate(source))


def test_writes_merges_as_strings(save_checkpoint, command, tmp_path):
    """transformers 4.40 cannot read pairs."""
    _, tokenizer, folder = save_checkpoint()
    command(folder, tmp_path / "native", "--to", "transformers")
    merges, pairs = (
        json.loads((each / "tokenizer.json").read_text())["model"]["merges"] for each in (tmp_path / "native", folder)
    )
    assert len(pairs) > 5
    assert [merge.split(" ") for merge in merges] == pairs


def test_rejects_unsupported_models(save_checkpoint, command, tmp_path, capsys):
    _, _, folder = save_checkpoint(position_embedding_type="learned")
    command(folder, tmp_path / "native", "--to", "transformers", status=2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hub.export: no native Transformers class can represent this model. Not MarianMTModel:")
    assert not (tmp_path / "native").exists()
    command(folder, tmp_path / "native", "--to", "transformers", "--quantization", "int8", status=2)
    assert "--quantization requires --to ctranslate2" in capsys.readouterr().err
