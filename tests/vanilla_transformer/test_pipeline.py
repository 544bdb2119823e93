import functools
import logging

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, MarianConfig, MarianMTModel, TokenizersBackend, pipeline

from vanilla_transformer import TranslationPipeline, beam_search
from vanilla_transformer.pipeline_vanilla_transformer import DEFAULT_BATCH_SIZE, MAX_GPU_BATCH_SIZE, ROW_ARGUMENTS

TEXTS = ["the dog runs", "a cat sleeps in the house", "two birds sing", "the old man reads a book", "the man"]


@pytest.fixture
def tokenizer(train_bpe, sentences, special_tokens):
    bpe = train_bpe(sentences["en"] + sentences["de"], 90)
    return TokenizersBackend(tokenizer_object=bpe, **special_tokens)


@pytest.fixture
def make_translator(make_model, tokenizer):
    def make(**variant) -> TranslationPipeline:
        model = make_model(vocab_size=len(tokenizer), **variant)
        model.generation_config.max_new_tokens = 8
        return TranslationPipeline(model=model, tokenizer=tokenizer)

    return make


def translate_one_by_one(translator, texts=TEXTS):
    model, tokenizer = translator.model, translator.tokenizer
    outputs = (model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=8) for text in texts)
    return [tokenizer.decode(ids[0], skip_special_tokens=True) for ids in outputs]


def test_string(make_translator):
    translator = make_translator()
    assert translator(TEXTS[0]) == [{"translation_text": translate_one_by_one(translator)[0]}]


def test_list_keeps_input_order(make_translator):
    translator = make_translator()
    expected = [{"translation_text": text} for text in translate_one_by_one(translator)]
    for batch_size in (1, 2, 32):
        assert translator(TEXTS, batch_size=batch_size) == expected


def test_padding_side_of_tokenizer_does_not_matter(tokenizer):
    """Marian counts positions without the mask, so that padding on the left would shift them."""
    torch.manual_seed(0)
    sizes = dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_model"), 32)
    sizes |= dict.fromkeys(
        ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"), 2
    )
    ids = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1}
    model = MarianMTModel(MarianConfig(vocab_size=len(tokenizer), init_std=0.5, **sizes, **ids)).eval()
    tokenizer.padding_side = "left"
    translator = TranslationPipeline(model=model, tokenizer=tokenizer, max_new_tokens=8)
    expected = [translator(text)[0] for text in TEXTS]
    assert len({each["translation_text"] for each in expected}) > 1
    assert translator(TEXTS) == expected


@pytest.mark.parametrize("name", [*ROW_ARGUMENTS, "decoder_start_token_id"])
def test_rejects_arguments_with_rows(make_translator, name):
    """Sentences are sorted by length, so that rows would belong to other sentences."""
    with pytest.raises(ValueError, match=f"{name} depends on the rows"):
        make_translator()(TEXTS, **{name: [1] * len(TEXTS)})


def test_generator_is_read_lazily(make_translator, monkeypatch):
    monkeypatch.setattr("vanilla_transformer.pipeline_vanilla_transformer.BATCHES_PER_WINDOW", 1)
    translator = make_translator()
    consumed = []

    def texts():
        for text in TEXTS:
            consumed.append(text)
            yield text

    outputs = translator(texts(), batch_size=2)
    first = next(iter(outputs))
    assert len(consumed) == 2
    assert [first, *outputs] == [{"translation_text": text} for text in translate_one_by_one(translator)]


def test_file(make_translator, tmp_path):
    translator = make_translator()
    (tmp_path / "source.txt").write_text("\n".join(TEXTS) + "\n")
    with (tmp_path / "source.txt").open() as lines:
        assert list(translator(lines)) == translator(TEXTS)


@pytest.mark.parametrize("white_space", ["\r\n", " ", "\t", "\N{NO-BREAK SPACE}", "\N{IDEOGRAPHIC SPACE}\n"])
def test_ignores_white_space_at_the_end(make_translator, white_space):
    translator = make_translator()
    texts = [text + white_space for text in TEXTS]
    assert translator(texts, return_scores=True) == translator(TEXTS, return_scores=True)


def test_dataset_column(make_translator):
    datasets = pytest.importorskip("datasets")
    translator = make_translator()
    column = datasets.Dataset.from_dict({"en": TEXTS})["en"]
    assert list(translator(column)) == translator(TEXTS)


def test_pipeline_by_name(make_translator, tmp_path):
    translator = make_translator()
    translator.model.save_pretrained(tmp_path)
    translator.tokenizer.save_pretrained(tmp_path)
    by_name = pipeline("translation", model=str(tmp_path), trust_remote_code=True)
    assert type(by_name).__name__ == "TranslationPipeline"
    assert by_name(TEXTS) == translator(TEXTS)


