"""`--to transformers` with transformers 4.40, which predates tokenizers 0.20, and 4.57, the last version 4."""

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from hub.export import main

SIDES = {True: ["."], False: ["source_tokenizer", "target_tokenizer"]}


@pytest.fixture
def exported(save_checkpoint, run_main, tmp_path):
    """Function that exports a model with one or two vocabularies: (model, tokenizer, directory of the export)."""

    def make(shared: bool, **architecture):
        model, tokenizer, folder = save_checkpoint(shared=shared, **architecture)
        partial(run_main, main)(folder, tmp_path / "native", "--to", "transformers")
        return model, tokenizer, tmp_path / "native"

    return make


@pytest.mark.parametrize("shared", [True, False])
def test_tokenizer_config_of_earlier_versions(exported, shared):
    _, _, folder = exported(shared)
    for side in SIDES[shared]:
        config = json.loads((folder / side / "tokenizer_config.json").read_text())
        assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert config["model_input_names"] == ["input_ids", "attention_mask"]
        assert config["clean_up_tokenization_spaces"] is False


VERSIONS = {  # transformers, and dependencies that differ from the environment
    "4.40.0": ("huggingface_hub<0.26", "tokenizers==0.19.1"),
    "4.57.6": ("huggingface_hub<1", "tokenizers>=0.22,<=0.23.0"),
}
ARCHITECTURES = {
    "marian": {},
    "marian, two vocabularies": {"shared": False},
    "pegasus": {"norm_position": "pre"},
    "bart": {"embedding_norm": True, "tie_word_embeddings": False, "lm_head_bias": True},
    "mbart": {"embedding_norm": True, "norm_position": "pre"},
    "blenderbot": {"position_embedding_type": "learned", "norm_position": "pre"},
}


@pytest.fixture(scope="module", params=VERSIONS)
def transformers_4(request, tmp_path_factory) -> tuple[str, Path]:
    """Directory with a version of transformers. Other dependencies are those of the environment."""
    site = tmp_path_factory.mktemp("transformers_4")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site]
    packages = [f"transformers=={request.param}", *VERSIONS[request.param]]
    if subprocess.run([*pip, *packages], capture_output=True, check=False).returncode:
        pytest.skip(f"transformers {request.param} cannot be installed.")
    return request.param, site


EXTERNAL_SCRIPT = """
import json, sys
version, site, folders = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
sys.path.insert(0, site)
sys.modules["vanilla_transformer"] = None
import transformers
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
assert transformers.__version__ == version
lines, output = json.load(sys.stdin), []
for folder, sides in folders:
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    source, target = AutoTokenizer.from_pretrained(sides[0]), AutoTokenizer.from_pretrained(sides[-1])
    batch = source(lines, return_tensors="pt", padding=True)
    ids = [model.generate(**batch, **options).tolist() for options in ({}, {"num_beams": 1})]
    output.append([ids, target.batch_decode(ids[0], skip_special_tokens=True)])
print(json.dumps(output))
"""


@pytest.mark.slow
def test_transformers_4_gives_same_translations(exported, transformers_4, sentences, tmp_path):
    """Check the saved generation settings and greedy decoding."""
    version, site = transformers_4
    lines = [" ".join(line.split()[i:]) for line in sentences["en"] for i in range(3)]
    folders, expected = [], []
    for name, options in ARCHITECTURES.items():
        model, tokenizer, folder = exported(**({"shared": True} | options))
        path = folder.rename(tmp_path / name)
        folders.append([str(path), [str(path / side) for side in SIDES[options.get("shared", True)]]])
        batch = tokenizer(lines, return_tensors="pt", padding=True)
        ids = [model.generate(**batch, **options).tolist() for options in ({}, {"num_beams": 1})]
        expected.append([ids, tokenizer.batch_decode(ids[0], skip_special_tokens=True)])
        shutil.rmtree(tmp_path / "checkpoint")
    process = subprocess.run(
        [sys.executable, "-c", EXTERNAL_SCRIPT, version, site, json.dumps(folders)],
        input=json.dumps(lines), cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-2000:]
    for name, actual, each in zip(ARCHITECTURES, json.loads(process.stdout.splitlines()[-1]), expected, strict=True):
        assert actual == each, name
