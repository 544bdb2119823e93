"""CTranslate2 gives the translations and scores of transformers, or a ValueError."""

import copy
import random

import pytest
import torch

from vanilla_transformer import TranslationPipeline

pytest.importorskip("ctranslate2")

from vanilla_transformer.shared import ctranslate2_pipeline  # noqa: E402
from vanilla_transformer.shared.ctranslate2_pipeline import CTranslate2Pipeline  # noqa: E402

NUM_MODELS = 4  # 200 models were compared once
CHOICES = {
    "norm_position": ["post", "pre"],
    "final_norm": [None, True, False],
    "position_embedding_type": ["sinusoidal", "learned"],
    "embedding_norm": [False, True],
    "scale_embedding": [True, False],
    "tie_word_embeddings": [True, False],
    "lm_head_bias": [False, True],
    "activation_function": ["relu", "gelu", "silu", "gelu_new"],
    "layer_norm_eps": [1e-5, 1e-3],
    "encoder_layers": [1, 2],
    "decoder_layers": [1, 2],
    "encoder_attention_heads": [2, 4],
    "decoder_attention_heads": [2, 4],
}
SEARCHES = [
    {},
    {"num_beams": 1, "max_new_tokens": 9},
    {"num_beams": 4, "early_stopping": True, "max_length": 12},
    {"num_beams": 5, "early_stopping": True, "num_return_sequences": 5, "length_penalty": 0.6},
    {"num_beams": 3, "early_stopping": True, "num_return_sequences": 2, "length_penalty": 0.0, "max_new_tokens": 20},
    {"num_beams": 4, "early_stopping": False, "length_penalty": 0.0},
    {"num_beams": 2, "early_stopping": True, "length_penalty": -0.5, "max_new_tokens": 7},
]


@pytest.fixture
def make_pair(make_model, make_tokenizer):
    """Factory: fields of the config -> the same random model as a pipeline of transformers and one of CTranslate2."""

    def make(seed: int = 0, shared: bool = True, **fields):
        tokenizer, sizes = make_tokenizer(shared)
        pair = {"model": make_model(seed, **(sizes | fields)), "tokenizer": tokenizer, "batch_size": 2}
        return TranslationPipeline(**pair), CTranslate2Pipeline(**pair)

    return make


def test_quantization_does_not_change_the_model(make_model, make_tokenizer):
    tokenizer, sizes = make_tokenizer(True)
    model = make_model(**sizes)
    before = copy.deepcopy(model.state_dict())
    CTranslate2Pipeline(model=model, tokenizer=tokenizer, quantization="int8")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("seed", range(NUM_MODELS))
def test_engines_agree(make_pair, sentences, seed):
    rng = random.Random(seed)
    fields = {name: rng.choice(values) for name, values in CHOICES.items()}
    fields["lm_head_bias"] &= not fields["tie_word_embeddings"]
    translator, engine = make_pair(seed, rng.random() < 0.5, **fields)
    texts = [*sentences["en"], "", "dog"]
    for options in SEARCHES:
        pairs = zip(*(each(texts, return_scores=True, **options) for each in (translator, engine)), strict=True)
        for expected, result in pairs:
            expected, result = ([each] if isinstance(each, dict) else each for each in (expected, result))
            for one, other in zip(expected, result, strict=True):
                is_tie = options and any(
                    abs(one["score"] - each["score"]) < 1e-4 for each in expected if each is not one
                )
                assert is_tie or other["translation_text"] == one["translation_text"], (fields, options)
                if options:  # without, a model repeats pad tokens, which the score of greedy decoding excludes
                    assert other["score"] == pytest.approx(one["score"], abs=1e-4)


def test_eos_may_be_a_token_with_text(make_model, make_tokenizer, sentences):
    tokenizer, sizes = make_tokenizer(True)
    model = make_model(**sizes)
    ids = model.generate(**tokenizer("the dog runs", return_tensors="pt"), max_new_tokens=9)[0]
    for eos in ids[1:].unique().tolist():
        model.generation_config.eos_token_id = eos
        pair = {"model": model, "tokenizer": tokenizer}
        expected, result = (
            each(**pair)(["the dog runs", *sentences["en"]], max_new_tokens=9)
            for each in (TranslationPipeline, CTranslate2Pipeline)
        )
        assert result == expected
        assert expected[0]["translation_text"].endswith(tokenizer.decode([eos]).strip())


def test_n_best_contains_only_hypotheses_that_exist(make_pair):
    options = {"num_beams": 70, "num_return_sequences": 70, "early_stopping": True, "max_new_tokens": 1}
    expected, result = (each("dog", **options) for each in make_pair())
    assert len(result) == len(expected) < 70


