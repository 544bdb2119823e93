"""Import of native Transformers models from directories and the Hub, mainly MarianMT of OPUS-MT."""

import json
import pickle
from functools import partial
from pathlib import Path

import ctranslate2
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

import hub.importing.transformers_models
from hub import export, push
from hub.import_checkpoint import main
from vanilla_transformer import TranslationPipeline, beam_search


@pytest.fixture
def command(run_main):
    return partial(run_main, main)


LINES = ["the dog runs", "a cat sleeps in the house", "two birds sing: the old man reads a book!", "Zebra", ""]


def generated(model, tokenizer, **options) -> list[list[int]]:
    """Return the generated ids of `LINES`, by default with the generation config of the model."""
    batch = tokenizer(LINES, return_tensors="pt", padding=True)
    with torch.no_grad():
        return model.generate(**batch, **options).tolist()


def test_opus_mt_round_trip(opus_folder, command, run_main, tmp_path, capsys):
    folder = opus_folder()
    command(folder, tmp_path / "imported")
    assert "transformers' MarianMTModel agrees" in capsys.readouterr().out
    report = json.loads((tmp_path / "imported" / "import_report.json").read_text())
    assert set(report["used"]) | set(report["left_out"]) == set(load_file(folder / "model.safetensors"))
    assert not set(report["used"]) & set(report["left_out"])
    assert report["layout"] == "marian"
    assert report["shapes"]["lm_head_bias"]
    assert report["parity"]["largest_difference_of_log_probabilities"] < 1e-5

    original, imported = (AutoModelForSeq2SeqLM.from_pretrained(each) for each in (folder, tmp_path / "imported"))
    first, second = (AutoTokenizer.from_pretrained(each) for each in (folder, tmp_path / "imported"))
    assert type(second).__name__ == "MarianTokenizer"
    for arguments in ({"text": LINES}, {"text_target": LINES}):
        assert first(**arguments)["input_ids"] == second(**arguments)["input_ids"]
    assert imported.generation_config.num_beams == 6
    for options in ({}, {"num_beams": 1}):
        expected = generated(original, first, **options)
        assert generated(imported, second, **options) == expected
        assert len({tuple(ids) for ids in expected}) > 2
    texts = first.batch_decode(generated(original, first), skip_special_tokens=True)
    translated = TranslationPipeline(model=imported, tokenizer=second)(LINES)
    assert [each["translation_text"] for each in translated[:4]] == texts[:4]

    run_main(export.main, tmp_path / "imported", tmp_path / "back", "--to", "transformers")
    before, after = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for name in ("source.spm", "target.spm"):
        assert (folder / name).read_bytes() == (tmp_path / "back" / name).read_bytes()
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "back")
    assert generated(again, AutoTokenizer.from_pretrained(tmp_path / "back")) == generated(original, first)


@pytest.mark.parametrize("old", [False, True])
def test_imports_pickles(opus_folder, command, tmp_path, old):
    """Pickles of OPUS-MT contain the sinusoids, and may have the format before PyTorch 1.6."""
    folder = opus_folder()
    state, original = load_file(folder / "model.safetensors"), AutoModelForSeq2SeqLM.from_pretrained(folder)
    table = original.state_dict()["model.encoder.embed_positions.weight"]
    state |= {"model.encoder.embed_positions.weight": table, "model.encoder.version": torch.ones(1)}
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not old)
    (folder / "model.safetensors").unlink()
    command(folder, tmp_path / "imported")
    report = json.loads((tmp_path / "imported" / "import_report.json").read_text())
    assert set(report["used"]) | set(report["left_out"]) == set(state)
    assert set(report["left_out"]) == {"model.encoder.embed_positions.weight", "model.encoder.version"}


class Payload:
    def __reduce__(self):
        return (Path.touch, (Path("run"),))


def test_rejects_pickles_with_code(opus_folder, command, tmp_path, capsys):
    folder = opus_folder()
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"lm_head.weight": Payload()}))
    command(folder, tmp_path / "imported", status=2)
    assert "is rejected, because reading it would execute code from the file" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "imported").exists()


