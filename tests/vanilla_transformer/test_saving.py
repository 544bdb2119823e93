"""Saving and loading: round trips in this process and in new ones, tied weights and resized vocabularies."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer, TokenizersBackend

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
    VanillaTransformerTokenizer,
)

VARIANTS = [
    {},
    {"tie_word_embeddings": False},
    {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 61},
    {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False, "lm_head_bias": True},
    {"norm_position": "pre", "position_embedding_type": "learned", "embedding_norm": True},
    {"key_head_dim": 5, "value_head_dim": 11},
]
MATRICES = [
    {"model.encoder.embed_tokens.weight"},
    {"model.encoder.embed_tokens.weight", "lm_head.weight"},
    {"model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"},
    {"model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"},
]


@torch.no_grad()
def logits_of(model, batch):
    return model(**batch).logits


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: ",".join(variant) or "paper")
def test_round_trip(make_model, batch, tmp_path, variant):
    model = make_model(**variant)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert type(loaded) is VanillaTransformerForConditionalGeneration
    assert not loaded.training
    assert torch.equal(logits_of(loaded, batch), logits_of(model, batch))
    ids = {name: batch[name] for name in ("input_ids", "attention_mask")}
    assert torch.equal(loaded.generate(**ids, max_new_tokens=5), model.generate(**ids, max_new_tokens=5))


@pytest.mark.parametrize(("variant", "matrices"), list(zip(VARIANTS[:4], MATRICES, strict=True)))
def test_tied_weights_are_stored_once(make_model, tmp_path, variant, matrices):
    make_model(**variant).save_pretrained(tmp_path, True)  # is_main_process, by position
    stored = {
        name for name in load_file(tmp_path / "model.safetensors") if "embed_tokens" in name or "lm_head.w" in name
    }
    assert stored == matrices
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    names = ("model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")
    assert len({loaded.get_submodule(name).weight.data_ptr() for name in names}) == len(matrices)


def test_base_model_loads_from_full_model_and_back(make_model, batch, tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path / "full")
    base = AutoModel.from_pretrained(tmp_path / "full")
    assert type(base) is VanillaTransformerModel
    with torch.no_grad():
        assert torch.equal(base(**batch).last_hidden_state, model.model(**batch).last_hidden_state)
    base.save_pretrained(tmp_path / "base")
    full_model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "base")
    assert torch.equal(logits_of(full_model, batch), logits_of(model, batch))


def test_registration_can_be_repeated():
    import importlib

    import vanilla_transformer

    importlib.reload(vanilla_transformer)
    assert isinstance(AutoConfig.for_model("vanilla_transformer"), VanillaTransformerConfig)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loading_in_half_precision(make_model, batch, tmp_path, dtype):
    make_model().save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=dtype)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    assert logits_of(loaded, batch).isfinite().all()


def test_device_map(make_model, batch, tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, device_map="auto", max_memory={"cpu": "1GB"})
    assert torch.equal(logits_of(loaded, batch), logits_of(model, batch))
    split = {"model.encoder": "cpu", "model.decoder.embed_tokens": "cpu", "lm_head": "cpu"}  # tied: on one device
    split |= {"model.decoder.layers": "disk", "model.decoder.norm": "cpu"}
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, device_map=split, offload_folder=tmp_path / "offload")
    assert torch.equal(logits_of(loaded, batch), logits_of(model, batch))


def test_sharded_files(make_model, batch, tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert torch.equal(logits_of(AutoModelForSeq2SeqLM.from_pretrained(tmp_path), batch), logits_of(model, batch))


def test_resizes_shared_vocabulary(make_model, batch, tmp_path):
    model = make_model()
    before = logits_of(model, batch)
    model.resize_token_embeddings(70)
    assert (model.config.vocab_size, model.config.decoder_vocab_size, model.lm_head.out_features) == (70, 70, 70)
    assert model.lm_head.weight is model.model.encoder.embed_tokens.weight is model.model.decoder.embed_tokens.weight
    torch.testing.assert_close(logits_of(model, batch)[..., :60], before)
    labels = torch.full((3, 4), 65)
    assert model(input_ids=torch.full((3, 4), 65), labels=labels).loss.isfinite()
    model.save_pretrained(tmp_path)
    assert torch.equal(logits_of(AutoModelForSeq2SeqLM.from_pretrained(tmp_path), batch), logits_of(model, batch))
    with pytest.raises(ValueError, match="share one vocabulary"):
        model.resize_decoder_token_embeddings(80)


@pytest.mark.parametrize("tied", [True, False])
def test_resizes_two_vocabularies_separately(make_model, batch, tmp_path, tied):
    model = make_model(
        share_encoder_decoder_embeddings=False, decoder_vocab_size=61, tie_word_embeddings=tied, lm_head_bias=True
    )
    before = logits_of(model, batch)
    model.resize_token_embeddings(70)
    torch.testing.assert_close(logits_of(model, batch), before)
    model.resize_decoder_token_embeddings(64)
    sizes = (
        model.config.vocab_size,
        model.config.decoder_vocab_size,
        model.lm_head.out_features,
        len(model.lm_head.bias),
    )
    assert sizes == (70, 64, 64, 64)
    assert (model.lm_head.weight is model.model.decoder.embed_tokens.weight) == tied
    torch.testing.assert_close(logits_of(model, batch)[..., :61], before)
    assert model(input_ids=torch.full((3, 4), 69), labels=torch.full((3, 4), 63)).loss.isfinite()
    model.save_pretrained(tmp_path)
    assert torch.equal(logits_of(AutoModelForSeq2SeqLM.from_pretrained(tmp_path), batch), logits_of(model, batch))


@pytest.mark.parametrize("tied", [True, False])
def test_resized_vocabulary_stays_frozen(make_model, tied):
    model = make_model(share_encoder_decoder_embeddings=False, tie_word_embeddings=tied, lm_head_bias=True)
    model.requires_grad_(False)
    model.resize_token_embeddings(70)
    model.resize_decoder_token_embeddings(64)
    assert not [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    model.requires_grad_(True)
    model.resize_decoder_token_embeddings(80)
    assert all(parameter.requires_grad for parameter in model.parameters())
    model.lm_head.weight.requires_grad_(False)
    model.resize_decoder_token_embeddings(90)
    assert model.lm_head.bias.requires_grad


SUBCLASS = """
import json, sys
folder, kind = sys.argv[1:]
from transformers import AutoModelForSeq2SeqLM
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
if kind == "module":
    from mine import Mine
