"""Forward pass and decoding on a simulated CUDA device: the results of the CPU, with few synchronizations.

`test_simulated_devices.py` runs these tests in a process with simulated devices.
"""

import copy
import sys

import pytest
import simulated_cuda
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from training import distill, score, translate
from vanilla_transformer import TranslationPipeline, beam_search
from vanilla_transformer.beam_search_vanilla_transformer import DONE_CHECK_INTERVAL
from vanilla_transformer.glossary_vanilla_transformer import LexicalConstraints
from vanilla_transformer.shared.transformers_conversion import to_transformers


def to_cuda(inputs: dict) -> dict:
    return {name: each.to("cuda") if isinstance(each, torch.Tensor) else each for name, each in inputs.items()}


@pytest.fixture
def models(make_model):
    """Two models on the CPU, and their copies on the device."""
    on_cpu = [make_model(seed, vocab_size=60) for seed in (1, 2)]
    return on_cpu, [copy.deepcopy(model).to("cuda") for model in on_cpu]


@pytest.fixture
def source(batch):
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def test_rejects_tensors_on_different_devices(models, batch):
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        models[1][0](**batch)
    with pytest.raises(RuntimeError, match="cuda:0 and cuda:1"):
        torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(2, device="cuda:2")


def test_counts_synchronizations_by_line():
    values = torch.ones(3, device="cuda")
    pinned = torch.ones(3).pin_memory()
    with simulated_cuda.count_synchronizations() as counter:
        line = sys._getframe().f_lineno + 1
        values.sum().item()
        values[values > 0] = torch.ones(3, device="cuda")
        values.copy_(pinned, non_blocking=True)
        values.mul_(2)
    assert dict(counter) == {
        ("_local_scalar_dense", f"tests/simulated_devices/cuda_decoding.py:{line}"): 1,
        ("boolean mask", f"tests/simulated_devices/cuda_decoding.py:{line + 1}"): 1,
    }


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_forward_and_backward_equal_those_of_the_cpu(models, batch, attention):
    (on_cpu, _), (on_device, _) = models
    results, batch["labels"] = [], torch.randint(3, 60, batch["decoder_input_ids"].shape)
    for model, inputs in ((on_cpu, batch), (on_device, to_cuda(batch))):
        model.set_attn_implementation(attention)
        model.train()
        with simulated_cuda.count_synchronizations() as counter:
            output = model(**inputs)
            output.loss.backward()
        assert not counter or model is on_cpu
        results.append([output.logits, *(parameter.grad for parameter in model.parameters())])
    for expected, found in zip(*results, strict=True):
        assert found.is_cuda
        torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-5)


TERMS = [[], [[[7, 8]]], [[[9]], [[11]]]]
WAYS = {
    "greedy": {},
    "beams": {"num_beams": 4, "num_return_sequences": 2},
    "processors": {"num_beams": 3, "no_repeat_ngram_size": 2, "min_length": 6},
    "glossary": {"num_beams": 3, "glossary": lambda: LexicalConstraints(TERMS, *torch.zeros(4, 60).bool())},
    "prompt": {"num_beams": 3, "decoder_input_ids": torch.tensor([[1, 7, 9], [0, 1, 7], [1, 5, 5]])},
}


@pytest.mark.parametrize("way", WAYS)
def test_tokens_equal_those_of_the_cpu(models, source, way):
    for ensemble_size in (1, 2):
        found = []
        for members, inputs in ((models[0], source), (models[1], to_cuda(source))):
            options = {name: value() if callable(value) else value for name, value in WAYS[way].items()}
            if inputs["input_ids"].is_cuda:
                options = to_cuda(options)
            ensemble = members[1:ensemble_size]
            ids = members[0].generate(
                **inputs, max_new_tokens=20, custom_generate=beam_search, ensemble=ensemble, **options
            )
            found.append(ids.cpu())
        assert found[0].equal(found[1])


@pytest.mark.parametrize("way", WAYS)
def test_synchronizations_per_token(models, source, way):
    """Only the check for completion synchronizes, every `DONE_CHECK_INTERVAL` tokens."""
    model, totals = models[1][0], []
    model.generation_config.eos_token_id = None
    for tokens in (20, 60):
        options = {name: value() if callable(value) else value for name, value in WAYS[way].items()}
        options.pop("min_length", None)
        inputs = to_cuda(source | options)
        with simulated_cuda.count_synchronizations() as counter:
            model.generate(**inputs, max_new_tokens=tokens, custom_generate=beam_search)
        totals.append(counter.total())
    assert totals[1] - totals[0] == 40 // DONE_CHECK_INTERVAL


@pytest.fixture
def checkpoint(make_model, make_tokenizer, tmp_path):
    tokenizer, sizes = make_tokenizer(True)
    model = make_model(**sizes)
    model.generation_config.update(max_new_tokens=12)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_pipeline_returns_the_translations_of_the_cpu(checkpoint, sentences):
    options = {"num_beams": 3, "return_scores": True, "return_alignments": True, "glossary": {"dog": "Hund"}}
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    on_cpu, on_device = (
        TranslationPipeline(model=model, tokenizer=tokenizer, device=device)(sentences["en"], **options)
        for device in ("cpu", "cuda")
    )
    for expected, found in zip(on_cpu, on_device, strict=True):
        assert found["translation_text"] == expected["translation_text"]
        assert found["score"] == pytest.approx(expected["score"], abs=1e-4)


@pytest.mark.parametrize("options", [["--num-beams", "3", "--scores"], ["--num-beams", "4", "--nbest", "2"]])
def test_commands_give_the_results_of_the_cpu(checkpoint, sentences, tmp_path, monkeypatch, capsys, options):
    for language in ("en", "de"):
        (tmp_path / language).write_text("".join(line + "\n" for line in sentences[language]), encoding="utf-8")
    score_options = ["--source", str(tmp_path / "en"), "--reference", str(tmp_path / "de"), "--likelihood", "--json"]
    texts = ["--source", str(tmp_path / "en"), "--target", str(tmp_path / "de"), "--keep-copies", *options[:2]]
    outputs = []
    for device in ("cpu", "cuda"):
        for module, arguments in (
            (translate, [checkpoint, "--input", str(tmp_path / "en"), *options]),
            (translate, [checkpoint, checkpoint, "--input", str(tmp_path / "en"), *options]),
            (score, [checkpoint, *score_options]),
            (distill, [checkpoint, checkpoint, *texts, "--output", str(tmp_path / f"{device}.tsv")]),
        ):
            monkeypatch.setattr(sys, "argv", [module.__name__, *arguments, "--device", device])
            module.main()
            outputs.append(capsys.readouterr().out)
    assert outputs[:3] == outputs[4:7]
    assert all(outputs[:3])
    tables = [(tmp_path / f"{device}.tsv").read_text(encoding="utf-8") for device in ("cpu", "cuda")]
    assert tables[0] == tables[1] != ""


def test_models_with_learned_positions_are_converted(make_model, batch):
    model = make_model(position_embedding_type="learned", embedding_norm=True)
    native = to_transformers(copy.deepcopy(model).to("cuda"))
    torch.testing.assert_close(native(**batch).logits, model(**batch).logits)


def test_page_translates_if_a_gpu_is_present(checkpoint):
    """The model of a Space stays on the CPU."""
    from hub.space import app

    translator = app.Translator(checkpoint)
    batch = translator.encode("the dog runs")
    (ids, _), *_ = translator.candidates(batch, 3)
    assert translator.attention(batch, ids)["cross"][0].shape[:2] == (2, 4)
    assert list(translator.stream(batch))
