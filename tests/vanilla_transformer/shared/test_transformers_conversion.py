"""Conversion to and from native Transformers classes, and models that none of them can represent."""

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BlenderbotConfig,
    BlenderbotForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    PegasusConfig,
    PegasusForConditionalGeneration,
    T5Config,
)

from vanilla_transformer.shared.transformers_conversion import (
    NATIVE_ARCHITECTURES,
    from_transformers,
    native_architecture_of,
    to_transformers,
)

PRE, LEARNED, EMBEDDING_NORM = (
    {"norm_position": "pre"},
    {"position_embedding_type": "learned"},
    {"embedding_norm": True},
)
HEADS_BY_SIDE = {"encoder_attention_heads": 2, "decoder_attention_heads": 8, "decoder_ffn_dim": 40}
UNTIED = {"tie_word_embeddings": False, "lm_head_bias": True}
TWO = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 50}
MODELS = {  # name -> (config fields, native class or part of the error message)
    "paper": ({}, MarianMTModel),
    "heads by side": (HEADS_BY_SIDE | {"activation_function": "silu", "scale_embedding": False}, MarianMTModel),
    "two vocabularies": (TWO, MarianMTModel),
    "two vocabularies, untied": (TWO | UNTIED | {"encoder_layers": 1}, MarianMTModel),
    "pre": (PRE, PegasusForConditionalGeneration),
    "pre, untied": (PRE | UNTIED | HEADS_BY_SIDE, PegasusForConditionalGeneration),
    "embedding norm": (EMBEDDING_NORM | LEARNED, BartForConditionalGeneration),
    "embedding norm, untied": (EMBEDDING_NORM | UNTIED, BartForConditionalGeneration),
    "pre, embedding norm": (PRE | EMBEDDING_NORM | {"lm_head_bias": True}, MBartForConditionalGeneration),
    "pre, learned": (PRE | LEARNED | HEADS_BY_SIDE, BlenderbotForConditionalGeneration),
    "learned": (
        LEARNED,
        "Not MarianMTModel: its positions are learned. "
        "Not BartForConditionalGeneration: it has no embedding LayerNorm.",
    ),
    "final LayerNorm": ({"final_norm": True}, "Not MarianMTModel: it has a final LayerNorm."),
    "no final LayerNorm": (
        PRE | {"final_norm": False},
        "Not PegasusForConditionalGeneration: it has no final LayerNorm.",
    ),
    "pre, two vocabularies": (
        PRE | TWO,
        "Not PegasusForConditionalGeneration: source and target have separate embeddings.",
    ),
    "separate head dimension": ({"key_head_dim": 5}, "Not MarianMTModel: it sets key_head_dim"),
    "other epsilon": ({"layer_norm_eps": 1e-6}, "Not MarianMTModel: its layer_norm_eps is 1e-06"),
    "odd": (
        LEARNED | EMBEDDING_NORM | {"d_model": 33, "encoder_attention_heads": 3, "decoder_attention_heads": 11},
        BartForConditionalGeneration,
    ),
}
CONVERTIBLE = [name for name, (_, found) in MODELS.items() if not isinstance(found, str)]


@pytest.fixture
def make_variant(make_model):
    return lambda name: make_model(**MODELS[name][0])


