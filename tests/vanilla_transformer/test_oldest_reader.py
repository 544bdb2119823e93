"""A checkpoint with its code in the oldest transformers that the manual says it loads in, without our package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

VERSION = "5.18.0"  # a lower bound of pyproject.toml


@pytest.fixture(scope="module")
def oldest_transformers(tmp_path_factory) -> Path:
    """In a folder of its own; what else it needs is the environment's."""
    site = tmp_path_factory.mktemp("transformers")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, f"transformers=={VERSION}"]
    if subprocess.run(pip, capture_output=True, check=False).returncode:
        pytest.skip(f"transformers {VERSION} cannot be installed here")
    return site


STRANGER = """
import json, sys
site, version, folder, lines = sys.argv[1:]
sys.path.insert(0, site)
sys.modules["vanilla_transformer"] = None
import torch, transformers
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
assert transformers.__version__ == version
lines = json.loads(lines)
model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
batch = tokenizer(lines, return_tensors="pt", padding=True)
with torch.no_grad():
    logits = model(**batch, decoder_input_ids=torch.tensor([[1, 5, 7]] * len(lines))).logits
ids = model.generate(**batch, num_beams=1, max_new_tokens=12)
print(json.dumps([logits.tolist(), tokenizer.batch_decode(ids, skip_special_tokens=True)]))
"""


def test_the_version_is_what_is_promised(repository):
    assert f'"transformers>={VERSION.removesuffix(".0")},<6"' in (repository / "pyproject.toml").read_text()
    assert f"transformers {VERSION.removesuffix('.0')}, or newer" in (repository / "docs" / "sharing.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_it_computes_the_same(oldest_transformers, make_model, make_tokenizer, sentences, tmp_path, shared):
    """Logits, and what greedy search translates."""
    tokenizer, sizes = make_tokenizer(shared)
    model = make_model(**sizes)
    model.save_pretrained(tmp_path / "ours")
    tokenizer.save_pretrained(tmp_path / "ours")
    batch = tokenizer(sentences["en"], return_tensors="pt", padding=True)
    with torch.no_grad():
        logits = model(**batch, decoder_input_ids=torch.tensor([[1, 5, 7]] * len(sentences["en"]))).logits
    ids = model.generate(**batch, num_beams=1, max_new_tokens=12)
    process = subprocess.run(
        [sys.executable, "-c", STRANGER, oldest_transformers, VERSION, tmp_path / "ours", json.dumps(sentences["en"])],
        cwd=tmp_path, env=os.environ | {"HF_HOME": str(tmp_path / "home")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    found, texts = json.loads(process.stdout.splitlines()[-1])
    torch.testing.assert_close(torch.tensor(found), logits, atol=1e-5, rtol=1e-5)
    assert texts == tokenizer.batch_decode(ids, skip_special_tokens=True)
