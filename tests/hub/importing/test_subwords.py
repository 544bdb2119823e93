"""Vocabularies, codes and SentencePiece models as tokenizers: the ids of the programs that they come from."""

import collections
import os
import random
import unicodedata
from pathlib import Path

import pytest

from hub.importing.toolkits.subwords import read_dictionary, read_toolkit_tokenizers

CONTINUED, LINES = "@@", 10_000


def learn(words: collections.Counter, number: int) -> list[tuple[str, str]]:
    """Sennrich's byte-pair encoding: the most frequent pair of neighbours becomes one symbol, `number` times."""
    splits = {word: [*word[:-1], word[-1] + "</w>"] for word in words}
    merges: list[tuple[str, str]] = []
    for _ in range(number):
        pairs: collections.Counter = collections.Counter()
        for word, parts in splits.items():
            for pair in zip(parts, parts[1:], strict=False):
                pairs[pair] += words[word]
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        splits = {word: joined(parts, best) for word, parts in splits.items()}
    return merges


def words_of(line: str) -> list[str]:
    """What stands between spaces; they take other white space, such as U+00A0, for letters."""
    return [word for word in line.strip("\r\n ").split(" ") if word]


def joined(parts: list[str], pair: tuple[str, str]) -> list[str]:
    found: list[str] = []
    i = 0
    while i < len(parts):
        both = tuple(parts[i : i + 2]) == pair
        found.append("".join(pair) if both else parts[i])
        i += 1 + both
    return found


class PlainTwin:
    """Codes applied as subword-nmt does it: the pair that was learned first, everywhere, again and again."""

    def __init__(self, merges):
        self.ranks, self.cache = {pair: i for i, pair in enumerate(merges)}, {}

    def word(self, word):
        if word not in self.cache:
            parts = [*word[:-1], word[-1] + "</w>"]
            while pairs := [pair for pair in zip(parts, parts[1:], strict=False) if pair in self.ranks]:
                parts = joined(parts, min(pairs, key=self.ranks.__getitem__))
            parts[-1] = parts[-1].removesuffix("</w>")
            self.cache[word] = [*(part + CONTINUED for part in parts[:-1]), parts[-1]]
        return self.cache[word]

    def __call__(self, line):
        return [part for word in words_of(line) for part in self.word(word)]


def lines_of(languages=("en", "de")) -> list[str]:
    """Of Multi30k and Tatoeba where they are there, else of the embedded corpus."""
    data = os.environ.get("VT_DATA")
    if not data:
        from training.demo.corpus import generate

        return [line for pair in generate()["train"][:3000] for line in pair]
    found = []
    for name, file in (("multi30k", "train"), ("tatoeba_en_de", "train")):
        for language in languages:
            text = (Path(data) / name / f"{file}.{language}").read_text(encoding="utf-8")
            found += random.Random(0).sample(text.splitlines(), 4000)
    return random.Random(1).sample(found, len(found))


@pytest.fixture(scope="module")
def lines():
    return lines_of()


