"""Packages for Argos Translate have the same tokens and translations as the checkpoint."""

import io
import json
import os
import random
import zipfile
from functools import partial
from pathlib import Path

import ctranslate2
import pytest
import sentencepiece
from tokenizers import pre_tokenizers, processors
from transformers import AutoTokenizer

from hub.export import main
from hub.exporting.to_argos import to_sentencepiece
from training.data.tokenizer import train_tokenizer
from training.recipe.arguments import TokenizerArguments

TEXTS = [
    "The 3 dogs run, don't they?",
    "A man's hat (old) costs 12.50 euros.",
    "Die 3 Hunde rennen – oder? „Ja“, sagt er.",
]


def make_tokenizer(**keys):
    return train_tokenizer(TEXTS, TEXTS[::-1], TokenizerArguments(**({"tokenizer_vocab_size": 130} | keys)))


def processor(tokenizer) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=to_sentencepiece(tokenizer).SerializeToString())


def test_sentencepiece_gives_same_ids():
    """Spaces, digits and new combinations have the same ids. A run of unknown characters is one token."""
    tokenizer = make_tokenizer()
    pieces, rng = processor(tokenizer), random.Random(0)
    alphabet = sorted(set("".join(TEXTS)))
    texts = [*TEXTS, "two  spaces ", *("".join(rng.choices(alphabet, k=30)).lstrip() for _ in range(300))]
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert [*pieces.encode(text), tokenizer.eos_token_id] == ids, text
        assert pieces.decode(ids[:-1]) == tokenizer.decode(ids, skip_special_tokens=True)
    assert pieces.encode("ΩΩ") == [tokenizer.convert_tokens_to_ids("▁"), tokenizer.unk_token_id]


@pytest.mark.skipif("VT_DATA" not in os.environ, reason="needs Multi30k")
def test_sentencepiece_gives_same_ids_on_multi30k():
    folder = Path(os.environ["VT_DATA"], "multi30k")
    english, german = (folder.joinpath(f"train.{each}").read_text().splitlines()[::15] for each in ("en", "de"))
    tokenizer = train_tokenizer(english, german, TokenizerArguments(tokenizer_vocab_size=4000))
    pieces = processor(tokenizer)
    for text in english + german:
        assert pieces.encode(text) == tokenizer(text)["input_ids"][:-1], text


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lowercase": True}, "normalizes text"),
        ({"moses": True}, "normalizes text"),
        ({"tokenizer_type": "unigram"}, "type is Unigram, expected BPE"),
        ({"tokenizer_type": "char"}, "type is WordLevel, expected BPE"),
        ({"shared_vocabulary": False}, "one vocabulary for both languages"),
    ],
)
def test_rejects_unsupported_tokenizers(keys, message):
    with pytest.raises(ValueError, match=message):
        to_sentencepiece(make_tokenizer(**keys))


@pytest.mark.parametrize("options", [{"prepend_scheme": "never"}, {"replacement": "_"}])
def test_rejects_other_word_markers(options):
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(**options)
    with pytest.raises(ValueError, match="does not write ▁ before each word"):
        to_sentencepiece(tokenizer)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("byte_fallback", True),
        ("end_of_word_suffix", "</w>"),
        ("continuing_subword_prefix", "##"),
        ("ignore_merges", True),
    ],
)
def test_rejects_bpe_options(name, value):
    tokenizer = make_tokenizer()
    setattr(tokenizer.backend_tokenizer.model, name, value)
    with pytest.raises(ValueError, match=f"the tokenizer uses {name}"):
        to_sentencepiece(tokenizer)


def test_rejects_added_tokens():
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["Fnord"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<2de>"]})
    with pytest.raises(ValueError, match="has 2 added tokens, such as <2de>, Fnord"):
        to_sentencepiece(tokenizer)


def test_rejects_other_punctuation_behaviors():
    tokenizer = make_tokenizer()
    steps = [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation(behavior="removed")]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    with pytest.raises(ValueError, match="the behavior of Punctuation is Removed, expected Isolated"):
        to_sentencepiece(tokenizer)


@pytest.mark.parametrize("template", ["$A", "<s> $A </s>", "$A </s> </s>"])
def test_rejects_other_post_processors(template):
    """Argos Translate adds EOS to the source."""
    tokenizer = make_tokenizer()
    special_tokens = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    processor = processors.TemplateProcessing(single=template, special_tokens=special_tokens)
    tokenizer.backend_tokenizer.post_processor = processor
    with pytest.raises(ValueError, match="does not add exactly one token, EOS"):
        to_sentencepiece(tokenizer)


@pytest.fixture
def checkpoint(make_model, tmp_path) -> Path:
    tokenizer = make_tokenizer()
    model = make_model(vocab_size=len(tokenizer))
    model.generation_config.update(max_new_tokens=12)
    model.save_pretrained(tmp_path / "run")
    tokenizer.save_pretrained(tmp_path / "run")
    return tmp_path / "run"


def test_package_gives_same_translations(checkpoint, run_main, make_model, tmp_path):
    """Translate as Argos Translate does: SentencePiece, CTranslate2, SentencePiece."""
    (checkpoint / "recipe.yaml").write_text("source_lang: en\ntarget_lang: de\n")
    run_main(main, checkpoint, tmp_path / "out", "--to", "argos")
    (path,) = (tmp_path / "out").iterdir()
    assert path.name == "translate-en_de.argosmodel"
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as package:
        package.extractall(tmp_path)
    folder = tmp_path / "translate-en_de"
    metadata = json.loads((folder / "metadata.json").read_text())
    assert [metadata[key] for key in ("from_code", "to_code", "from_name")] == ["en", "de", "English"]
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "sentencepiece.model"))
    translator = ctranslate2.Translator(str(folder / "model"), intra_threads=1)
    tokens = [pieces.encode(text, out_type=str) for text in TEXTS]
    results = translator.translate_batch(tokens, beam_size=1, max_decoding_length=12)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = make_model(vocab_size=len(tokenizer))
    for text, result in zip(TEXTS, results, strict=True):
        ids = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=12, num_beams=1)[0]
        assert pieces.decode_pieces(result.hypotheses[0]) == tokenizer.decode(ids, skip_special_tokens=True)


def test_requires_languages(checkpoint, run_main, tmp_path, capsys):
    command = partial(run_main, main, checkpoint, tmp_path / "out", "--to", "argos")
    command(status=2)
    assert "Set --source-lang and --target-lang" in capsys.readouterr().err
    command("--source-lang", "../x", "--target-lang", "de", status=2)
    assert "'../x' is not a language code" in capsys.readouterr().err
    command("--source-lang", "sv", "--target-lang", "pt-BR", "--quantization", "int8")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["translate-sv_pt-BR.argosmodel"]
