"""Tests of `training.benchmark` and of its decoders."""

import argparse
import json
import subprocess
import sys
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from training import benchmark
from training.benchmarks import runner
from training.benchmarks.decoding import DecodingBenchmark, quantize_int8
from training.benchmarks.forward_backward import DTYPES
from training.benchmarks.models import SIZES


@pytest.mark.slow
def test_command_reports_consistent_figures(tmp_path):
    """Real measurements of the smallest size."""
    command = [sys.executable, "-m", "training.benchmark", "--sizes", "t128", "--benchmarks", "step", "greedy", "beam"]
    command += ["--target-tokens", "64", "--rounds", "2", "--sentences", "4", "--output-dir", str(tmp_path), "--json"]
    process = subprocess.run(command, check=True, capture_output=True, text=True)
    report = json.loads((tmp_path / "benchmark.json").read_text())
    assert json.loads(process.stdout) == report
    assert [path.name for path in tmp_path.iterdir()] == ["benchmark.json"]
    assert report["machine"]["threads"] == 1
    assert report["machine"]["GFLOP/s"]["fp32"] > 0
    titles = [row["line"].split(",")[0].split(" of")[0] for row in report["rows"]]
    assert titles == ["training step", "training step", "greedy", "5 beams"]
    for row in report["rows"]:
        assert f"{row['size']}  {row['line']}" in process.stderr
        best = max(rate["median"] for name, rate in row["rates"].items() if name.startswith("Marian"))
        for rate in row["rates"].values():
            assert rate["low"] <= rate["median"] <= rate["high"]
            assert rate["ratio"] == pytest.approx(rate["median"] / best)
            assert row["limit"] is None or rate["median"] < row["limit"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--source", "."], "--source requires --model"),
        (["--reference", "."], "--reference requires --source"),
        (["--model", ".", "--source", "missing.txt"], "missing.txt does not exist"),
        (["--benchmarks", "recipe"], "requires --recipe and --data-dir"),
        (["--benchmarks", "serving"], "invalid choice: 'serving'"),
        (["--sizes", "huge"], "invalid choice: 'huge'"),
    ],
)
def test_rejects_wrong_arguments(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["training.benchmark", *arguments])
    with pytest.raises(SystemExit, match="2"):
        benchmark.main()
    assert message in capsys.readouterr().err


def test_rejects_reference_with_different_length(tmp_path, monkeypatch, capsys):
    for name, lines in (("source", 3), ("reference", 2)):
        (tmp_path / name).write_text("A dog runs.\n" * lines)
    paths = ["--source", str(tmp_path / "source"), "--reference", str(tmp_path / "reference")]
    monkeypatch.setattr(sys, "argv", ["training.benchmark", "--model", str(tmp_path), *paths])
    with pytest.raises(SystemExit, match="2"):
        benchmark.main()
    assert "3 lines" in capsys.readouterr().err


def test_rejects_existing_benchmark(tmp_path, monkeypatch, capsys):
    (tmp_path / "benchmark.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["training.benchmark", "--output-dir", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        benchmark.main()
    assert "contains an earlier benchmark" in capsys.readouterr().err
    assert (tmp_path / "benchmark.json").read_text() == "{}"


def test_choices_are_those_of_the_measurements():
    """They are written twice, because the parser does not import torch."""
    assert list(benchmark.SIZES) == list(SIZES)
    assert list(benchmark.PRECISIONS) == list(DTYPES)


def test_reports_missing_torchao_before_measuring(monkeypatch, capsys):
    monkeypatch.setattr(runner, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["training.benchmark", "--device", "cpu", "--benchmarks", "step", "beam"])
    with pytest.raises(SystemExit) as end:
        benchmark.main()
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "torchao" in line
    assert "pip install" in line


@pytest.mark.parametrize(("supported", "limit"), [(True, 4 * 1000 / 16), (False, None)])
def test_emulated_bf16_has_no_limit(monkeypatch, supported, limit):
    """Without bf16 instructions, a large matrix product is slower than small ones, and no limit."""
    monkeypatch.setattr(runner, "has_bf16", lambda: supported)
    benchmark = SimpleNamespace(device=torch.device("cpu"), speeds={"bf16": 1000.0, "fp32": 1000.0})
    run = partial(torch.mm, torch.ones(2, 2), torch.ones(2, 2))  # 16 FLOP
    assert runner.Benchmark.limit(benchmark, run, 4, "bf16") == limit
    assert runner.Benchmark.limit(benchmark, run, 4) == 250


def test_int8_model_raises_no_deprecation_warning(make_model):
    pytest.importorskip("torchao.quantization")
    model = make_model(d_model=64, encoder_attention_heads=2, decoder_attention_heads=2)
    source = torch.arange(4, 12)[None]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", DeprecationWarning)
        logits = quantize_int8(model)(source, decoder_input_ids=source).logits
    expected = model(source, decoder_input_ids=source).logits
    assert 0 < float((logits - expected).detach().abs().max()) < 0.3 * float(expected.detach().std())


@pytest.mark.parametrize("num_beams", [1, 5])
def test_decoders_on_gpu(num_beams):
    """The meta device takes the code path of GPUs: static caches, and beam search in two precisions."""
    arguments = argparse.Namespace(model=None, source=None, reference=None, sentences=4, batch_size=2)
    decoders = DecodingBenchmark(arguments, "t128", torch.device("meta")).decoders(
        {"num_beams": num_beams, "do_sample": False}
    )
    names = {"Vanilla sdpa", "Marian sdpa", "Vanilla sdpa static", "Marian sdpa static"}
    assert names | {"Vanilla beam_search", "Vanilla beam_search, bf16"} <= decoders.keys()
    assert decoders["Marian sdpa static"].args[1]["cache_implementation"] == "static"


@pytest.mark.parametrize(
    ("overrides", "peer"), [({"norm_position": "pre"}, "Pegasus"), ({"norm_position": "post"}, "Marian")]
)
def test_decodes_trained_model_with_native_class_that_fits(make_model, make_tokenizer, tmp_path, overrides, peer):
    """The demo model is pre-norm, which Marian does not support. Both give the same translations."""
    tokenizer, sizes = make_tokenizer(True)
    folder = tmp_path / "checkpoint"
    make_model(**sizes, **overrides, max_position_embeddings=100).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (tmp_path / "source.en").write_text("the dog runs\na cat sleeps\n")
    arguments = argparse.Namespace(
        model=str(folder), source=tmp_path / "source.en", reference=None, sentences=2, batch_size=2
    )
    pytest.importorskip("torchao.quantization")
    decoders = DecodingBenchmark(arguments, "", torch.device("cpu")).decoders({"num_beams": 2, "do_sample": False})
    assert {"Vanilla eager", "Vanilla beam_search", f"{peer} eager", f"{peer} sdpa"} <= decoders.keys()
    expected = decoders[f"{peer} sdpa"]()
    assert any(expected)
    for name in ("Vanilla eager", "Vanilla sdpa", "Vanilla beam_search"):
        assert decoders[name]() == expected, name
