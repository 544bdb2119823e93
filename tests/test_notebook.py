"""The annotated paper as it is committed. `make docs` runs it in a fresh kernel; its own asserts check what it says."""

import re

import nbformat
import pytest

SECTIONS = ["3.2.1", "3.2.2", "3.2.3", "3.3", "3.4", "3.5", "3.1", "5.1", "5.3", "5.4", "A training", "6.1"]


@pytest.fixture
def notebook(repository):
    return nbformat.read(repository / "docs" / "annotated.ipynb", as_version=4)


def test_it_takes_the_papers_sections_in_its_order(notebook):
    titles = [match for cell in notebook.cells for match in re.findall(r"^## (.*)$", cell.source, re.MULTILINE)]
    assert [section for title in titles for section in SECTIONS if title.startswith(section)] == SECTIONS


def test_what_is_committed_was_run_from_top_to_bottom_without_errors(notebook):
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]
    assert not [output for cell in cells for output in cell.outputs if output.get("name") == "stderr"]
    pictures = [cell for cell in cells if any("image/png" in output.get("data", {}) for output in cell.outputs)]
    assert len(pictures) >= 15
