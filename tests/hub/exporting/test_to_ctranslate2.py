from functools import partial

import ctranslate2
import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

from hub.export import main
from hub.exporting.to_ctranslate2 import to_spec


@pytest.fixture
def command(run_main):
    return partial(run_main, main)


ARCHITECTURES = {
    "post-norm": {},
    "pre-norm": {"norm_position": "pre"},
    "pre-norm without a final LayerNorm": {"norm_position": "pre", "final_norm": False},
    "post-norm with a final LayerNorm": {"final_norm": True},
    "learned positions": {"position_embedding_type": "learned"},
    "embedding LayerNorm, no scale": {"embedding_norm": True, "scale_embedding": False},
    "heads by side": {"encoder_attention_heads": 2, "decoder_attention_heads": 8, "decoder_layers": 1},
    "bias, gelu, eps": {"lm_head_bias": True, "activation_function": "gelu", "layer_norm_eps": 1e-3},
    "untied": {"tie_word_embeddings": False},
}


@pytest.mark.parametrize("shared", [True, False], ids=["one vocabulary", "two"])
@pytest.mark.parametrize("overrides", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_ctranslate2_gives_same_results(save_checkpoint, command, tmp_path, sentences, shared, overrides):
    """Log-probabilities of targets differ by at most 1e-4. Greedy and 5-beam search give the same ids."""
    model, tokenizer, folder = save_checkpoint(shared=shared, **overrides)
    command(folder, tmp_path / "ct2", "--to", "ctranslate2")
    translator = ctranslate2.Translator(str(tmp_path / "ct2"), intra_threads=1)
    sides = [tmp_path / "ct2"] * 2 if shared else [tmp_path / "ct2" / f"{s}_tokenizer" for s in ("source", "target")]
    source, target = (AutoTokenizer.from_pretrained(side) for side in sides)
    tokens = [source.convert_ids_to_tokens(source(text).input_ids) for text in sentences["en"]]

    batch = tokenizer(sentences["en"], text_target=sentences["de"], return_tensors="pt", padding=True)
    labels = batch.pop("labels")
    labels[labels == tokenizer.pad_token_id] = -100
    with torch.no_grad():
        logits = model(**batch, labels=labels).logits.log_softmax(-1)
    log_probs = logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    goal = [target.convert_ids_to_tokens([id_ for id_ in row.tolist() if id_ >= 0])[:-1] for row in labels]
    for row, scored in enumerate(translator.score_batch(tokens, goal)):
        expected = log_probs[row][labels[row] >= 0]
        torch.testing.assert_close(torch.tensor(scored.log_probs), expected, atol=1e-4, rtol=0)

    for beams in (1, 5):
        generated = model.generate(**batch, num_beams=beams, max_new_tokens=12, early_stopping=beams > 1)
        results = translator.translate_batch(tokens, beam_size=beams, max_decoding_length=12)
        for row, result in zip(generated.tolist(), results, strict=True):
            kept = [id_ for id_ in row[1:] if id_ not in (tokenizer.pad_token_id, tokenizer.eos_token_id)]
            assert target.convert_tokens_to_ids(result.hypotheses[0]) == kept


def test_quantizes_weights(save_checkpoint, command, tmp_path):
    _, _, folder = save_checkpoint()
    command(folder, tmp_path / "float", "--to", "ctranslate2")
    command(folder, tmp_path / "int8", "--to", "ctranslate2", "--quantization", "int8")
    sizes = [(tmp_path / name / "model.bin").stat().st_size for name in ("int8", "float")]
    assert sizes[0] < 0.5 * sizes[1]
    assert ctranslate2.Translator(str(tmp_path / "int8"), compute_type="default").compute_type.startswith("int8")


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"key_head_dim": 5}, "key_head_dim and value_head_dim must be None"),
        ({"activation_function": "mish"}, "activation_function=mish"),
        ({"decoder_start_token_id": None, "bos_token_id": None}, "a special token id is not set"),
        ({"eos_token_id": [2, 5]}, "multiple eos_token_id"),
        ({"vocab_size": 20, "pad_token_id": 0}, "the model has only 20 embedding rows"),
    ],
)
def test_rejects_unsupported_models(save_checkpoint, assert_rejected, tmp_path, overrides, reason):
    _, _, folder = save_checkpoint(**overrides)
    assert_rejected(main, folder, tmp_path / "out", "--to", "ctranslate2", message=reason)


@pytest.mark.parametrize(
    "settings",
    [
        {"forced_bos_token_id": 5},
        {"no_repeat_ngram_size": 2},
        {"encoder_no_repeat_ngram_size": 3},
        {"repetition_penalty": 3.0},
        {"begin_suppress_tokens": [5]},
        {"bad_words_ids": [[4], [5, 6]]},
        {"sequence_bias": [[[5], 1.0]]},
        {"exponential_decay_length_penalty": (3, 1.5)},
        {"encoder_repetition_penalty": 2.0},
        {"forced_eos_token_id": 7},
        {"min_new_tokens": 2},
    ],
)
def test_rejects_unsupported_generation_settings(make_model, make_tokenizer, settings):
    """Settings without effect, and bans of single tokens, are accepted."""
    tokenizer, sizes = make_tokenizer(True)
    model = make_model(**sizes)
    without_effect = {"no_repeat_ngram_size": 0, "repetition_penalty": 1.0, "bad_words_ids": [[4]], "num_beams": 5}
    without_effect |= {"forced_eos_token_id": 2, "min_new_tokens": 1, "renormalize_logits": True}
    model.generation_config = GenerationConfig(**without_effect)
    to_spec(model, tokenizer, None)
    model.generation_config = GenerationConfig(**(without_effect | settings))
    (name,) = settings
    with pytest.raises(ValueError, match=f"does not support this model: remove {name}"):
        to_spec(model, tokenizer, None)


def test_uses_special_ids_of_generation_config(make_model, make_tokenizer):
    tokenizer, sizes = make_tokenizer(True)
    model = make_model(**sizes)
    model.generation_config.update(decoder_start_token_id=5, eos_token_id=6)
    settings = to_spec(model, tokenizer, None).config
    assert [settings.decoder_start_token, settings.eos_token] == tokenizer.convert_ids_to_tokens([5, 6])
    model.generation_config.eos_token_id = [6]
    assert to_spec(model, tokenizer, None).config.eos_token == settings.eos_token
    model.generation_config.eos_token_id = [2, 6]
    with pytest.raises(ValueError, match="multiple eos_token_id"):
        to_spec(model, tokenizer, None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_model_with_bias_can_ban_tokens(make_model, make_tokenizer, dtype):
    tokenizer, sizes = make_tokenizer(True)
    model = make_model(lm_head_bias=True, **sizes)
    model.generation_config.suppress_tokens = [4]
    spec = to_spec(model.to(dtype), tokenizer, None)
    assert spec.decoder.projection.bias.numpy()[4] == -1e9
