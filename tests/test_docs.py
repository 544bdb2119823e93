"""Whether README and docs/ tell the truth: links, names, trees, commands and snippets are those of the code."""

import argparse
import ast
import functools
import importlib.util
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
PACKAGES = ("vanilla_transformer", "training", "hub")
README_LINES, TABLE_WIDTH = 180, 120
THEIRS = {  # options on the pages that are of other programs: torchrun, accelerate, make's pip, Python's http.server
    *("nproc-per-node", "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port"),
    "directory",
}


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def prose(text: str) -> str:
    """The text without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def test_the_readme_is_a_front_page():
    assert len(read("README.md").splitlines()) <= README_LINES


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_narrow(page):
    for line in prose(read(page)).splitlines():
        assert not line.startswith("|") or len(line) <= TABLE_WIDTH, f"{page}, row of {len(line)} characters: {line}"


def anchors(page: Path) -> set[str]:
    """Those that GitHub and mkdocs make of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = prose(read(page))
    targets = re.findall(r"\]\((?!https?:)([^)\s]+)\)", text) + re.findall(r'(?:src|href)="(?!https?:)([^"]+)"', text)
    for target in targets:
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f"{page}: {target}"
        if anchor:
            assert anchor in anchors(path), f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES)
def test_paths_and_modules_on_the_pages_exist(page):
    text = re.sub(r"^```text\n.*?^```", "", read(page), flags=re.DOTALL | re.MULTILINE)
    for path in re.findall(rf"(?<![\w/.-])((?:{'|'.join(PACKAGES)}|docs|tests)/[\w/.]*\w/?)", text):
        assert (ROOT / path).exists() or path.startswith(("docs/annotated",)), f"{page}: {path}"
    for module in re.findall(r"-m ((?:training|hub)(?:\.\w+)+)", text):
        assert importlib.util.find_spec(module), f"{page}: {module}"


def names_of_the_code() -> set[str]:
    """Every name that the packages define or assign to, methods and fields included."""
    found = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    found.add(node.name)
                elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                    found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


def section(title: str) -> str:
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", read("docs/architecture.md"), re.DOTALL | re.MULTILINE)[1]


def test_names_of_the_papers_sections_exist():
    names = re.findall(r"`([A-Za-z_]+(?:\.[a-z_]+)?)`", section("From the paper to the code"))
    assert len(names) > 15
    known = names_of_the_code()
    for name in names:
        assert set(name.split(".")) <= known, name


def test_fields_of_the_tutorials_names_exist():
    from vanilla_transformer import VanillaTransformerConfig

    rows = re.findall(r"^\| (?!in |---)[^|]*\|([^|]*)\|$", section("From a tutorial's names to ours"), re.MULTILINE)
    fields = [name for row in rows for name in re.findall(r"`([a-z_]+)(?:=[^`]*)?`", row)]
    assert len(fields) > 20
    for name in set(fields) - {"attention_mask"}:
        assert hasattr(VanillaTransformerConfig(), name), name


def tree(text: str) -> tuple[set[str], set[str]]:
    """Paths of the annotated tree, which indents by two and may name several files a line; and the folders of it that
    stand for all their files, "one file for each ..."."""
    paths, whole, above = set(), set(), []
    for line in text.splitlines():
        entries, *remark = re.split(r"\s{2,}", line.strip(), maxsplit=1)
        depth = (len(line) - len(line.lstrip())) // 2
        above = above[:depth]
        found = ["".join(above) + entry for entry in entries.split()]
        paths |= set(found)
        if remark and remark[0].startswith("one file for each "):
            whole |= {path for path in found if path.endswith("/")}
        if entries.endswith("/"):
            above.append(entries)
    return paths, whole


def test_the_tree_is_the_tree():
    paths, whole = tree(re.search(r"```text\n(.*?)```", section("The tree"), re.DOTALL)[1])
    for path in paths:
        assert (ROOT / path).exists(), path
        assert (ROOT / path).is_dir() == path.endswith("/"), path
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            name = file.relative_to(ROOT).as_posix()
            said = name in paths or any(name.startswith(folder) for folder in whole)
            assert said or file.name == "__init__.py", f"{name} is missing in the tree of docs/architecture.md"


def test_a_tree_is_read_with_its_folders():
    paths, whole = tree("a/        text\n  b.py c.py\n  d/      one file for each thing\n  e/\n    f.py  text\ng.py")
    assert paths == {"a/", "a/b.py", "a/c.py", "a/d/", "a/e/", "a/e/f.py", "g.py"}
    assert whole == {"a/d/"}


