"""Checks of the committed notebook. `make docs` runs it, including its assertions."""

import re

import nbformat
import pytest

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
