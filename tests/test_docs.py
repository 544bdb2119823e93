"""Consistency of README and docs/ with the code: links, names, file tree, commands and snippets."""

import argparse
import ast
import functools
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import vanilla_transformer
from vanilla_transformer import program
from vanilla_transformer.shared.command_line import checkpoint_name, existing_path, new_path

PATH_TYPES = (checkpoint_name, existing_path, new_path)
ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
PACKAGES = ("vanilla_transformer", "training", "hub")
README_LINES, TABLE_WIDTH = 180, 120
EXTERNAL_OPTIONS = {  # options of other programs: torchrun, accelerate, http.server, pip, pytest
    *("nproc-per-node", "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port"),
    *("directory", "constraint", "editable", "ignore"),
    *("help", "version", "json"),  # without a parser
}


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def prose(text: str) -> str:
    """Return the text without fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def test_readme_is_short():
    assert len(read("README.md").splitlines()) <= README_LINES


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_narrow(page):
    for line in prose(read(page)).splitlines():
        assert not line.startswith("|") or len(line) <= TABLE_WIDTH, f"{page}, row of {len(line)} characters: {line}"


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub and MkDocs create for the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_are_valid(page):
    text = prose(read(page))
    targets = re.findall(r"\]\((?!https?:)([^)\s]+)\)", text) + re.findall(r'(?:src|href)="(?!https?:)([^"]+)"', text)
    for target in targets:
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f"{page}: {target}"
        if anchor:
            assert anchor in anchors(path), f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES)
def test_paths_and_modules_exist(page):
    text = re.sub(r"^```text\n.*?^```", "", read(page), flags=re.DOTALL | re.MULTILINE)
    for path in re.findall(rf"(?<![\w/.-])((?:{'|'.join(PACKAGES)}|docs|tests)/[\w/.]*\w/?)", text):
        assert (ROOT / path).exists() or path.startswith(("docs/annotated",)), f"{page}: {path}"
    for module in re.findall(r"-m ((?:training|hub)(?:\.\w+)+)", text):
        assert importlib.util.find_spec(module), f"{page}: {module}"


def defined_names() -> set[str]:
    """Return all names that the packages define or assign, including methods and fields."""
    names = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    names.add(node.name)
                elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                    names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


def section(title: str) -> str:
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", read("docs/architecture.md"), re.DOTALL | re.MULTILINE)[1]


def test_names_in_paper_table_exist():
    names = re.findall(r"`([A-Za-z_]+(?:\.[a-z_]+)?)`", section("From the paper to the code"))
    assert len(names) > 15
    known = defined_names()
    for name in names:
        assert set(name.split(".")) <= known, name


def test_fields_in_tutorial_table_exist():
    from vanilla_transformer import VanillaTransformerConfig

    rows = re.findall(
        r"^\| (?!in |---)[^|]*\|([^|]*)\|$", section("From a tutorial's names to this package's"), re.MULTILINE
    )
    fields = [name for row in rows for name in re.findall(r"`([a-z_]+)(?:=[^`]*)?`", row)]
    assert len(fields) > 20
    for name in set(fields) - {"attention_mask"}:
        assert hasattr(VanillaTransformerConfig(), name), name


def tree(text: str) -> tuple[set[str], set[str]]:
    """Parse the annotated tree, which has an indent of two and may have several files per line.

    Returns:
        The paths, and the directories with the comment "one file for each ...", whose files are not listed.
    """
    paths, unlisted, parents = set(), set(), []
    for line in text.splitlines():
        entries, *comment = re.split(r"\s{2,}", line.strip(), maxsplit=1)
        depth = (len(line) - len(line.lstrip())) // 2
        parents = parents[:depth]
        names = ["".join(parents) + entry for entry in entries.split()]
        paths |= set(names)
        if comment and comment[0].startswith("one file for each "):
            unlisted |= {path for path in names if path.endswith("/")}
        if entries.endswith("/"):
            parents.append(entries)
    return paths, unlisted


def test_file_tree_matches_repository():
    paths, unlisted = tree(re.search(r"```text\n(.*?)```", section("The tree"), re.DOTALL)[1])
    for path in paths:
        assert (ROOT / path).exists(), path
        assert (ROOT / path).is_dir() == path.endswith("/"), path
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            name = file.relative_to(ROOT).as_posix()
            is_listed = name in paths or any(name.startswith(folder) for folder in unlisted)
            assert is_listed or file.name == "__init__.py", f"{name} is missing in the tree of docs/architecture.md"


def test_tree_parser():
    paths, unlisted = tree("a/        text\n  b.py c.py\n  d/      one file for each thing\n  e/\n    f.py  text\ng.py")
    assert paths == {"a/", "a/b.py", "a/c.py", "a/d/", "a/e/", "a/e/f.py", "g.py"}
    assert unlisted == {"a/d/"}


def load_script(name: str):
    specification = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["recipe_keys", "commands"])
def test_generated_page_is_current(name):
    assert load_script(name).page() == read(f"docs/{name}.md"), f"run `python docs/{name}.py`"


def test_reference_has_all_functions():
    entries = {f"::: {module}.{name}" for name, module in vanilla_transformer.FUNCTIONS.items()}
    assert entries <= set(read("docs/reference/functions.md").splitlines())


def commands(text: str) -> list[str]:
    """Return the commands in bash blocks, in indented blocks and in inline code, with continued lines joined."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    blocks += re.findall(r"(?:^    .*\n)+", prose(text), re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    inline = re.findall(r"`((?:python -m (?:training|hub)\.|vanilla-transformer )[^`]* [^`]*)`", prose(text))
    return [line.strip() for line in lines] + inline


def find_parser(module: str) -> argparse.ArgumentParser:
    """Return the argument parser of a command. It does not check whether paths exist."""
    if module == "training.train":  # sets up its process before it parses arguments
        from training.recipe.reading import make_parser
        from training.train import add_own_options

        parser = make_parser()
        add_own_options(parser)
        return parser
    parser = load_script("commands").find_parser("hub.space.__main__" if module == "hub.space" else module, module)
    for action in parser._actions:  # the paths of examples do not exist
        action.type = str if action.type in PATH_TYPES else action.type
    return parser


@pytest.fixture(scope="module")
def parser_of():
    return functools.cache(find_parser)


COMMANDS = {name: command for group in program.SUBCOMMANDS.values() for name, command in group.items()}
SUBCOMMANDS = {name: module for name, (module, _) in COMMANDS.items() if module}


def module_and_arguments(command: str) -> tuple[str, list[str]] | None:
    """Return the module and the arguments of `python -m MODULE` or `vanilla-transformer SUBCOMMAND`."""
    words = shlex.split(command, comments=True)
    for i in range(len(words) - 1):
        if words[i] == "-m" and re.fullmatch(r"(vanilla_transformer\.)?(training|hub)(\.\w+)+", words[i + 1]):
            return words[i + 1].removeprefix("vanilla_transformer."), words[i + 2 :]
        if words[i].endswith("vanilla-transformer") and not words[i + 1].startswith("-"):
            name = words[i + 1]
            assert name in SUBCOMMANDS or name in ("recipes", "SUBCOMMAND"), command
            if name in SUBCOMMANDS:
                return SUBCOMMANDS[name], ["demo", *words[i + 2 :]] if name == "demo" else words[i + 2 :]
    return None


def can_parse(parser: argparse.ArgumentParser, arguments: list[str]) -> bool:
    try:
        parser.parse_args(arguments)
    except SystemExit as end:
        return not end.code  # 0 for --help
    return True


@pytest.mark.filterwarnings("ignore")
def test_documented_commands_are_valid(parser_of):
    """The parser of each command accepts the documented arguments."""
    count = 0
    for page in PAGES:
        for command in commands(read(page)):
            if parts := module_and_arguments(command):
                module, arguments = parts
                assert can_parse(parser_of(module), arguments), f"{page}: {command}"
                count += 1
    assert count > 25


@pytest.mark.filterwarnings("ignore")
def test_invalid_commands_are_detected(parser_of):
    for wrong in ("hub.push runs/mine user/name --dry-ran", "training.score runs/mine", "hub.export a b --to nothing"):
        module, *arguments = wrong.split()
        assert not can_parse(parser_of(module), arguments), wrong
    with pytest.raises(AssertionError):
        module_and_arguments("vanilla-transformer trian demo")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", PAGES)
def test_documented_options_exist(page, parser_of):
    text = read(page)
    modules = {module for p in PAGES for module in re.findall(r"-m ((?:training|hub)(?:\.\w+)+)", read(p))}
    modules |= set(SUBCOMMANDS.values())
    known = {name.lstrip("-") for module in modules for name in parser_of(module)._option_string_actions}
    for name in re.findall(r"(?<![\w-])--([a-z][\w-]*)", text):
        assert name in known | EXTERNAL_OPTIONS, f"{page}: --{name}"
    targets = re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE)
    for name in re.findall(r"(?:`|^ {4}|^)make ([a-z-]+)", text, re.MULTILINE):
        assert name in targets, f"{page}: make {name}"


