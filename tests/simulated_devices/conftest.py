"""Runs of `training.train` on simulated devices."""

import json
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "training/recipes/demo.yaml"
SMALL = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "tokenizer_vocab_size": 300, "warmup_steps": 10, "disable_tqdm": "true", "report_to": "none",
    "eval_strategy": "no", "max_new_tokens": 8, "num_beams": 1,
}  # fmt: skip


@pytest.fixture
def run_train(monkeypatch, tmp_path):
    """Function (setup, keys): run `training.train` with a small demo, and return the trainer and the results.

    `setup` is called with the trainer before training starts.
    """
    from training import train
    from training.demo import corpus
    from training.run.trainer import TokenBatchTrainer

    generate, init = corpus.generate, TokenBatchTrainer.__init__
    monkeypatch.setattr(corpus, "generate", lambda: generate(train=1500, validation=20, test=20))
    count = iter(range(100))

    def run(setup=lambda trainer: None, **keys):
        trainers, folder = [], tmp_path / str(next(count))

        def make(self, **kwargs):
            init(self, **kwargs)
            setup(self)
            trainers.append(self)

        settings = SMALL | {"output_dir": str(folder)} | keys
        arguments = [f"--{name}={value}" for name, value in settings.items()]
        monkeypatch.setattr(sys, "argv", ["training.train", str(DEMO), *arguments])
        with monkeypatch.context() as patch:
            patch.setattr(TokenBatchTrainer, "__init__", make)
            train.main()
        (trainer,) = trainers
        return trainer, json.loads((folder / "all_results.json").read_text())

    return run


@pytest.fixture
def losses():
    """Function (trainer): the logged training losses."""
    return lambda trainer: [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
