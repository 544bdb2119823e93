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
    texts = [*TEXTS, "two  spaces", *("".join(rng.choices(alphabet, k=30)).strip() for _ in range(300))]
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert [*pieces.encode(text), tokenizer.eos_token_id] == ids, text
        assert pieces.decode(ids[:-1]) == tokenizer.decode(ids, skip_special_tokens=True)
    assert pieces.encode("ΩΩ") == [tokenizer.convert_tokens_to_ids("▁"), tokenizer.unk_token_id]


def test_sentencepiece_normalizes_text():
    """White space such as no-break spaces counts as a space, and decomposed characters are composed."""
    tokenizer = make_tokenizer()
    pieces, rng = processor(tokenizer), random.Random(0)
    texts = [
        "The\u00a03\u202fdogs\trun",
        "\u3000The",
        "Die Ha\u0308nde",
        "e\u0323\u0302 \u00ea\u0323 \u212b \u1112\u1161\u11ab",
        "o\u0301\u0323 \u00f3\u0323",
        "\u062c\u062f\u0651\u064b\u0627",  # Arabic shadda before a vowel mark
        "\u05e9\u05bc\u05c1\u05b8\u05d1\u05b7\u05bc",  # Hebrew dagesh, shin dot and vowel mark
    ]
    spaces = "\t \u0085\u00a0\u1680\u2003\u2028\u202f\u205f\u3000\x1c\u200b"
    texts += [
        "".join(rng.choices([*spaces, *"The3dogs", "a\u0301", "\u00c5", "o\u0308\u0304"], k=20)) + "."
        for _ in range(300)
    ]
    for text in texts:
        normalized = tokenizer.backend_tokenizer.normalizer.normalize_str(text)
        assert pieces.normalize(text) == "\u2581" + normalized.replace(" ", "\u2581"), text
        assert pieces.encode(text) == pieces.encode(normalized), text
    assert pieces.encode(texts[0]) == tokenizer(texts[0])["input_ids"][:-1] == pieces.encode("The 3 dogs run")


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


def set_template(tokenizer, template: str) -> None:
    special_tokens = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    processor = processors.TemplateProcessing(single=template, special_tokens=special_tokens)
    tokenizer.backend_tokenizer.post_processor = processor


def add_tokens(tokenizer) -> None:
    tokenizer.add_tokens(["Fnord"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<2de>"]})


def set_pre_tokenizer(tokenizer, *others, **options) -> None:
    steps = [pre_tokenizers.Metaspace(**options), *others]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if others else steps[0]


BPE_OPTIONS = {"byte_fallback": True, "end_of_word_suffix": "</w>", "continuing_subword_prefix": "##"}
BPE_OPTIONS |= {"ignore_merges": True}
REMOVED = pre_tokenizers.Punctuation(behavior="removed")
CHANGES = [  # change of a tokenizer, message
    *((partial(set_pre_tokenizer, **options), "does not write ▁ before each word")
      for options in ({"prepend_scheme": "never"}, {"replacement": "_"})),
    *((lambda each, name=name, value=value: setattr(each.backend_tokenizer.model, name, value),
       f"the tokenizer uses {name}") for name, value in BPE_OPTIONS.items()),
    (add_tokens, "has 2 added tokens, such as <2de>, Fnord"),
    (lambda each: set_pre_tokenizer(each, REMOVED), "the behavior of Punctuation is Removed, expected Isolated"),
    *((partial(set_template, template=template), "does not add exactly one token, EOS")  # Argos Translate adds EOS
      for template in ("$A", "<s> $A </s>", "$A </s> </s>")),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_rejects_changed_tokenizers(change, message):
    tokenizer = make_tokenizer()
    change(tokenizer)
    with pytest.raises(ValueError, match=message):
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


def test_requires_the_eos_of_the_tokenizer(checkpoint, run_main, tmp_path, capsys):
    path = checkpoint / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 8}))
    languages = ("--source-lang", "en", "--target-lang", "de")
    run_main(main, checkpoint, tmp_path / "out", "--to", "argos", *languages, status=2)
    assert "eos_token_id is 8 in generation_config.json and 2 in the tokenizer" in capsys.readouterr().err
