"""The project's shape: which way imports point, and what the wheel holds."""

import ast
import itertools
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


SUBPROCESSES = {("training", "hub.push")}  # `python -m` of another package: a finished run is pushed, if asked for
LONGEST = 420  # lines of a file; the modeling file is the whole architecture, and may have more
LONGEST_MODELING = 760
MOST = 12  # modules of a folder, __init__.py not counted


def modules(repository: Path, package: str) -> list[Path]:
    return sorted((repository / package).rglob("*.py"))


def dotted(repository: Path, path: Path) -> str:
    return ".".join(path.relative_to(repository).with_suffix("").parts).removesuffix(".__init__")


def imported(repository: Path, path: Path, tree: ast.AST | None = None) -> set[str]:
    """Dotted names that a file (or a tree made of it) imports: of modules, and of what is taken out of them."""
    here = dotted(repository, path).split(".")
    folder = here if path.name == "__init__.py" else here[:-1]
    found = set()
    for node in ast.walk(tree or ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = [*folder[: len(folder) - node.level + 1], node.module or ""] if node.level else [node.module]
            name = ".".join(part for part in parts if part)
            found |= {f"{name}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(repository, package):
    """The model knows nothing of training and hub, and these nothing of each other."""
    for path in modules(repository, package):
        tops = {name.split(".")[0] for name in imported(repository, path)} & set(PACKAGES)
        assert tops <= PACKAGES[package], f"{path} imports {tops - PACKAGES[package]}"


@pytest.mark.parametrize("package", PACKAGES)
def test_commands_run_others_one_way(repository, package):
    """What a file names as `python -m MODULE` in a subprocess is an arrow, too: only known ones leave the package."""
    for path in modules(repository, package):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.List | ast.Tuple | ast.Call):
                continue
            texts = [
                each.value if isinstance(each, ast.Constant) else None
                for each in (node.args if isinstance(node, ast.Call) else node.elts)
            ]
            for flag, module in itertools.pairwise(texts):
                if flag == "-m" and isinstance(module, str) and module.split(".")[0] in PACKAGES:
                    own = module.split(".")[0] in PACKAGES[package]
                    assert own or (package, module) in SUBPROCESSES, f"{path} runs {module}"


def test_a_finished_run_is_pushed_by_the_one_known_subprocess(repository):
    texts = [path.read_text(encoding="utf-8") for path in modules(repository, "training")]
    assert sum('"-m", "hub.push"' in text for text in texts) == 1


def test_no_imports_in_a_circle(repository):
    """Annotations' imports under TYPE_CHECKING never run, and do not count."""
    paths = [path for package in PACKAGES for path in modules(repository, package)]
    names = {dotted(repository, path) for path in paths}
    arrows = {}
    for path in paths:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in list(ast.walk(tree)):
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                node.body = [ast.Pass()]
        prefixes = (itertools.accumulate(name.split("."), "{}.{}".format) for name in imported(repository, path, tree))
        found = {([each for each in parts if each in names] or [""])[-1] for parts in prefixes}
        arrows[dotted(repository, path)] = found - {dotted(repository, path)}
    while leaves := {name for name, to in arrows.items() if not to & arrows.keys()}:
        arrows = {name: to for name, to in arrows.items() if name not in leaves}
    assert not arrows, f"these import each other in a circle, or what does: {sorted(arrows)}"


def test_rooms_are_small(repository):
    for package in PACKAGES:
        folders = {path.parent for path in modules(repository, package)}
        for folder in folders:
            held = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
            assert len(held) <= MOST, f"{folder} holds {len(held)} modules"
        for path in modules(repository, package):
            text = path.read_text(encoding="utf-8")
            is_modeling = path.name == "modeling_vanilla_transformer.py"
            limit = LONGEST_MODELING if is_modeling else LONGEST
            assert len(text.splitlines()) <= limit, f"{path} has more than {limit} lines"
            assert is_modeling or "# ---" not in text, f"{path}: its sections are files of their own"


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
    files = {name for name in names if name.startswith("vanilla_transformer/")}
    own = {path.relative_to(repository).as_posix() for path in modules(repository, "vanilla_transformer")}
    assert files == own | {"vanilla_transformer/py.typed"}
    assert any(name.endswith("licenses/LICENSE") for name in names)
