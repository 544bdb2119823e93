import functools
import logging

import pytest
import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, pipeline

from vanilla_transformer import TranslationPipeline, beam_search
from vanilla_transformer.pipeline_vanilla_transformer import DEFAULT_BATCH_SIZE, MAX_GPU_BATCH_SIZE

TEXTS = ["the dog runs", "a cat sleeps in the house", "two birds sing", "the old man reads a book", "the man"]


@pytest.fixture
def tokenizer(train_bpe, sentences, special_tokens):
    bpe = train_bpe(sentences["en"] + sentences["de"], 90)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **special_tokens)


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


@pytest.mark.parametrize("num_beams", [1, 3])
def test_arguments_with_rows_follow_their_sentences(make_translator, monkeypatch, num_beams):
    monkeypatch.setattr("vanilla_transformer.pipeline_vanilla_transformer.BATCHES_PER_WINDOW", 1)
    translator = make_translator()
    prompts = torch.tensor([[0, 1, 10], [1, 20, 21], [1, 30, 31], [0, 1, 40], [1, 50, 51]])
    rows = {"decoder_input_ids": prompts, "decoder_attention_mask": (prompts != 0).long()}
    allowed = [[10, 11], [20, 21], [30, 31], [40, 41], [50, 51]]
    for options in (rows, {"decoder_start_token_id": [10, 20, 30, 40, 50]}):
        each = [{name: values[i : i + 1] for name, values in options.items()} for i in range(len(TEXTS))]
        expected = [translator(text, num_beams=num_beams, **one)[0] for text, one in zip(TEXTS, each, strict=True)]
        assert translator(TEXTS, num_beams=num_beams, batch_size=3, **options) == expected
        with pytest.raises(ValueError, match="has 5 rows. Pass one row per sentence"):
            translator(TEXTS[:4], num_beams=num_beams, **options)
    expected = [
        translator(text, num_beams=num_beams, prefix_allowed_tokens_fn=lambda row, ids, ids_of_text=ids: ids_of_text)[0]
        for text, ids in zip(TEXTS, allowed, strict=True)
    ]
    options = {"num_beams": num_beams, "prefix_allowed_tokens_fn": lambda row, ids: allowed[row]}
    assert translator(TEXTS, batch_size=3, **options) == expected


def test_padded_prompts_do_not_depend_on_the_batch(make_translator):
    """`generate()` adds a start token to a batch in which all prompts begin with padding, if it may decide."""
    translator = make_translator()
    for start in ([1], []):
        prompts = [[*start, *ids] for ids in ([20, 21], [10], [31], [40, 41], [51])]
        ids = torch.tensor([[0] * (2 + len(start) - len(each)) + each for each in prompts])
        options = {"decoder_input_ids": ids, "decoder_attention_mask": (ids != 0).long()}
        expected = [
            translator(text, decoder_input_ids=torch.tensor([prompt]), return_scores=True)[0]["score"]
            for text, prompt in zip(TEXTS, prompts, strict=True)
        ]
        for batch_size in (1, 2, 5):
            results = translator(TEXTS, batch_size=batch_size, return_scores=True, **options)
            assert [each["score"] for each in results] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("options", [{"do_sample": True}, {"num_beams": 3}])
def test_allowed_tokens_of_several_translations(make_translator, tokenizer, options):
    translator, allowed = make_translator(), [[10, 11], [20, 21], [30, 31], [40, 41], [50, 51]]
    options |= {"num_return_sequences": 3, "prefix_allowed_tokens_fn": lambda row, ids: allowed[row]}
    for candidates, ids in zip(translator(TEXTS, return_token_scores=True, **options), allowed, strict=True):
        assert len(candidates) == 3
        assert {token for each in candidates for token in each["tokens"]} <= {*tokenizer.convert_ids_to_tokens(ids)}


def test_one_prompt_for_all_sentences(make_translator):
    translator, prompt = make_translator(), torch.tensor([[1, 20]])
    expected = [translator(text, decoder_input_ids=prompt)[0] for text in TEXTS]
    assert translator(TEXTS, decoder_input_ids=prompt) == expected
    assert list(translator(iter(TEXTS), decoder_input_ids=prompt)) == expected


def test_prompt_without_start_token(make_translator):
    """`generate()` adds the start token. The scores of all tokens are returned, also at the length limit."""
    translator = make_translator()
    translator.model.generation_config.update(max_new_tokens=None, eos_token_id=None)
    prompts = [torch.tensor([[20]]), torch.tensor([[1, 20]])]
    without_start, with_start = (
        translator("the dog", decoder_input_ids=each, return_token_scores=True)[0] for each in prompts
    )
    assert without_start["tokens"] == with_start["tokens"]
    assert without_start["log_probability"] == pytest.approx(with_start["log_probability"])


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
    with open(tmp_path / "source.txt") as lines:
        assert list(translator(lines)) == translator(TEXTS)


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
    with pytest.raises(ValueError, match="An ensemble requires `beam_search`"):
        ensemble_translator(TEXTS, guidance_scale=2.0)


def test_ensemble_uses_smallest_position_limit(make_translator, make_model, tokenizer):
    other = make_model(1, vocab_size=len(tokenizer), position_embedding_type="learned", max_position_embeddings=6)
    translator = make_translator()
    long, short = translator(["the dog runs the dog runs", "the"], ensemble=[other], max_new_tokens=20)
    assert "the model takes at most 6" in long["error"]
    assert short["translation_text"]
    batch = tokenizer("the", return_tensors="pt")
    options = {"custom_generate": beam_search, "ensemble": [other], "max_new_tokens": None}
    assert translator.model.generate(**batch, **options, extra_tokens=20).shape[1] <= 6


def test_gpu_batch_size_fits_memory(make_translator, monkeypatch):
    """Longer sentences, more beams and longer outputs give smaller batches, from 1 to the maximum."""
    translator = make_translator()
    assert translator._auto_batch_size(5, {}) == DEFAULT_BATCH_SIZE
    monkeypatch.setattr(type(translator.model), "device", property(lambda model: torch.device("cuda")))
    free = {"bytes": 4e6}
    monkeypatch.setattr(f"{TranslationPipeline.__module__}.get_free_memory", lambda device: free["bytes"])
    largest = translator._auto_batch_size(5, {})
    more_options = [{"num_beams": 5}, {"max_new_tokens": 50}, {"ensemble": [translator.model]}]
    sizes = [translator._auto_batch_size(5, options) for options in more_options]
    assert 0 < max(sizes) < largest < MAX_GPU_BATCH_SIZE
    assert translator._auto_batch_size(50, {}) < largest
    free["bytes"] = 8e6
    assert largest < translator._auto_batch_size(5, {}) <= 2 * largest + 1
    free["bytes"] = 1
    assert translator._auto_batch_size(5, {}) == 1
    free["bytes"] = 1e12
    assert translator._auto_batch_size(5, {}) == MAX_GPU_BATCH_SIZE


def test_batch_sizes_may_vary(make_translator, monkeypatch):
    translator = make_translator()
    expected = translator(TEXTS)
    sizes = iter((1, 3, 7))
    monkeypatch.setattr(translator, "_auto_batch_size", lambda length, options: next(sizes))
    assert translator(TEXTS) == expected
    assert not list(sizes)
    assert translator(TEXTS, batch_size=2) == expected
