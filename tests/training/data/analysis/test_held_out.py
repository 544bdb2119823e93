"""Held-out data: no copies and near-duplicates in the training data."""

import random

import pytest

from training.data.analysis.near_duplicates import WordIndex, word_set
from training.data.corpora import read_corpus
from training.recipe.arguments import DataArguments


def make_sentences(count: int, words: int = 900, seed: int = 0) -> list[str]:
    """Return random sentences, of which every third one replaces a word of an earlier one."""
    rng = random.Random(seed)
    sentences: list[str] = []
    for i in range(count):
        if i % 3 == 2:
            chosen = rng.choice(sentences).split()
            chosen[rng.randrange(len(chosen))] = f"w{rng.randrange(words)}"
        else:
            chosen = [f"w{int(words * rng.random() ** 2)}" for _ in range(rng.randint(2, 9))]
        sentences.append(" ".join(chosen))
    return sentences


def jaccard(one: str, two: str) -> float:
    return len(word_set(one) & word_set(two)) / len(word_set(one) | word_set(two))


def test_index_finds_the_same_sentences_as_pairwise_comparison():
    sentences = make_sentences(1500)
    index = WordIndex(sentences)
    queries = [*make_sentences(60, seed=1), *sentences[:60], "W1, w2! unknown", "unknown", "..."]
    found = [index.near_duplicates(query) for query in queries]
    assert found == [
        [i for i, each in enumerate(sentences) if word_set(query) and jaccard(query, each) >= 0.6] for query in queries
    ]
    assert sum(map(len, found)) > 150
    for query in queries[:-1]:
        assert index.nearest(query) == max(range(1500), key=lambda i, query=query: (jaccard(query, sentences[i]), -i))


@pytest.fixture
def read(tmp_path):
    def read(pairs, **keys):
        (tmp_path / "train.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
        return read_corpus(DataArguments(**{"data_dir": str(tmp_path), "train_file": "train.tsv"} | keys))

    return read


SIZES = {"validation_file": None, "validation_size": 60, "test_size": 40}


def test_splits_share_no_similar_pairs(read):
    pairs = [(text, f"target {i % 1900}") for i, text in enumerate(make_sentences(2000))]
    corpus, again = read(pairs, **SIZES), read(pairs, **SIZES)
    assert {split: len(text) for split, text in corpus.items()} == {"train": 1900, "validation": 60, "test": 40}
    assert all(corpus[split].sha256() == again[split].sha256() for split in corpus)
    kept = sorted(pair for text in corpus.values() for pair in zip(text.sources, text.targets, strict=True))
    assert kept == sorted(pairs)
    assert list(corpus["test"].line_numbers) == sorted(corpus["test"].line_numbers)
    for one, two in (("train", "validation"), ("train", "test"), ("validation", "test")):
        assert not set(corpus[one].targets) & set(corpus[two].targets)
        assert max(jaccard(x, y) for x in corpus[one].sources for y in corpus[two].sources) < 0.6


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (
            [(f"w{i % 10} w{i} x y z", f"t{i}") for i in range(2000)],
            "near-duplicates of a pair may be in different splits",
        ),
        ([(f"w{i}", f"t{i % 3}") for i in range(2000)], "copies of a pair may be in different splits"),
    ],
)
def test_similar_pairs_are_separated_if_necessary(read, read_messages, pairs, message):
    """For example, if each pair has one of three targets."""
    assert len(read(pairs, **SIZES)["test"]) == 40
    assert message in read_messages()


def test_size_must_be_less_than_the_data(read):
    with pytest.raises(ValueError, match="validation_size=60 plus test_size=40 must be less than .* pairs, 100"):
        read([(f"w{i}", "t") for i in range(100)], **SIZES)


def test_reports_and_drops_copies_and_near_duplicates(read, tmp_path, read_messages):
    sentences = [f"a{i} b{i} c{i} d{i}" for i in range(200)]
    test = ["a1 b1 c1 d1", "A2 b2, c2 e", "a3 b3 e f", "A1 b1 c1 d1"]
    (tmp_path / "test.tsv").write_text("".join(f"{text}\tt\n" for text in test))
    pairs, keys = [(text, "t") for text in sentences], {"validation_file": None, "test_file": "test.tsv"}
    assert read(pairs, **keys)["train"].sources == sentences
    expected = (
        "test set: 1 of 4 sources are also in the training data, 2 have a near-duplicate there "
        "(at least 60% of the words in common); 2 training pairs, at lines 2, 3: "
    )
    assert f"{expected}kept\n" in read_messages()
    train = read(pairs, **keys, on_eval_overlap="drop")["train"]
    assert train.sources == [sentences[0], *sentences[3:]]
    assert train.dropped == {"source held out": 1, "source similar to held-out source": 1}
    assert f"{expected}dropped\n" in read_messages()
    with pytest.raises(ValueError, match="1 of 4 sources .* Remove them, or set --on-eval-overlap"):
        read(pairs, **keys, on_eval_overlap="error")


def test_overlap_of_data_that_were_split_off(read):
    """Frequent sources cannot be separated completely."""
    pairs = [(f"frequent {i % 5} source text", f"t{i}") for i in range(2000)]
    kept = read(pairs, **SIZES)
    assert set(kept["train"].sources) & set(kept["test"].sources)
    with pytest.raises(ValueError, match="Remove them, or set --on-eval-overlap"):
        read(pairs, **SIZES, on_eval_overlap="error")


def test_near_duplicates_of_copies_are_dropped(read, tmp_path):
    sentences = [f"a{i} b{i} c{i} d{i}" for i in range(200)]
    (tmp_path / "test.tsv").write_text("a1 b1 c1 d1\tt\n")
    pairs = [(text, "t") for text in (*sentences, "a1 b1 c1 e")]
    keys = {"validation_file": None, "test_file": "test.tsv", "on_eval_overlap": "drop"}
    assert read(pairs, **keys)["train"].sources == [sentences[0], *sentences[2:]]


def test_text_with_few_different_words_has_no_near_duplicates(read, tmp_path, read_messages):
    (tmp_path / "test.tsv").write_text("c a b\tt\n")
    assert len(read([("a b c", "t")], validation_file=None, test_file="test.tsv", on_eval_overlap="drop")["train"]) == 1
    assert "near-duplicate" not in read_messages()
