"""The console program: subcommands, answers without torch, and the installed wheel."""

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from training.recipe.packaged import find_recipe
from training.recipe.reading import read_recipe
from vanilla_transformer import __version__, program

# The console script, with a check that libraries with slow imports were not imported
SCRIPT = """
import sys
sys.argv = ["bin/vanilla-transformer", *sys.argv[1:]]
try:
    from vanilla_transformer.program import main
    main()
finally:
    slow = {"torch", "transformers", "datasets"} & sys.modules.keys()
    assert not slow, slow
"""


def run_script(repository, *arguments):
    command = [sys.executable, "-c", SCRIPT, *arguments]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_help_lists_all_subcommands_without_torch(repository, arguments):
    result = run_script(repository, *arguments)
    assert result.returncode == 0, result.stderr
    for group, commands in program.SUBCOMMANDS.items():
        assert f"{group}:" in result.stdout
        for name, (_, _, text) in commands.items():
            assert re.search(rf"^  {name} +{re.escape(text)}$", result.stdout, re.MULTILINE)


def test_version(repository):
    assert run_script(repository, "--version").stdout == f"vanilla-transformer {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("trian",), "unknown subcommand 'trian'; did you mean train?"),
        (("qqq",), "unknown subcommand 'qqq'. See --help."),
        (("recipes", "show", "missing"), "show missing is not a recipe."),
    ],
)
def test_mistakes_exit_with_one_line_without_torch(repository, arguments, message):
    result = run_script(repository, *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_recipes_are_listed_and_shown(repository, capsys):
    program.show_recipes([])
    lines = capsys.readouterr().out.splitlines()
    names = sorted(path.stem for path in (repository / "training" / "recipes").glob("*.yaml"))
    assert [line.split()[0] for line in lines] == names
    assert all(len(line.split()) > 3 for line in lines)
    program.show_recipes(["show", "demo"])
    assert capsys.readouterr().out == (repository / "training" / "recipes" / "demo.yaml").read_text(encoding="utf-8")


def test_train_finds_packaged_recipes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_recipe(["demo"]).name == "demo"
    Path("demo").write_text("output_dir: own\n")
    assert find_recipe("demo") == "demo"  # a file of the user
    Path("notebook").mkdir()
    assert find_recipe("notebook") != "notebook"
    with pytest.raises(ValueError, match="cannot read the recipe missing.yaml: no such file. Packaged recipes: .*demo"):
        find_recipe("missing.yaml")


def test_all_subcommands_exist():
    for commands in program.SUBCOMMANDS.values():
        for module, extra, _ in commands.values():
            assert extra in ("training", "hub")
            assert not module or (Path(__file__).parents[1] / f"{module.replace('.', '/')}.py").exists()


def test_missing_library_names_the_extra(monkeypatch, capsys):
    def fail(name, package):
        raise ModuleNotFoundError("No module named 'datasets'", name="datasets")

    monkeypatch.setattr(program.importlib, "import_module", fail)
    monkeypatch.setattr(sys, "argv", ["vanilla-transformer", "train", "demo"])
    monkeypatch.setattr(program.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit, match="2"):
        program.main()
    expected = 'vanilla-transformer: train requires datasets. Run: pip install "vanilla-transformer[training]"\n'
    assert capsys.readouterr().err == expected


@pytest.fixture(scope="module")
def installed(repository, tmp_path_factory) -> Path:
    """The console script of the wheel, in a new environment that shares the libraries of this one."""
    folder = tmp_path_factory.mktemp("installed")
    shutil.copytree(repository, folder / "source", ignore=shutil.ignore_patterns(".*", "build", "runs", "*.egg-info"))
    build = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(folder / "source"),
    ]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True)
    (site,) = (folder / "venv" / "lib").glob("*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")  # its own .pth files are not read
    return folder / "venv" / "bin" / "vanilla-transformer"


@pytest.mark.slow
def test_installed_program_works_in_an_empty_folder(installed, tmp_path):
    def run(*arguments, text=None, status=0):
        result = subprocess.run(
            [str(installed), *arguments], cwd=tmp_path, input=text, capture_output=True, text=True, check=False
        )
        assert result.returncode == status, result.stderr
        return result.stdout + result.stderr

    python = installed.with_name("python")
    for name in ("training", "hub"):
        assert subprocess.run([str(python), "-c", f"import {name}"], cwd=tmp_path, capture_output=True).returncode
    assert "demo" in run("recipes")
    assert "usage: vanilla-transformer train" in run("train", "--help")
    small = ("--max-steps", "4", "--eval-strategy", "no", "--d-model", "32", "--tokenizer-vocab-size", "300")
    log = run("demo", *small, "--num-beams", "1", "--max-new-tokens", "8", "--num-processes", "2")
    assert "2 processes" in log
    assert "BLEU" in log
    assert (tmp_path / "runs" / "demo" / "all_results.json").exists()
    assert run("translate", "runs/demo", text="A dog sleeps.\n") is not None
    (tmp_path / "test.en").write_text("A dog sleeps.\n")
    (tmp_path / "test.de").write_text("Ein Hund schläft.\n")
    assert '"bleu"' in run("score", "runs/demo", "--source", "test.en", "--reference", "test.de", "--json")
    run("average", "runs/demo", "--output", "mean")
    run("export", "mean", "exported", "--to", "transformers")
    assert "license: mit" in run("card", "runs/demo", "user/name", "--license", "mit")
    assert "vanilla-transformer train: " in run("train", "missing.yaml", status=2)
