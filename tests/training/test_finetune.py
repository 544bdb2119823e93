"""Fine-tuning of checkpoints: all weights or LoRA, vanilla_transformer and other classes."""

import copy
import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from sentencepiece import SentencePieceProcessor
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    ByT5Tokenizer,
    FSMTConfig,
    FSMTForConditionalGeneration,
    FSMTTokenizer,
    GenerationConfig,
    LEDConfig,
    LEDForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    M2M100Tokenizer,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
)

from training.inference.scoring import compute_likelihood
from training.recipe.reading import read_recipe
from training.run.factories import load_base_model
from vanilla_transformer.shared.loading import load_tokenizer

OTHERS = {"vocab_size": 259, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64}
OTHERS |= {"decoder_ffn_dim": 64, "encoder_attention_heads": 2, "decoder_attention_heads": 2}


@pytest.fixture
def make_base(tmp_path, make_model, make_tokenizer, train_bpe, sentences, special_tokens, sentencepiece_models):
    """Return the directory of a checkpoint of a class."""

    def save_m2m(folder: Path) -> None:
        """`get_vocab()` of a new tokenizer omits its languages. The model translates to French."""
        folder.mkdir()
        pieces = SentencePieceProcessor(model_proto=sentencepiece_models["en"])
        tokens = ["<s>", "<pad>", "</s>", "<unk>", *(pieces.id_to_piece(i) for i in range(2, len(pieces)))]
        (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
        (folder / "pieces.model").write_bytes(sentencepiece_models["en"])
        files = str(folder / "vocab.json"), str(folder / "pieces.model")
        tokenizer = M2M100Tokenizer(*files, src_lang="en", tgt_lang="de")
        ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
        rows = max(tokenizer.lang_token_to_id.values()) + 1
        model = M2M100ForConditionalGeneration(M2M100Config(**(OTHERS | ids | {"vocab_size": rows})))
        model.generation_config.forced_bos_token_id = tokenizer.get_lang_id("fr")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    def make(kind: str) -> Path:
        folder = tmp_path / "base"
        if kind in ("vanilla", "two vocabularies"):
            tokenizer, sizes = make_tokenizer(kind == "vanilla")
            model = make_model(**sizes)
        elif kind == "m2m_100":
            save_m2m(folder)
            return folder
        elif kind == "fsmt":
            tokenizer = PreTrainedTokenizerFast(tokenizer_object=train_bpe(sentences["en"], 60), **special_tokens)
            sizes = {"src_vocab_size": 60, "tgt_vocab_size": 60, "langs": ["en", "de"], "tie_word_embeddings": False}
            ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
            model = FSMTForConditionalGeneration(FSMTConfig(**(OTHERS | sizes | ids)))
        elif kind == "fsmt with two vocabularies":
            folder.mkdir()
            letters = sorted(
                {letter for side in sentences.values() for text in side for letter in text.replace(" ", "")}
            )
            tokens = [letter + end for letter in letters for end in ("", "</w>")]
            for name, own in (("source", tokens), ("target", tokens[::-1])):
                ids = {token: i for i, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", *own])}
                (folder / f"{name}.json").write_text(json.dumps(ids))
            (folder / "merges").write_text("#version: 0.2\n")
            files = (str(folder / name) for name in ("source.json", "target.json", "merges"))
            tokenizer = FSMTTokenizer(["en", "de"], *files, eos_token="</s>")
            sizes = {"src_vocab_size": len(ids), "tgt_vocab_size": len(ids), "langs": ["en", "de"]}
            ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
            config = FSMTConfig(**(OTHERS | sizes | ids | {"tie_word_embeddings": False}))
            model = FSMTForConditionalGeneration(config)
        elif kind == "marian":
            tokenizer = PreTrainedTokenizerFast(tokenizer_object=train_bpe(sentences["en"], 60), **special_tokens)
            model = MarianMTModel(MarianConfig(**OTHERS, pad_token_id=0, eos_token_id=2, decoder_start_token_id=0))
        else:  # a tokenizer written in Python
            tokenizer = ByT5Tokenizer()
            config = OTHERS | {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
            config["vocab_size"] = len(tokenizer)
            if kind == "bart":
                model = BartForConditionalGeneration(BartConfig(**config))
            else:
                model = LEDForConditionalGeneration(LEDConfig(**config, attention_window=[16], decoder_layerdrop=0.5))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def tune(programs, tmp_path, make_recipe):
    """Fine-tune a base model on the small corpus, and return the output directory."""
    data = Path(next(line for line in make_recipe(tmp_path).read_text().splitlines() if "data_dir" in line).split()[1])
    recipe = tmp_path / "tune.yaml"
    recipe.write_text(
        f"data_dir: {data}\noutput_dir: {tmp_path / 'tuned'}\ntokens_per_update: 256\nmax_steps: 6\n"
        "learning_rate: 1.0e-3\nwarmup_steps: 2\neval_strategy: steps\neval_steps: 3\nsave_steps: 3\n"
        "num_beams: 2\nmax_new_tokens: 12\ntest_file: test\ndisable_tqdm: true\nprecision: fp32\n"
        "attn_implementation: sdpa\n"
    )

    def run(base: Path | str, *arguments: str, status: int = 0):
        process = programs.run("training.train", recipe, "--base-model", base, *arguments, status=status)
        return process if status else tmp_path / "tuned"

    return run


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vanilla", "two vocabularies", "marian", "bart", "fsmt", "m2m_100"])
def test_starts_from_the_weights_of_any_class(make_base, tune, kind):
    base = make_base(kind)
    folder = tune(base, "--learning-rate", "1e-9", "--warmup-steps", "0")
    before, after = (load_file(each / "model.safetensors") for each in (base, folder))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, atol=1e-6, rtol=0)
    assert type(AutoModelForSeq2SeqLM.from_pretrained(folder)) is type(AutoModelForSeq2SeqLM.from_pretrained(base))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(base).get_vocab()
    if kind == "m2m_100":  # that of the base model is French
        assert GenerationConfig.from_pretrained(folder).forced_bos_token_id == tokenizer.get_lang_id("de")
    assert (folder / "attention_1.png").exists()
    results = json.loads((folder / "all_results.json").read_text())
    assert results["updates"] == 6
    assert "test_bleu" in results
    recipe = (folder / "recipe.yaml").read_text()
    assert f"base_model: {base}" in recipe
    assert "d_model" not in recipe  # the default, which differs from this model


@pytest.mark.slow
def test_targets_have_the_vocabulary_of_the_decoder(make_base, tune, sentences):
    """`FSMTTokenizer` has two vocabularies, but tokenizes all texts with that of the source."""
    folder = tune(make_base("fsmt with two vocabularies"))
    for tokenizer in (load_tokenizer(folder), copy.deepcopy(load_tokenizer(folder))):
        text = sentences["de"][0]
        ids = tokenizer(text_target=text)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert tokenizer(text)["input_ids"] != ids
    scores = json.loads((folder / "all_results.json").read_text())
    data = Path(read_recipe([str(folder / "recipe.yaml")]).data.data_dir)
    likelihood = compute_likelihood(folder, data / "test.en", data / "test.de")
    assert scores["test_loss"] == pytest.approx(likelihood["nll_per_token"], abs=1e-5)


@pytest.mark.slow
def test_trains_all_weights(make_base, tune):
    base = make_base("vanilla")
    folder = tune(base, "--dropout", "0.3")
    before, after = (load_file(each / "model.safetensors") for each in (base, folder))
    assert all(not torch.equal(before[name], after[name]) for name in before if "k_proj.bias" not in name)
    assert AutoModelForSeq2SeqLM.from_pretrained(folder).config.dropout == 0.3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vanilla", "marian", "bart", "fsmt"])
def test_saved_model_is_the_trained_one(make_base, tune, kind):
    """The validation scores are those of the model in training, the test scores those of the saved model."""
    arguments = ("--validation-file", "test", "--num-beams", "1", "--learning-rate", "0.01", "--max-steps", "12")
    folder = tune(make_base(kind), *arguments, "--eval-steps", "12", "--save-steps", "12", "--dropout", "0")
    results = json.loads((folder / "all_results.json").read_text())
    for name in ("bleu", "chrf", "loss"):
        assert results[f"eval_{name}"] == pytest.approx(results[f"test_{name}"], rel=1e-5), name


@pytest.mark.slow
def test_processes_may_have_unused_parameters(make_base, tune):
    """LED does not use its projections of global attention, and layerdrop skips layers at random."""
    folder = tune(make_base("led"), "--num_processes", "2")
    assert json.loads((folder / "all_results.json").read_text())["processes"] == 2


@pytest.mark.slow
def test_processes_may_extend_their_position_tables(make_base, tune):
    """M2M100 extends its table of sinusoids, a buffer, if a sentence is longer."""
    base = make_base("m2m_100")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2}))
    folder = tune(base, "--num_processes", "2")
    assert json.loads((folder / "all_results.json").read_text())["processes"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vanilla", "marian"])
def test_lora_is_merged_and_saved_as_adapter(make_base, tune, kind):
    base = make_base(kind)
    folder = tune(base, "--lora-rank", "2", "--learning-rate", "0.01")
    before, after = (load_file(each / "model.safetensors") for each in (base, folder))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.endswith("proj.weight") or ".fc" in name for name in changed)
    model = AutoModelForSeq2SeqLM.from_pretrained(base)
    adapted = PeftModel.from_pretrained(model, folder / "adapter").merge_and_unload()
    for name, tensor in adapted.state_dict().items():
        if name in after:
            torch.testing.assert_close(tensor, after[name], atol=1e-6, rtol=0)
    assert json.loads((folder / "all_results.json").read_text())["parameters"] == adapted.num_parameters()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "lora"), [("vanilla", ["--lora-rank", "2"]), ("marian", [])])
