"""The classes of transformers whose arithmetic is ours: there and back, and what none of them can express."""

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
ARCHITECTURES = {  # what we have -> the class that expresses it, or what keeps each of the nearest from it
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
        "Not MarianMTModel: its positions are learned. Not BartForConditionalGeneration: it has no norm on its "
        "embeddings.",
    ),
    "final norm": ({"final_norm": True}, "Not MarianMTModel: it has a final norm."),
    "no final norm": (PRE | {"final_norm": False}, "Not PegasusForConditionalGeneration: it has no final norm."),
    "pre, two vocabularies": (
        PRE | TWO,
        "Not PegasusForConditionalGeneration: source and target have embeddings of their own.",
    ),
    "heads of their own width": ({"key_head_dim": 5}, "Not MarianMTModel: its heads have a width of their own"),
    "another epsilon": ({"layer_norm_eps": 1e-6}, "Not MarianMTModel: its layer_norm_eps is 1e-06"),
    "odd": (
        LEARNED | EMBEDDING_NORM | {"d_model": 33, "encoder_attention_heads": 3, "decoder_attention_heads": 11},
        BartForConditionalGeneration,
    ),
}
FITTING = [name for name, (_, found) in ARCHITECTURES.items() if not isinstance(found, str)]


@pytest.fixture
def make_architecture(make_model):
    return lambda name: make_model(**ARCHITECTURES[name][0])


def padded_batch(sizes: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Sources of 9 down to 4 tokens, padded on the right, and targets of 7."""
    generator = torch.Generator().manual_seed(0)
    source, target = (
        torch.randint(3, size, (6, n), generator=generator) for size, n in zip(sizes, (9, 7), strict=True)
    )
    mask = torch.arange(9) < 9 - torch.arange(6)[:, None]
    return {"input_ids": source * mask, "attention_mask": mask.long(), "decoder_input_ids": target}


@torch.no_grad()
def assert_same(ours, theirs, atol: float = 1e-5) -> None:
    """Logits, and what greedy decoding and 4 beams give."""
    batch = padded_batch((ours.config.vocab_size, ours.config.decoder_vocab_size))
    torch.testing.assert_close(ours(**batch).logits, theirs(**batch).logits, atol=atol, rtol=0)
    del batch["decoder_input_ids"]
    for beams in (1, 4):
        first, second = (each.generate(**batch, num_beams=beams, max_new_tokens=6) for each in (ours, theirs))
        assert torch.equal(first, second)


@pytest.mark.parametrize("name", FITTING)
def test_a_class_of_transformers_computes_the_same(make_architecture, name):
    model = make_architecture(name)
    theirs = to_transformers(model)
    assert type(theirs) is ARCHITECTURES[name][1]
    assert_same(model, theirs)


@pytest.mark.parametrize("name", FITTING)
def test_there_and_back_is_bit_for_bit(make_architecture, name):
    model = make_architecture(name)
    again = from_transformers(to_transformers(model))
    wanted, got = model.state_dict(), again.state_dict()
    for key in wanted:
        assert torch.equal(got[key], wanted[key]), key
    assert {key.rpartition(".embed_positions")[0] for key in got.keys() - wanted.keys()} <= {
        "model.encoder",
        "model.decoder",
    }  # sinusoids became a table
    fields = set(ARCHITECTURES[name][0]) - {"initialization"}
    assert all(getattr(again.config, field) == getattr(model.config, field) for field in fields)
    assert again.config.share_encoder_decoder_embeddings == model.config.share_encoder_decoder_embeddings


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in FITTING])
def test_what_none_can_express_is_refused(make_architecture, name):
    with pytest.raises(ValueError, match="no class of transformers can express this model") as error:
        to_transformers(make_architecture(name))
    assert ARCHITECTURES[name][1] in str(error.value)
    assert "\n" not in str(error.value)


OWN_SETTINGS = {"_from_model_config": False}
SIZE = {"vocab_size": 60, "d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 48}
SIZE |= {"decoder_ffn_dim": 40, "encoder_attention_heads": 4, "decoder_attention_heads": 2, "dropout": 0.0}
SIZE |= {"max_position_embeddings": 40}
IDS = {"pad_token_id": 59, "eos_token_id": 0, "bos_token_id": None, "decoder_start_token_id": 59}  # as OPUS-MT's
OWN = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
THEIRS = {
    "marian": (MarianMTModel, MarianConfig(**SIZE, **IDS, activation_function="swish", scale_embedding=True)),
    "pegasus": (PegasusForConditionalGeneration, PegasusConfig(**SIZE, scale_embedding=True)),
    "bart": (BartForConditionalGeneration, BartConfig(**SIZE, **OWN)),
    "mbart": (MBartForConditionalGeneration, MBartConfig(**SIZE, **OWN, scale_embedding=True)),
    "m2m_100": (M2M100ForConditionalGeneration, M2M100Config(**SIZE, **OWN)),
    "blenderbot": (BlenderbotForConditionalGeneration, BlenderbotConfig(**SIZE, **OWN)),
}


@pytest.fixture
def make_theirs():
    """(a class's model_type) -> a model of it whose every weight is drawn anew, the bias of its logits, too."""

    def make(model_type: str):
        model_class, config = THEIRS[model_type]
        torch.manual_seed(0)
        theirs = model_class(config)
        with torch.no_grad():
            for name, tensor in [*theirs.named_parameters(), *theirs.named_buffers()]:
                if "embed_positions" not in name or model_type in ("bart", "mbart", "blenderbot"):
                    tensor.add_(0.15 * torch.randn(tensor.shape))
        return theirs.eval()

    return make


def test_each_class_has_a_model_here():
    assert {stock.model_type for stock in NATIVE_ARCHITECTURES} == set(THEIRS)


@pytest.mark.parametrize("model_type", THEIRS)
def test_theirs_becomes_ours_and_theirs_again(make_theirs, model_type):
    """Bit for bit, but for rows of a table of positions that nothing reads."""
    theirs = make_theirs(model_type)
    ours = from_transformers(theirs)
    assert_same(ours, theirs)
    again = to_transformers(ours)
    assert type(again) is type(theirs)
    unread = next(stock.position_offset for stock in NATIVE_ARCHITECTURES if stock.model_type == model_type)
    wanted, got = theirs.state_dict(), again.state_dict()
    assert wanted.keys() == got.keys()
    for key in wanted:
        first = unread if "embed_positions" in key else 0
        assert torch.equal(got[key][first:], wanted[key][first:]), key
    assert again.generation_config.to_dict() == ours.generation_config.to_dict()
    assert ours.generation_config.to_diff_dict() == theirs.generation_config.to_diff_dict() | OWN_SETTINGS
    for field in (*SIZE, "pad_token_id", "eos_token_id", "decoder_start_token_id", "scale_embedding"):
        assert getattr(again.config, field) == getattr(theirs.config, field), field


@pytest.mark.parametrize("model_type", THEIRS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_dtype_is_that_of_the_source(make_theirs, model_type, dtype):
    ours = from_transformers(make_theirs(model_type).to(dtype))
    assert {parameter.dtype for parameter in ours.parameters()} == {dtype}
    assert not NATIVE_ARCHITECTURES[
        [each.model_type for each in NATIVE_ARCHITECTURES].index(model_type)
    ].incompatibilities(ours)


def test_others_are_refused_by_name():
    with pytest.raises(ValueError, match="a t5 is no model of this kind: it has relative positions"):
        native_architecture_of(T5Config())