def snippets() -> list[tuple[str, str]]:
    return [(page, code) for page in PAGES for code in re.findall(r"^```python\n(.*?)^```", read(page), re.S | re.M)]


# Imports common modules, and runs each snippet in a separate process, with a smaller built-in corpus
RUN_EACH = """
import os, sys, traceback
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, Seq2SeqTrainer, pipeline
from vanilla_transformer.training.demo.corpus import generate
generate.__defaults__ = 300, 20, 20, 0
for path in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        status = 1
        os.dup2(os.open(path + ".errors", os.O_WRONLY | os.O_CREAT), 2)
        try:
            exec(compile(open(path).read(), path, "exec"), {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    with open(path + ".status", "w") as file:
        file.write(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
"""


@pytest.fixture(scope="module")
def snippet_dir(tmp_path_factory, save_tutorial, make_recipe):
    """Directory with a small checkpoint in `runs/demo` in which all snippets have run."""
    folder = tmp_path_factory.mktemp("snippets")
    command = [sys.executable, "-m", "training.train", str(make_recipe(folder)), "--eval-strategy", "no"]
    command += ["--num-processes", "1", "--output-dir", str(folder / "runs" / "demo")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    save_tutorial(folder / "model.pt")
    names = [f"{i}.py" for i in range(len(snippets()))]
    for name, (_, code) in zip(names, snippets(), strict=True):
        (folder / name).write_text(code, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HOME": str(folder / "home"), "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", RUN_EACH, *names], cwd=folder, env=environment, check=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(snippets())), ids=[page for page, _ in snippets()])
def test_snippets_run_as_written(number, snippet_dir):
    page, code = snippets()[number]
    errors = (snippet_dir / f"{number}.py.errors").read_text(encoding="utf-8")
    assert (snippet_dir / f"{number}.py.status").read_text() == "0", f"{page}:\n{code}\n{errors[-3000:]}"
    if "runs/fine_tuned" in code:
        assert (snippet_dir / "runs" / "fine_tuned" / "model.safetensors").exists()


def test_pages_have_snippets():
    pages = {page for page, _ in snippets()}
    assert {"README.md", "docs/training.md", "docs/decoding.md", "docs/architecture.md"} <= pages
