"""Fixtures that several test modules of the package use."""

import pytest
import torch

from vanilla_transformer import generation_vanilla_transformer


@pytest.fixture(params=["dynamic batch", "static batch"])
def search_mode(request, monkeypatch):
    """Beam search as on a CPU (finished sentences leave the batch) and as on a GPU (they stay in it)."""
    if request.param == "static batch":
        monkeypatch.setattr(generation_vanilla_transformer, "is_async_device", lambda device: True)


@pytest.fixture
def source():
    """Sources of 9, 7, 5, 9 and 3 tokens, padded on the right."""
    ids = torch.randint(3, 30, (5, 9), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    for row, length in enumerate((9, 7, 5, 9, 3)):
        ids[row, length:] = mask[row, length:] = 0
    return {"input_ids": ids, "attention_mask": mask}