def test_resumes_bit_for_bit(make_base, tune, tmp_path, kind, lora):
    base = make_base(kind)
    uninterrupted = tmp_path / "uninterrupted"
    tune(base, *lora, "--output-dir", str(uninterrupted))
    tune(base, *lora)
    resumed = tmp_path / "tuned"
    (resumed / "all_results.json").unlink()
    (resumed / "model.safetensors").unlink()
    for path in (resumed / "checkpoint-6").iterdir():
        if path.is_file():
            path.unlink()  # only checkpoint-3 is valid
    tune(base, *lora)
    first, second = (load_file(folder / "model.safetensors") for folder in (uninterrupted, resumed))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "base_model=nowhere: cannot be loaded"),
        (["base", "--d-model", "64"], "d_model is determined by base_model=base"),
        (["base", "--no-tie-word-embeddings"], "tie_word_embeddings is determined by base_model=base"),
        (["base", "--tokenizer-vocab-size", "64"], "tokenizer_vocab_size is determined by base_model"),
        (["base", "--lora-rank", "-1"], "lora_rank=-1"),
        (["base", "--lora-rank", "2", "--ema-decay", "0.9"], "cannot be combined with ema_decay"),
        (["base", "--push-to-hub", "true", "--hub-strategy", "every_save"], "is uploaded at the end"),
    ],
)
def test_rejects_keys_that_contradict_the_base_model(tune, arguments, message):
    assert message in tune(*arguments, status=2).stderr


def test_rejects_upload_of_another_class_before_training(make_base, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(f"base_model: {make_base('marian')}\noutput_dir: out\nlearning_rate: 0.001\npush_to_hub: true\n")
    with pytest.raises(ValueError, match="push_to_hub does not support the marian model"):
        load_base_model(read_recipe([str(path)]))


def test_requires_learning_rate_and_base_model(programs, tmp_path):
    for name, line, message in (("base", "base_model: base", "base_model requires learning_rate"),
                                ("lora", "lora_rank: 2", "lora_rank requires base_model")):  # fmt: skip
        recipe = tmp_path / f"{name}.yaml"
        recipe.write_text(f"output_dir: {tmp_path / 'out'}\n{line}\n")
        assert message in programs.run("training.train", recipe, status=2).stderr


def test_base_model_path_does_not_depend_on_its_existence(tmp_path, monkeypatch):
    """Otherwise a run that was started too early could not be resumed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "next.yaml").write_text("base_model: ./first\noutput_dir: out\nlearning_rate: 0.001\n")
    before = read_recipe(["next.yaml"]).training.base_model
    (tmp_path / "first").mkdir()
    assert before == read_recipe(["next.yaml"]).training.base_model == str(tmp_path / "first")
