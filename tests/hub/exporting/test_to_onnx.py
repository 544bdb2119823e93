"""ONNX graphs give the results of the model, with the modules and with onnxruntime."""

import json
from functools import partial

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from sacrebleu.metrics import CHRF
from transformers import GenerationConfig

from hub.export import main
from hub.exporting import to_onnx as onnx_export
from hub.exporting.onnx_graphs import EncoderGraph, FirstStepGraph, NextStepGraph
from hub.exporting.to_ctranslate2 import to_spec
from vanilla_transformer.shared.loading import load_model, load_tokenizer
from vanilla_transformer.shared.transformers_conversion import to_transformers

ARCHITECTURES = {
    "post-norm": {},
    "pre-norm": {"norm_position": "pre"},
    "pre-norm without a final LayerNorm": {"norm_position": "pre", "final_norm": False},
    "post-norm with a final LayerNorm": {"final_norm": True},
    "learned positions": {"position_embedding_type": "learned"},
    "embedding LayerNorm, no scale": {"embedding_norm": True, "scale_embedding": False},
    "heads by side": {"encoder_attention_heads": 2, "decoder_attention_heads": 8, "decoder_layers": 1},
    "separate head dimensions": {"key_head_dim": 5, "value_head_dim": 7},
    "bias, gelu, eps": {"lm_head_bias": True, "activation_function": "gelu", "layer_norm_eps": 1e-3},
    "untied": {"tie_word_embeddings": False},
    "two vocabularies": {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 70},
    "multiple EOS tokens": {"eos_token_id": [2, 5]},
}
SMALL = {"encoder_layers": 1, "decoder_layers": 1}
ODD = SMALL | ARCHITECTURES["heads by side"] | ARCHITECTURES["bias, gelu, eps"] | {"norm_position": "pre"}


@pytest.fixture
def command(run_main):
    return partial(run_main, main)


@pytest.fixture
def translator(onnx_translator):
    return onnx_translator


@pytest.fixture
def onnx_decoder(load_tests_module):
    return load_tests_module("exporting/onnx_references.py").OnnxGreedyDecoder


