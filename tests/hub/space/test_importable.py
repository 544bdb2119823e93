"""Both pages with all kinds of imported checkpoints and tokenizers."""

import json
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    BlenderbotConfig,
    BlenderbotForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MBartConfig,
    MBartForConditionalGeneration,
    PegasusConfig,
    PegasusForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from hub import import_checkpoint
from hub.exporting.exporter import load as load_for_export
from hub.space import app, static_page
from vanilla_transformer.shared.transformers_conversion import NATIVE_ARCHITECTURES

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
VOCABULARY = [*"abcdefghijklmnopqrstuvwxyz", "dog", "runs"]
SIZE = {"vocab_size": 60, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24}
SIZE |= {"decoder_ffn_dim": 24, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
SIZE |= {"max_position_embeddings": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZE |= {"decoder_start_token_id": 2}
NATIVE_CLASSES = {
    "bart": (BartForConditionalGeneration, BartConfig),
    "mbart": (MBartForConditionalGeneration, MBartConfig),
    "pegasus": (PegasusForConditionalGeneration, PegasusConfig),
    "blenderbot": (BlenderbotForConditionalGeneration, BlenderbotConfig),
    "m2m_100": (M2M100ForConditionalGeneration, M2M100Config),
}
KINDS = ["tutorial", "tutorial, two", "fairseq", "fairseq, two", "fairseq, sentencepiece", "opennmt"]
KINDS += ["opennmt 2", *NATIVE_CLASSES, "marian", "marian, two", "marian, added tokens", "m2m_100, python"]


@pytest.fixture
def make_checkpoint(
    run_main, tmp_path, make_reference, save_as, load_tests_module, opus_folder, marian_files, sentencepiece_models,
    train_bpe, sentences, special_tokens,
):  # fmt: skip
    """Function that imports a checkpoint of a kind and returns its directory."""

    def tutorial(files: list[str]) -> list:
        _, state, _, _, _ = make_reference("notebook", sizes=(31, 31))
        for name in files:
            (tmp_path / name).write_text("\n".join(random.Random(name).sample([*SPECIAL, *VOCABULARY[2:]], 30)))
        options = [each for name in files for each in (f"--{name}", tmp_path / name)]
        return [save_as("bare", state, tmp_path), "--num-heads", 4, *options]

    def toolkit(name: str, two: bool, pieces: bytes | None = None) -> list:
        toolkits = load_tests_module("importing/toolkit_references.py")
        (tmp_path / "code").write_text("#version: 0.2\no g</w>\nd og</w>\n")
        if pieces:
            (tmp_path / "code").write_bytes(pieces)
        marks = [*(f"{letter}@@" for letter in VOCABULARY[:26]), *VOCABULARY, "▁", "▁the"]
        sides = [marks, marks[:-1] if two else marks]
        for language, tokens in zip(("de", "en"), sides, strict=True):
            (tmp_path / f"dict.{language}.txt").write_text("".join(f"{token} 1\n" for token in tokens))
        reference = toolkits.make(name, sizes=tuple(len(tokens) + 4 for tokens in sides))
        reference.tokens = lambda: [["<unk>", "<blank>", "<s>", "</s>", *tokens] for tokens in sides]
        return [toolkits.save(reference.content(), tmp_path / "model.pt"), "--bpe-codes", tmp_path / "code"]

    def save_native(name: str) -> Path:
        model_class, config_class = NATIVE_CLASSES[name]
        model_class(config_class(**SIZE)).eval().save_pretrained(tmp_path / name)
        bpe = train_bpe(sentences["en"] + sentences["de"], 60)
        PreTrainedTokenizerFast(tokenizer_object=bpe, **special_tokens).save_pretrained(tmp_path / name)
        return tmp_path / name

    def marian_with_two() -> Path:
        ids = {"pad_token_id": 2, "decoder_start_token_id": 2}
        sizes = {"vocab_size": 37, "decoder_vocab_size": 29, "share_encoder_decoder_embeddings": False}
        folder = opus_folder("two", **sizes, **ids)
        shutil.copytree(marian_files, folder, dirs_exist_ok=True)
        decoding = json.loads((folder / "generation_config.json").read_text()) | ids | {"bad_words_ids": [[2]]}
        (folder / "generation_config.json").write_text(json.dumps(decoding))
        return folder

    def marian_with_added_tokens() -> Path:
        folder = opus_folder()
        tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder)
        tokenizer.add_tokens(["<ent>", AddedToken("<tag>", special=True)])
        model.resize_token_embeddings(len(tokenizer))
        for each in (tokenizer, model):
            each.save_pretrained(folder)
        return folder

    def m2m_in_python() -> Path:
        from sentencepiece import SentencePieceProcessor

        folder = save_native("m2m_100")
        for path in folder.glob("token*"):
            path.unlink()
        pieces = SentencePieceProcessor(model_proto=sentencepiece_models["en"])
        tokens = [*SPECIAL, *(pieces.id_to_piece(i) for i in range(2, pieces.get_piece_size()))]
        (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
        (folder / "sentencepiece.bpe.model").write_bytes(sentencepiece_models["en"])
        settings = {"tokenizer_class": "M2M100Tokenizer", "src_lang": "en", "tgt_lang": "de"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        model_class, config_class = NATIVE_CLASSES["m2m_100"]
        ids = {"vocab_size": 250, "bos_token_id": 0, "pad_token_id": 1}
        model_class(config_class(**(SIZE | ids))).eval().save_pretrained(folder)
        return folder

    def make(kind: str) -> Path:
        arguments = {
            "tutorial": lambda: tutorial(["source_tokenizer"]),
            "tutorial, two": lambda: tutorial(["source_tokenizer", "target_tokenizer"]),
            "fairseq": lambda: toolkit("fairseq base", two=False),
            "fairseq, two": lambda: toolkit("fairseq base", two=True),
            "fairseq, sentencepiece": lambda: toolkit("fairseq base", True, sentencepiece_models["en"]),
            "opennmt": lambda: toolkit("opennmt 3", two=True),
            "opennmt 2": lambda: toolkit("opennmt 2", two=True),
            **{name: lambda name=name: [save_native(name)] for name in NATIVE_CLASSES},
            "marian": lambda: [opus_folder()],
            "marian, two": lambda: [marian_with_two()],
            "marian, added tokens": lambda: [marian_with_added_tokens()],
            "m2m_100, python": lambda: [m2m_in_python()],
        }[kind]()
        run_main(import_checkpoint.main, arguments[0], tmp_path / "checkpoint", *arguments[1:])
        return tmp_path / "checkpoint"

    return make


TEXTS = ["the dog runs", "d o g", "a cat sleeps in the house", "Zebra dog", "two birds sing: 3!", "a <ent> sees<tag>"]


@pytest.mark.parametrize("kind", KINDS)
def test_both_pages_support_checkpoint(make_checkpoint, no_graphs, tmp_path, kind):
    folder = make_checkpoint(kind)
    translator = app.Translator(str(folder))
    load = next(each.fn for each in app.make_page(str(folder)).fns.values() if each.name == "load")
    *_, (status, *_) = load()
    assert "Ready" in status
    batch = translator.encode("d o g")
    *_, last = translator.stream(batch)
    assert isinstance(last, str)
    ids, _ = translator.candidates(batch, 2)[0]
    weights, rows, columns = translator.attention(batch, ids)["cross"]
    assert weights.shape[2:] == (len(rows), len(columns))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    vocabulary = tokenizer.get_vocab()
    source_ids = batch["input_ids"][0].tolist()
    assert [vocabulary.get(column, i) for i, column in zip(source_ids, columns, strict=True)] == source_ids

    if kind == "m2m_100, python":
        with pytest.raises(ValueError, match="M2M100Tokenizer cannot be converted to tokenizer.json"):
            static_page.create_page(str(folder), tmp_path / "page")
        return
    static_page.create_page(str(folder), tmp_path / "page")
    prepared, _ = load_for_export(str(folder), "onnx")
    page = json.loads((tmp_path / "page" / "page.json").read_text())
    for side, argument in (("source", "text"), ("target", "text_target")):
        own = AutoTokenizer.from_pretrained(tmp_path / "page" / page[side])
        rows = prepared.get_encoder().embed_tokens.num_embeddings if side == "source" else prepared.lm_head.out_features
        assert max(own.get_vocab().values()) < rows
        assert (tmp_path / "page" / page[side] / "tokenizer.json").is_file()
        assert own(TEXTS)["input_ids"] == tokenizer(**{argument: TEXTS})["input_ids"]
        for ids in tokenizer(text_target=TEXTS)["input_ids"] if side == "target" else ():
            words = own.decode(ids, skip_special_tokens=True).split()
            assert words == tokenizer.decode(ids, skip_special_tokens=True).split()


def test_pages_are_tested_with_all_native_classes():
    assert {each.model_type for each in NATIVE_ARCHITECTURES} <= set(KINDS)


def test_space_requirements_cover_all_tokenizers(repository):
    lines = (repository / "hub" / "space" / "requirements.txt").read_text().splitlines()
    assert {re.split("[<>=]", line)[0] for line in lines} == {"sentencepiece", "torch", "transformers"}


@pytest.mark.slow
def test_opus_mt_onnx_gives_same_translations(make_checkpoint, run_main, tmp_path, onnx_translator):
    """Check the graphs and both tokenizer.json files with the loop of the docs."""
    from hub import export

    folder = make_checkpoint("marian")
    run_main(export.main, folder, tmp_path / "out", "--to", "onnx")
    model, tokenizer = (auto.from_pretrained(folder) for auto in (AutoModelForSeq2SeqLM, AutoTokenizer))
    translate = onnx_translator(str(tmp_path / "out"))
    for text in TEXTS:
        batch = tokenizer(text, return_tensors="pt")
        options = {"num_beams": 1, "max_new_tokens": 8, "bad_words_ids": None, "forced_eos_token_id": None}
        expected = model.generate(**batch, **options, suppress_tokens=None)
        ids = translate.generate(batch["input_ids"].numpy(), batch["attention_mask"].numpy(), 8)
        assert torch.equal(torch.from_numpy(ids), expected)
        assert [each.ids for each in translate.source.encode_batch([text])] == batch["input_ids"].tolist()
