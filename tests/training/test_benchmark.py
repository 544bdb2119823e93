"""The benchmark as a user runs it: its figures are consistent."""

import argparse
import json
import subprocess
import sys
import warnings

import pytest
import torch

from training import benchmark
from training.benchmarks.decoding import DecodingBenchmark, quantize_int8


@pytest.mark.slow
def test_the_command(tmp_path):
    """Real measurements of the smallest size; no figure is asserted, but that they agree with each other."""
    command = [sys.executable, "-m", "training.benchmark", "--sizes", "t128", "--benchmarks", "step", "greedy", "beam"]
    command += ["--target_tokens", "64", "--rounds", "2", "--sentences", "4", "--output_dir", str(tmp_path)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    kept = json.loads((tmp_path / "benchmark.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["benchmark.json"]
    assert kept["machine"]["threads"] == 1
    assert kept["machine"]["GFLOP/s"]["fp32"] > 0
    titles = [row["line"].split(",")[0].split(" of")[0] for row in kept["rows"]]
    assert titles == ["training step", "training step", "greedy", "5 beams"]
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
        (["--reference", "x"], "--reference needs --source"),
        (["--model", "x", "--source", "missing.txt"], "missing.txt does not exist"),
        (["--benchmarks", "recipe"], "needs --recipe and --data_dir"),
        (["--benchmarks", "serving"], "invalid choice: 'serving'"),
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


def test_a_missing_torchao_is_told_before_anything_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "find_spec", lambda name: None, raising=False)
    monkeypatch.setattr(sys, "argv", ["training.benchmark", "--device", "cpu", "--benchmarks", "step", "beam"])
    with pytest.raises(SystemExit) as end:
        benchmark.parse()
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "torchao" in line
    assert "pip install" in line


def test_int8_decodes_with_nothing_that_is_deprecated(make_model):
    pytest.importorskip("torchao.quantization")
    model, source = (
        make_model(d_model=64, encoder_attention_heads=2, decoder_attention_heads=2),
        torch.arange(4, 12)[None],
    )
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", DeprecationWarning)
        logits = quantize_int8(model)(source, decoder_input_ids=source).logits
    expected = model(source, decoder_input_ids=source).logits
    assert 0 < float((logits - expected).detach().abs().max()) < 0.3 * float(expected.detach().std())


@pytest.mark.parametrize("num_beams", [1, 5])
def test_what_is_compared_on_a_gpu(num_beams):
    """Shown by a device that computes nothing: both with a static cache, and our search in both precisions."""
    arguments = argparse.Namespace(model=None, source=None, reference=None, sentences=4, batch_size=2)
    decoders = DecodingBenchmark(arguments, "t128", torch.device("meta")).decoders(
        {"num_beams": num_beams, "do_sample": False}
    )
    names = {"ours sdpa", "Marian sdpa", "ours sdpa static", "Marian sdpa static"}
    assert names | {"ours beam_search", "ours beam_search, bf16"} <= decoders.keys()
    assert decoders["Marian sdpa static"].args[1]["cache_implementation"] == "static"