def write_dictionary(path: Path, tokens: collections.Counter) -> dict[str, int]:
    """fairseq's file: the most frequent first, made up to a multiple of 8; the ids that it gives."""
    entries = tokens.most_common()
    entries += [(f"madeupword{i:04d}", 0) for i in range(-(len(entries) + 4) % 8)]
    path.write_text("".join(f"{token} {count}\n" for token, count in entries), encoding="utf-8")
    return {token: i for i, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", *(token for token, _ in entries)])}


TOLD = {"source_lang": "de", "target_lang": "en"}


@pytest.mark.parametrize("kind", ["subword-nmt", "fastBPE"])
def test_codes_give_the_ids_of_the_plain_program(lines, tmp_path, kind):
    """A dictionary that lacks results of merges, unknown characters, and text that was not in training."""
    train, test = lines[:2000], lines[2000:]
    merges = learn(collections.Counter(word for line in train[:400] for word in words_of(line)), 300)
    head, tail = ("#version: 0.2\n", "") if kind == "subword-nmt" else ("", " 7")
    code = "".join(f"{left} {right}{tail}\n" for left, right in merges)
    (tmp_path / "code").write_text(head + code, encoding="utf-8")
    twin = PlainTwin(merges)
    ids = write_dictionary(tmp_path / "dict.de.txt", collections.Counter(part for line in train for part in twin(line)))
    (tmp_path / "dict.en.txt").write_bytes((tmp_path / "dict.de.txt").read_bytes())
    tokenizers = read_toolkit_tokenizers("fairseq", tmp_path / "model.pt", TOLD, None, [])
    tokenizer, rows = tokenizers.tokenizer, tokenizers.source.rows
    assert rows[: len(ids)] == list(range(len(ids)))
    assert set(rows[len(ids) :]) == {3}
    unknown, surplus = 0, 0
    for side in ("text", "text_target"):
        found = tokenizer(**{side: test})["input_ids"]
        for line, given in zip(test, found, strict=True):
            parts = twin(line)
            expected = [ids.get(part, 3) for part in parts]
            unknown += expected.count(3)
            surplus += sum(each >= len(ids) for each in given)
            assert [rows[each] for each in given] == [*expected, 2], line
            text = " ".join("<unk>" if each == 3 else part for part, each in zip(parts, given[:-1], strict=True))
            assert tokenizer.decode(given[:-1]) == f"{text} ".replace(f"{CONTINUED} ", "").rstrip(), line
    assert unknown > 10
    assert surplus  # a part that the dictionary lacks was left somewhere, or nothing of it was tested
    assert tokenizer.decode([]) == tokenizer.decode([2], skip_special_tokens=True) == ""
    assert len(tokenizer) == len(rows) == max(tokenizer.get_vocab().values()) + 1


def test_it_gives_the_same_ids_when_it_is_loaded(lines, tmp_path):
    from transformers import AutoTokenizer

    merges = learn(collections.Counter(word for line in lines[:400] for word in words_of(line)), 300)
    (tmp_path / "code").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges), encoding="utf-8")
    twin = PlainTwin(merges)
    write_dictionary(tmp_path / "dict.txt", collections.Counter(part for line in lines[:2000] for part in twin(line)))
    tokenizer = read_toolkit_tokenizers("fairseq", tmp_path / "model.pt", {}, None, []).tokenizer
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again(lines[300:900])["input_ids"] == tokenizer(lines[300:900])["input_ids"]


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_sentencepiece(lines, tmp_path, kind):
    """Its own program, with a dictionary that also has text that no piece covers."""
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
    theirs = sentencepiece.SentencePieceProcessor(str(tmp_path / "model.model"))
    pieces = collections.Counter(piece for line in train for piece in theirs.encode(line, out_type=str))
    ids = write_dictionary(tmp_path / "dict.txt", pieces)
    found = read_toolkit_tokenizers("fairseq", tmp_path / "model.pt", {}, None, [tmp_path / "model.model"])
    given = found.tokenizer(test)["input_ids"]
    for line, each in zip(test, given, strict=True):
        expected = theirs.encode(line, out_type=str)
        assert [found.source.rows[i] for i in each] == [*(ids.get(piece, 3) for piece in expected), 2], line
        if 3 not in each:
            assert found.tokenizer.decode(each[:-1]) == "".join(expected).replace("▁", " ").strip()


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
    [{"byte_fallback": True}, {"split_by_whitespace": False}, {"remove_extra_whitespaces": False}],
    ids=str,
)
@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_settings_of_sentencepiece_are_obeyed(lines, tmp_path, kind, options):
    theirs = train_sentencepiece(lines[:1000], tmp_path / "x.model", kind, **options)
    found = read_toolkit_tokenizers("fairseq", tmp_path / "model.pt", {}, None, [tmp_path / "x.model"])
    for line in [*lines[1000:1200], " one  space ", "日本語 Ω", "a Ω"]:
        expected = theirs.encode(line, out_type=str)
        ids = found.tokenizer(line)["input_ids"][:-1]
        pieces = found.tokenizer.convert_ids_to_tokens(ids)
        assert [piece for piece in pieces if piece != "<unk>"] == [
            piece for piece in expected if theirs.piece_to_id(piece) != theirs.unk_id()
        ], line
        if "byte_fallback" in options:
            assert 3 not in ids
            assert found.tokenizer.decode(ids) == theirs.decode(expected)


