"""Tokenizers from vocabularies, BPE codes and SentencePiece models give the ids of the original programs."""

import collections
import os
import random
import re
import unicodedata
from pathlib import Path

import pytest

from hub.importing.toolkits.subwords import read_dictionary, read_toolkit_tokenizers

CONTINUATION = "@@"


def learn(counts: collections.Counter, number: int) -> list[tuple[str, str]]:
    """Learn `number` BPE merges: each merge joins the most frequent pair of adjacent symbols."""
    splits = {word: [*word[:-1], word[-1] + "</w>"] for word in counts}
    merges: list[tuple[str, str]] = []
    for _ in range(number):
        pairs: collections.Counter = collections.Counter()
        for word, parts in splits.items():
            for pair in zip(parts, parts[1:], strict=False):
                pairs[pair] += counts[word]
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        splits = {word: merge_pair(parts, best) for word, parts in splits.items()}
    return merges


def split_words(line: str) -> list[str]:
    """Split at spaces. As in subword-nmt, other white space such as U+00A0 counts as a letter."""
    return [word for word in line.strip("\r\n ").split(" ") if word]


def merge_pair(parts: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    i = 0
    while i < len(parts):
        both = tuple(parts[i : i + 2]) == pair
        merged.append("".join(pair) if both else parts[i])
        i += 1 + both
    return merged


class ReferenceBPE:
    """Reference implementation of subword-nmt: repeatedly applies the earliest merge."""

    def __init__(self, merges):
        self.ranks, self.cache = {pair: i for i, pair in enumerate(merges)}, {}

    def word(self, word):
        if word not in self.cache:
            parts = [*word[:-1], word[-1] + "</w>"]
            while pairs := [pair for pair in zip(parts, parts[1:], strict=False) if pair in self.ranks]:
                parts = merge_pair(parts, min(pairs, key=self.ranks.__getitem__))
            parts[-1] = parts[-1].removesuffix("</w>")
            self.cache[word] = [*(part + CONTINUATION for part in parts[:-1]), parts[-1]]
        return self.cache[word]

    def __call__(self, line):
        return [part for word in split_words(line) for part in self.word(word)]


def read_lines(languages=("en", "de")) -> list[str]:
    """Return lines of Multi30k and Tatoeba if available, else of the built-in corpus."""
    data = os.environ.get("VT_DATA")
    if not data:
        from training.demo.corpus import generate

        return [line for pair in generate(3000, 10, 10)["train"] for line in pair]
    lines = []
    for name, file in (("multi30k", "train"), ("tatoeba_en_de", "train")):
        for language in languages:
            text = (Path(data) / name / f"{file}.{language}").read_text(encoding="utf-8")
            lines += random.Random(0).sample(text.splitlines(), 4000)
    return random.Random(1).sample(lines, len(lines))


@pytest.fixture(scope="module")
def lines():
    return read_lines()


def write_dictionary(path: Path, tokens: collections.Counter) -> dict[str, int]:
    """Write a fairseq dictionary, padded to a multiple of 8, and return its ids."""
    entries = tokens.most_common()
    entries += [(f"madeupword{i:04d}", 0) for i in range(-(len(entries) + 4) % 8)]
    path.write_text("".join(f"{token} {count}\n" for token, count in entries), encoding="utf-8")
    return {token: i for i, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", *(token for token, _ in entries)])}


LANGUAGES = {"source_lang": "de", "target_lang": "en"}


@pytest.mark.parametrize("kind", ["subword-nmt", "fastBPE"])
def test_bpe_codes_give_reference_ids(lines, tmp_path, kind):
    """The dictionary lacks some results of merges, and the test text has unknown characters."""
    train, test = lines[:2000], lines[2000:]
    merges = learn(collections.Counter(word for line in train[:400] for word in split_words(line)), 300)
    head, tail = ("#version: 0.2\n", "") if kind == "subword-nmt" else ("", " 7")
    code = "".join(f"{left} {right}{tail}\n" for left, right in merges)
    (tmp_path / "code").write_text(head + code, encoding="utf-8")
    reference = ReferenceBPE(merges)
    ids = write_dictionary(
        tmp_path / "dict.de.txt", collections.Counter(part for line in train for part in reference(line))
    )
    (tmp_path / "dict.en.txt").write_bytes((tmp_path / "dict.de.txt").read_bytes())
    tokenizers = read_toolkit_tokenizers("fairseq", tmp_path / "model.pt", LANGUAGES, None, [])
    tokenizer, rows = tokenizers.tokenizer, tokenizers.source.rows
    assert rows[: len(ids)] == list(range(len(ids)))
    assert set(rows[len(ids) :]) == {3}
    unknown, surplus = 0, 0
    for side in ("text", "text_target"):
        for line, encoded in zip(test, tokenizer(**{side: test})["input_ids"], strict=True):
            parts = reference(line)
            expected = [ids.get(part, 3) for part in parts]
            unknown += expected.count(3)
            surplus += sum(each >= len(ids) for each in encoded)
            assert [rows[each] for each in encoded] == [*expected, 2], line
            text = " ".join("<unk>" if each == 3 else part for part, each in zip(parts, encoded[:-1], strict=True))
            assert tokenizer.decode(encoded[:-1]) == f"{text} ".replace(f"{CONTINUATION} ", "").rstrip(), line
    assert unknown > 10
    assert surplus  # the text must contain subwords that the dictionary lacks
    assert tokenizer.decode([]) == tokenizer.decode([2], skip_special_tokens=True) == ""
    assert len(tokenizer) == len(rows) == max(tokenizer.get_vocab().values()) + 1


def test_ids_after_save_and_load(lines, tmp_path):
    from transformers import AutoTokenizer

    merges = learn(collections.Counter(word for line in lines[:400] for word in split_words(line)), 300)
    (tmp_path / "code").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges), encoding="utf-8")
    reference = ReferenceBPE(merges)
    write_dictionary(
        tmp_path / "dict.txt", collections.Counter(part for line in lines[:2000] for part in reference(line))
    )
    tokenizer = read_toolkit_tokenizers("fairseq", tmp_path / "model.pt", {}, None, []).tokenizer
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again(lines[300:900])["input_ids"] == tokenizer(lines[300:900])["input_ids"]


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_sentencepiece(lines, tmp_path, kind):
    """The ids equal those of SentencePiece, also for text that no piece covers."""
    sentencepiece = pytest.importorskip("sentencepiece")
    train, test = lines[:3000], lines[3000:]
    (tmp_path / "train").write_text("\n".join(train), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "train"),
        model_prefix=str(tmp_path / "model"),
        vocab_size=500,
        model_type=kind,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    processor = sentencepiece.SentencePieceProcessor(str(tmp_path / "model.model"))
    pieces = collections.Counter(piece for line in train for piece in processor.encode(line, out_type=str))
    ids = write_dictionary(tmp_path / "dict.txt", pieces)
    tokenizers = read_toolkit_tokenizers("fairseq", tmp_path / "model.pt", {}, None, [tmp_path / "model.model"])
    encoded = tokenizers.tokenizer(test)["input_ids"]
    for line, each in zip(test, encoded, strict=True):
        expected = processor.encode(line, out_type=str)
        assert [tokenizers.source.rows[i] for i in each] == [*(ids.get(piece, 3) for piece in expected), 2], line
        if 3 not in each:
            assert tokenizers.tokenizer.decode(each[:-1]) == "".join(expected).replace("▁", " ").strip()


