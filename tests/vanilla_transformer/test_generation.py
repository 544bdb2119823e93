"""Decoding methods and options of `generate()`."""

import pytest
import torch
from transformers import DynamicCache

from vanilla_transformer import TranslationPipeline
from vanilla_transformer.generation_vanilla_transformer import CACHE_NAME

VARIANTS = [
    {},
    {"norm_position": "pre", "position_embedding_type": "learned"},
    {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 61, "decoder_layers": 3},
    {"key_head_dim": 5, "value_head_dim": 11},
]
SETTINGS = {
    "max_new_tokens": 12,
    "min_new_tokens": 6,
    "no_repeat_ngram_size": 1,
}  # untrained models would repeat tokens


@pytest.fixture
def source(batch):
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: ",".join(variant) or "paper")
@pytest.mark.parametrize("beams", [1, 3])
def test_cached_equals_uncached(make_model, source, variant, attention, beams):
    model = make_model(**variant)
    model.set_attn_implementation(attention)
    cached = model.generate(**source, **SETTINGS, num_beams=beams)
    uncached = model.generate(**source, **SETTINGS, num_beams=beams, use_cache=False)
    assert torch.equal(cached, uncached)
    assert len(cached.unique()) > 5  # not only repetitions


def test_static_cache_with_left_padded_targets(make_model, source):
    """With a static cache, positions are computed from a 4D mask."""
    model = make_model()
    start = torch.tensor([[1, 9, 8], [0, 1, 7], [0, 0, 1]])
    prompt = {"decoder_input_ids": start, "decoder_attention_mask": (start != 0).long()}
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = 1
    expected = model.generate(**source, **prompt, **SETTINGS)
    assert torch.equal(model.generate(**source, **prompt, **SETTINGS, cache_implementation="static"), expected)


def test_encoder_runs_once_and_cross_attention_keys_are_computed_once(make_model, source):
    model = make_model()
    calls = {"encoder": 0, "cross": 0, "self": 0}
    layer = model.model.decoder.layers[0]

    def count(name):
        return lambda *_: calls.__setitem__(name, calls[name] + 1)

    model.get_encoder().register_forward_hook(count("encoder"))
    layer.cross_attn.k_proj.register_forward_hook(count("cross"))
    layer.self_attn.k_proj.register_forward_hook(count("self"))
    model.generate(**source, max_new_tokens=8, min_new_tokens=8)
    assert calls == {"encoder": 1, "cross": 1, "self": 8}


def test_cross_attention_cache_does_not_grow(make_model, source):
    model = make_model()
    outputs = model.generate(**source, **SETTINGS, return_dict_in_generate=True)
    cache = outputs[CACHE_NAME]
    assert cache.cross_attention_cache.layers[0].keys.shape[-2] == source["input_ids"].shape[1]
    assert cache.self_attention_cache.get_seq_length() == outputs.sequences.shape[1] - 1


def test_separate_calls_of_encoder_decoder_and_lm_head(make_model, batch):
    """Tutorials call these parts `encode`, `decode` and `project`."""
    model = make_model()
    with torch.no_grad():
        states = model.get_encoder()(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        decoded = model.get_decoder()(
            batch["decoder_input_ids"], encoder_hidden_states=states, encoder_attention_mask=batch["attention_mask"]
        ).last_hidden_state
        torch.testing.assert_close(model.lm_head(decoded), model(**batch).logits)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("cache_class", [None, DynamicCache], ids=["default", "dynamic"])
def test_forward_in_steps_with_a_cache(make_model, batch, cache_class, name):
    model = make_model()
    cache = cache_class() if cache_class else None
    with torch.no_grad():
        expected = model(**batch).logits
        source = {name: batch[name] for name in ("input_ids", "attention_mask")}
        steps = []
        for position in range(6):
            outputs = model(
                **source,
                decoder_input_ids=batch["decoder_input_ids"][:, position : position + 1],
                use_cache=True,
                **{name: cache},
            )
            cache = outputs[CACHE_NAME]
            steps.append(outputs.logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), expected, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_compile_has_no_graph_break(make_model, batch, source):
    """`forward` compiles as one graph, and so does each step of `generate` with a static cache."""
    torch.compiler.reset()
    model = make_model()
    with torch.no_grad():
        expected = model(**batch).logits
        compiled = torch.compile(model, fullgraph=True)
        torch.testing.assert_close(compiled(**batch).logits, expected, atol=1e-4, rtol=0)
    expected_ids = model.generate(**source, **SETTINGS)
    model.generation_config.compile_config = _compile_config_for_all_devices()
    got = model.generate(**source, **SETTINGS, cache_implementation="static")
    assert torch.equal(got, expected_ids)


def _compile_config_for_all_devices():
    from transformers import CompileConfig

    config = CompileConfig(fullgraph=True, mode="default")
    config._compile_all_devices = True  # by default, transformers compiles only on GPUs
    return config


@pytest.mark.parametrize("setting", [{"encoder_no_repeat_ngram_size": 1}, {"encoder_repetition_penalty": 2.0}])
def test_rejects_settings_that_compare_ids_of_two_vocabularies(make_model, setting):
    source = torch.tensor([[58, 59]])
    assert make_model().generate(source, max_new_tokens=3, **setting).shape[0] == 1
    model = make_model(decoder_vocab_size=50, share_encoder_decoder_embeddings=False)
    with pytest.raises(ValueError, match="requires one vocabulary"):
        model.generate(source, max_new_tokens=3, **setting)


def test_warns_if_ids_may_be_of_two_vocabularies(make_model, make_tokenizer, monkeypatch):
    """With separate embeddings of equal sizes, only the tokenizer shows whether the ids have the same meaning."""
    warnings, tokenizer = [], make_tokenizer(False)[0]
    monkeypatch.setattr("vanilla_transformer.generation_vanilla_transformer.logger.warning_once", warnings.append)
    model = make_model(share_encoder_decoder_embeddings=False)
    setting = {"encoder_no_repeat_ngram_size": 2, "max_new_tokens": 3}
    model.generate(torch.tensor([[28, 29]]), **setting)
    assert len(warnings) == 1
    assert "encoder_no_repeat_ngram_size=2 requires the same ids in source and target" in warnings[0]
    translator = TranslationPipeline(model=model, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="encoder_no_repeat_ngram_size=2 requires one vocabulary"):
        translator("the dog", **setting)
