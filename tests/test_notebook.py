"""Checks of the committed notebooks. `make docs` runs annotated.ipynb, including its assertions."""

import re

import nbformat
import pytest
from nbclient import NotebookClient

SECTIONS = ["3.2.1", "3.2.2", "3.2.3", "3.3", "3.4", "3.5", "3.1", "5.1", "5.3", "5.4", "A training", "6.1"]


@pytest.fixture
def notebook(repository):
    return nbformat.read(repository / "docs" / "annotated.ipynb", as_version=4)


def test_sections_follow_the_paper(notebook):
    titles = [match for cell in notebook.cells for match in re.findall(r"^## (.*)$", cell.source, re.MULTILINE)]
    assert [section for title in titles for section in SECTIONS if title.startswith(section)] == SECTIONS


def test_committed_notebook_was_run_in_order_without_errors(notebook):
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]
    assert not [output for cell in cells for output in cell.outputs if output.get("name") == "stderr"]
    cells_with_plots = [cell for cell in cells if any("image/png" in output.get("data", {}) for output in cell.outputs)]
    assert len(cells_with_plots) >= 15


@pytest.fixture
def quickstart(repository):
    return nbformat.read(repository / "docs" / "quickstart.ipynb", as_version=4)


def test_quickstart_has_no_outputs(quickstart):
    cells = [cell for cell in quickstart.cells if cell.cell_type == "code"]
    assert not [cell for cell in cells if cell.outputs or cell.execution_count]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_quickstart_runs_offline(quickstart, tmp_path, monkeypatch):
    """With fewer updates than in the notebook."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    steps = '"max_steps": 150, "warmup_steps": 50'
    assert sum(steps in cell.source for cell in quickstart.cells) == 1
    for cell in quickstart.cells:
        cell.source = cell.source.replace(steps, '"max_steps": 4, "warmup_steps": 2')
    NotebookClient(quickstart, timeout=1200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in quickstart.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    texts = "".join(output.text for output in outputs if output.get("name") == "stdout")
    assert "exact match" in texts
    assert "model.safetensors" in texts
