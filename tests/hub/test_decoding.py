"""The decoding as a repository of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

from hub import decoding
from hub.decoding import main, write
from vanilla_transformer.generation_vanilla_transformer import beam_search

ALONE = """
import sys
import torch
from transformers import AutoModelForSeq2SeqLM

sys.modules["vanilla_transformer"] = None  # cannot be imported
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], trust_remote_code=True)
source = torch.tensor([[5, 6, 7, 2], [8, 9, 2, 0]])
options = {"num_beams": 3, "max_new_tokens": 9, "custom_generate": sys.argv[2], "trust_remote_code": True}
print(model.generate(source, attention_mask=(source != 0).long(), **options).tolist())
print(model.generate(source, attention_mask=(source != 0).long(), **options, alpha=0.6, extra_tokens=2).tolist())
"""


@pytest.mark.slow
def test_it_is_loaded_without_the_package(tmp_path, make_model):
    """In a process that has nothing of ours but the folders; the results are those of `beam_search`."""
    model = make_model(vocab_size=30)
    model.save_pretrained(tmp_path / "model")
    write(tmp_path / "search", "search")
    translate_alone(model, tmp_path, str(tmp_path / "search"), os.environ)


def translate_alone(model, folder, search, environment):
    """By the decoding `search`, in a process that cannot import the package; the results are `beam_search`'s."""
    arguments = [sys.executable, "-c", ALONE, str(folder / "model"), search]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    source = torch.tensor([[5, 6, 7, 2], [8, 9, 2, 0]])
    for line, own in zip(done.stdout.splitlines()[-2:], ({}, {"alpha": 0.6, "extra_tokens": 2}), strict=True):
        options = {"num_beams": 3, "max_new_tokens": 9, "custom_generate": beam_search}
        expected = model.generate(source, attention_mask=(source != 0).long(), **options, **own)
        assert line == str(expected.tolist())


def test_card_and_folder(tmp_path, run_main, capsys):
    run_main(main, tmp_path / "search")
    card = ModelCard.load(tmp_path / "search" / "README.md")
    assert card.data.tags == ["custom_generate"]
    assert 'custom_generate="search"' in card.text
    code = tmp_path / "search" / "custom_generate"
    own = {path.name for path in decoding.CODE}
    names = ("generation", "incremental_decoding", "search", "constraints")
    assert own == {f"{name}_vanilla_transformer.py" for name in names}
    assert {path.name for path in code.iterdir()} == {"generate.py"} | own
    for path in decoding.CODE:
        assert (code / path.name).read_bytes() == Path(path).read_bytes()
    named = re.findall(r"^from \.(\w+) import", (code / "generate.py").read_text(), re.MULTILINE)
    assert {f"{name}.py" for name in named} == own


@pytest.mark.slow
def test_it_is_pushed(tmp_path, hub, start_programs, make_model):
    """With the real client to a Hub's server on this machine, and loaded from there."""
    with start_programs("hub.decoding", **hub.environment) as programs:
        told = programs.run("hub.decoding", tmp_path / "search", "--push", "user/search")
    assert "user/search" in told.stdout
    files = hub.repositories["user/search"].files("main")
    assert "custom_generate/generate.py" in files
    assert "README.md" in files
    model = make_model(vocab_size=30)
    model.save_pretrained(tmp_path / "model")
    environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "PATH": "/usr/bin"}
    translate_alone(model, tmp_path, "user/search", environment)


@pytest.mark.slow
def test_what_could_not_be_pushed_is_made_anew(tmp_path, hub, start_programs):
    """Without the right to write: told in words, and the next call is not in the way of itself."""
    with start_programs("hub.decoding", **hub.environment | {"HF_TOKEN": "wrong"}) as programs:
        told = programs.run("hub.decoding", tmp_path / "search", "--push", "user/refused", status=2)
    assert "Traceback" not in told.stderr
    assert not (tmp_path / "search").exists()
    assert "user/refused" not in hub.repositories