def test_the_page_of_recipe_keys_is_what_the_code_says():
    specification = importlib.util.spec_from_file_location("recipe_keys", ROOT / "docs" / "recipe_keys.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    assert module.page() == read("docs/recipe_keys.md"), "run `python docs/recipe_keys.py`"


def commands(text: str) -> list[str]:
    """The lines of shell blocks, fenced as bash or indented by four, continued ones joined; and those in the text."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    blocks += re.findall(r"(?:^    .*\n)+", prose(text), re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    inline = re.findall(r"`(python -m (?:training|hub)\.[^`]* [^`]*)`", prose(text))
    return [line.strip() for line in lines] + inline


class Parsing(BaseException):
    """Carries the parser out of a program that begins to read its command line."""


def stop(parser: argparse.ArgumentParser, *arguments, **options):
    raise Parsing(parser)


def find_parser(module: str) -> argparse.ArgumentParser:
    """The parser of a program, without running more of it."""
    if module == "training.train":  # which sets up its process before it reads
        from training.recipe import make_parser

        return make_parser()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module])
        patch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
        try:
            runpy.run_module(module, run_name="__main__")
        except Parsing as found:
            return found.args[0]
    raise AssertionError(f"{module} reads no command line")


@pytest.fixture(scope="module")
def parser_of():
    return functools.cache(find_parser)


def module_and_arguments(command: str) -> tuple[str, list[str]] | None:
    words = shlex.split(command, comments=True)
    for i in range(len(words) - 1):
        if words[i] == "-m" and re.fullmatch(r"(training|hub)(\.\w+)+", words[i + 1]):
            return words[i + 1], words[i + 2 :]
    return None


def is_understood(parser: argparse.ArgumentParser, arguments: list[str]) -> bool:
    try:
        parser.parse_args(arguments)
    except SystemExit as end:
        return not end.code  # 0 where it is --help
    return True


@pytest.mark.filterwarnings("ignore")
def test_commands_on_the_pages_are_understood(parser_of):
    """Each is read by its program's own parser: options exist, values are allowed, nothing needed is missing."""
    count = 0
    for page in PAGES:
        for command in commands(read(page)):
            if found := module_and_arguments(command):
                module, arguments = found
                assert is_understood(parser_of(module), arguments), f"{page}: {command}"
                count += 1
    assert count > 25


@pytest.mark.filterwarnings("ignore")
def test_a_command_that_is_wrong_is_found(parser_of):
    for wrong in ("hub.push runs/mine user/name --dry_ran", "training.score runs/mine", "hub.export a b --to nothing"):
        module, *arguments = wrong.split()
        assert not is_understood(parser_of(module), arguments), wrong


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", PAGES)
def test_options_in_the_text_exist(page, parser_of):
    text = read(page)
    modules = {module for p in PAGES for module in re.findall(r"-m ((?:training|hub)(?:\.\w+)+)", read(p))}
    known = {name.lstrip("-") for module in modules for name in parser_of(module)._option_string_actions}
    for name in re.findall(r"(?<![\w-])--([a-z][\w-]*)", text):
        assert name in known | THEIRS, f"{page}: --{name}"
    targets = re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE)
    for name in re.findall(r"(?:`|^ {4}|^)make ([a-z-]+)", text, re.MULTILINE):
        assert name in targets, f"{page}: make {name}"


def snippets() -> list[tuple[str, str]]:
    return [(page, code) for page in PAGES for code in re.findall(r"^```python\n(.*?)^```", read(page), re.S | re.M)]


# Imports what all snippets wait for, then gives each a process of its own, which knows nothing of the others
RUN_EACH = """
import os, sys, traceback
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, Seq2SeqTrainer, pipeline
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
def folder_after(tmp_path_factory):
    """A folder where `runs/demo` is a small checkpoint of that recipe and every snippet has run."""
    folder = tmp_path_factory.mktemp("snippets")
    command = [sys.executable, "-m", "training.train", "training/recipes/demo.yaml", "--max_steps", "4"]
    command += ["--d_model", "32", "--encoder_layers", "1", "--decoder_layers", "1", "--eval_strategy", "no"]
    command += ["--num_beams", "2", "--max_new_tokens", "8", "--output_dir", str(folder / "runs" / "demo")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    names = [f"{i}.py" for i in range(len(snippets()))]
    for name, (_, code) in zip(names, snippets(), strict=True):
        (folder / name).write_text(code, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HOME": str(folder / "home"), "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", RUN_EACH, *names], cwd=folder, env=environment, check=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(snippets())), ids=[page for page, _ in snippets()])
def test_snippets_run_as_written(number, folder_after):
    page, code = snippets()[number]
    errors = (folder_after / f"{number}.py.errors").read_text(encoding="utf-8")
    assert (folder_after / f"{number}.py.status").read_text() == "0", f"{page}:\n{code}\n{errors[-3000:]}"
    if "runs/fine_tuned" in code:
        assert (folder_after / "runs" / "fine_tuned" / "model.safetensors").exists()


def test_the_pages_have_snippets():
    pages = {page for page, _ in snippets()}
    assert {"README.md", "docs/training.md", "docs/decoding.md", "docs/architecture.md"} <= pages
