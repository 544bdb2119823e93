import os
from pathlib import Path

import numpy as np
import pytest

from training.arguments import TokenizerArguments
from training.data.batching import TokenBatchSampler, padded_size
from training.data.files import read_pair
from training.data.tokenization import sequence_lengths, tokenize_corpus
from training.data.tokenizer import train_tokenizer


def sample_lengths(pairs):
    rng = np.random.default_rng(0)
    sources = rng.gamma(9, 1.5, pairs).astype(int) + 2
    targets = np.maximum(2, np.round(sources * rng.normal(1, 0.15, pairs))).astype(int)
    return np.stack([sources, targets], axis=1)


@pytest.fixture
def lengths():
    return sample_lengths(3000)


@pytest.mark.parametrize("batches_per_update", [1, 2, 8])
def test_yields_every_pair_once_within_max_tokens(lengths, batches_per_update):
    sampler = TokenBatchSampler(lengths, max_tokens=1000, seed=0, batches_per_update=batches_per_update)
    batches = list(sampler)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(len(batch) * lengths[batch].max() <= 1000 for batch in batches)
    assert len(batches) == len(sampler)
    assert len(batches) % batches_per_update == 0


def test_padding_is_small(lengths):
    """Below 10 % on a small random corpus; larger ones have more pairs of similar length."""
    batches = list(TokenBatchSampler(lengths, max_tokens=1000, seed=0))
    padded = sum(padded_size(np.array(batch), lengths) for batch in batches)
    assert 1 - lengths.sum() / padded < 0.10


def test_epochs_are_random_and_reproducible(lengths):
    sampler, other = (TokenBatchSampler(lengths, 1000, 3, batches_per_update=2) for _ in range(2))
    first = list(sampler)
    assert list(sampler) == first == list(other)
    sampler.set_epoch(1)
    second = list(sampler)
    assert second != first
    assert {frozenset(batch) for batch in second} != {frozenset(batch) for batch in first}
    assert len(second) == len(first) == len(sampler)


def test_batches_of_an_update_have_similar_size():
    size, lengths = 4, sample_lengths(20_000)

    def spread(batches):
        groups = [batches[i : i + size] for i in range(0, len(batches), size)]
        costs = [[padded_size(np.array(batch), lengths) for batch in group] for group in groups]
        return np.mean([max(cost) / min(cost) for cost in costs])

    equal = spread(list(TokenBatchSampler(lengths, 1000, 0, batches_per_update=size)))
    random = spread(list(TokenBatchSampler(lengths, 1000, 0)))
    assert 1 < equal < 1.06 < random


def test_overlong_pair_has_a_separate_batch():
    lengths = np.array([(3, 3), (50, 4), (3, 2)])
    assert sorted(map(len, TokenBatchSampler(lengths, max_tokens=10, seed=0))) == [1, 2]


@pytest.mark.slow
@pytest.mark.skipif("VT_DATA" not in os.environ, reason="VT_DATA is not set to the directory of the real corpora")
def test_padding_on_multi30k():
    """Padding is less than 5 % of the tokens."""
    folder = Path(os.environ["VT_DATA"]) / "multi30k"
    text = read_pair(folder / "train.en", folder / "train.de")
    lengths = sequence_lengths(tokenize_corpus(text, train_tokenizer(text.sources, text.targets, TokenizerArguments())))
    for batches_per_update in (1, 2):
        sampler = TokenBatchSampler(lengths, 2048, 0, batches_per_update)
        padded = sum(padded_size(np.array(batch), lengths) for batch in sampler)
        assert 1 - lengths.sum() / padded < 0.05


@pytest.mark.parametrize("pairs", range(1, 13))
@pytest.mark.parametrize("batches_per_update", [1, 2, 3, 4, 8])
def test_splits_few_pairs_evenly(pairs, batches_per_update):
    """There are at most as many batches as pairs."""
    sampler = TokenBatchSampler(np.full((pairs, 2), 5), max_tokens=1000, seed=0, batches_per_update=batches_per_update)
    batches = list(sampler)
    assert sorted(i for batch in batches for i in batch) == list(range(pairs))
    assert len(batches) == len(sampler) == (batches_per_update if pairs >= batches_per_update else pairs)
