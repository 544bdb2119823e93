"""Findings of `mlinter`, the linter of Hugging Face for model files."""

import json
import subprocess
import sys

import pytest

IGNORED_RULES = {
    "TRF023": "The fields of the config have the names of Bart and Marian, which other libraries read.",
    "TRF028": "One line names the license. Its text is in the file LICENSE.",
    "TRF029": "Encoder and decoder have different numbers of heads and vocabularies, so a module cannot read them.",
    "TRF041": "Every field with a branch is needed by an imported layout or by a row of the paper's table 3.",
    "TRF057": "Docstrings are written in the Google style, which the API reference shows.",
}


def test_findings_have_reasons(tmp_path, repository):
    pytest.importorskip("mlinter")
    report = tmp_path / "findings.json"
    options = ["--no-cache", "--no-progress", "--output-json", str(report)]
    package = repository / "vanilla_transformer"
    done = subprocess.run([sys.executable, "-m", "mlinter", package, *options], capture_output=True, check=False)
    assert report.exists(), done.stderr
    findings = json.loads(report.read_text(encoding="utf-8"))["findings"]
    assert [each for each in findings if each["rule"] not in IGNORED_RULES] == []
    assert {each["rule"] for each in findings} == IGNORED_RULES.keys()
