"""Translations do not depend on the batch, and length limits are those of `generate()`."""

import random

import pytest
import torch
from transformers import GenerationConfig, TokenizersBackend

from vanilla_transformer import TranslationPipeline
from vanilla_transformer.pipeline_vanilla_transformer import EXTRA_TOKENS

NUM_CALLS = 500
FEW_EXTRA_TOKENS = 6  # instead of EXTRA_TOKENS, for shorter tests
WORDS = ["the", "dog", "cat", "runs", "sleeps", "in", "house", "old", "man", "reads", "a", "book"]


@pytest.fixture
def tokenizer(train_bpe, sentences, special_tokens):
    return TokenizersBackend(tokenizer_object=train_bpe(sentences["en"] + sentences["de"], 60), **special_tokens)


@pytest.fixture
def make_translator(make_model, tokenizer):
    def make(seed: int = 0, **variant) -> TranslationPipeline:
        torch.manual_seed(seed)
        sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
        model = make_model(vocab_size=len(tokenizer), **(sizes | variant))
        model.generation_config.update(max_new_tokens=None, max_length=None)
        return TranslationPipeline(model=model, tokenizer=tokenizer)

    return make


def generate(translator, text, **options) -> list[list[int]]:
    ids = translator.model.generate(**translator.tokenizer(text, return_tensors="pt"), **options)
    return [translator.tokenizer.decode(row, skip_special_tokens=True) for row in ids]


def texts_of(outputs) -> list[str]:
    return [each["translation_text"] for each in as_list(outputs)]


def default_limit(translator, text) -> int:
    length, config = len(translator.tokenizer(text)["input_ids"]), translator.model.config
    is_learned = config.position_embedding_type == "learned"
    return min(
        length + FEW_EXTRA_TOKENS, config.max_position_embeddings - 1 if is_learned else length + FEW_EXTRA_TOKENS
    )


def random_texts(rng, n):
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 6))) for _ in range(n)]


@pytest.mark.slow
def test_limits_match_generate(make_translator, monkeypatch):
    """Settings of the model, the call and keywords are sampled 500 times. The default limit depends on the source."""
    monkeypatch.setattr("vanilla_transformer.pipeline_vanilla_transformer.EXTRA_TOKENS", FEW_EXTRA_TOKENS)
    rng = random.Random(0)
    translators = [make_translator(0), make_translator(1, position_embedding_type="learned")]
    keys = {
        "max_new_tokens": [1, 2, 5, 9],
        "max_length": [2, 3, 7],
        "min_new_tokens": [3],
        "num_beams": [1, 2, 3],
        "length_penalty": [0.5],
        "num_return_sequences": [1, 2],
    }

    def sample_options(probability: float) -> dict:
        return {name: rng.choice(values) for name, values in keys.items() if rng.random() < probability}

    defaults = dict.fromkeys(keys)
    num_tried = 0
    while num_tried < NUM_CALLS:
        translator = rng.choice(translators)
        model_options = sample_options(0.2)
        call_options = sample_options(0.2) if rng.random() < 0.5 else None
        keywords = sample_options(0.25)
        merged = model_options | (call_options or {}) | keywords
        if any(
            each.get("num_return_sequences", 1) > each.get("num_beams", 1)
            for each in (model_options, call_options or {}, merged)
        ):
            continue  # an error of transformers
        translator.model.generation_config.update(**(defaults | model_options))
        options = (
            keywords if call_options is None else {"generation_config": GenerationConfig(**call_options), **keywords}
        )
        (text,) = random_texts(rng, 1)
        expected = options
        if not {"max_new_tokens", "max_length"} & merged.keys():
            expected = options | {"max_new_tokens": default_limit(translator, text)}
        actual = translator([text], **options)[0]
        assert texts_of(actual) == generate(translator, text, **expected), (model_options, call_options, keywords)
        assert isinstance(actual, list) == (merged.get("num_return_sequences", 1) > 1)
        num_tried += 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sinusoidal", "learned"])
