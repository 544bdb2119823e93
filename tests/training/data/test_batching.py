import os
from pathlib import Path

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard

from training.data.batch_shapes import choose_shapes
from training.data.batching import TokenBatchSampler, groups_per_update
from training.data.files import read_pair
from training.data.tokenization import sequence_lengths, tokenize_corpus
from training.data.tokenizer import train_tokenizer
from training.recipe.arguments import TokenizerArguments

MACHINES = [(2, 1), (1, 2), (3, 2), (4, 1), (2, 4)]  # processes, accumulation steps; their product is even


def sample_lengths(pairs):
    rng = np.random.default_rng(0)
    sources = rng.gamma(9, 1.5, pairs).astype(int) + 2
    targets = np.maximum(2, np.round(sources * rng.normal(1, 0.15, pairs))).astype(int)
    return np.stack([sources, targets], axis=1)


def padded_size(batch, lengths):
    """Return the number of source and target tokens of a batch, including padding."""
    return len(batch) * int(lengths[batch].max(0).sum())


@pytest.fixture
def lengths():
    return sample_lengths(3000)


@pytest.mark.parametrize("micro_batches", [1, 2, 8])
def test_yields_every_pair_once_within_tokens_per_update(lengths, micro_batches):
    sampler = TokenBatchSampler(lengths, tokens_per_update=1000, seed=0, micro_batches=micro_batches)
    batches = list(sampler)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    updates = [batches[i : i + micro_batches] for i in range(0, len(batches), micro_batches)]
    groups = groups_per_update(micro_batches)
    parts = micro_batches // groups
    for update in updates:
        for i in range(0, micro_batches, parts):
            group = sum(update[i : i + parts], [])
            assert not group or len(group) * lengths[group].max() <= 1000 / groups
    limit = 1000 / micro_batches + lengths.max()  # the last pair may exceed it
    assert all(len(batch) * lengths[batch].max() <= limit for batch in batches if batch)
    assert len(batches) == len(sampler) == micro_batches * len(updates)


@pytest.mark.parametrize("has_shapes", [False, True])
def test_updates_have_the_same_pairs_on_every_machine(has_shapes):
    """The first 200 updates, also with few long pairs, which leave some processes without pairs."""
    lengths = np.concatenate([sample_lengths(16_000), np.full((7, 2), 300)])
    shapes = choose_shapes(lengths, 1000) if has_shapes else None
    updates = {}
    machines = [(1, 1), *MACHINES] if has_shapes else MACHINES
    for processes, steps in machines:
        sampler = TokenBatchSampler(lengths, 1000, 3, processes * steps, shapes)
        ranks = [list(BatchSamplerShard(sampler, processes, rank)) for rank in range(processes)]
        assert {len(rank) for rank in ranks} == {len(sampler) // processes}
        prefix = 1 if shapes else 0
        updates[processes, steps] = [
            [i for k in range(update * steps, update * steps + steps) for rank in ranks for i in rank[k][prefix:]]
            for update in range(200)
        ]
        assert processes * steps == 2 or has_shapes or any(not batch for rank in ranks for batch in rank)
    assert len(sum(updates[1, 2], [])) > 11_000
    for machine in machines:
        assert updates[machine] == updates[1, 2], machine


def test_update_has_two_groups_of_different_lengths():
    """The lengths of an update vary more than those of its micro-batches."""
    lengths = sample_lengths(16_000)
    batches = list(TokenBatchSampler(lengths, 2000, 0, 4))
    updates = [batches[i : i + 4] for i in range(0, len(batches), 4)]
    longest = [[lengths[batch].max() for batch in update] for update in updates]
    assert np.mean([max(a, b) - min(a, b) <= 1 for a, b, _, _ in longest]) > 0.9
    assert np.mean([max(a, c) - min(a, c) <= 1 for a, _, c, _ in longest]) < 0.3


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_padding_is_small(micro_batches):
    """Below 7 % on a small random corpus; larger ones have more pairs of similar length."""
    lengths = sample_lengths(6000)
    batches = list(TokenBatchSampler(lengths, 1000, 0, micro_batches))
    assert 1 - lengths.sum() / sum(padded_size(batch, lengths) for batch in batches if batch) < 0.07


def test_epochs_are_random_and_reproducible(lengths):
    sampler, other = (TokenBatchSampler(lengths, 1000, 3, micro_batches=2) for _ in range(2))
    first = list(sampler)
    assert list(sampler) == first == list(other)
    sampler.set_epoch(1)
    second = list(sampler)
    assert second != first
    assert {frozenset(batch) for batch in second} != {frozenset(batch) for batch in first}
    assert len(second) == len(first) == len(sampler)


def test_micro_batches_of_a_group_have_similar_size():
    size, lengths = 4, sample_lengths(20_000)
    batches = list(TokenBatchSampler(lengths, 4000, 0, size))
    groups = [batches[i : i + size // 2] for i in range(0, len(batches), size // 2)]
    costs = [[padded_size(batch, lengths) for batch in group] for group in groups]
    assert np.mean([max(cost) / min(cost) for cost in costs]) < 1.06


def test_overlong_pair_has_a_separate_update():
    lengths = np.array([(3, 3), (50, 4), (3, 2)])
    assert sorted(map(len, TokenBatchSampler(lengths, tokens_per_update=10, seed=0))) == [1, 2]


@pytest.mark.slow
@pytest.mark.skipif("VT_DATA" not in os.environ, reason="VT_DATA is not set to the directory of the real corpora")
def test_padding_on_multi30k():
    """Padding is less than 5 % of the tokens."""
    folder = Path(os.environ["VT_DATA"]) / "multi30k"
    text = read_pair(folder / "train.en", folder / "train.de")
    lengths = sequence_lengths(tokenize_corpus(text, train_tokenizer(text.sources, text.targets, TokenizerArguments())))
    for micro_batches in (1, 2):
        sampler = TokenBatchSampler(lengths, 2048 * micro_batches, 0, micro_batches)
        padded = sum(padded_size(batch, lengths) for batch in sampler if batch)
        assert 1 - lengths.sum() / padded < 0.05


@pytest.mark.parametrize("pairs", range(1, 13))
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 8])
def test_splits_few_pairs_evenly(pairs, micro_batches):
    """The first micro-batch is never empty."""
    sampler = TokenBatchSampler(np.full((pairs, 2), 5), 1000, seed=0, micro_batches=micro_batches)
    batches = list(sampler)
    assert sorted(i for batch in batches for i in batch) == list(range(pairs))
    assert len(batches) == len(sampler) == micro_batches
    assert len(batches[0]) == max(map(len, batches)) <= min(map(len, batches)) + 1
