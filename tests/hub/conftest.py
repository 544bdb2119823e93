import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def references():
    """The module of the tutorials' models."""
    spec = importlib.util.spec_from_file_location("references", Path(__file__).with_name("references.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