else:
    class Mine(VanillaTransformerForConditionalGeneration):
        pass
size = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
config = VanillaTransformerConfig(vocab_size=9, encoder_attention_heads=2, decoder_attention_heads=2, **size)
Mine(config).save_pretrained(folder)
assert type(Mine.from_pretrained(folder)) is Mine
"""
MINE = """
from .modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration


class Mine(VanillaTransformerForConditionalGeneration):
    added = 1
"""
LOAD_WITHOUT_PACKAGE = """
import sys
sys.modules["vanilla_transformer"] = None
from transformers import AutoModel, AutoModelForSeq2SeqLM
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], trust_remote_code=True)
print(type(model).__name__, getattr(model, "added", 0))
assert type(AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)).__name__ == "VanillaTransformerModel"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "warning", "loaded"),
    [
        ("module", "The code of Mine is saved with the model. If", "Mine 1"),
        (
            "__main__",
            "The code of Mine is not saved with the model: define",
            "VanillaTransformerForConditionalGeneration 0",
        ),
    ],
)
def test_subclass_is_saved_with_its_code(repository, tmp_path, kind, warning, loaded):
    """If its code cannot be saved, a warning is logged, and the checkpoint loads as the base class."""
    (tmp_path / "mine.py").write_text(MINE.replace("from .modeling", "from vanilla_transformer.modeling"))
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "PYTHONPATH": f"{repository}:{tmp_path}"}

    def run(script: str, *arguments: str) -> subprocess.CompletedProcess:
        process = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / "saved"), *arguments],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert process.returncode == 0, process.stderr[-2000:]
        return process

    saved = run(SUBCLASS, kind)
    if kind == "module":
        assert (tmp_path / "saved" / "mine.py").read_text() == (tmp_path / "mine.py").read_text()
        (tmp_path / "saved" / "mine.py").write_text(MINE)  # with the relative import of remote code
    assert warning in saved.stderr
    assert "Use Mine.from_pretrained" in saved.stderr
    assert run(LOAD_WITHOUT_PACKAGE).stdout.strip().splitlines()[-1] == loaded


