"""The beam search as a separate repository."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

from hub.decoding import main
from hub.publishing.decoding_code import CODE, write
from vanilla_transformer.generation_vanilla_transformer import beam_search

SCRIPT = """
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
def test_loads_without_package(tmp_path, make_model):
    """A process that cannot import the package gets the results of `beam_search`."""
    model = make_model(vocab_size=30)
    model.save_pretrained(tmp_path / "model")
    write(tmp_path / "search", "search")
    translate_without_package(model, tmp_path, str(tmp_path / "search"), os.environ)


def translate_without_package(model, folder, search, environment):
    """Check that the repository `search` gives the results of `beam_search` without the package."""
    arguments = [sys.executable, "-c", SCRIPT, str(folder / "model"), search]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    source = torch.tensor([[5, 6, 7, 2], [8, 9, 2, 0]])
    for line, arguments in zip(done.stdout.splitlines()[-2:], ({}, {"alpha": 0.6, "extra_tokens": 2}), strict=True):
        options = {"num_beams": 3, "max_new_tokens": 9, "custom_generate": beam_search}
        expected = model.generate(source, attention_mask=(source != 0).long(), **options, **arguments)
        assert line == str(expected.tolist())


def test_writes_card_and_modules(tmp_path, run_main, capsys):
    run_main(main, tmp_path / "search")
    card = ModelCard.load(tmp_path / "search" / "README.md")
    assert card.data.tags == ["custom_generate"]
    assert 'custom_generate="search"' in card.text
    code = tmp_path / "search" / "custom_generate"
    code_files = {path.name for path in CODE}
    names = ("generation", "decoder", "beam_search")
    assert code_files == {f"{name}_vanilla_transformer.py" for name in names}
    assert {path.name for path in code.iterdir()} == {"generate.py"} | code_files
    for path in CODE:
        assert (code / path.name).read_bytes() == Path(path).read_bytes()
    modules = re.findall(r"^from \.(\w+) import", (code / "generate.py").read_text(), re.MULTILINE)
    assert {f"{name}.py" for name in modules} == code_files


@pytest.mark.slow
def test_pushes_to_hub(tmp_path, hub, start_programs, make_model):
    """Upload with the Hub client to a local server, then load from there."""
    with start_programs("hub.decoding", **hub.environment) as programs:
        output = programs.run("hub.decoding", tmp_path / "search", "--push", "user/search")
    assert "user/search" in output.stdout
    files = hub.repositories["user/search"].files("main")
    assert "custom_generate/generate.py" in files
    assert "README.md" in files
    model = make_model(vocab_size=30)
    model.save_pretrained(tmp_path / "model")
    environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "PATH": "/usr/bin"}
    translate_without_package(model, tmp_path, "user/search", environment)


@pytest.mark.slow
def test_removes_directory_if_push_fails(tmp_path, hub, start_programs):
    """Without write permission, there is a message, and the next call can write the directory again."""
    with start_programs("hub.decoding", **hub.environment | {"HF_TOKEN": "wrong"}) as programs:
        output = programs.run("hub.decoding", tmp_path / "search", "--push", "user/rejected", status=2)
    assert "Traceback" not in output.stderr
    assert not (tmp_path / "search").exists()
    assert "user/rejected" not in hub.repositories
