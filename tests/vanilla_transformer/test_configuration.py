import importlib.metadata
import runpy

import pytest
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoConfig

from vanilla_transformer import VanillaTransformerConfig


def test_default_is_base_model_of_paper():
    config = VanillaTransformerConfig()
    assert (config.encoder_layers, config.decoder_layers) == (6, 6)
    assert (config.d_model, config.encoder_attention_heads) == (512, 8)
    assert (config.encoder_ffn_dim, config.dropout, config.vocab_size) == (2048, 0.1, 37000)
    assert config.norm_position == "post"
    assert config.position_embedding_type == "sinusoidal"
    assert config.tie_word_embeddings
    assert config.share_encoder_decoder_embeddings


def test_old_transformers_are_an_error_that_names_the_required_version(repository, monkeypatch):
    """The version is the lower bound of pyproject.toml."""
    requirement = "transformers>=5.18"
    assert f'"{requirement},' in (repository / "pyproject.toml").read_text()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.57.1")
    with pytest.raises(ImportError, match=rf"{requirement} is required .* found transformers==4\.57\.1"):
        runpy.run_path(str(repository / "vanilla_transformer" / "configuration_vanilla_transformer.py"))


@pytest.mark.parametrize(("size", "expected"), [("base", 63e6), ("big", 214e6)])
def test_sizes_of_table_3(size, expected):
    """Table 3 counts 65 and 213 million parameters, with about 37,000 tokens."""
    import torch

    from vanilla_transformer import VanillaTransformerForConditionalGeneration

    with torch.device("meta"):
        model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig.from_size(size))
    assert model.num_parameters() == pytest.approx(expected, rel=0.02)


def test_rejects_unknown_size():
    with pytest.raises(ValueError, match="'huge' is not supported: choose one of base, big, tiny"):
        VanillaTransformerConfig.from_size("huge")


def test_unknown_field_suggests_similar_field():
    with pytest.raises(ValueError, match="'d_modle' is not a field .* did you mean 'd_model'"):
        VanillaTransformerConfig(d_modle=5)


def test_rejects_generation_parameter():
    with pytest.raises(ValueError, match="'num_beams' is a generation parameter"):
        VanillaTransformerConfig(num_beams=4)


def test_from_dict_keeps_unknown_keys():
    values = VanillaTransformerConfig().to_dict() | {"auto_map": {"AutoConfig": "x.Y"}, "future_field": 3}
    config = VanillaTransformerConfig.from_dict(values)
    assert config.future_field == 3
    assert config.auto_map == {"AutoConfig": "x.Y"}
    assert config.to_dict()["future_field"] == 3


def test_from_dict_prefers_keywords_and_returns_unused_ones():
    values = VanillaTransformerConfig().to_dict() | {"custom": 1}
    config, unused = VanillaTransformerConfig.from_dict(
        values, custom=2, dropout=0.3, other=4, return_unused_kwargs=True
    )
    assert (config.custom, config.dropout, unused) == (2, 0.3, {"other": 4})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"d_model": 10}, "d_model=10 is not a multiple of encoder_attention_heads=8"),
        ({"eos_token_id": 40000}, "eos_token_id=40000 is outside the vocabulary of 37000"),
        ({"eos_token_id": [2, -1]}, "eos_token_id=-1 is outside the vocabulary"),
        ({"decoder_vocab_size": 50}, "vocab_size=37000 and decoder_vocab_size=50 cannot share one embedding"),
        ({"dropout": 1.5}, "dropout=1.5 must be a probability"),
        ({"encoder_layers": 0}, "encoder_layers=0 must be at least 1"),
        ({"d_model": 9, "encoder_attention_heads": 3, "decoder_attention_heads": 3}, "d_model=9 is odd"),
    ],
)
def test_rejects_inconsistent_values(values, message):
    with pytest.raises(ValueError, match=message):
        VanillaTransformerConfig(**values)


def test_model_rejects_unknown_activation_function(make_model):
    with pytest.raises(ValueError, match="activation_function='nope' is not supported: choose one of .*relu"):
        make_model(activation_function="nope")


def test_rejects_wrong_types():
    with pytest.raises(StrictDataclassFieldValidationError):
        VanillaTransformerConfig(d_model="512")
    with pytest.raises(StrictDataclassFieldValidationError):
        VanillaTransformerConfig(norm_position="middle")


def test_integers_are_valid_probabilities():
    assert VanillaTransformerConfig(dropout=0, attention_dropout=0).dropout == 0


def test_explicit_head_dimensions_need_no_divisor():
    config = VanillaTransformerConfig(d_model=10, key_head_dim=3, value_head_dim=5)
    assert config.key_head_dim == 3


def test_decoder_vocab_size_follows_shared_vocabulary():
    assert VanillaTransformerConfig(vocab_size=100).decoder_vocab_size == 100
    config = VanillaTransformerConfig()
    config.vocab_size = 100
    assert config.decoder_vocab_size == 100


def test_two_vocabulary_sizes_survive_round_trip(tmp_path):
    config = VanillaTransformerConfig(
        vocab_size=8000, decoder_vocab_size=37000, share_encoder_decoder_embeddings=False, custom_pipelines={}
    )
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert (loaded.vocab_size, loaded.decoder_vocab_size) == (8000, 37000)


def test_decoder_text_config():
    config = VanillaTransformerConfig(
        encoder_layers=2, decoder_layers=5, vocab_size=50, decoder_vocab_size=70, share_encoder_decoder_embeddings=False
    )
    view = config.get_text_config(decoder=True)
    assert (view.num_hidden_layers, view.vocab_size) == (5, 70)