def test_n_best_with_scores(make_translator):
    translator = make_translator()
    best = translator(TEXTS[0], num_beams=4, num_return_sequences=3, return_scores=True)
    assert len(best) == 3
    assert best[0]["score"] >= best[1]["score"] >= best[2]["score"]
    candidate_lists = translator([*TEXTS, ""], num_beams=4, num_return_sequences=3, return_scores=True)
    assert [len(candidates) for candidates in candidate_lists] == [3, 3, 3, 3, 3, 3]
    assert [c["translation_text"] for c in candidate_lists[0]] == [c["translation_text"] for c in best]
    assert [c["score"] for c in candidate_lists[0]] == pytest.approx([c["score"] for c in best])


@pytest.mark.parametrize("options", [{}, {"length_penalty": 3.0}, {"alpha": 0.6}, {"max_time": 100.0}])
@pytest.mark.parametrize("return_scores", [False, True])
def test_n_best_contains_only_hypotheses_that_beam_search_has_found(make_translator, options, return_scores):
    """With one new token, there is one hypothesis per token. `generate()` pads the list with masked copies."""
    translator = make_translator()
    vocab_size = translator.model.config.decoder_vocab_size
    options = options | {"num_beams": vocab_size + 9, "num_return_sequences": vocab_size + 9, "max_new_tokens": 1}
    best = translator(TEXTS[0], return_scores=return_scores, **options)
    assert len(best) == vocab_size
    assert all(("score" in each) == return_scores and each.get("score", 0) > -1000 for each in best)


@pytest.mark.parametrize("options", [{"num_beams": 4}, {"num_beams": 4, "max_time": 100.0}, {"do_sample": True}])
def test_n_best_without_scores_keeps_no_scores_of_steps(make_translator, monkeypatch, options):
    """They would be one value per token of the vocabulary, hypothesis and step."""
    translator, outputs = make_translator(), []
    options = options | {"num_return_sequences": 3}
    torch.manual_seed(0)
    expected = translator(TEXTS[0], return_scores=True, **options)
    generate = translator.model.generate
    monkeypatch.setattr(
        translator.model, "generate", lambda *args, **kwargs: outputs.append(generate(*args, **kwargs)) or outputs[0]
    )
    torch.manual_seed(0)
    actual = translator(TEXTS[0], **options)
    assert [each["translation_text"] for each in actual] == [each["translation_text"] for each in expected]
    assert isinstance(outputs[0], torch.Tensor)  # only ids


def test_greedy_score_is_mean_log_probability(make_translator):
    translator = make_translator()
    (greedy,) = translator(TEXTS[1], return_scores=True)
    ids = translator.model.generate(**translator.tokenizer(TEXTS[1], return_tensors="pt"), max_new_tokens=8)
    source = translator.tokenizer(TEXTS[1], return_tensors="pt")
    with torch.no_grad():
        log_probabilities = translator.model(**source, decoder_input_ids=ids[:, :-1]).logits.log_softmax(-1)
    expected = log_probabilities.gather(-1, ids[:, 1:, None]).mean().item()
    assert greedy["score"] == pytest.approx(expected, abs=1e-4)
    length = ids.shape[1] - 1
    (paper,) = translator(TEXTS[1], return_scores=True, alpha=0.6)
    assert paper["score"] == pytest.approx(expected * length / ((5 + length) / 6) ** 0.6, abs=1e-4)


def test_scores_of_calls_that_continue_in_the_loops_of_transformers(make_translator):
    translator, results = make_translator(), []
    for options in ({}, {"custom_generate": beam_search}):
        torch.manual_seed(0)
        results.append(translator(TEXTS[:2], do_sample=True, return_scores=True, **options))
    assert results[0] == results[1]
    assert all("score" in result for result in results[0])


@pytest.mark.parametrize("num_beams", [1, 3])
def test_integer_length_penalty(make_translator, num_beams):
    translator = make_translator()
    options = {"return_scores": True, "num_beams": num_beams, "num_return_sequences": num_beams}
    assert translator(TEXTS, **options, length_penalty=-1) == translator(TEXTS, **options, length_penalty=-1.0)
    assert len(translator(TEXTS[0], **options, length_penalty=30.0)) == num_beams


