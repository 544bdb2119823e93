"""Random tables and texts: Unicode separators, encodings, nested JSON, null structs, very long lines."""

import json
import random
from itertools import islice

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.fuzz.contract import call, fingerprint, fuzz
from training.data.corpora import read_corpus
from training.data.streaming import stream_pairs
from training.data.tokenization import tokenize_corpus, validate_eval_lengths
from training.data.tokenizer import train_tokenizer
from training.recipe.arguments import DataArguments, TokenizerArguments
from vanilla_transformer.shared.command_line import exit_on_user_error

pytestmark = pytest.mark.slow

WORDS = [
    "a",
    "Hund",
    "the",
    "ü",
    "漢字",
    "🦜",
    "1",
    "'",
    '"',
    "\\",
    "{",
    "[",
    "null",
    "<s>",
    "</s>",
    "\u0301",
    "\u200b",
    "\ufeff",
]
ENDS = ["\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029", "\t", " ", "\xa0", "\0"]
ENCODINGS = ["utf-8"] * 12 + ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1", "cp1252", "gbk"]


def sentence(rng: random.Random) -> str:
    words = [rng.choice(WORDS) for _ in range(rng.choice((0, 1, 3, 8)))]
    if rng.random() < 0.3:
        words.insert(rng.randrange(len(words) + 1), rng.choice(ENDS))
    if rng.random() < 0.02:
        words.append(rng.choice(("x", "x ", "ab", "漢")) * rng.choice((1_000, 30_000, 500_000)))
    return rng.choice(("", " ")).join(words)


def value(rng: random.Random):
    """Return a random value that replaces a text."""
    return rng.choice(
        [
            *(None, 5, 0.5, True, float("nan"), float("inf"), [], {}, ["a"], {"en": "a"}, "\ud800", "a\nb", 10**30, ""),
            sentence(rng),
        ]
    )


def row(rng: random.Random):
    fields = {"en": sentence(rng), "de": sentence(rng)}
    while rng.random() < 0.15:
        fields[rng.choice(("en", "de", "id", "translation", ""))] = value(rng)
    if rng.random() < 0.1:
        del fields[rng.choice(list(fields))]
    return rng.choice([fields, fields, fields, {"translation": fields}, {"translation": value(rng)}, value(rng)])


def table(rng: random.Random, kind: str, folder, name: str) -> None:
    """Write a file of the given kind, valid or not."""
    count, path = rng.choice((0, 1, 4, 12)), folder / name
    if kind == "parquet":
        is_valid = rng.random() < 0.4
        rows = [{"en": "a", "de": sentence(rng)} if is_valid else row(rng) for _ in range(count)]
        try:
            arrow_table = pa.Table.from_pylist([each for each in rows if isinstance(each, dict)])
            parquet.write_table(arrow_table, path)
        except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError):
            path.write_bytes(b"PAR1" + rng.randbytes(40) + b"PAR1")
        content = path.read_bytes()
    else:
        if kind == "tsv":
            lines = ["\t".join(sentence(rng) for _ in range(rng.choice((2, 2, 2, 2, 1, 3, 4)))) for _ in range(count)]
        elif kind == "jsonl":
            lines = [json.dumps(row(rng), ensure_ascii=rng.random() < 0.5) for _ in range(count)]
            if rng.random() < 0.1:
                lines.append(
                    rng.choice(("[" * 100_000, '{"a":' * 50_000, "9" * 5000, "NaN", "{", "", '{"en": "a", "en": "b"}'))
                )
        else:
            lines = [sentence(rng) for _ in range(count)]
        content = (
            rng.choice(("\n", "\n", "\n", "\r\n", "\r", "\u2028")).join(lines) + "\n" * rng.choice((0, 1, 2))
        ).encode(rng.choice(ENCODINGS), rng.choice(("ignore", "replace")))
    if content and rng.random() < 0.15:
        index = rng.randrange(len(content))
        content = content[:index] + rng.randbytes(rng.choice((0, 1, 4))) + content[index + rng.choice((0, 1, 30)) :]
    path.write_bytes(content)


def test_data(tmp_path, monkeypatch):
    monkeypatch.setattr("training.data.tokenization.HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def try_one(rng: random.Random, folder):
        keys = {"data_dir": str(folder), "on_bad_lines": rng.choice(("error", "drop", "drop"))}
        for split in ("train", "validation", "test"):
            kind = rng.choice(("text", "text", "tsv", "jsonl", "parquet"))
            keys[f"{split}_file"] = None if split != "train" and rng.random() < 0.4 else f"{split}.{kind}"
            if kind == "text":
                for language in ("en", "de"):
                    side_rng = rng if rng.random() < 0.1 else random.Random(rng.random())
                    table(side_rng, kind, folder, f"{split}.text.{language}")
            else:
                table(rng, kind, folder, f"{split}.{kind}")
        if rng.random() < 0.1:
            next(iter(folder.iterdir())).unlink()
        if rng.random() < 0.1:
            table(rng, "tsv", folder, "refs.tsv")
            keys["test_references"] = "refs.tsv"
        keys |= {"on_eval_overlap": rng.choice(("keep", "drop", "error")), "validation_size": rng.choice((0, 0, 1, 5))}
        keys |= {"max_length": rng.choice((3, 256)), "max_length_ratio": rng.choice((None, None, 1.5))}
        keys["streaming"] = rng.random() < 0.3
        kind = rng.choice(("bpe", "bpe", "unigram", "word", "char"))
        size, shared = rng.choice((5, 30, 300)), rng.random() < 0.5
        before = fingerprint(folder)

        def main():
            with exit_on_user_error("training.train"):
                data = DataArguments(**keys)
                corpus = read_corpus(data)
                if data.streaming:
                    pairs = list(islice(stream_pairs(data), 100))
                    sources, targets = [pair["source"] for pair in pairs], [pair["target"] for pair in pairs]
                else:
                    sources, targets = corpus["train"].sources, corpus["train"].targets
                arguments = TokenizerArguments(tokenizer_type=kind, tokenizer_vocab_size=size, shared_vocabulary=shared)
                tokenizer = train_tokenizer(sources, targets, arguments)
                validate_eval_lengths(corpus, tokenizer, data)
                if "train" in corpus:
                    tokenize_corpus(corpus["train"], tokenizer, data)
                for text in corpus.values():
                    assert all(text.sources + text.targets)
                    assert "\0" not in "".join(text.sources + text.targets)

        call(main, "training.train", [f"--{name}={value}" for name, value in keys.items()])
        assert fingerprint(folder) == before

    fuzz("data", try_one, tmp_path)