SIZE = {"vocab_size": 60, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48}
SIZE |= {"decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
SIZE |= {"max_position_embeddings": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize("kind", ["bart", "m2m_100"])
def test_other_classes_with_fast_tokenizer(command, tmp_path, train_bpe, special_tokens, kind):
    """Bart has two unused rows before its learned positions. M2M100 has the sinusoids of tensor2tensor."""
    if kind == "bart":
        original = BartForConditionalGeneration(BartConfig(**SIZE, decoder_start_token_id=2))
    else:
        original = M2M100ForConditionalGeneration(M2M100Config(**SIZE, decoder_start_token_id=2))
    original.eval().save_pretrained(tmp_path / kind)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=train_bpe(LINES, 60), **special_tokens)
    tokenizer.save_pretrained(tmp_path / kind)
    command(tmp_path / kind, tmp_path / "imported")
    imported = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "imported")
    assert imported.config.position_embedding_type == "learned"
    imported_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "imported")
    assert imported_tokenizer(LINES[:3])["input_ids"] == tokenizer(LINES[:3])["input_ids"]
    report = json.loads((tmp_path / "imported" / "import_report.json").read_text())
    assert any("layerdrop" in line for line in report["check"]) == (kind == "m2m_100")
    batch = tokenizer(LINES[:3], return_tensors="pt", padding=True)
    first, second = (each.generate(**batch, num_beams=3, max_new_tokens=6) for each in (original, imported))
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_imports_half_precision_models(opus_folder, command, tmp_path, dtype):
    """The computed positions are not rounded in the original model or in the imported one."""
    folder = opus_folder()
    AutoModelForSeq2SeqLM.from_pretrained(folder).to(dtype).save_pretrained(folder)
    command(folder, tmp_path / "imported")
    report = json.loads((tmp_path / "imported" / "import_report.json").read_text())
    assert report["parity"]["largest_difference_of_log_probabilities"] < 1e-5
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "imported").dtype == torch.float32


@pytest.mark.parametrize("more", [{"early_stopping": True}, {"temperature": 0.9, "do_sample": False}])
def test_keeps_unused_generation_config_fields(opus_folder, command, tmp_path, more):
    """transformers only warns about such fields of a published model."""
    folder = opus_folder()
    path = folder / "generation_config.json"
    config = json.loads(path.read_text()) | {"num_beams": 1} | more
    path.write_text(json.dumps(config))
    command(folder, tmp_path / "imported")
    after = json.loads((tmp_path / "imported" / "generation_config.json").read_text())
    assert more.items() <= after.items()


def test_drops_unused_table_of_untied_model(opus_folder, command, tmp_path):
    folder = opus_folder(tie_word_embeddings=False)
    assert "model.shared.weight" in load_file(folder / "model.safetensors")
    command(folder, tmp_path / "imported")
    report = json.loads((tmp_path / "imported" / "import_report.json").read_text())
    assert "model.shared.weight" in report["left_out"]


def test_rejects_m2m100_with_pad_start_token(command, tmp_path, capsys):
    """Its class gives the pad token no position."""
    M2M100ForConditionalGeneration(M2M100Config(**SIZE, decoder_start_token_id=0)).save_pretrained(tmp_path / "m2m")
    command(tmp_path / "m2m", tmp_path / "imported", status=2)
    assert "or its decoder starts with the pad token" in capsys.readouterr().err
    assert not (tmp_path / "imported").exists()