def padded_batch(sizes: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Sources of 9 down to 4 tokens, padded on the right, and targets of 7."""
    generator = torch.Generator().manual_seed(0)
    source, target = (
        torch.randint(3, size, (6, n), generator=generator) for size, n in zip(sizes, (9, 7), strict=True)
    )
    mask = torch.arange(9) < 9 - torch.arange(6)[:, None]
    return {"input_ids": source * mask, "attention_mask": mask.long(), "decoder_input_ids": target}


@torch.no_grad()
def assert_same(model, native, atol: float = 1e-5) -> None:
    """Assert equal logits and equal outputs of greedy decoding and of 4 beams."""
    batch = padded_batch((model.config.vocab_size, model.config.decoder_vocab_size))
    torch.testing.assert_close(model(**batch).logits, native(**batch).logits, atol=atol, rtol=0)
    del batch["decoder_input_ids"]
    for beams in (1, 4):
        first, second = (each.generate(**batch, num_beams=beams, max_new_tokens=6) for each in (model, native))
        assert torch.equal(first, second)


@pytest.mark.parametrize("name", CONVERTIBLE)
def test_native_class_computes_the_same(make_variant, name):
    model = make_variant(name)
    native = to_transformers(model)
    assert type(native) is MODELS[name][1]
    assert_same(model, native)


@pytest.mark.parametrize("name", CONVERTIBLE)
def test_round_trip_is_bit_for_bit_exact(make_variant, name):
    model = make_variant(name)
    converted = from_transformers(to_transformers(model))
    expected, actual = model.state_dict(), converted.state_dict()
    for key in expected:
        assert torch.equal(actual[key], expected[key]), key
    assert {key.rpartition(".embed_positions")[0] for key in actual.keys() - expected.keys()} <= {
        "model.encoder",
        "model.decoder",
    }  # sinusoids are converted to a table
    fields = set(MODELS[name][0]) - {"initialization"}
    assert all(getattr(converted.config, field) == getattr(model.config, field) for field in fields)
    assert converted.config.share_encoder_decoder_embeddings == model.config.share_encoder_decoder_embeddings


@pytest.mark.parametrize("name", [name for name in MODELS if name not in CONVERTIBLE])
def test_rejects_models_without_native_class(make_variant, name):
    with pytest.raises(ValueError, match="no native Transformers class can represent this model") as error:
        to_transformers(make_variant(name))
    assert MODELS[name][1] in str(error.value)
    assert "\n" not in str(error.value)


NOT_DERIVED = {"_from_model_config": False}
SIZE = {"vocab_size": 60, "d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 48}
SIZE |= {"decoder_ffn_dim": 40, "encoder_attention_heads": 4, "decoder_attention_heads": 2, "dropout": 0.0}
SIZE |= {"max_position_embeddings": 40}
MARIAN_IDS = {
    "pad_token_id": 59,
    "eos_token_id": 0,
    "bos_token_id": None,
    "decoder_start_token_id": 59,
}  # as in OPUS-MT
BART_IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
NATIVE_MODELS = {
    "marian": (MarianMTModel, MarianConfig(**SIZE, **MARIAN_IDS, activation_function="swish", scale_embedding=True)),
    "pegasus": (PegasusForConditionalGeneration, PegasusConfig(**SIZE, scale_embedding=True)),
    "bart": (BartForConditionalGeneration, BartConfig(**SIZE, **BART_IDS)),
    "mbart": (MBartForConditionalGeneration, MBartConfig(**SIZE, **BART_IDS, scale_embedding=True)),
    "m2m_100": (M2M100ForConditionalGeneration, M2M100Config(**SIZE, **BART_IDS)),
    "blenderbot": (BlenderbotForConditionalGeneration, BlenderbotConfig(**SIZE, **BART_IDS)),
}


@pytest.fixture
def make_native():
    """Return a function: model_type -> native model with random weights and a random bias of the logits."""

    def make(model_type: str):
        model_class, config = NATIVE_MODELS[model_type]
        torch.manual_seed(0)
        native = model_class(config)
        with torch.no_grad():
            for name, tensor in [*native.named_parameters(), *native.named_buffers()]:
                if "embed_positions" not in name or model_type in ("bart", "mbart", "blenderbot"):
                    tensor.add_(0.15 * torch.randn(tensor.shape))
        return native.eval()

    return make


def test_each_architecture_is_tested():
    assert {architecture.model_type for architecture in NATIVE_ARCHITECTURES} == set(NATIVE_MODELS)


@pytest.mark.parametrize("model_type", NATIVE_MODELS)
def test_native_round_trip(make_native, model_type):
    """Exact bit for bit, except for the unused rows of a position table."""
    native = make_native(model_type)
    model = from_transformers(native)
    assert_same(model, native)
    converted = to_transformers(model)
    assert type(converted) is type(native)
    offset = next(
        architecture.position_offset for architecture in NATIVE_ARCHITECTURES if architecture.model_type == model_type
    )
    expected, actual = native.state_dict(), converted.state_dict()
    assert expected.keys() == actual.keys()
    for key in expected:
        first = offset if "embed_positions" in key else 0
        assert torch.equal(actual[key][first:], expected[key][first:]), key
    assert converted.generation_config.to_dict() == model.generation_config.to_dict()
    assert model.generation_config.to_diff_dict() == native.generation_config.to_diff_dict() | NOT_DERIVED
    for field in (*SIZE, "pad_token_id", "eos_token_id", "decoder_start_token_id", "scale_embedding"):
        assert getattr(converted.config, field) == getattr(native.config, field), field


@pytest.mark.parametrize("model_type", NATIVE_MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_keeps_dtype(make_native, model_type, dtype):
    model = from_transformers(make_native(model_type).to(dtype))
    for each in (model, to_transformers(model)):
        assert {parameter.dtype for parameter in each.parameters()} == {dtype}
    assert not NATIVE_ARCHITECTURES[
        [each.model_type for each in NATIVE_ARCHITECTURES].index(model_type)
    ].incompatibilities(model)


def test_rejects_adapters(make_native, make_model, any_peft_version):
    """The weights of an adapter belong to other modules."""
    pytest.importorskip("ctranslate2")
    peft = pytest.importorskip("peft")
    from vanilla_transformer.shared.ctranslate2_conversion import to_spec

    lora = peft.LoraConfig(target_modules=["q_proj"], r=1)
    tokens = list(map(str, range(make_model().config.vocab_size)))
    conversions = (
        (make_native("marian"), from_transformers),
        (make_model(), to_transformers),
        (make_model(), lambda model: to_spec(model, tokens, tokens, "3")),
    )
    for model, convert in conversions:
        convert(model)
        wrapper = peft.get_peft_model(model, lora)
        for each in (wrapper, model):
            with pytest.raises(ValueError, match="the model has a PEFT adapter"):
                convert(each)
        convert(wrapper.merge_and_unload())
        model.add_adapter(lora)
        with pytest.raises(ValueError, match="the model has a PEFT adapter"):
            convert(model)


def test_rejects_unsupported_model_types():
    with pytest.raises(ValueError, match="model_type=t5 is not supported: it has relative positions"):
        native_architecture_of(T5Config())
