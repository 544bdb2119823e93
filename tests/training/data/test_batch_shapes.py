"""Batches with few fixed shapes: every pair once, little padding, one shape per update."""

import numpy as np
import pytest

from training.data.batch_shapes import (
    MAX_PADDING_FRACTION,
    MAX_SHAPES,
    Shape,
    assign_shapes,
    choose_shapes,
    count_groups,
)
from training.data.batching import TokenBatchSampler

RNG = np.random.default_rng


def sentence_lengths(pairs: int) -> np.ndarray:
    sources = RNG(0).gamma(9, 1.5, pairs).astype(int) + 2
    targets = np.maximum(2, np.round(sources * RNG(1).normal(1, 0.15, pairs))).astype(int)
    return np.stack([sources, targets], axis=1)


def skewed_lengths(pairs: int) -> np.ndarray:
    """Return lengths of which most are very short and a few very long."""
    lengths = np.minimum(RNG(0).zipf(1.3, pairs), 1000) + 1
    return np.stack([lengths, RNG(1).permutation(lengths)], axis=1)


CORPORA = {"sentences": sentence_lengths(60_000), "skewed": skewed_lengths(20_000), "equal": np.full((999, 2), 9)}
CORPORA |= {"one": np.array([[5, 7]]), "few": sentence_lengths(11)}


@pytest.mark.parametrize("micro_batches", [1, 8])
@pytest.mark.parametrize("corpus", CORPORA)
def test_yields_every_pair_once(corpus, micro_batches):
    lengths = CORPORA[corpus]
    shapes = choose_shapes(lengths, 4096)
    assert 1 <= len(shapes) <= MAX_SHAPES
    sampler = TokenBatchSampler(lengths, 4096, 3, micro_batches, shapes)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    assert sorted(i for _, *batch in batches for i in batch) == list(range(len(lengths)))
    for number, *batch in batches:
        shape = shapes[number]
        assert len(batch) <= shape.split(micro_batches).rows
        assert shape.rows * max(shape.source, shape.target) <= 4096
        assert (lengths[batch] <= [shape.source, shape.target]).all()
    updates = [batches[i : i + micro_batches] for i in range(0, len(batches), micro_batches)]
    assert all(len({number for number, *_ in update}) == 1 for update in updates)
    sizes = [len(batch) for _, *batch in updates[0]]
    assert max(sizes) - min(sizes) <= 1
    sizes = [sum(len(batch) for _, *batch in update) for update in updates if update[0][0] == updates[0][0][0]]
    assert max(sizes) - min(sizes) <= 1  # pairs are distributed evenly


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("corpus", ["sentences", "skewed"])
def test_padding_is_limited_and_reported(corpus, micro_batches):
    lengths = CORPORA[corpus]
    shapes = choose_shapes(lengths, 4096)
    sampler = TokenBatchSampler(lengths, 4096, 0, micro_batches, shapes)
    used = [shapes[number].split(micro_batches) for number, *_ in sampler]
    longer = sum(shape.rows * max(shape.source, shape.target) for shape in used)
    tolerance = 0.01 if micro_batches == 1 else 0.05  # twelve shapes do not reach less; rows are rounded up
    assert 1 - lengths.max(1).sum() / longer < MAX_PADDING_FRACTION + tolerance
    assert sampler.padding == pytest.approx(1 - lengths.sum() / sum(shape.positions for shape in used))


def test_choice_of_shapes_is_optimal():
    """Compare dynamic programming with an exhaustive search on a small histogram."""
    lengths = np.repeat(RNG(2).integers(2, 12, 60), 2).reshape(-1, 2)
    shapes = choose_shapes(lengths, 40)
    ends = np.unique(lengths)

    def cost(chosen) -> int:
        total, before = 0, 0
        for end in chosen:
            pairs = ((lengths[:, 0] > before) & (lengths[:, 0] <= end)).sum()
            total, before = total + max(1, -(-pairs // (40 // end))) * (40 // end) * end, end
        return total

    subsets = [
        [*(e for i, e in enumerate(ends[:-1]) if mask >> i & 1), ends[-1]] for mask in range(2 ** len(ends[:-1]))
    ]
    best = min(cost(subset) for subset in subsets if len(subset) <= len(shapes))
    assert cost([shape.target for shape in shapes]) == best


def test_epochs_are_random_and_reproducible():
    lengths = CORPORA["sentences"]
    shapes = choose_shapes(lengths, 1000)
    sampler, other = (TokenBatchSampler(lengths, 1000, 3, 2, shapes) for _ in range(2))
    first = list(sampler)
    assert list(sampler) == first == list(other)
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert len(list(sampler)) == len(first)


def test_rejects_pairs_that_fit_no_shape():
    shapes = choose_shapes(CORPORA["sentences"], 1000)
    with pytest.raises(ValueError, match="longer than the largest shape"):
        assign_shapes(np.array([[3, 500]]), shapes)


def test_counts_groups():
    shapes = choose_shapes(np.full((10, 2), 4), 8)
    assert shapes[0].rows == 2
    assert count_groups(np.array([5]), shapes).tolist() == [3]
    assert shapes[0].split(2).rows == 1
    assert shapes[0].split(3).rows == 1


def test_micro_batches_have_no_size_of_one():
    """`torch.compile` compiles separate code for a size of 1."""
    assert Shape(3, 1, 5).split(4).without_ones() == Shape(2, 2, 5)