def test_errors_are_one_line(opus_folder, save_checkpoint, command, tmp_path, capsys, any_peft_version):
    def assert_rejected(location, *options, reason: str) -> None:
        command(location, tmp_path / "out", *options, status=2)
        (line,) = capsys.readouterr().err.splitlines()
        assert reason in line
        assert not (tmp_path / "out").exists()

    folder = opus_folder()
    assert_rejected(folder, "--num-heads", 4, reason="--num-heads is not supported for")
    assert_rejected(folder, "--pad-token-id", 0, reason="--pad-token-id is not supported for")
    assert_rejected(save_checkpoint()[2], reason="is already a vanilla_transformer model")
    assert_rejected("user/missing", reason="not a local directory, and HF_HUB_OFFLINE is set")
    T5ForConditionalGeneration(
        T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    ).save_pretrained(tmp_path / "t5")
    assert_rejected(tmp_path / "t5", reason="model_type=t5 is not supported: it has relative positions")
    adapted = AutoModelForSeq2SeqLM.from_pretrained(folder)
    adapted.add_adapter(LoraConfig(target_modules=["q_proj"], r=1))
    adapted.save_pretrained(adapter := opus_folder("adapter"))
    assert_rejected(adapter, reason="has a PEFT adapter. Call merge_and_unload()")
    state = load_file(folder / "model.safetensors")
    save_file(state | {"model.encoder.adapter.weight": torch.ones(3)}, folder / "model.safetensors", {"format": "pt"})
    assert_rejected(folder, reason="model.encoder.adapter.weight does not exist in a MarianMTModel")
    del state["model.decoder.layers.0.fc1.bias"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    assert_rejected(folder, reason="model.decoder.layers.0.fc1.bias")
    (folder / "model.safetensors").unlink()
    assert_rejected(folder, reason="contains no weights")
    (folder / "config.json").unlink()
    assert_rejected(folder, reason="has no config.json")


def test_writes_nothing_if_outputs_differ(opus_folder, command, tmp_path, capsys, monkeypatch):
    def convert_wrongly(original):
        model = from_transformers(original)
        model.lm_head.bias.data += torch.arange(len(model.lm_head.bias)) * 1e-3
        return model

    from_transformers = hub.importing.transformers_models.from_transformers
    monkeypatch.setattr(hub.importing.transformers_models, "from_transformers", convert_wrongly)
    command(opus_folder(), tmp_path / "out", status=2)
    assert "MarianMTModel and of the imported model differ" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_downloads_only_required_files(opus_folder, command, tmp_path, monkeypatch):
    folder, requests = opus_folder(), []

    def snapshot(repo_id, allow_patterns):
        requests.append((repo_id, allow_patterns))
        return str(folder)

    monkeypatch.setattr(hub.importing.transformers_models, "snapshot_download", snapshot)
    command("Helsinki-NLP/opus-mt-en-de", tmp_path / "imported")
    assert [repo_id for repo_id, _ in requests] == ["Helsinki-NLP/opus-mt-en-de"]
    assert "*.bin" not in str(requests)  # pickles are only a fallback for safetensors
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    command("Helsinki-NLP/opus-mt-en-de", tmp_path / "again")
    assert "pytorch_model*.bin" in requests[-1][1]
    first, second = (load_file(tmp_path / each / "model.safetensors") for each in ("imported", "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_beam_search_follows_imported_generation_config(opus_folder, command, tmp_path):
    """`beam_search` supports six beams, a forced EOS token and suppressed padding."""
    command(opus_folder(), tmp_path / "imported")
    imported, tokenizer = (
        auto.from_pretrained(tmp_path / "imported") for auto in (AutoModelForSeq2SeqLM, AutoTokenizer)
    )
    imported.lm_head.bias.data[tokenizer.pad_token_id] = 9.0  # would be chosen if it was not suppressed
    for options in ({}, {"num_beams": 1}):
        expected = generated(imported, tokenizer, **options)
        assert generated(imported, tokenizer, **options, custom_generate=beam_search) == expected
        assert tokenizer.pad_token_id not in expected[0][1:-1]


@pytest.mark.slow
def test_fine_tunes_and_exports_imported_model(opus_folder, command, run_main, start_programs, small_corpus, tmp_path):
    """Full and LoRA fine-tuning work, CTranslate2 gives the same output, and the upload check passes."""
    command(opus_folder(), tmp_path / "imported")
    recipe = tmp_path / "tune.yaml"
    recipe.write_text(
        "corpus: demo\nnum_processes: 1\ntokens_per_update: 512\nmax_steps: 30\nlearning_rate: 0.003\n"
        "eval_strategy: 'no'\nprecision: fp32\nattn_implementation: sdpa\nnum_beams: 2\nmax_new_tokens: 12\n"
    )
    before = load_file(tmp_path / "imported" / "model.safetensors")
    with start_programs("training.train") as programs:
        for name, options in {"tuned": (), "lora": ("--lora-rank", "2")}.items():
            base = ("--base-model", tmp_path / "imported", "--output-dir", tmp_path / name)
            programs.run("training.train", recipe, *map(str, base), *options, setup_code=small_corpus)
            after = load_file(tmp_path / name / "model.safetensors")
            assert before.keys() == after.keys()
            assert any(not torch.equal(before[key], after[key]) for key in before)
    assert (tmp_path / "lora" / "adapter").is_dir()
    imported, tokenizer = (auto.from_pretrained(tmp_path / "tuned") for auto in (AutoModelForSeq2SeqLM, AutoTokenizer))
    assert type(tokenizer).__name__ == "MarianTokenizer"
    run_main(export.main, tmp_path / "tuned", tmp_path / "ct2", "--to", "ctranslate2")
    tokens = [
        tokenizer.convert_ids_to_tokens(ids) for ids in tokenizer(LINES[:4])["input_ids"]
    ]  # CTranslate2 returns nothing for ""
    results = ctranslate2.Translator(str(tmp_path / "ct2")).translate_batch(tokens, beam_size=1, max_decoding_length=9)
    expected = generated(imported, tokenizer, num_beams=1, max_new_tokens=9, forced_eos_token_id=None)[:4]
    special = set(tokenizer.all_special_ids)
    for result, ids in zip(results, expected, strict=True):
        assert tokenizer.convert_tokens_to_ids(result.hypotheses[0]) == [i for i in ids if i not in special]
    run_main(push.main, tmp_path / "tuned", "me/mine", "--dry-run")
