"""The training program as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

SMALL = """
tokenizer_size: 300
d_model: 32
encoder_layers: 1
decoder_layers: 1
encoder_attention_heads: 2
decoder_attention_heads: 2
encoder_ffn_dim: 64
decoder_ffn_dim: 64
max_tokens: 256
max_steps: 6
learning_rate: 1.0e-3
logging_steps: 2
eval_strategy: steps
eval_steps: 3
predict_with_generate: true
save_strategy: "no"
use_cpu: true
num_beams: 2
max_new_tokens: 12
test_file: test
"""
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "recipe.yaml",
    "all_results.json",
    "samples.tsv",
    "training_curve.png",
    "attention_1.png",
}


@pytest.fixture
def data_dir(tmp_path):
    from training.demo_corpus import generate

    folder = tmp_path / "data"
    folder.mkdir()
    for split, pairs in generate(train=120, validation=10, test=10).items():
        for side, language in enumerate(("en", "de")):
            path = folder / f"{'val' if split == 'validation' else split}.{language}"
            path.write_text("".join(pair[side] + "\n" for pair in pairs), encoding="utf-8")
    return folder


@pytest.fixture
def train(tmp_path, data_dir, repository):
    recipe = tmp_path / "small.yaml"
    recipe.write_text(SMALL)

    def run(*arguments: str, status: int = 0) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "training.train", str(recipe), "--data_dir", str(data_dir)]
        command += ["--output_dir", str(tmp_path / "out"), *arguments]
        process = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
        assert process.returncode == status, process.stdout[-3000:] + process.stderr[-3000:]
        return process

    return run


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["true", "false"])
def test_from_files_to_a_scored_checkpoint(train, tmp_path, shared):
    process = train("--shared_vocabulary", shared)
    folder = tmp_path / "out"
    names = {path.name for path in folder.iterdir()}
    assert names >= FILES
    assert "training_args.bin" not in names
    results = json.loads((folder / "all_results.json").read_text())
    assert results["test_bleu_signature"] in process.stdout
    assert {"test_bleu", "test_chrf", "test_bleu_tokenized_lc", "train_runtime", "train_loss", "eval_loss"} <= set(
        results
    )
    assert (results["train_pairs"], results["recipe"]) == (120, "small")
    rows = (folder / "samples.tsv").read_text().splitlines()
    assert rows[0] == "source\treference\ttranslation"
    assert len(rows) == 11
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["num_beams"], generation["max_new_tokens"]) == (2, 12)
    assert "max_length" not in generation

    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    source, _, translation = rows[1].split("\t")
    ids = model.generate(**tokenizer(source, return_tensors="pt"))
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == translation

    before = (folder / "model.safetensors").read_bytes()
    again = train("--shared_vocabulary", shared)
    assert "holds a finished run" in again.stdout
    assert results["test_bleu_signature"] in again.stdout
    assert (folder / "model.safetensors").read_bytes() == before


def test_a_model_in_the_output_folder_is_left_alone(tmp_path, monkeypatch, capsys):
    from training.train import main

    (tmp_path / "model.safetensors").write_bytes(b"precious")
    monkeypatch.setattr(sys, "argv", ["train", "training/recipes/demo.yaml", "--output_dir", str(tmp_path)])
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert "already holds a model" in capsys.readouterr().err
    assert (tmp_path / "model.safetensors").read_bytes() == b"precious"


@pytest.mark.slow
def test_bad_data_end_with_a_message_and_leave_nothing(train, tmp_path, data_dir):
    (data_dir / "train.de").write_text("eins\n")
    process = train(status=2)
    assert "has 120 lines" in process.stderr
    assert "Traceback" not in process.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif("VT_DATA" not in os.environ, reason="VT_DATA does not name the folder of the real corpora")
def test_multi30k_runs_through(repository, tmp_path):
    """The recipe on the real corpus, shortened."""
    command = [sys.executable, "-m", "training.train", "training/recipes/multi30k_en_de.yaml"]
    command += ["--data_dir", str(Path(os.environ["VT_DATA"]) / "multi30k"), "--output_dir", str(tmp_path / "out")]
    command += ["--max_steps", "10", "--num_beams", "1", "--max_new_tokens", "10", "--eval_strategy", "no"]
    process = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    results = json.loads((tmp_path / "out" / "all_results.json").read_text())
    assert results["train_pairs"] > 28_900
    assert "test_bleu" in results


@pytest.mark.slow
@pytest.mark.skipif("VT_DATA" not in os.environ, reason="VT_DATA does not name the folder of the real corpora")
def test_padding_on_multi30k():
    """Below 5 % of the tokens that a batch holds."""
    from training.batching import TokenBatchSampler
    from training.data import read_pair
    from training.tokenizer import train_tokenizer

    folder = Path(os.environ["VT_DATA"]) / "multi30k"
    text = read_pair(folder / "train.en", folder / "train.de")
    tokenizer = train_tokenizer(text.sources, text.targets, size=8000, shared=True)
    encoded = tokenizer(text.sources, text_target=text.targets)
    lengths = [(len(s), len(t)) for s, t in zip(encoded["input_ids"], encoded["labels"], strict=True)]
    padded = real = 0
    for batch in TokenBatchSampler(lengths, max_tokens=2048, seed=0):
        for side in (0, 1):
            padded += len(batch) * max(lengths[i][side] for i in batch)
            real += sum(lengths[i][side] for i in batch)
    assert 1 - real / padded < 0.05


@pytest.mark.slow
def test_two_processes_train_the_same_model(train, tmp_path):
    """Data parallel over gloo: the program runs, and every process holds the same weights at the end."""
    recipe = tmp_path / "small.yaml"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "training.train", str(recipe), "--data_dir", str(tmp_path / "data")]
    command += ["--output_dir", str(tmp_path / "both"), "--num_beams", "1"]
    process = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    results = json.loads((tmp_path / "both" / "all_results.json").read_text())
    assert results["processes"] == 2
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "both")
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