def test_fsdp_model_is_saved_with_original_class(make_model, tmp_path):
    """FSDP 2 replaces the class of the model, whose module is part of PyTorch."""
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = make_model()
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        wrapped = type(fully_shard(model, mesh=distributed.init_device_mesh("cpu", (1,))))
        model.save_pretrained(tmp_path, state_dict=state)
        assert type(model) is wrapped is not VanillaTransformerForConditionalGeneration
    finally:
        distributed.destroy_process_group()
    class_name = "modeling_vanilla_transformer.VanillaTransformerForConditionalGeneration"
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"]["AutoModelForSeq2SeqLM"] == class_name
    assert not [path for path in tmp_path.glob("*.py") if not path.name.endswith("_vanilla_transformer.py")]
    assert not list(tmp_path.glob("_fsdp*"))


ROUND_TRIP_WITHOUT_PACKAGE = """
import json, sys
sys.modules["vanilla_transformer"] = None          # as if the package were not installed
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer, pipeline
folder, again = sys.argv[1:]
for loader in (AutoModelForSeq2SeqLM, AutoModel, AutoConfig):
    try:
        loader.from_pretrained(folder, trust_remote_code=False)
        raise SystemExit(f"{loader.__name__} loaded without trust")
    except ValueError as error:
        assert "trust_remote_code" in str(error), error
try:
    AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    assert "source_tokenizer.json" not in __import__("os").listdir(folder), "silently loaded the wrong vocabulary"
except ValueError as error:
    assert "trust_remote_code" in str(error), error
assert AutoModel.from_pretrained(folder, trust_remote_code=True).config.model_type == "vanilla_transformer"
results = []
for path in (folder, again):                       # the original, and a copy saved without the package
    model = AutoModelForSeq2SeqLM.from_pretrained(path, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    batch = tokenizer("the dog runs", text_target="der Hund rennt", return_tensors="pt")
    with torch.no_grad():
        logits = model(**batch).logits
    translator = pipeline("translation", model=path, trust_remote_code=True)
    for options in ({"glossary": {"dog": "Hund"}}, {"return_alignments": True}, {"return_token_scores": True}):
        try:
            translator("the dog runs", **options)
            raise SystemExit(f"{options} worked without the package")
        except ImportError as error:
            assert "`pip install .`" in str(error), error
    results.append({
        "labels": batch["labels"].tolist(),
        "logits": logits.double().flatten().tolist(),
        "text": translator("the dog runs", max_new_tokens=6)[0]["translation_text"],
        "class": type(translator).__name__,
    })
    model.save_pretrained(again)
    tokenizer.save_pretrained(again)
print(json.dumps(results))
"""