def test_translates_a_source_of_one_special_token(make_pair):
    batch = {"input_ids": torch.tensor([[2], [1]]), "attention_mask": torch.ones(2, 1)}
    expected, result = (
        each.postprocess(each.forward(batch, return_scores=False, max_new_tokens=6)) for each in make_pair()
    )
    assert result == expected


def test_bans_tokens_with_greedy_decoding(make_pair, sentences):
    translator, engine = make_pair()
    eos = translator.model.config.eos_token_id  # generate() ignores it in `bad_words_ids`
    for banned in ({"bad_words_ids": [[26], [11], [eos]]}, {"suppress_tokens": [26, 36]}):
        translator.model.generation_config.update(**(dict.fromkeys(["bad_words_ids", "suppress_tokens"]) | banned))
        engine = CTranslate2Pipeline(model=translator.model, tokenizer=translator.tokenizer)
        assert engine(sentences["en"], max_new_tokens=9) == translator(sentences["en"], max_new_tokens=9)
        with pytest.raises(
            ValueError, match="CTranslate2 does not support bad_words_ids and suppress_tokens with beam"
        ):
            engine("the dog", num_beams=2, early_stopping=True)


def test_model_decodes_sentences_beyond_the_position_table(make_pair, sentences, monkeypatch):
    monkeypatch.setattr(ctranslate2_pipeline, "MAX_TOKENS", 14)
    translator, engine = make_pair(shared=False)
    texts = ["the dog", *sentences["en"], "a cat sleeps in the house " * 3]
    for limit in (9, 15):
        assert engine(texts, max_new_tokens=limit) == translator(texts, max_new_tokens=limit)


def test_accepts_options_without_effect(make_pair):
    _, engine = make_pair()
    neutral = {"min_length": 0, "repetition_penalty": 1.0, "do_sample": False, "ensemble": [], "glossary": None}
    assert engine("the dog", max_new_tokens=5, **neutral) == engine("the dog", max_new_tokens=5)


def test_quantizes(make_pair):
    translator, engine = make_pair()
    engine = CTranslate2Pipeline("int8", model=translator.model, tokenizer=translator.tokenizer)
    assert engine.engine.compute_type.startswith("int8")
    assert engine("the dog runs", max_new_tokens=5)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"glossary": {"dog": "Hund"}}, "glossary"),
        ({"return_token_scores": True}, "return_token_scores"),
        ({"min_new_tokens": 3, "do_sample": True}, "min_new_tokens, do_sample"),
        ({"extra_tokens": 0}, "extra_tokens"),
        ({"suppress_tokens": [7]}, "suppress_tokens"),
        ({"num_beams": 2}, "early_stopping=None with beam search"),
        ({"decoder_input_ids": torch.tensor([[1, 9]])}, "decoder_input_ids"),
        ({"num_beams": 2, "num_return_sequences": 2, "length_penalty": 0.0}, "early_stopping=None"),
    ],
)
def test_rejects_options(make_pair, options, reason):
    _, engine = make_pair()
    with pytest.raises(ValueError, match=f"CTranslate2 does not support {reason}"):
        engine("the dog runs", **options)


def add_lora(model):
    peft = pytest.importorskip("peft")
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: model.bfloat16(), "weights that are not float32"),
        (lambda model: model.to("meta"), "the device meta here"),
        (lambda model: model.generation_config.update(forced_eos_token_id=2), "forced_eos_token_id"),
        (lambda model: setattr(model.config, "activation_function", "mish"), "activation_function=mish"),
        (lambda model: add_lora(model), "a modified Linear"),
        (lambda model: model.get_encoder().layers[0].register_forward_hook(print), "a modified EncoderLayer"),
        (lambda model: setattr(model.lm_head, "forward", abs), "a modified Linear"),
    ],
)
def test_rejects_models(make_pair, change, reason):
    def select(translator):
        ctranslate2_pipeline.validate_ctranslate2_options(translator, {})
        return CTranslate2Pipeline(model=translator.model, tokenizer=translator.tokenizer)

    translator, _ = make_pair()
    assert select(translator)
    change(translator.model)
    with pytest.raises(ValueError, match=f"CTranslate2 does not support .*{reason}"):
        select(translator)


@pytest.mark.parametrize("changed", [{"suppress_tokens": [7]}, {"eos_token_id": 9}, {"decoder_start_token_id": 2}])
def test_changes_after_the_conversion_are_rejected(make_pair, changed):
    _, engine = make_pair()
    engine.model.generation_config.update(**changed)
    with pytest.raises(ValueError, match=f"{next(iter(changed))} has changed after the conversion"):
        engine("dog")
