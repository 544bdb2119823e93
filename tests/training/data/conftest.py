"""Fixtures: files of parallel text, and a word-level tokenizer."""

import pytest

from training.data.tokenizer import train_tokenizer
from training.recipe.arguments import DataArguments, TokenizerArguments


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.fixture
def arguments(tmp_path):
    return lambda **keys: DataArguments(data_dir=str(tmp_path), **keys)


@pytest.fixture
def tokenizer():
    words = [f"w{i}" for i in range(60)]
    return train_tokenizer([" ".join(words)], [" ".join(words)], TokenizerArguments(tokenizer_type="word"))
