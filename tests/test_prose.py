"""Sentences of docstrings and documentation: at most 35 words, and fewer than 3 % of them above 25."""

import ast
import json
import re
from collections.abc import Iterator

import pytest

MAX_WORDS = 35
LONG = 25
MAX_LONG_FRACTION = 0.03


def docstrings(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (doc := ast.get_docstring(node)):
            yield doc


def sentences(text: str) -> list[str]:
    """Split Markdown or a docstring into sentences, without code blocks, tables and headings."""
    text = re.sub(r"(?ms)^\s*```.*?^\s*```|^---\n.*?^---$|<!--.*?-->", "\n\n", text)
    blocks: list[str] = []
    for line in text.split("\n"):
        line = line.strip()
        starts = re.match(r"([-*>] |\d+\. |#|\||:::|\w[\w., ]*(\(.*?\))?:(?: |$))", line)
        if re.match(r"(\.venv/bin/)?(python|pip|make|torchrun) |.*\S  +\S", line):  # a command, or aligned columns
            blocks.append("")
        elif not line or starts or not blocks:
            blocks.append("" if line.startswith(("|", "#", ":::")) else line)
        else:
            blocks[-1] += " " + line
    parts = [re.split(r"(?<=[.!?])[)\"*]*\s+(?=[A-Z`\"(*\[0-9])", block) for block in blocks]
    return [sentence for part in parts for sentence in part if sentence]


def count_words(sentence: str) -> int:
    """Count words; a formula or code in backticks is one word, and the address of a link is none."""
    sentence = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`|\$[^$]*\$", "code", sentence))
    return len([word for word in sentence.split() if re.search(r"\w", word)])


@pytest.mark.parametrize(
    "pattern", ["vanilla_transformer/**/*.py", "training/**/*.py", "hub/**/*.py", "tests/**/*.py", "docs/*.md", "*.md"]
)
def test_sentences_are_short(repository, pattern):
    counts = {}
    for path in sorted(repository.glob(pattern)):
        if "witness" in path.parts:
            continue
        text = path.read_text(encoding="utf-8")
        for part in docstrings(text) if path.suffix == ".py" else [text]:
            counts |= {(str(path.relative_to(repository)), each): count_words(each) for each in sentences(part)}
    assert [(key, count) for key, count in counts.items() if count > MAX_WORDS] == []
    long = [key for key, count in counts.items() if count > LONG]
    assert len(long) < MAX_LONG_FRACTION * len(counts), long


def test_sentences_of_the_notebook_are_short(repository):
    cells = json.loads((repository / "docs" / "annotated.ipynb").read_text(encoding="utf-8"))["cells"]
    found = [each for cell in cells if cell["cell_type"] == "markdown" for each in sentences("".join(cell["source"]))]
    assert [each for each in found if count_words(each) > MAX_WORDS] == []
    assert sum(count_words(each) > LONG for each in found) < MAX_LONG_FRACTION * len(found)