def train_sentencepiece(lines: list[str], path: Path, kind: str, **options):
    """Write a small model and a dictionary of its pieces next to it; return its processor."""
    sentencepiece = pytest.importorskip("sentencepiece")
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            **{"sentence_iterator": iter(lines), "model_writer": file, "vocab_size": 500, "model_type": kind},
            **{"minloglevel": 2, "hard_vocab_limit": False, **options},
        )
    processor = sentencepiece.SentencePieceProcessor(str(path))
    pieces = [processor.id_to_piece(i) for i in range(3, len(processor))]
    write_dictionary(path.with_name("dict.txt"), collections.Counter(pieces))
    return processor


@pytest.mark.parametrize(
    "options",
    [
        {"byte_fallback": True},
        {"split_by_whitespace": False},
        {"remove_extra_whitespaces": False},
        {"add_dummy_prefix": False},
        {"add_dummy_prefix": False, "remove_extra_whitespaces": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_sentencepiece_options(lines, tmp_path, kind, options):
    processor = train_sentencepiece(lines[:1000], tmp_path / "x.model", kind, **options)
    tokenizers = read_toolkit_tokenizers("fairseq", tmp_path / "model.pt", {}, None, [tmp_path / "x.model"])
    for line in [*lines[1000:1200], " one  space ", "日本語 Ω", "a Ω", "dog\r\nruns"]:
        expected = processor.encode(line, out_type=str)
        ids = tokenizers.tokenizer(line)["input_ids"][:-1]
        tokens = tokenizers.tokenizer.convert_ids_to_tokens(ids)
        assert [piece for piece in tokens if piece != "<unk>"] == [
            piece for piece in expected if processor.piece_to_id(piece) != processor.unk_id()
        ], line
        assert 3 not in ids or "byte_fallback" not in options
        if 3 not in ids:
            assert tokenizers.tokenizer.decode(ids) == processor.decode(expected)


@pytest.mark.parametrize("rule", ["nmt_nfkc", "nfkc", "nmt_nfkc_cf", "identity"])
def test_sentencepiece_normalization(lines, tmp_path, rule):
    """Covers combining marks, half-width katakana, white space at the ends, and several lines."""
    words = ["École", "Zürich", "Ånd", "Việt", "각", "が", "ﾊﾞｽ", "バス", "Čechy", "ño", "\t", "\u3000", "_"]
    words += ["А\u0301нна", "Ọ\u0301ba", "²\u0304", "\ufee3\u064e\ufeae"]  # marks without a composed form
    words += ["tiê\u0301ng", "nươ\u0300c", "nü\u030c", "가\u11a8"]  # added to composed letters
    words += ["T\u200db", "A\u0e33", "A\u0eb3"]  # continue a grapheme
    texts = [" ".join(words[i:] + words[:i]) for i in range(len(words))]
    processor = train_sentencepiece(
        [*lines[:300], *texts], tmp_path / "x.model", "unigram", normalization_rule_name=rule
    )
    tokenizer = read_toolkit_tokenizers("fairseq", tmp_path / "model.pt", {}, None, [tmp_path / "x.model"]).tokenizer
    several = [] if rule == "identity" else ["a \nb", "a\n b", " a \n \n b ", "a\r\nb"]
    assert not re.search(r"\\\\(A|z|x{)", tokenizer.backend_tokenizer.to_str())  # regular expressions in JavaScript
    for text in [*texts, *(unicodedata.normalize("NFD", text) for text in texts), *several]:
        pieces = [processor.id_to_piece(i) for i in processor.encode(text)]
        assert tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"][:-1]) == pieces, text


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("unigram", {"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix=true, which is not supported"),
        ("bpe", {"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix=true, which is not supported"),
        ("bpe", {"user_defined_symbols": ["dog"]}, "user_defined_symbols in BPE, which is not supported"),
    ],
)
def test_rejects_unsupported_sentencepiece_options(lines, tmp_path, kind, options, message):
    train_sentencepiece(lines[:1000], tmp_path / "x.model", kind, **options)
    with pytest.raises(ValueError, match=message):
        read_toolkit_tokenizers("fairseq", tmp_path / "model.pt", {}, None, [tmp_path / "x.model"])


def test_ignores_byte_order_mark(tmp_path):
    (tmp_path / "dict.txt").write_text("a 1\nb 1\n", encoding="utf-8-sig")
    assert read_dictionary(tmp_path / "dict.txt")[4:] == ["a", "b"]


def test_splits_words_without_codes(tmp_path):
    write_dictionary(tmp_path / "dict.de.txt", collections.Counter(["ein", "Hund", "läuft"]))
    write_dictionary(tmp_path / "dict.en.txt", collections.Counter(["a", "dog", "runs"]))
    tokenizer = read_toolkit_tokenizers("fairseq", tmp_path / "model.pt", LANGUAGES, None, []).tokenizer
    ids = tokenizer("ein  Hund bellt", text_target="a dog")
    assert (ids["input_ids"], ids["labels"]) == ([4, 5, 3, 2], [4, 5, 2])
    assert tokenizer.decode(ids["labels"], skip_special_tokens=True) == "a dog"


def test_opennmt_sources_have_no_eos():
    tokens = ["<unk>", "<blank>", "<s>", "</s>", "a", "b@@", "c"]
    metadata = {"vocabularies": {"source": tokens, "target": tokens}}
    tokenizer = read_toolkit_tokenizers("opennmt", Path("model.pt"), metadata, None, []).tokenizer
    ids = tokenizer("a c", text_target="a c")
    assert (ids["input_ids"], ids["labels"]) == ([4, 6], [4, 6, 3])


@pytest.mark.parametrize(
    ("files", "metadata", "option", "message"),
    [
        (
            {"dict.de.txt": "a 1\n"},
            LANGUAGES,
            "data",
            "has no dict.en.txt. Found dict.de.txt: set target_lang with --set",
        ),
        ({}, LANGUAGES, "data", "has no dict.de.txt. Check --fairseq-data."),
        ({"dict.de.txt": "a 1\n", "dict.en.txt": "b 1\n"}, {}, None, "no dictionary for an unknown source_lang"),
        ({"dict.txt": "a 1\na 1\n"}, {}, None, "line 2: the token 'a' is repeated"),
        ({"dict.txt": "a\n"}, {}, None, "line 1: expected `token count`, got 'a'"),
        ({"dict.txt": "a 1\n", "code": "#version: 0.3\na b\n"}, {}, None, "Only version 0.2 is supported"),
        ({"dict.txt": "a 1\n", "code": "a </w>\n"}, {}, None, "codes of subword-nmt 0.1"),
        ({"dict.txt": "a 1\n", "code": "a b c\n"}, {}, None, "line 1: 'a b c' is not a pair"),
        ({"dict.txt": "a 1\n", "code": "\0\1\2"}, {}, None, "is neither a file of BPE codes nor a SentencePiece model"),
        ({}, {}, "codes", "requires the fairseq dictionaries"),
        ({"dict.txt": "a 1\n"}, {}, "codes", "cannot be read"),
    ],
)
def test_rejects_invalid_vocabularies_and_codes(tmp_path, files, metadata, option, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    codes = [tmp_path / "missing"] if option == "codes" else []
    with pytest.raises(ValueError, match=".") as error:
        read_toolkit_tokenizers(
            "fairseq", tmp_path / "model.pt", metadata, tmp_path if option == "data" else None, codes
        )
    assert message in str(error.value)


def test_accepts_overwritten_tokens(tmp_path):
    (tmp_path / "dict.txt").write_text("a 1\nb 1\na 1 #fairseq:overwrite\n")
    assert read_dictionary(tmp_path / "dict.txt")[4:] == ["<overwritten_4>", "b", "a"]
