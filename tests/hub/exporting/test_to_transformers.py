"""`--to transformers` writes a checkpoint of the native class that fits the model."""

import json
from functools import partial

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hub.export import main
from hub.exporting.to_transformers import convert, pad_to_equal_vocab_sizes
from vanilla_transformer.shared.transformers_conversion import to_marian

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


def test_padded_model_keeps_dtype(make_model):
    model = make_model(share_encoder_decoder_embeddings=False, decoder_vocab_size=61).bfloat16()
    padded = pad_to_equal_vocab_sizes(model)
    assert padded.config.vocab_size == 61
    assert {parameter.dtype for parameter in padded.parameters()} == {torch.bfloat16}


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


def test_rejects_unsupported_models(save_checkpoint, assert_rejected, tmp_path):
    _, _, folder = save_checkpoint(position_embedding_type="learned")
    message = "hub.export: no native Transformers class can represent this model. Not MarianMTModel:"
    assert_rejected(main, folder, tmp_path / "out", "--to", "transformers", message=message)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_marian_gives_same_results(save_checkpoint, shared, tied, bias):
    """Logits of right-padded batches differ by at most 1e-5. 5-beam search gives the same translations."""
    model, _, _ = save_checkpoint(shared=shared, tie_word_embeddings=tied, lm_head_bias=bias)
    marian = to_marian(model)
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(3, model.config.vocab_size, (6, 9), generator=generator)
    target = torch.randint(3, model.config.decoder_vocab_size, (6, 7), generator=generator)
    mask = torch.ones_like(source)
    for row in range(6):
        mask[row, 9 - row :] = 0
    source *= mask
    batch = {"input_ids": source, "attention_mask": mask}
    with torch.no_grad():
        expected, logits = (each(**batch, decoder_input_ids=target).logits for each in (model, marian))
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    first, second = (each.generate(**batch, num_beams=5, max_new_tokens=10) for each in (model, marian))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"norm_position": "pre"}, "it is pre-norm"),
        ({"final_norm": True}, "a final LayerNorm"),
        ({"position_embedding_type": "learned"}, "positions are learned"),
        ({"embedding_norm": True}, "an embedding LayerNorm"),
        ({"key_head_dim": 5}, "it sets key_head_dim"),
        ({"layer_norm_eps": 1e-6}, "layer_norm_eps is 1e-06"),
    ],
)
def test_marian_rejects_other_architectures(make_model, overrides, reason):
    with pytest.raises(ValueError, match=f"MarianMTModel cannot represent this model: .*{reason}"):
        to_marian(make_model(**overrides))


@pytest.mark.parametrize("sizes", [(31, 37), (41, 37)])
@pytest.mark.parametrize("tied", [True, False])
def test_pads_tables_to_equal_length(make_model, make_tokenizer, sizes, tied, tmp_path):
    """transformers 4.57 requires equal lengths. Results do not change, and added tokens are never generated."""
    model = make_model(
        **dict(zip(("vocab_size", "decoder_vocab_size"), sizes, strict=True)),
        share_encoder_decoder_embeddings=False,
        tie_word_embeddings=tied,
    )
    convert(model, None, None)(tmp_path)
    marian = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert marian.config.vocab_size == marian.config.decoder_vocab_size == max(sizes)
    assert len(marian.get_encoder().embed_tokens.weight) == len(marian.get_decoder().embed_tokens.weight) == max(sizes)
    generator = torch.Generator().manual_seed(0)
    source, target = (torch.randint(3, size, (4, 6), generator=generator) for size in sizes)
    with torch.no_grad():
        expected, logits = (each(input_ids=source, decoder_input_ids=target).logits for each in (model, marian))
    torch.testing.assert_close(logits[..., : sizes[1]].log_softmax(-1), expected.log_softmax(-1), atol=1e-5, rtol=0)
    assert (logits[..., sizes[1] :] < -1e8).all()
    first, second = (each.generate(source, num_beams=5, max_new_tokens=10) for each in (model, marian))
    assert torch.equal(first, second)