@pytest.mark.parametrize("rule", ["nmt_nfkc", "nfkc", "nmt_nfkc_cf", "identity"])
def test_texts_are_normalized_as_sentencepiece_does(lines, tmp_path, rule):
    """Letters with separate combining marks, and white space other than the space at both ends."""
    words = ["École", "Zürich", "Ånd", "Việt", "각", "が", "Čechy", "ño", "\t", "\u3000", "_"]
    texts = [" ".join(words[i:] + words[:i]) for i in range(len(words))]
    theirs = train_sentencepiece([*lines[:300], *texts], tmp_path / "x.model", "unigram", normalization_rule_name=rule)
    tokenizer = read_toolkit_tokenizers("fairseq", tmp_path / "model.pt", {}, None, [tmp_path / "x.model"]).tokenizer
    for text in [*texts, *(unicodedata.normalize("NFD", text) for text in texts)]:
        pieces = [theirs.id_to_piece(i) for i in theirs.encode(text)]
        assert tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"][:-1]) == pieces, text


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("unigram", {"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix=true, which is not supported"),
        ("bpe", {"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix=true, which is not supported"),
        ("bpe", {"user_defined_symbols": ["dog"]}, "user_defined_symbols in BPE, which is not supported"),
    ],
)
def test_other_settings_of_sentencepiece_are_errors(lines, tmp_path, kind, options, message):
    train_sentencepiece(lines[:1000], tmp_path / "x.model", kind, **options)
    with pytest.raises(ValueError, match=message):
        read_toolkit_tokenizers("fairseq", tmp_path / "model.pt", {}, None, [tmp_path / "x.model"])


def test_a_byte_order_mark_is_not_part_of_a_token(tmp_path):
    (tmp_path / "dict.txt").write_text("a 1\nb 1\n", encoding="utf-8-sig")
    assert read_dictionary(tmp_path / "dict.txt")[4:] == ["a", "b"]


def test_without_codes_tokens_are_words(tmp_path):
    write_dictionary(tmp_path / "dict.de.txt", collections.Counter(["ein", "Hund", "läuft"]))
    write_dictionary(tmp_path / "dict.en.txt", collections.Counter(["a", "dog", "runs"]))
    tokenizer = read_toolkit_tokenizers("fairseq", tmp_path / "model.pt", TOLD, None, []).tokenizer
    ids = tokenizer("ein  Hund bellt", text_target="a dog")
    assert (ids["input_ids"], ids["labels"]) == ([4, 5, 3, 2], [4, 5, 2])
    assert tokenizer.decode(ids["labels"], skip_special_tokens=True) == "a dog"


def test_opennmts_sources_end_with_nothing():
    tokens = ["<unk>", "<blank>", "<s>", "</s>", "a", "b@@", "c"]
    told = {"vocabularies": {"source": tokens, "target": tokens}}
    tokenizer = read_toolkit_tokenizers("opennmt", Path("model.pt"), told, None, []).tokenizer
    ids = tokenizer("a c", text_target="a c")
    assert (ids["input_ids"], ids["labels"]) == ([4, 6], [4, 6, 3])


@pytest.mark.parametrize(
    ("files", "told", "given", "message"),
    [
        ({"dict.de.txt": "a 1\n"}, TOLD, "data", "has no dict.en.txt. Found dict.de.txt: set target_lang with --set"),
        ({}, TOLD, "data", "has no dict.de.txt. Check --fairseq_data."),
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
def test_what_is_no_vocabulary_or_codes_is_refused(tmp_path, files, told, given, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    codes = [tmp_path / "nowhere"] if given == "codes" else []
    with pytest.raises(ValueError, match=".") as error:
        read_toolkit_tokenizers("fairseq", tmp_path / "model.pt", told, tmp_path if given == "data" else None, codes)
    assert message in str(error.value)


def test_a_token_may_be_overwritten(tmp_path):
    (tmp_path / "dict.txt").write_text("a 1\nb 1\na 1 #fairseq:overwrite\n")
    assert read_dictionary(tmp_path / "dict.txt")[4:] == ["<overwritten_4>", "b", "a"]