@pytest.mark.parametrize("shared", [True, False], ids=["shared vocabulary", "two vocabularies"])
def test_checkpoint_contains_its_code(make_model, train_bpe, sentences, special_tokens, tmp_path, shared):
    """A process without the package computes exactly the same logits. Without `trust_remote_code`, loading fails."""
    english, german = train_bpe(sentences["en"], 60), train_bpe(sentences["de"], 70)
    if shared:
        bpe = train_bpe(sentences["en"] + sentences["de"], 90)
        tokenizer = TokenizersBackend(tokenizer_object=bpe, **special_tokens)
        model = make_model(vocab_size=bpe.get_vocab_size())
    else:
        tokenizer = VanillaTransformerTokenizer(
            source_tokenizer_object=english, target_tokenizer_object=german, **special_tokens
        )
        model = make_model(
            vocab_size=english.get_vocab_size(),
            decoder_vocab_size=german.get_vocab_size(),
            share_encoder_decoder_embeddings=False,
        )
    folder, again, empty_dir = tmp_path / "model", tmp_path / "again", tmp_path / "empty"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    empty_dir.mkdir()
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(
        [sys.executable, "-c", ROUND_TRIP_WITHOUT_PACKAGE, str(folder), str(again)],
        cwd=empty_dir, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    batch = tokenizer("the dog runs", text_target="der Hund rennt", return_tensors="pt")
    expected = logits_of(model, batch).double().flatten().tolist()
    from vanilla_transformer import TranslationPipeline

    text = TranslationPipeline(model=model, tokenizer=tokenizer)("the dog runs", max_new_tokens=6)[0]
    results = json.loads(process.stdout.splitlines()[-1])
    assert len(results) == 2
    for result in results:
        assert result["labels"] == batch["labels"].tolist()
        assert result["logits"] == expected
        assert result["text"] == text["translation_text"]
        assert result["class"] == "TranslationPipeline"


def test_saved_config_maps_auto_classes(make_model, tmp_path):
    make_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert set(config["auto_map"]) == {"AutoConfig", "AutoModel", "AutoModelForSeq2SeqLM"}
    assert config["custom_pipelines"]["translation"]["impl"] == "pipeline_vanilla_transformer.TranslationPipeline"
    for name in config["auto_map"].values():
        assert (tmp_path / f"{name.split('.')[0]}.py").exists()
    assert not {path.name.split("_")[0] for path in tmp_path.glob("*.py")} & {"glossary", "alignment"}
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in tmp_path.glob("*.py")) <= 2600


def test_installed_package_takes_precedence_over_saved_code(make_model, train_bpe, sentences, special_tokens, tmp_path):
    make_model().save_pretrained(tmp_path)
    tokenizer = TokenizersBackend(tokenizer_object=train_bpe(sentences["en"], 60), **special_tokens)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(loaded) is VanillaTransformerForConditionalGeneration
    assert AutoTokenizer.from_pretrained(tmp_path)("the dog").input_ids == tokenizer("the dog").input_ids


GOLDEN_CHECKPOINT_SCRIPT = """
import json, sys
sys.modules["vanilla_transformer"] = None
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
batch = tokenizer("the dog runs", text_target="der Hund rennt", return_tensors="pt")
source = tokenizer("the dog runs", return_tensors="pt")
ids = model.generate(**source, use_cache=False)[0]  # transformers 5.24 renamed the argument for the cache
text = tokenizer.decode(ids, skip_special_tokens=True)
print(json.dumps({"logits": model(**batch).logits[0].tolist(), "text": text}))
"""


def assert_as_expected(folder, actual) -> None:
    expected = json.loads((folder / "expected.json").read_text())
    torch.testing.assert_close(torch.tensor(actual["logits"]), torch.tensor(expected["logits"]), atol=1e-4, rtol=0)
    assert actual["text"] == expected["text"] != ""


@pytest.mark.parametrize("name", ["shared", "two"])
def test_checkpoints_of_version_0_1_load(repository, name):
    """Version 0.1 wrote `tests/witness`: a shared vocabulary, and two vocabularies with pre-norm and saved code."""
    folder = repository / "tests" / "witness" / name
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    batch = tokenizer("the dog runs", text_target="der Hund rennt", return_tensors="pt")
    ids = model.generate(**tokenizer("the dog runs", return_tensors="pt"))[0]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert_as_expected(folder, {"logits": logits_of(model, batch)[0].tolist(), "text": text})


@pytest.mark.slow
def test_code_of_version_0_1_runs(repository, tmp_path):
    folder = repository / "tests" / "witness" / "two"
    process = subprocess.run(
        [sys.executable, "-c", GOLDEN_CHECKPOINT_SCRIPT, str(folder)],
        cwd=tmp_path, env=os.environ | {"HF_HOME": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-2000:]
    assert_as_expected(folder, json.loads(process.stdout.splitlines()[-1]))
