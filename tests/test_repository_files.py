"""Consistency of the changelog, citation, Makefile, workflows and issue forms."""

import re
import shutil
import subprocess
import tomllib

import pytest
import yaml

from vanilla_transformer import __version__


def targets(makefile: str) -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))


@pytest.fixture
def makefile(repository) -> str:
    return (repository / "Makefile").read_text(encoding="utf-8")


def test_changelog_starts_with_current_version(repository):
    """The heading is `## Unreleased (0.2.0.dev0)` during development, and `## 0.2.0 (2026-12-31)` for a release."""
    text = (repository / "CHANGELOG.md").read_text(encoding="utf-8")
    name, bracket = re.search(r"^## (\S+) \((.*)\)$", text, re.MULTILINE).groups()
    assert __version__ == (bracket if name == "Unreleased" else name)
    assert (name == "Unreleased") == (".dev" in __version__)


def test_citation_has_current_version(repository):
    citation = yaml.safe_load((repository / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == __version__
    assert citation["references"][0]["title"] == "Attention Is All You Need"


@pytest.mark.skipif(not shutil.which("make"), reason="requires make")
def test_make_help_lists_all_targets(repository, makefile):
    result = subprocess.run(["make", "help"], cwd=repository, capture_output=True, text=True, check=True)
    described = dict(re.findall(r"^make (\S+)\s+(\S.*)$", result.stdout, re.MULTILINE))
    assert set(described) == targets(makefile)
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1]
    assert set(phony.split()) == targets(makefile)


def test_called_make_targets_exist(repository, makefile):
    called = set()
    for path in (repository / ".github" / "workflows").glob("*.yml"):
        workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
        for job in workflow["jobs"].values():
            called |= set(job.get("strategy", {}).get("matrix", {}).get("target", []))
            for step in job["steps"]:
                called |= set(re.findall(r"\bmake ([a-z-]+)", step.get("run", "")))
    for name in (".ci/run", "CONTRIBUTING.md", ".github/pull_request_template.md"):
        text = (repository / name).read_text(encoding="utf-8")
        called |= set(re.findall(r"(?:^step |^    |`)make ([a-z-]+)", text, re.MULTILINE))
    assert called >= {"test", "lint", "test-oldest", "docs"}
    assert called <= targets(makefile), called - targets(makefile)


def test_windows_workflow_runs_the_documented_commands(repository, makefile):
    """The last one has the options of `make test`."""
    workflow = yaml.safe_load((repository / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))
    commands = [step["run"] for step in workflow["jobs"]["windows"]["steps"] if "run" in step]
    page = (repository / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert all(f"    {command}\n" in page for command in commands)
    assert len(commands) == 3
    assert commands[-1].partition("python ")[2] in makefile


def test_workflow_tests_each_supported_python(repository):
    """On Linux; the classifiers of `pyproject.toml` list them."""
    workflow = yaml.safe_load((repository / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]
    classifiers = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]["classifiers"]
    assert matrix["os"] == ["ubuntu-latest"]
    assert [f"Programming Language :: Python :: {version}" for version in matrix["python"]] == [
        name for name in classifiers if name.startswith("Programming Language :: Python :: 3.")
    ]
    assert {entry["os"] for entry in matrix["include"]} == {"macos-latest"}


def test_issue_forms_are_valid(repository):
    folder = repository / ".github" / "ISSUE_TEMPLATE"
    for name in ("bug.yml", "feature.yml"):
        form = yaml.safe_load((folder / name).read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= set(form)
        ids = [field["id"] for field in form["body"]]
        assert len(ids) == len(set(ids))
        assert any(field.get("validations", {}).get("required") for field in form["body"])
