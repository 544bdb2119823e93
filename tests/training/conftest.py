"""What the tests of training share: its programs, and a recipe of a second."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def programs(start_programs):
    with start_programs("training.train", "training.average", "training.score", "training.translate") as server:
        yield server


RECIPE = """
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
warmup_steps: 2
logging_steps: 2
eval_strategy: steps
eval_steps: 3
save_steps: 3
precision: fp32
attention: sdpa
use_cpu: true
num_beams: 2
max_new_tokens: 12
test_file: test
disable_tqdm: true
"""


@pytest.fixture(scope="session")
def make_recipe():
    """Writes 120 training pairs, 10 each to validate and test, and a recipe of a second; its output folder is "out"."""
    from training.demo_corpus import generate

    def make(folder: Path) -> Path:
        data = folder / "data"
        data.mkdir()
        for split, pairs in generate(train=120, validation=10, test=10).items():
            for side, language in enumerate(("en", "de")):
                path = data / f"{'val' if split == 'validation' else split}.{language}"
                path.write_text("".join(pair[side] + "\n" for pair in pairs), encoding="utf-8")
        path = folder / "small.yaml"
        path.write_text(f"data_dir: {data}\noutput_dir: {folder / 'out'}\n{RECIPE}")
        return path

    return make


@pytest.fixture
def recipe(tmp_path, make_recipe) -> Path:
    return make_recipe(tmp_path)
