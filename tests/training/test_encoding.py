import numpy as np
import pytest
from datasets import IterableDataset
from datasets.distributed import split_dataset_by_node

from training.data import ParallelText
from training.encoding import TokenBatchStream, encode, sequence_lengths
from training.recipe import DataArguments, TokenizerArguments
from training.tokenizer import train_tokenizer


@pytest.fixture
def tokenizer():
    words = [f"w{i}" for i in range(60)]
    return train_tokenizer([" ".join(words)], [" ".join(words)], TokenizerArguments(tokenizer_type="word"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("training.encoding.HF_DATASETS_CACHE", str(tmp_path))
    return tmp_path / "vanilla_transformer"


def test_pairs_are_left_out_with_a_report(tokenizer, capsys):
    text = ParallelText(["w1 w2 w3", "w1", "w1 w2"], ["w1", "w2 w2 w2 w2 w2 w2", "w3 w3"])
    data = encode(text, tokenizer, DataArguments(max_length=5))
    assert len(data) == 2
    assert "left out 1 of 3 pairs: a side has more than max_length=5 tokens" in capsys.readouterr().out
    data = encode(text, tokenizer, DataArguments(max_length=5, max_length_ratio=1.5))
    assert [len(row["labels"]) for row in data] == [3]
    assert "1 of 3 pairs: one side has more than max_length_ratio=1.5" in capsys.readouterr().out
    assert sum(text.dropped.values()) == 3  # of both calls
    assert len(encode(text, tokenizer)) == 3
    with pytest.raises(ValueError, match="no pair has at most max_length=1"):
        encode(text, tokenizer, DataArguments(max_length=1))


def test_lengths_are_those_of_the_rows(tokenizer):
    data = encode(ParallelText(["w1 w2", "w1", "w3"], ["w1", "w2 w3 w4", "w5"]), tokenizer)
    assert sequence_lengths(data).tolist() == [[3, 2], [2, 4], [2, 2]]
    assert sequence_lengths(data.select([2, 1])).tolist() == [[2, 2], [2, 4]]


def test_text_is_encoded_once_and_kept_by_content(tokenizer, cache):
    text = ParallelText(["w1 w2"], ["w3"])
    first = encode(text, tokenizer)
    (file,) = cache.glob("*.arrow")
    stamp = file.stat().st_mtime_ns
    assert encode(ParallelText(["w1 w2"], ["w3"]), tokenizer)[0] == first[0]
    assert file.stat().st_mtime_ns == stamp
    assert encode(ParallelText(["w1 w2"], ["w4"]), tokenizer)[0] != first[0]
    assert len(list(cache.glob("*.arrow"))) == 2


def test_bpe_dropout_encodes_anew_each_time():
    sentences = ["the quick brown fox", "jumps over the lazy dog"]
    tokenizer = train_tokenizer(sentences, sentences, TokenizerArguments(tokenizer_size=100))
    data = encode(ParallelText(sentences, sentences), tokenizer, DataArguments(), dropout=0.5)
    assert len({str(data[[0, 1]]["input_ids"]) for _ in range(6)}) > 1
    plain = encode(ParallelText(sentences, sentences), tokenizer)
    assert (sequence_lengths(data) == sequence_lengths(plain)).all()
    assert set(data[0]) == {"input_ids", "labels"}


def rows(n):
    rng = np.random.default_rng(0)
    for i in range(n):
        yield {"source": " ".join(["w1"] * rng.integers(1, 9)) + f" w{i % 60}", "target": f"w{i % 60} w{i // 60}"}


def stream(tokenizer, n=300, rank=0, world=1, **keys):
    pairs = split_dataset_by_node(IterableDataset.from_generator(rows, gen_kwargs={"n": n}), rank, world)
    return TokenBatchStream(pairs, tokenizer, DataArguments(buffer_size=70, **keys), max_tokens=50, seed=0)


def take(batches, count):
    iterator = iter(batches)
    return [next(iterator) for _ in range(count)]


def test_a_stream_yields_every_pair_in_batches_within_the_budget(tokenizer):
    batches, pairs = iter(stream(tokenizer)), []
    while len(pairs) < 300:
        batch = next(batches)
        assert len(batch) * max(max(len(p["input_ids"]), len(p["labels"])) for p in batch) <= 50
        pairs += batch
    assert len(pairs) == 300
    assert len({str(pair["labels"]) for pair in pairs}) == 300
    assert len({str(pair["labels"]) for batch in take(batches, 20) for pair in batch}) > 40  # it begins anew


@pytest.mark.parametrize("count", [0, 1, 17, 60, 150])
def test_a_stream_goes_on_where_its_state_was_taken(tokenizer, count):
    original = stream(tokenizer)
    iterator = iter(original)
    for _ in range(count):
        next(iterator)
    ahead = [next(iterator) for _ in range(5)]  # a loader may have read further than was trained on
    state = original.state_at(count)
    resumed = stream(tokenizer)
    resumed.load_state(state)
    assert take(resumed, 5) == ahead


def test_processes_share_a_stream(tokenizer):
    seen = [
        {str(pair["labels"]) for batch in take(stream(tokenizer, rank=rank, world=2), 8) for pair in batch}
        for rank in (0, 1)
    ]
    assert not seen[0] & seen[1]


def test_a_stream_without_usable_pairs_ends_with_a_message(tokenizer):
    with pytest.raises(ValueError, match="no pair of the training data is left"):
        take(stream(tokenizer, max_length=1), 1)
    with pytest.raises(ValueError, match="no pair of the training data is left"):
        take(stream(tokenizer, n=0), 1)