@pytest.mark.parametrize("overrides", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_modules_give_same_results(make_model, batch, overrides):
    """Logits and cross-attention weights differ by at most 1e-5, in one step or in two with past keys and values."""
    model = make_model(**overrides)
    model.set_attn_implementation("eager")
    ids, mask, target = batch.values()
    with torch.no_grad():
        expected = model(**batch, output_attentions=True)
        states = EncoderGraph(model)(ids, mask)
        logits, *_, weights = FirstStepGraph(model)(mask, target, states)
        torch.testing.assert_close(logits, expected.logits, atol=1e-5, rtol=0)
        torch.testing.assert_close(weights, expected.cross_attentions[-1], atol=1e-5, rtol=0)
        _, *present = FirstStepGraph(model)(mask, target[:, :2], states)
        past = present[: 4 * model.config.decoder_layers]
        logits = NextStepGraph(model)(mask, target[:, 2:], *past)[0]
    torch.testing.assert_close(logits, expected.logits[:, 2:], atol=1e-5, rtol=0)


def feed(path, **inputs) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(path)
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def check_merged(folder, model, batch) -> None:
    """Check logits of the first step, which ignores its past, and of the next step within 1e-4."""
    ids, mask, target = (each.numpy() for each in batch.values())
    with torch.no_grad():
        expected = model(**batch).logits.numpy()
    path = folder / "onnx" / "decoder_model_merged.onnx"
    states = feed(folder / "onnx" / "encoder_model.onnx", input_ids=ids, attention_mask=mask)["last_hidden_state"]
    inputs = {"encoder_attention_mask": mask, "encoder_hidden_states": states}
    shapes = {each.name: each.shape for each in onnxruntime.InferenceSession(path).get_inputs()}
    for length in (0, 1):  # transformers.js passes a past of length 0, optimum of length 1
        past = {
            name: np.ones([len(ids), shape[1], length, shape[3]], np.float32)
            for name, shape in shapes.items()
            if name.startswith("past")
        }
        first = feed(path, **inputs, **past, input_ids=target[:, :2], use_cache_branch=np.array([False]))
        np.testing.assert_allclose(first["logits"], expected[:, :2], atol=1e-4, rtol=0)
    past = {name.replace("present", "past_key_values"): each for name, each in first.items() if "present" in name}
    after = feed(path, **inputs, **past, input_ids=target[:, 2:], use_cache_branch=np.array([True]))
    np.testing.assert_allclose(after["logits"], expected[:, 2:], atol=1e-4, rtol=0)
    assert after["cross_attentions.0"].shape == (3, model.config.decoder_attention_heads, 4, 7)


def check_greedy(translator, onnx_decoder, folder, model, tokenizer, texts) -> None:
    """Check that the loop of the docs gives the ids and texts of `generate()` for a padded batch."""
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    inputs = (batch["input_ids"].numpy(), batch["attention_mask"].numpy())
    expected = model.generate(**batch, num_beams=1, max_new_tokens=12).numpy()
    translate = translator(str(folder))
    ids = translate.generate(*inputs, 12)
    np.testing.assert_array_equal(ids, expected)
    special = [getattr(model.generation_config, f"{name}_token_id") for name in ("decoder_start", "eos")]
    measured = onnx_decoder(folder, 1).generate(*inputs, *special, 12)
    real = expected != model.config.pad_token_id
    np.testing.assert_array_equal(measured[real], expected[real])
    assert translate(texts, 12) == tokenizer.batch_decode(expected, skip_special_tokens=True)


def test_rejects_too_large_graphs(save_checkpoint, assert_rejected, tmp_path, monkeypatch):
    """Tied weights count once. The check runs before tracing."""
    model, _, folder = save_checkpoint()
    decoder = [model.get_decoder(), model.lm_head]
    size = 4 * sum(each.numel() for each in {each for part in decoder for each in part.parameters()})
    monkeypatch.setattr(onnx_export, "MAX_BYTES", size)
    onnx_export.convert(model, None, None)
    monkeypatch.setattr(onnx_export, "MAX_BYTES", size - 1)
    message = f"A graph has {size:,} bytes of weights"
    assert_rejected(main, folder, tmp_path / "out", "--to", "onnx", message=message)


def test_onnxruntime_gives_same_results(
    save_checkpoint, command, translator, onnx_decoder, tmp_path, sentences, batch, capsys
):
    """Two vocabularies and other non-default settings. File and tensor names are those of the client libraries."""
    model, tokenizer, folder = save_checkpoint(shared=False, **ODD)
    out = tmp_path / "out"
    command(folder, out, "--to", "onnx")
    assert f'from_pretrained("{out / "source_tokenizer"}")' in capsys.readouterr().out
    check_greedy(translator, onnx_decoder, out, model, tokenizer, sentences["en"])
    batch["decoder_input_ids"] = batch["decoder_input_ids"].clamp(max=model.config.decoder_vocab_size - 1)
    batch["input_ids"] = batch["input_ids"].clamp(max=model.config.vocab_size - 1)
    check_merged(out, model, batch)

    names = ["encoder_model", "decoder_model", "decoder_with_past_model", "decoder_model_merged"]
    assert sorted(path.name for path in (out / "onnx").iterdir()) == sorted(f"{name}.onnx" for name in names)
    graphs = {name: onnx.load(out / "onnx" / f"{name}.onnx").graph for name in names}
    inputs = {name: [each.name for each in graph.input] for name, graph in graphs.items()}
    outputs = {name: [each.name for each in graph.output] for name, graph in graphs.items()}
    past = [f"past_key_values.0.{side}.{part}" for side in ("decoder", "encoder") for part in ("key", "value")]
    present = [name.replace("past_key_values", "present") for name in past]
    assert inputs["encoder_model"] == ["input_ids", "attention_mask"]
    assert outputs["encoder_model"] == ["last_hidden_state"]
    assert inputs["decoder_model"] == ["encoder_attention_mask", "input_ids", "encoder_hidden_states"]
    assert outputs["decoder_model"] == ["logits", *present, "cross_attentions.0"]
    assert inputs["decoder_with_past_model"] == ["encoder_attention_mask", "input_ids", *past]
    assert outputs["decoder_with_past_model"] == ["logits", *present[:2], "cross_attentions.0"]
    assert set(inputs["decoder_model_merged"]) == {*inputs["decoder_model"], *past, "use_cache_branch"}
    assert set(outputs["decoder_model_merged"]) == set(outputs["decoder_model"])
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "marian"
    assert config["transformers.js_config"] == {"dtype": "fp32"}
    assert all(str(tmp_path).encode() not in path.read_bytes() for path in out.rglob("*") if path.is_file())


def test_graphs_never_generate_banned_tokens(
    save_checkpoint, command, translator, onnx_decoder, tmp_path, sentences, capsys
):
    """The special ids are those of the generation config, and other settings are reported."""
    model, tokenizer, folder = save_checkpoint(**SMALL)
    batch = tokenizer(sentences["en"], return_tensors="pt", padding=True)
    model.generation_config.update(decoder_start_token_id=5, eos_token_id=[2, 6])
    for name, add_words in (("suppress_tokens", list), ("bad_words_ids", lambda ids: [[each] for each in ids])):
        generated = model.generate(**batch, num_beams=1, max_new_tokens=12)[:, 1:]
        banned = sorted(set(generated.flatten().tolist()) - {0, 2, 6})
        model.generation_config.update(**{name: add_words(banned)})
    model.generation_config.bad_words_ids += [[6], [8, 9]]  # like generate(), the graphs allow EOS
    model.generation_config.save_pretrained(folder)
    command(folder, tmp_path / "out", "--to", "onnx")
    warning = (
        "The ONNX graphs do not contain these settings of the generation config: bad_words_ids of multiple tokens."
    )
    assert warning in capsys.readouterr().err
    model.generation_config.bad_words_ids.pop()
    check_greedy(translator, onnx_decoder, tmp_path / "out", model, tokenizer, sentences["en"])


@pytest.mark.parametrize("settings", [{"min_new_tokens": 1}, {"forced_bos_token_id": 5}, {"repetition_penalty": 3.0}])
def test_reports_settings_outside_graphs(make_model, caplog, settings):
    model = make_model()
    model.generation_config.update(num_beams=5, max_new_tokens=12, bad_words_ids=[[4]], forced_eos_token_id=2)
    onnx_export.convert(model, None, None)
    assert not caplog.messages
    model.generation_config.update(**settings)
    onnx_export.convert(model, None, None)
    (message,) = caplog.messages
    assert f"of the generation config: {next(iter(settings))}. " in message


def test_config_has_special_ids_of_generation_config(make_model):
    model = make_model()
    ids = {"decoder_start_token_id": 5, "eos_token_id": [2, 6], "pad_token_id": 7}
    model.generation_config.update(**ids)
    assert ids.items() <= onnx_export.native_config(model).items()
    model.generation_config.update(**dict.fromkeys(ids))
    assert onnx_export.native_config(model)["eos_token_id"] == model.config.eos_token_id


def test_missing_special_ids_are_those_of_generate(make_model, make_tokenizer):
    """`generate()` begins with BOS if there is no start token, and pads with EOS if there is no pad token."""
    tokenizer, sizes = make_tokenizer(True)
    model = make_model(**sizes, decoder_start_token_id=None, pad_token_id=None, bos_token_id=7, eos_token_id=2)
    model.generation_config = GenerationConfig(bos_token_id=7, eos_token_id=2)
    batch = tokenizer(["the dog runs", "a cat"], return_tensors="pt", padding=True)
    ids = model.generate(**batch, max_new_tokens=4)
    config = onnx_export.native_config(model)
    assert (config["decoder_start_token_id"], config["pad_token_id"]) == (ids[0, 0], 2)
    native = to_transformers(model)
    assert native.config.decoder_start_token_id == 7
    assert native.generate(**batch, max_new_tokens=4).tolist() == ids.tolist()
    assert to_spec(model, tokenizer, None).config.decoder_start_token == tokenizer.convert_ids_to_tokens(7)
    model.generation_config.bos_token_id = model.config.bos_token_id = None
    for convert in (to_transformers, lambda model: onnx_export.convert(model, tokenizer, None)):
        with pytest.raises(ValueError, match="has no decoder start token"):
            convert(model)


@pytest.mark.slow
@pytest.mark.parametrize("names", [("pre-norm", "learned positions", "untied", "separate head dimensions"),
                                   ("post-norm with a final LayerNorm", "embedding LayerNorm, no scale",
                                    "multiple EOS tokens")])  # fmt: skip
def test_onnxruntime_supports_other_architectures(
    save_checkpoint, command, translator, onnx_decoder, tmp_path, sentences, batch, names
):
    overrides = {key: value for name in names for key, value in ARCHITECTURES[name].items()}
    model, tokenizer, folder = save_checkpoint(**(overrides | SMALL))
    command(folder, tmp_path / "out", "--to", "onnx")
    check_greedy(translator, onnx_decoder, tmp_path / "out", model, tokenizer, sentences["en"])
    batch["decoder_input_ids"] = batch["decoder_input_ids"].clamp(max=model.config.vocab_size - 1)
    batch["input_ids"] = batch["input_ids"].clamp(max=model.config.vocab_size - 1)
    check_merged(tmp_path / "out", model, batch)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # may train the model first, on busy cores
def test_trained_model_translates_the_same(demo_checkpoint, demo_sentences, command, translator, tmp_path):
    """250 sentences: float32 gives equal translations, int8 and fp16 similar ones (chrF) with smaller files."""
    model, tokenizer = load_model(str(demo_checkpoint)), load_tokenizer(str(demo_checkpoint))
    lines = [english for english, _ in demo_sentences[:250]]
    batch = tokenizer(lines, return_tensors="pt", padding=True)
    expected_ids = model.generate(**batch, num_beams=1, max_new_tokens=40)
    expected = tokenizer.batch_decode(expected_ids, skip_special_tokens=True)
    sizes = {}
    for quantization, suffix, least in ((None, "", 100), ("int8", "_quantized", 90), ("fp16", "_fp16", 99)):
        out = tmp_path / f"onnx{suffix}"
        command(demo_checkpoint, out, "--to", "onnx", *(["--quantization", quantization] if quantization else []))
        translated = translator(str(out), suffix)(lines, 40)
        similarity = CHRF().corpus_score(translated, [expected]).score  # measured with int8: 95.1 and 95.6
        assert similarity >= least, suffix
        assert suffix or translated == expected
        sizes[suffix] = sum(path.stat().st_size for path in (out / "onnx").iterdir())
    assert sizes["_quantized"] < 0.35 * sizes[""]
    assert sizes["_fp16"] < 0.6 * sizes[""]
