"""The command `training.average`."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

pytestmark = pytest.mark.slow


def test_averages_weights(programs, finished, tmp_path):
    programs.run("training.average", tmp_path / "mean", finished, "--last", "2")
    folders = (tmp_path / "mean", finished / "checkpoint-4", finished / "checkpoint-6")
    mean, first, second = (load_file(folder / "model.safetensors") for folder in folders)
    for name, tensor in mean.items():
        torch.testing.assert_close(tensor, (first[name] + second[name]) / 2)
    AutoTokenizer.from_pretrained(tmp_path / "mean")
    listed = ("training.average", tmp_path / "same", finished / "checkpoint-4", finished / "checkpoint-6")
    programs.run(*listed)
    assert (tmp_path / "same" / "model.safetensors").read_bytes() == (folders[0] / "model.safetensors").read_bytes()
    assert "checkpoint-" in programs.run("training.average", tmp_path / "best", finished, "--best", "2").stdout
