"""Loading a checkpoint with its code in the oldest supported version of transformers, without this package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

VERSION = "5.18.0"  # the lower bound in pyproject.toml


@pytest.fixture(scope="module")
def oldest_transformers(tmp_path_factory) -> Path:
    """The oldest version in a separate directory; its dependencies are those of the environment."""
    site = tmp_path_factory.mktemp("transformers")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, f"transformers=={VERSION}"]
    if subprocess.run(pip, capture_output=True, check=False).returncode:
        pytest.skip(f"transformers {VERSION} cannot be installed here")
    return site


LOAD_SCRIPT = """
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


def test_version_matches_documentation(repository):
    assert f'"transformers>={VERSION.removesuffix(".0")},<6"' in (repository / "pyproject.toml").read_text()
    assert f"transformers {VERSION.removesuffix('.0')} or newer" in (repository / "docs" / "sharing.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_oldest_version_computes_the_same(oldest_transformers, make_model, make_tokenizer, sentences, tmp_path, shared):
    """Logits and greedy translations are equal."""
    tokenizer, sizes = make_tokenizer(shared)
    model = make_model(**sizes)
    folder = tmp_path / "checkpoint"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    batch = tokenizer(sentences["en"], return_tensors="pt", padding=True)
    with torch.no_grad():
        logits = model(**batch, decoder_input_ids=torch.tensor([[1, 5, 7]] * len(sentences["en"]))).logits
    ids = model.generate(**batch, num_beams=1, max_new_tokens=12)
    process = subprocess.run(
        [sys.executable, "-c", LOAD_SCRIPT, oldest_transformers, VERSION, folder, json.dumps(sentences["en"])],
        cwd=tmp_path, env=os.environ | {"HF_HOME": str(tmp_path / "home")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    actual, texts = json.loads(process.stdout.splitlines()[-1])
    torch.testing.assert_close(torch.tensor(actual), logits, atol=1e-5, rtol=1e-5)
    assert texts == tokenizer.batch_decode(ids, skip_special_tokens=True)
