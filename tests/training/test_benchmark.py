"""The benchmark: its peers do the same work, its figures are consistent, a difference is noticed."""

import json
import subprocess
import sys
import time

import pytest
import torch

from training.benchmark import check_same_loss, loss_of, make_batch, matrix_speed
from training.peers import TorchPeer, TutorialPeer, bart
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.to_marian import to_marian


@pytest.fixture
def ours():
    torch.manual_seed(0)
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    config = VanillaTransformerConfig(
        vocab_size=60, encoder_attention_heads=4, decoder_attention_heads=4, dropout=0.0, **sizes
    )
    return VanillaTransformerForConditionalGeneration(config)


@pytest.fixture
def batch():
    return make_batch(6, 60, torch.device("cpu"))


@pytest.mark.parametrize("make", [TorchPeer, TutorialPeer, to_marian])
def test_peers_have_our_loss_and_gradients(ours, batch, make):
    peer = make(ours).train()
    expected = loss_of("ours", ours.train(), batch)
    found = loss_of("peer", peer, batch)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    expected.backward()
    found.backward()
    embedding = peer.embedding if hasattr(peer, "embedding") else peer.get_input_embeddings()
    order = torch.cat([torch.arange(0, 32, 2), torch.arange(1, 32, 2)]) if make is to_marian else slice(None)
    wanted = ours.get_input_embeddings().weight.grad[1:, order]  # Marian keeps its padding's row from learning
    torch.testing.assert_close(embedding.weight.grad[1:], wanted, atol=1e-5, rtol=1e-4)


def test_another_work_is_noticed(ours, batch):
    models = {"ours": ours, "Marian": to_marian(ours), "Bart": bart(ours.config)}
    check_same_loss(models, batch)
    with torch.no_grad():
        models["Marian"].get_input_embeddings().weight.mul_(1.01)
    with pytest.raises(AssertionError, match="not the same work: losses"):
        check_same_loss(models, batch)
    other = VanillaTransformerConfig.from_dict(ours.config.to_dict() | {"encoder_layers": 3})
    with pytest.raises(AssertionError, match="not the same work: weights"):
        check_same_loss({"ours": ours, "Bart": bart(other)}, batch)


def test_the_speed_of_a_matrix_product_is_plausible():
    assert 1e8 < matrix_speed(torch.device("cpu"), torch.float32, time.perf_counter) < 1e14


@pytest.mark.slow
def test_the_command(tmp_path):
    """Real measurements of the smallest size; no figure is asserted, but that they agree with each other."""
    command = [
        sys.executable,
        "-m",
        "training.benchmark",
        "--sizes",
        "t128",
        "--lines",
        "step",
        "greedy",
        "beam",
        "load",
    ]
    command += ["--target_tokens", "64", "--rounds", "2", "--sentences", "4", "--output_dir", str(tmp_path)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    kept = json.loads((tmp_path / "benchmark.json").read_text())
    assert (tmp_path / "benchmark.png").read_bytes().startswith(b"\x89PNG")
    assert kept["machine"]["threads"] == 1
    assert kept["machine"]["GFLOP/s"]["fp32"] > 0
    assert [row["line"].split(",")[0].split(" of")[0] for row in kept["rows"]] == [
        *["training step"] * 2, "greedy", "5 beams", "from_pretrained"
    ]  # fmt: skip
    for row in kept["rows"]:
        assert f"{row['size']}  {row['line']}" in output
        best = max(rate["median"] for name, rate in row["rates"].items() if name.startswith("Marian"))
        for rate in row["rates"].values():
            assert rate["low"] <= rate["median"] <= rate["high"]
            assert rate["ratio"] == pytest.approx(rate["median"] / best)
            assert row["limit"] is None or rate["median"] < row["limit"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--source", "x"], "--source needs --model"),
        (["--also", "x"], "--also needs --model"),
        (["--reference", "x"], "--reference needs --source"),
        (["--model", "x", "--source", "missing.txt"], "missing.txt does not exist"),
        (["--lines", "recipe"], "needs --recipe and --data_dir"),
        (["--sizes", "huge"], "invalid choice: 'huge'"),
    ],
)
def test_wrong_arguments(arguments, told):
    done = subprocess.run([sys.executable, "-m", "training.benchmark", *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert told in done.stderr


def test_a_reference_of_another_length(tmp_path):
    for name, lines in (("source", 3), ("reference", 2)):
        (tmp_path / name).write_text("A dog runs.\n" * lines)
    paths = ["--source", str(tmp_path / "source"), "--reference", str(tmp_path / "reference")]
    command = [sys.executable, "-m", "training.benchmark", "--model", "x", *paths]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "3 lines" in done.stderr


def test_an_earlier_benchmark_is_not_overwritten(tmp_path):
    (tmp_path / "benchmark.json").write_text("{}")
    command = [sys.executable, "-m", "training.benchmark", "--output_dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "holds an earlier benchmark" in done.stderr
    assert (tmp_path / "benchmark.json").read_text() == "{}"
