import random

import pytest

from training.batching import TokenBatchSampler


@pytest.fixture
def lengths():
    rng = random.Random(0)
    sources = [int(rng.gammavariate(9, 1.5)) + 2 for _ in range(3000)]
    return [(source, max(2, round(source * rng.gauss(1, 0.15)))) for source in sources]


def test_every_pair_once_within_the_budget(lengths):
    sampler = TokenBatchSampler(lengths, max_tokens=1000, seed=0)
    batches = list(sampler)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(len(batch) * max(max(lengths[i]) for i in batch) <= 1000 for batch in batches)
    assert len(batches) == len(sampler)


def test_little_is_padding(lengths):
    """Below 10 % on a small random corpus; larger ones have more pairs of like length."""
    padded = real = 0
    for batch in TokenBatchSampler(lengths, max_tokens=1000, seed=0):
        for side in (0, 1):
            padded += len(batch) * max(lengths[i][side] for i in batch)
            real += sum(lengths[i][side] for i in batch)
    assert 1 - real / padded < 0.10


def test_epochs_differ_and_can_be_repeated(lengths):
    sampler, other = (TokenBatchSampler(lengths, max_tokens=1000, seed=3) for _ in range(2))
    first = list(sampler)
    assert list(sampler) == first == list(other)
    sampler.set_epoch(1)
    second = list(sampler)
    assert second != first
    assert {frozenset(batch) for batch in second} != {frozenset(batch) for batch in first}
    assert len(second) == len(first) == len(sampler)


def test_a_pair_beyond_the_budget_has_a_batch_of_its_own():
    assert sorted(map(len, TokenBatchSampler([(3, 3), (50, 4), (3, 2)], max_tokens=10, seed=0))) == [1, 2]
