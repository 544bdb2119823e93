"""What `--to marian` writes, for transformers 4.57, from before the classes of tokenizers got new names."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from hub.export import main

SIDES = {True: ["."], False: ["source_tokenizer", "target_tokenizer"]}


@pytest.fixture
def exported(save_checkpoint, run_main, tmp_path):
    """(whether one vocabulary serves both sides) -> our model, its tokenizer, the folder of its export."""

    def make(shared: bool):
        model, tokenizer, folder = save_checkpoint(shared=shared)
        partial(run_main, main)(folder, tmp_path / "marian", "--to", "marian")
        return model, tokenizer, tmp_path / "marian"

    return make


@pytest.mark.parametrize("shared", [True, False])
def test_the_tokenizers_have_the_names_of_before(exported, shared):
    _, _, folder = exported(shared)
    for side in SIDES[shared]:
        config = json.loads((folder / side / "tokenizer_config.json").read_text())
        assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert config["model_input_names"] == ["input_ids", "attention_mask"]


@pytest.fixture(scope="module")
def transformers_4(tmp_path_factory) -> Path:
    """transformers 4.57 in a folder of its own; what else it needs is the environment's."""
    site = tmp_path_factory.mktemp("transformers_4")
    wanted = ("transformers==4.57.6", "huggingface_hub<1", "tokenizers>=0.22,<=0.23.0")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, *wanted]
    if subprocess.run(pip, capture_output=True, check=False).returncode:
        pytest.skip("transformers 4.57 cannot be installed here")
    return site


STRANGER = """
import json, sys
site, folder, *sides = sys.argv[1:]
sys.path.insert(0, site)
sys.modules["vanilla_transformer"] = None
import transformers
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
assert transformers.__version__.startswith("4.57")
model = AutoModelForSeq2SeqLM.from_pretrained(folder)
source, target = AutoTokenizer.from_pretrained(sides[0]), AutoTokenizer.from_pretrained(sides[-1])
batch = source(json.load(sys.stdin), return_tensors="pt", padding=True)
ids = model.generate(**batch, num_beams=5, max_new_tokens=12)
print(json.dumps([type(model).__name__, target.batch_decode(ids, skip_special_tokens=True)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_transformers_4_translates_the_same(exported, transformers_4, sentences, tmp_path, shared):
    model, tokenizer, folder = exported(shared)
    lines = [" ".join(line.split()[i:]) for line in sentences["en"] for i in range(3)]
    with torch.no_grad():
        batch = tokenizer(lines, return_tensors="pt", padding=True)
        expected = model.generate(**batch, num_beams=5, max_new_tokens=12)
    sides = [folder / side for side in SIDES[shared]]
    process = subprocess.run(
        [sys.executable, "-c", STRANGER, *map(str, (transformers_4, folder, *sides))],
        input=json.dumps(lines), cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-2000:]
    name, texts = json.loads(process.stdout.splitlines()[-1])
    assert name == "MarianMTModel"
    assert texts == tokenizer.batch_decode(expected, skip_special_tokens=True)
