"""Comparison of dropout with `nn.functional.dropout`."""

import pytest
import torch
from torch import nn

from vanilla_transformer.dropout_vanilla_transformer import apply_dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("p", [0.1, 0.3, 0.9])
def test_distribution_matches_torch(p, dtype):
    states = torch.ones(1001, 999, dtype=dtype, requires_grad=True)  # not a multiple of 4 samples
    dropped = apply_dropout(states, p, True)
    mask = dropped != 0
    for fraction in (mask.double().mean(), *(mask[:, i::4].double().mean() for i in range(4))):
        assert abs(fraction - (1 - p)) < 0.005
    assert abs(dropped.double().mean() - 1) < (0.02 if p == 0.9 else 0.005)
    reference = nn.functional.dropout(states, p, True)
    torch.testing.assert_close(dropped[mask].unique(), reference[reference != 0].unique(), rtol=1e-4, atol=1e-3)

    neighbors = (mask[:, 1:] & mask[:, :-1]).double().mean(), (mask[1:] & mask[:-1]).double().mean()
    assert all(abs(fraction - (1 - p) ** 2) < 0.005 for fraction in neighbors)  # independent samples

    dropped.sum().backward()
    assert torch.equal(states.grad, dropped.detach())


def test_seeds_and_other_modes():
    states = torch.randn(3, 7, 5)
    torch.manual_seed(1)
    first, second = apply_dropout(states, 0.5, True), apply_dropout(states, 0.5, True)
    torch.manual_seed(1)
    assert torch.equal(apply_dropout(states, 0.5, True), first)
    assert not torch.equal(first, second)
    assert apply_dropout(states, 0.5, False) is states
    assert torch.equal(apply_dropout(states, 0.0, True), states)
    assert torch.equal(apply_dropout(states, 1.0, True), torch.zeros_like(states))
