"""Project structure: directions of imports, file sizes, and contents of the wheel."""

import ast
import itertools
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

PACKAGES = {
    "vanilla_transformer": {"vanilla_transformer"},
    "training": {"training", "vanilla_transformer"},
    "hub": {"hub", "vanilla_transformer"},
}


# Order of the packages in training/: a package may import only itself, those before it, and no command
TRAINING_ORDER = ("demo", "recipe", "data", "inference", "run", "distillation", "benchmarks")
MAX_LINES = 420  # per file
MAX_MODELING_LINES = 760  # the modeling file contains the complete architecture
MAX_MODULES = 12  # per directory, without __init__.py


def modules(repository: Path, package: str) -> list[Path]:
    return sorted((repository / package).rglob("*.py"))


def dotted(repository: Path, path: Path) -> str:
    return ".".join(path.relative_to(repository).with_suffix("").parts).removesuffix(".__init__")


def imported(repository: Path, path: Path, tree: ast.AST | None = None) -> set[str]:
    """Return the dotted names of the modules and objects that a file, or a syntax tree of it, imports."""
    parts = dotted(repository, path).split(".")
    package = parts if path.name == "__init__.py" else parts[:-1]
    names = set()
    for node in ast.walk(tree or ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = [*package[: len(package) - node.level + 1], node.module or ""] if node.level else [node.module]
            name = ".".join(part for part in parts if part)
            names |= {f"{name}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_allowed_packages(repository, package):
    """`vanilla_transformer` imports no other package; `training` and `hub` do not import each other."""
    for path in modules(repository, package):
        top_levels = {name.split(".")[0] for name in imported(repository, path)} & set(PACKAGES)
        assert top_levels <= PACKAGES[package], f"{path} imports {top_levels - PACKAGES[package]}"


@pytest.mark.parametrize("package", PACKAGES)
def test_subprocesses_run_only_allowed_modules(repository, package):
    """`python -m MODULE` in a subprocess is also a dependency."""
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
                    assert module.split(".")[0] in PACKAGES[package], f"{path} runs {module}"


POSIX_MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
POSIX_NAMES = {
    "os": "fork forkpty getuid geteuid getpgid killpg mkfifo nice sched_getaffinity setpgid setsid statvfs uname",
    "signal": "SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGUSR1 SIGUSR2 alarm pause",
}


@pytest.mark.parametrize("package", PACKAGES)
def test_posix_names_are_optional(repository, package):
    """Windows lacks these modules and names: modules are imported in a try statement, other uses follow `hasattr`."""
    for path in modules(repository, package):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        optional = [node for each in ast.walk(tree) if isinstance(each, ast.Try) for node in ast.walk(each)]
        checked = {node.args[1].value for node in ast.walk(tree) if is_call_of(node, "hasattr")}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom) and node not in optional:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
                assert not POSIX_MODULES & set(names), f"{path}, line {node.lineno} requires {names}"
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                is_posix = node.attr in POSIX_NAMES.get(node.value.id, "").split()
                assert not is_posix or node.attr in checked, f"{path}, line {node.lineno}: {node.value.id}.{node.attr}"


@pytest.mark.parametrize("package", PACKAGES)
def test_text_files_have_an_encoding(repository, package):
    """The default of Windows lacks most characters."""
    for path in modules(repository, package):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("read_text", "write_text"):
                assert "encoding" in {keyword.arg for keyword in node.keywords}, f"{path}, line {node.lineno}"


def is_call_of(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def test_only_one_module_runs_hub_push(repository):
    """The upload of a finished run is the only dependency of `training` on `hub`."""
    texts = [path.read_text(encoding="utf-8") for path in modules(repository, "training")]
    assert sum('"hub.push"' in text for text in texts) == 1


def test_training_imports_point_one_way(repository):
    for path in modules(repository, "training"):
        package = path.relative_to(repository / "training").parts[0]
        if package not in TRAINING_ORDER:
            continue
        for name in imported(repository, path):
            if name.startswith("training.") and (target := name.split(".")[1]) not in (package, "STARTED"):
                allowed = TRAINING_ORDER[: TRAINING_ORDER.index(package)]
                assert target in allowed, f"{path} imports {name}"


def test_all_subpackages_are_in_the_wheel(repository):
    settings = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {path.parent.relative_to(repository) for path in repository.glob("*/**/__init__.py")}
    names = {".".join(folder.parts) for folder in folders if folder.parts[0] in PACKAGES}
    prefixed = {name if name.startswith("vanilla") else f"vanilla_transformer.{name}" for name in names}
    assert set(settings["packages"]) == prefixed


def test_no_circular_imports(repository):
    """Imports under TYPE_CHECKING do not count."""
    paths = [path for package in PACKAGES for path in modules(repository, package)]
    names = {dotted(repository, path) for path in paths}
    dependencies = {}
    for path in paths:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in list(ast.walk(tree)):
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                node.body = [ast.Pass()]
        prefixes = (itertools.accumulate(name.split("."), "{}.{}".format) for name in imported(repository, path, tree))
        imports = {([each for each in parts if each in names] or [""])[-1] for parts in prefixes}
        dependencies[dotted(repository, path)] = imports - {dotted(repository, path)}
    while leaves := {name for name, targets in dependencies.items() if not targets & dependencies.keys()}:
        dependencies = {name: targets for name, targets in dependencies.items() if name not in leaves}
    assert not dependencies, f"circular imports among {sorted(dependencies)}"


def test_files_and_directories_are_small(repository):
    for package in PACKAGES:
        folders = {path.parent for path in modules(repository, package)}
        for folder in folders:
            names = [path.name for path in folder.glob("*.py") if not path.name.startswith("__")]
            assert len(names) <= MAX_MODULES, f"{folder} has {len(names)} modules"
        for path in modules(repository, package):
            text = path.read_text(encoding="utf-8")
            is_modeling = path.name == "modeling_vanilla_transformer.py"
            limit = MAX_MODELING_LINES if is_modeling else MAX_LINES
            assert len(text.splitlines()) <= limit, f"{path} has more than {limit} lines"
            assert is_modeling or "# ---" not in text, f"{path}: split the sections into separate files"


def test_files_in_checkpoints_import_only_allowed_modules(repository):
    """These files are copied into checkpoints: they import only sibling modules and standard dependencies."""
    allowed = {"torch", "transformers", "tokenizers", "huggingface_hub", "regex", "tqdm"} | set(sys.stdlib_module_names)
    for path in (repository / "vanilla_transformer").glob("*_vanilla_transformer.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1
                assert (path.parent / f"{node.module}.py").exists(), f"{path}: from .{node.module}"
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
                assert {name.split(".")[0] for name in names} <= allowed, f"{path}: {names}"


def test_init_only_registers_and_exports(repository):
    tree = ast.parse((repository / "vanilla_transformer" / "__init__.py").read_text())
    definitions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert definitions == ["is_command", "__getattr__"]  # of the commands


def test_all_recipes_are_valid(repository):
    from training.recipe.reading import read_recipe

    recipes = list((repository / "training" / "recipes").glob("*.yaml"))
    assert recipes
    for path in recipes:
        assert read_recipe([str(path)]).name == path.stem
        comments = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
        command = "demo" if path.stem == "demo" else f"train {path.stem}"
        assert any(line.startswith(f"#     vanilla-transformer {command}") for line in comments)
        assert len(comments) <= 8, f"{path}: move notes to docs/results.md"


@pytest.mark.slow
def test_wheel_contains_all_packages_and_their_data(repository, tmp_path):
    source = tmp_path / "source"  # without the modules of an earlier build
    shutil.copytree(repository, source, ignore=shutil.ignore_patterns(".*", "build", "runs", "*.egg-info"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size < 10**6
    names = zipfile.ZipFile(wheel).namelist()
    top_levels = {name.split("/")[0] for name in names}
    assert {top for top in top_levels if not top.endswith(".dist-info")} == {"vanilla_transformer"}
    expected = {
        path.relative_to(repository).as_posix()
        for package in PACKAGES
        for path in (repository / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    prefixed = {name if name.startswith("vanilla") else f"vanilla_transformer/{name}" for name in expected}
    assert {name for name in names if name.startswith("vanilla_transformer/")} == prefixed
    assert any(name.endswith("licenses/LICENSE") for name in names)