def test_translations_do_not_depend_on_the_batch(make_translator, monkeypatch, kind):
    """In random calls, each batch size and each order gives the same translations as single sentences."""
    monkeypatch.setattr("vanilla_transformer.pipeline_vanilla_transformer.EXTRA_TOKENS", FEW_EXTRA_TOKENS)
    rng = random.Random(kind)
    translators = [make_translator(seed, position_embedding_type=kind) for seed in (0, 1)]
    for number in range(NUM_CALLS // 2):
        translator = rng.choice(translators)
        limit = rng.choice([None, None, 4])
        translator.model.generation_config.update(max_new_tokens=limit)
        options = {"num_beams": rng.choice([1, 1, 2, 3]), "return_scores": rng.random() < 0.3}
        if options["num_beams"] > 1 and rng.random() < 0.3:
            options["num_return_sequences"] = 2
        if options["num_beams"] > 1 and rng.random() < 0.2:
            options["glossary"] = {"dog": "Hund", "book": "Buch"}
        if rng.random() < 0.2:  # decoded by the loop of transformers, which has one limit per batch
            options["forced_eos_token_id"] = translator.tokenizer.eos_token_id
        options["return_token_scores"] = rng.random() < 0.2
        options["return_alignments"] = rng.random() < 0.2
        texts = random_texts(rng, rng.randint(2, 3)) + rng.choice([[], [""]])
        rng.shuffle(texts)
        single = [translator([text], batch_size=1, **options)[0] for text in texts]
        size = rng.choice([2, 3, len(texts), None])
        assert_equal(translator(texts, batch_size=size, **options), single, (number, size, options))
        assert_equal(translator(texts[::-1], batch_size=size, **options)[::-1], single, (number, size, options))


def assert_equal(actual, expected, message) -> None:
    """Assert equality. Scores may differ slightly, because matrix products of other sizes sum in another order."""
    for one, other in zip(actual, expected, strict=True):
        for a, b in zip(as_list(one), as_list(other), strict=True):
            assert a.keys() == b.keys(), message
            for name, value in a.items():
                if name in ("score", "log_probability", "token_scores"):
                    assert value == pytest.approx(b[name], rel=1e-4, abs=1e-5), message
                else:
                    assert value == b[name], (name, message)


def as_list(value) -> list:
    return value if isinstance(value, list) else [value]


def test_each_sentence_has_separate_limit(make_translator):
    """Without an EOS token, a translation has exactly 50 tokens more than its source."""
    translator = make_translator()
    translator.model.generation_config.eos_token_id = None
    texts = ["the dog", "the old man reads a book in the house", "a cat sleeps"]
    forced = {"forced_eos_token_id": translator.tokenizer.eos_token_id}  # decoded by the loop of transformers
    for options in ({}, {"return_scores": True}, forced):
        actual = translator(texts, batch_size=3, return_token_scores=True, **options)
        lengths = [len(each["tokens"]) for each in actual]
        assert lengths == [len(translator.tokenizer(text)["input_ids"]) + EXTRA_TOKENS for text in texts]


def test_limit_is_capped_at_last_position(make_translator):
    translator = make_translator(position_embedding_type="learned", max_position_embeddings=12)
    translator.model.generation_config.update(max_length=200, eos_token_id=None)
    actual = translator("the dog", return_token_scores=True)[0]
    assert len(actual["tokens"]) == 11  # without the start token


def test_stop_string_does_not_add_eos_token(make_translator):
    """The pad token equals the EOS token, and pads the stopped sentences of a batch."""
    translator = make_translator()
    config = translator.model.generation_config
    config.update(pad_token_id=translator.tokenizer.eos_token_id, max_new_tokens=8)
    texts = random_texts(random.Random(1), 30)
    stops = sorted({each["translation_text"][4:6] for each in translator(texts)[:3]})
    options = {"stop_strings": stops, "return_scores": True, "return_token_scores": True}
    single = [translator([text], **options)[0] for text in texts]
    assert len({len(each["tokens"]) for each in single}) > 1
    assert_equal(translator(texts, batch_size=30, **options), single, "stop_strings")


def test_config_of_call_keeps_settings_of_model(make_translator):
    translator = make_translator()
    translator.model.generation_config.update(max_length=5, num_beams=2, num_return_sequences=2, eos_token_id=None)
    actual = translator("the dog", generation_config=GenerationConfig(num_beams=3), return_token_scores=True)
    assert [len(each["tokens"]) for each in actual] == [4, 4]  # without the start token


def test_empty_sentences_have_all_keys(make_translator):
    translator = make_translator(position_embedding_type="learned", max_position_embeddings=10)
    options = {"return_scores": True, "return_token_scores": True, "return_alignments": True, "num_beams": 3}
    options |= {"num_return_sequences": 3, "glossary": {"dog": "Hund"}, "max_new_tokens": 5}
    empty, too_long, normal = translator(["", "the old man " * 20, "the dog"], **options)
    assert len(empty) == len(too_long) == len(normal) == 3
    for one, other, third in zip(empty, too_long, normal, strict=True):
        assert one.keys() == other.keys() - {"error"} == third.keys()
        assert (one["score"], other["score"]) == (0.0, float("-inf"))


@pytest.mark.parametrize("pad", ["eos", None, "pad"])
def test_greedy_scores_include_eos_token(make_translator, pad):
    translator = make_translator()
    config, ids = translator.model.generation_config, translator.tokenizer
    bias = torch.zeros(len(ids))
    bias[ids.eos_token_id] = 50.0  # an empty translation
    translator.model.lm_head.register_forward_hook(lambda module, inputs, output: output + bias)
    config.pad_token_id = {"eos": ids.eos_token_id, None: None, "pad": ids.pad_token_id}[pad]
    config.max_new_tokens = 5
    (actual,) = translator("the dog", return_scores=True, return_token_scores=True)
    assert actual["translation_text"] == ""
    assert actual["score"] == pytest.approx(actual["log_probability"], abs=1e-6)


@pytest.mark.parametrize("pad", ["eos", None, "pad"])
def test_greedy_scores_are_mean_log_probabilities(make_translator, pad):
    """The mean includes EOS, also if the pad token has its id."""
    translator = make_translator()
    config, tokenizer = translator.model.generation_config, translator.tokenizer
    bias = torch.zeros(len(tokenizer))
    bias[tokenizer.eos_token_id] = 3.0  # likely, but not certain
    translator.model.lm_head.register_forward_hook(lambda module, inputs, output: output + bias)
    config.pad_token_id = {"eos": tokenizer.eos_token_id, None: None, "pad": tokenizer.pad_token_id}[pad]
    config.max_new_tokens = 9
    ends = set()
    for text in random_texts(random.Random(0), 20):
        (actual,) = translator(text, return_scores=True)
        batch = tokenizer(text, return_tensors="pt")
        ids = translator.model.generate(**batch, num_beams=1, pad_token_id=0)
        with torch.no_grad():
            log_probs = translator.model(**batch, decoder_input_ids=ids[:, :-1]).logits.log_softmax(-1)
        assert actual["score"] == pytest.approx(float(log_probs.gather(-1, ids[:, 1:, None]).mean()), abs=1e-4)
        ends.add(ids[0, -1].item() == tokenizer.eos_token_id)
    assert True in ends


def test_overlong_translation_has_no_alignments(make_translator, monkeypatch):
    """After re-tokenization, a translation may be longer than before. Other sentences keep their alignments."""
    translator = make_translator(position_embedding_type="learned", max_position_embeddings=12)
    decode = translator.tokenizer.batch_decode

    def longer(sequences, **options):
        return [f"{text} {'Hund ' * (12 if i == 0 else 1)}" for i, text in enumerate(decode(sequences, **options))]

    monkeypatch.setattr(translator.tokenizer, "batch_decode", longer)
    translator.model.generation_config.max_new_tokens = 2
    assert translator("the dog", return_alignments=True)[0]["alignments"] == []
    texts = iter(["Hund " * 12, "Hund"])
    monkeypatch.setattr(translator.tokenizer, "batch_decode", lambda rows, **options: [next(texts)])
    actual = translator(["the dog", "a cat"], return_alignments=True)
    assert sorted(len(each["alignments"]) for each in actual) == [0, 1]