def test_rejects_stop_strings_with_a_word_tokenizer(make_model, special_tokens):
    """Transformers decodes tokens between letters, which this vocabulary does not contain."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", "a", "dog"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = TokenizersBackend(tokenizer_object=words, **special_tokens)
    translator = TranslationPipeline(model=make_model(vocab_size=len(tokenizer)), tokenizer=tokenizer)
    message = r"stop_strings=\[.dog.\] cannot be used: this TokenizersBackend has no single letters. Omit it"
    with pytest.raises(ValueError, match=message):
        translator("a dog", stop_strings=["dog"], max_new_tokens=3)


def test_rejects_stop_strings_without_tokens(make_translator):
    with pytest.raises(ValueError, match=r"stop_strings=\[.日.\] cannot be used: .*not in the tokenizer vocabulary"):
        make_translator()(TEXTS, stop_strings=["日"])


def test_token_scores_of_stopped_translations(make_translator):
    """Beam search of transformers pads with EOS if the id of the pad token is 0."""
    translator = make_translator()
    options = {
        "num_beams": 3,
        "num_return_sequences": 3,
        "stop_strings": ["e", "n", "s"],
        "tokenizer": translator.tokenizer,
    }
    for candidates in translator(TEXTS, return_scores=True, return_token_scores=True, **options):
        for each in candidates:
            assert each["score"] * len(each["tokens"]) == pytest.approx(each["log_probability"], abs=1e-4)


def test_call_overrides_constructor(make_model, tokenizer):
    model = make_model(vocab_size=len(tokenizer))
    translator = TranslationPipeline(model=model, tokenizer=tokenizer, num_beams=3, return_scores=True, batch_size=2)
    assert "score" in translator("the dog")[0]
    assert "score" not in translator("the dog", return_scores=False)[0]


def test_default_length_depends_on_source(make_model, tokenizer):
    """The default is that of section 6.1, input length + 50, not the 20 tokens of transformers."""
    model = make_model(vocab_size=len(tokenizer))
    translator = TranslationPipeline(model=model, tokenizer=tokenizer, eos_token_id=-1)
    tokens = len(tokenizer("the dog")["input_ids"])
    outputs = translator.forward(tokenizer.pad([translator.preprocess("the dog")], return_tensors="pt"),
                                 return_scores=False, min_new_tokens=70)  # fmt: skip
    assert outputs["sequences"].shape[-1] == 1 + tokens + 50


def test_empty_string_has_empty_translation(make_translator):
    translator = make_translator()
    assert translator("") == [{"translation_text": ""}]
    outputs = translator(["", TEXTS[0], "  "])
    assert [bool(output["translation_text"]) for output in outputs] == [False, True, False]


def test_reports_overlong_sentences(make_translator, caplog):
    translator = make_translator(position_embedding_type="learned", max_position_embeddings=16)
    logging.getLogger("transformers").propagate = True
    outputs = translator([TEXTS[0], "dog " * 40, TEXTS[2]])
    assert outputs[1]["translation_text"] == ""
    assert "the model takes at most 16" in outputs[1]["error"]
    assert "error" not in outputs[0]
    assert outputs[2] == translator(TEXTS[2])[0]


def test_sinusoidal_positions_support_any_length(make_translator):
    translator = make_translator(max_position_embeddings=8)
    assert "error" not in translator("dog " * 40)[0]


def test_rejects_non_strings(make_translator):
    with pytest.raises(ValueError, match="7 is not a string"):
        make_translator()(["a", 7])


def test_progress_bar(make_translator, capsys):
    translator = make_translator()
    translator(TEXTS)
    assert "sentences" not in capsys.readouterr().err
    translator(TEXTS, progress=True)
    assert "5/5" in capsys.readouterr().err


@pytest.fixture
def search_calls(monkeypatch):
    """List of the keyword arguments of each call of `beam_search`."""
    calls = []

    @functools.wraps(beam_search)
    def counted(*args, **kwargs):
        calls.append(kwargs)
        return beam_search(*args, **kwargs)

    monkeypatch.setattr("vanilla_transformer.pipeline_vanilla_transformer.beam_search", counted)
    return calls


def test_uses_beam_search_with_config_from_model_config(make_translator, search_calls):
    """The config also has options that do not change translations."""
    translator = make_translator()
    expected = translator(TEXTS)
    assert search_calls
    search_calls.clear()
    config = GenerationConfig.from_model_config(translator.model.config)
    config.update(max_new_tokens=8, use_cache=False, output_attentions=True, output_scores=True)
    translator.model.generation_config = config
    assert translator(TEXTS) == expected
    assert search_calls


@pytest.mark.parametrize("options", [{"no_repeat_ngram_size": 2}, {"num_beams": 3, "bad_words_ids": [[7]]}])
def test_beam_search_applies_generation_options(make_translator, search_calls, options):
    translator = make_translator()
    ids = translator.model.generate(**translator.tokenizer(TEXTS, padding=True, return_tensors="pt"), **options)
    expected = translator.tokenizer.batch_decode(ids, skip_special_tokens=True)
    assert [each["translation_text"] for each in translator(TEXTS, **options)] == expected
    assert search_calls


def test_unsupported_options_use_generate(make_translator, search_calls):
    translator = make_translator()
    assert len(translator(TEXTS, prompt_lookup_num_tokens=2, batch_size=1)) == len(TEXTS)
    assert not search_calls


def test_modified_models_use_generate(make_translator, search_calls):
    translator = make_translator()
    before = translator(TEXTS)
    search_calls.clear()
    layer = translator.model.get_decoder().layers[0]
    layer.cross_attn.register_forward_hook(lambda module, inputs, outputs: (torch.ones_like(outputs[0]), None))
    expected = [{"translation_text": text} for text in translate_one_by_one(translator)]
    assert translator(TEXTS) == expected != before
    assert not search_calls


def test_prefix_tuning_uses_generate(make_translator, search_calls):
    """Prefix tuning prepends keys and values to those of the decoder, in the loops of transformers."""
    peft = pytest.importorskip("peft")
    translator = make_translator()
    source = translator.tokenizer(TEXTS, padding=True, return_tensors="pt")
    tuned = peft.get_peft_model(
        translator.model, peft.PrefixTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=3)
    )
    for parameter in tuned.prompt_encoder.parameters():
        torch.nn.init.normal_(parameter, std=3.0)
    expected = tuned.generate(**source, max_new_tokens=8)
    assert torch.equal(tuned.generate(**source, max_new_tokens=8, custom_generate=beam_search), expected)
    translated = TranslationPipeline(model=tuned, tokenizer=translator.tokenizer)(TEXTS, max_new_tokens=8)
    assert [each["translation_text"] for each in translated] == translator.tokenizer.batch_decode(
        expected, skip_special_tokens=True
    )
    assert not search_calls


def test_ensemble(make_translator, make_model, tokenizer):
    """The ensemble is that of `beam_search`, given to the constructor or a call. Unsupported options are rejected."""
    translator = make_translator(seed=1)
    other = make_model(seed=2, vocab_size=len(tokenizer))
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    options = {"num_beams": 3, "num_return_sequences": 2}
    ids = translator.model.generate(**batch, custom_generate=beam_search, ensemble=[other], **options)
    expected = tokenizer.batch_decode(ids, skip_special_tokens=True)
    actual = translator(TEXTS, ensemble=[other], return_scores=True, **options)
    assert [each["translation_text"] for row in actual for each in row] == expected
    assert all(row[0]["score"] >= row[1]["score"] for row in actual)
    ensemble_translator = TranslationPipeline(model=translator.model, tokenizer=tokenizer, ensemble=[other])
    assert (
        ensemble_translator(TEXTS, return_scores=True, **options)
        == actual
        != translator(TEXTS, return_scores=True, **options)
    )
    assert ensemble_translator(TEXTS, num_beams=1, return_scores=True)[0]["score"] < 0
    without = translator(TEXTS, return_token_scores=True)
    assert translator(TEXTS, return_token_scores=True, extra_tokens=None, ensemble=None) == without
    assert ensemble_translator(TEXTS, return_token_scores=True, ensemble=None) == without
    with pytest.raises(ValueError, match="an ensemble requires `beam_search`"):
        ensemble_translator(TEXTS, guidance_scale=2.0)
    with pytest.raises(ValueError, match="alpha requires `beam_search`, which does not support"):
        translator(TEXTS, alpha=0.6, do_sample=True)


def test_ensemble_uses_smallest_position_limit(make_translator, make_model, tokenizer):
    other = make_model(1, vocab_size=len(tokenizer), position_embedding_type="learned", max_position_embeddings=6)
    translator = make_translator()
    long, short = translator(["the dog runs the dog runs", "the"], ensemble=[other], max_new_tokens=20)
    assert "the model takes at most 6" in long["error"]
    assert short["translation_text"]
    batch = tokenizer("the", return_tensors="pt")
    options = {"custom_generate": beam_search, "ensemble": [other], "max_new_tokens": None}
    assert translator.model.generate(**batch, **options, extra_tokens=20).shape[1] <= 6


def test_gpu_batch_size_depends_on_length_and_beams(make_translator, monkeypatch):
    translator = make_translator()
    assert translator._auto_batch_size(5, {}) == DEFAULT_BATCH_SIZE
    monkeypatch.setattr(type(translator.model), "device", property(lambda model: torch.device("cuda")))
    assert translator._auto_batch_size(5, {}) == MAX_GPU_BATCH_SIZE
    assert translator._auto_batch_size(128, {}) == 128
    assert translator._auto_batch_size(128, {"num_beams": 4}) == 32
    assert translator._auto_batch_size(10**6, {}) == 1


def test_batch_sizes_may_vary(make_translator, monkeypatch):
    translator = make_translator()
    expected = translator(TEXTS)
    sizes = iter((1, 3, 7))
    monkeypatch.setattr(translator, "_auto_batch_size", lambda length, options: next(sizes))
    assert translator(TEXTS) == expected
    assert not list(sizes)
    assert translator(TEXTS, batch_size=2) == expected
