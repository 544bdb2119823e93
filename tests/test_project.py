"""The project's shape: which way imports point, what the wheel holds, and whether the README tells the truth."""

import ast
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PACKAGES = {
    "vanilla_transformer": {"vanilla_transformer"},
    "training": {"training", "vanilla_transformer"},
    "hub": {"hub", "vanilla_transformer"},
}


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(repository, package):
    """The model knows nothing of training and hub, and these nothing of each other."""
    for path in (repository / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            tops = {name.split(".")[0] for name in names} & set(PACKAGES)
            assert tops <= PACKAGES[package], f"{path} imports {tops - PACKAGES[package]}"


def test_shipped_files_import_only_siblings_and_what_every_reader_has(repository):
    """These files land flat in a checkpoint: relative imports name a sibling module, and nothing else is needed."""
    allowed = {"torch", "transformers", "tokenizers", "huggingface_hub", "tqdm"} | set(sys.stdlib_module_names)
    for path in (repository / "vanilla_transformer").glob("*_vanilla_transformer.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1
                assert (path.parent / f"{node.module}.py").exists(), f"{path}: from .{node.module}"
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
                assert {name.split(".")[0] for name in names} <= allowed, f"{path}: {names}"


def test_init_registers_and_exports_alone(repository):
    tree = ast.parse((repository / "vanilla_transformer" / "__init__.py").read_text())
    assert not [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]


def readme_tree(text: str) -> set[str]:
    """Paths of the annotated tree, which indents by two and may name several files a line."""
    block = re.search(r"The tree:\n\n(.*?)\n\n", text, re.DOTALL)[1]
    paths, folder = set(), ""
    for line in block.splitlines():
        entries = re.split(r"\s{2,}", line.strip())[0]
        depth = len(line) - len(line.lstrip())
        for entry in entries.split():
            if depth == 4 and entry.endswith("/"):
                folder = entry
            paths.add(entry if depth == 4 else folder + entry)
    return paths


def test_the_readmes_tree_is_the_tree(repository):
    paths = readme_tree((repository / "README.md").read_text(encoding="utf-8"))
    for path in paths:
        assert (repository / path).exists(), path
    for package in ("vanilla_transformer", "training"):
        for path in (repository / package).glob("*.py"):
            name = f"{package}/{path.name}"
            assert name in paths or path.name == "__init__.py", f"{name} is missing in the README's tree"


def test_the_readmes_links_and_names_exist(repository):
    text = (repository / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (repository / target).exists(), target
    files = [path for folder in ("vanilla_transformer", "training") for path in (repository / folder).rglob("*.*")]
    code = "".join(path.read_text(encoding="utf-8") for path in files if path.suffix in (".py", ".yaml"))
    section = text[text.index("The paper, section by section") : text.index("The tree:")]
    for name in re.findall(r"`([A-Za-z_]+(?:\.[a-z_]+)?)`", section):
        assert name.split(".")[-1] in code, name


def test_every_recipe_can_be_read(repository):
    from training.recipe import read_recipe

    recipes = list((repository / "training" / "recipes").glob("*.yaml"))
    assert recipes
    for path in recipes:
        assert read_recipe([str(path)]).name == path.stem
        assert path.read_text(encoding="utf-8").startswith("#"), f"{path} has no head that tells its cost"


@pytest.mark.slow
def test_the_wheel_holds_the_package_alone(repository, tmp_path):
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(repository)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"vanilla_transformer"}
    modules = {Path(name).name for name in names if name.startswith("vanilla_transformer/")}
    assert modules == {path.name for path in (repository / "vanilla_transformer").glob("*.py")}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def snippets(repository: Path) -> list[str]:
    text = (repository / "README.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.slow
def test_the_readmes_snippets_run_as_written(repository, tmp_path):
    """In order, each in a process of its own, in a folder where `runs/demo` is a small checkpoint of that recipe."""
    command = [sys.executable, "-m", "training.train", "training/recipes/demo.yaml", "--max_steps", "4"]
    command += ["--d_model", "32", "--encoder_layers", "1", "--decoder_layers", "1", "--eval_strategy", "no"]
    command += ["--num_beams", "2", "--max_new_tokens", "8", "--output_dir", str(tmp_path / "runs" / "demo")]
    subprocess.run(command, cwd=repository, check=True, capture_output=True)
    found = snippets(repository)
    assert len(found) >= 5
    environment = os.environ | {
        "PYTHONPATH": str(repository),
        "HF_HOME": str(tmp_path / "home"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    for snippet in found:
        process = subprocess.run(
            [sys.executable, "-c", snippet],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert process.returncode == 0, f"{snippet}\n{process.stderr[-3000:]}"
    assert (tmp_path / "runs" / "fine_tuned" / "model.safetensors").exists()
