"""`--to onnx` with ORTModelForSeq2SeqLM of optimum, which requires transformers before 4.58."""

import json
import subprocess
import sys
from functools import partial

import pytest
import torch

from hub.export import main

PACKAGES = ("optimum==2.3.0", "optimum-onnx==0.1.0", "transformers==4.57.6", "huggingface_hub<1", "tokenizers<=0.23.0")
EXTERNAL_SCRIPT = """
import json, sys
site, folder, source, target = sys.argv[1:]
sys.path.insert(0, site)
sys.modules["vanilla_transformer"] = None
from optimum.onnxruntime import ORTModelForSeq2SeqLM
from transformers import AutoTokenizer
source, target = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(target)
batch = source(json.load(sys.stdin), return_tensors="pt", padding=True)
translations = {}
for merged in (True, False):
    model = ORTModelForSeq2SeqLM.from_pretrained(folder, subfolder="onnx", use_merged=merged)
    for beams in (1, 4):
        ids = model.generate(**batch, num_beams=beams, max_new_tokens=12)
        translations[f"{merged} {beams}"] = target.batch_decode(ids, skip_special_tokens=True)
print(json.dumps(translations))
"""


@pytest.fixture(scope="module")
def optimum(tmp_path_factory):
    """Directory with optimum and its version of transformers. Other dependencies are those of the environment."""
    site = tmp_path_factory.mktemp("optimum")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, *PACKAGES]
    if subprocess.run(pip, capture_output=True, check=False).returncode:
        pytest.skip("optimum cannot be installed.")
    return site


@pytest.mark.slow
def test_optimum_gives_same_translations(save_checkpoint, run_main, optimum, sentences, tmp_path):
    """Check the merged graph and two graphs, greedy and beam search, with two vocabularies and pre-norm."""
    model, tokenizer, folder = save_checkpoint(shared=False, norm_position="pre", encoder_layers=1, decoder_layers=1)
    out = tmp_path / "out"
    partial(run_main, main)(folder, out, "--to", "onnx")
    lines = [" ".join(line.split()[i:]) for line in sentences["en"] for i in range(3)]
    process = subprocess.run(
        [sys.executable, "-c", EXTERNAL_SCRIPT, optimum, out, out / "source_tokenizer", out / "target_tokenizer"],
        input=json.dumps(lines), cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-2000:]
    translations = json.loads(process.stdout.splitlines()[-1])
    batch = tokenizer(lines, return_tensors="pt", padding=True)
    for beams in (1, 4):
        with torch.no_grad():
            ids = model.generate(**batch, num_beams=beams, max_new_tokens=12)
        expected = tokenizer.batch_decode(ids, skip_special_tokens=True)
        for merged in (True, False):
            assert translations[f"{merged} {beams}"] == expected, (merged, beams)
