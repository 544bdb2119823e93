"""The console program: subcommands, answers without torch, and the installed wheel."""

import importlib.metadata
import json
import os
import re
import shlex
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
        for name, (_, text) in commands.items():
            assert re.search(rf"^  {name} +{re.escape(text)}$", result.stdout, re.MULTILINE)


@pytest.mark.parametrize("arguments", [(), ("recipes",)])
def test_reader_can_close_the_output(repository, arguments):
    """A reader such as `head` can end before the program prints."""
    command = [sys.executable, "-c", SCRIPT, *arguments]
    process = subprocess.Popen(command, cwd=repository, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 0


def test_version(repository):
    assert run_script(repository, "--version").stdout == f"vanilla-transformer {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("trian",), "unknown subcommand 'trian'; did you mean train?"),
        (("qqq",), "unknown subcommand 'qqq'. See --help."),
        (("recipes", "show", "missing"), "show missing is not a recipe."),
        (("train", "missing.yaml"), "train: cannot read the recipe missing.yaml: no such file."),
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
    assert [line.split()[0] for line in lines[::2]] == names
    assert all(len(line.split()) > 3 for line in lines)
    program.show_recipes(["--json"])
    recipes = json.loads(capsys.readouterr().out)
    assert list(recipes) == names
    hardware = "2 cores of an AMD EPYC with AVX512-BF16"
    data = "The built-in English-German corpus: 40,000 pairs from a small grammar, as in `make demo`"
    assert recipes["demo"] == {"data": data, "hardware": hardware, "time": "3.9 minutes", "score": "BLEU 98.1"}
    assert lines[2 * names.index("demo") + 1].split(maxsplit=2)[2] == f"on {hardware}: BLEU 98.1"
    for name, facts in recipes.items():
        text = (repository / "training" / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
        was_run = "NOT RUN BY US" not in " ".join(text.replace("#", "").split())
        assert [was_run] * 3 == [facts[key] is not None for key in ("hardware", "time", "score")], name
        assert was_run == ("NOT RUN BY US" not in lines[2 * names.index(name) + 1])
    program.show_recipes(["--help"])
    assert capsys.readouterr().out.startswith("usage: vanilla-transformer recipes [--json]\n")
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
    Path("pairs.tsv").write_text("cat\tKatze\n")
    Path("my_data").mkdir()
    for name in ("pairs.tsv", "my_data"):
        with pytest.raises(ValueError, match=f"{name} is not a recipe .* use --data-dir DIRECTORY"):
            find_recipe(name)


def test_all_subcommands_exist():
    for commands in program.SUBCOMMANDS.values():
        for module, _ in commands.values():
            assert not module or module.startswith(("training.", "hub."))
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


MISTAKES = [
    ("import model.pt OUTPUT", "model.pt does not exist"),
    ("import {file} {file}", "already exists. Choose another path"),
    ("import {file} OUTPUT --num-head 8", "did you mean --num-heads?"),
    ("export missing OUTPUT --to onnx", "missing does not exist"),
    ("export {file} OUTPUT --to nothing", "invalid choice: 'nothing'"),
    ("push missing user/name", "missing does not exist"),
    ("push {file} user/name --dry-ran", "did you mean --dry-run?"),
    ("card {file} user/name --license 'a b'", "'a b' is not a license"),
    ("space missing", "missing does not exist"),
    ("space {file} --static {file}", "already exists. Choose another path"),
]


@pytest.mark.parametrize(("command", "message"), MISTAKES, ids=[command for command, _ in MISTAKES])
def test_subcommands_report_mistakes_without_torch(repository, tmp_path, command, message):
    (tmp_path / "file").touch()
    result = run_script(repository, *shlex.split(command.format(file=tmp_path / "file")))
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert result.stderr.startswith(f"vanilla-transformer {command.split()[0]}: ")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["space", *program.SUBCOMMANDS["Import, export and sharing"]])
def test_help_of_subcommands_needs_no_torch(repository, name):
    result = run_script(repository, name, "--help")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"usage: vanilla-transformer {name} ")


def test_program_runs_as_module(repository):
    command = [sys.executable, "-m", "vanilla_transformer", "push", "missing", "user/name"]
    result = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == "vanilla-transformer push: argument checkpoint: missing does not exist\n"


@pytest.fixture(scope="module")
def wheel(repository, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(".*", "build", "runs", "*.egg-info")
    shutil.copytree(repository, folder / "source", ignore=ignored)
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
    return wheel


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The console script of the wheel, in a new environment that shares the libraries of this one."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python")]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", str(wheel)], check=True)
    (site,) = (venv / "lib").glob("*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")  # its own .pth files are not read
    subprocess.run([*pip, "check"], check=True, capture_output=True)
    return venv / "bin" / "vanilla-transformer"


SMALL = ("--max-steps", "4", "--eval-strategy", "no", "--d-model", "32", "--tokenizer-vocab-size", "300")
SMALL += ("--num-beams", "1", "--max-new-tokens", "8")
PYTHON_FUNCTIONS = """
import json
import vanilla_transformer as package

settings = {"max_steps": 2, "eval_strategy": "no", "d_model": 32, "tokenizer_vocab_size": 300, "num_beams": 1}
settings |= {"corpus": "files", "data_dir": ".", "train_file": "train.tsv", "validation_file": "val.tsv"}
result = package.train("demo", output_dir="python", test_file="test.tsv", max_new_tokens=8, **settings)
assert result.finished and result.scores["test_bleu"] >= 0, result
assert len(package.translate("python", ["A dog sleeps."])) == 1
assert package.score("python", "test.en", ["test.de"])["bleu"]["score"] >= 0
assert package.average(["python", "runs/own"], "python_mean").name == "python_mean"
package.distill("python", "test.en", "distilled.tsv")
package.train("demo", source_lang="de", target_lang="en", output_dir="backward", **settings)
package.diversify("python", "backward", "test.en", "test.de", "diverse.tsv")
assert package.import_checkpoint("model.pt", "python_imported", num_heads=4).report["layout"] == "notebook"
assert package.export("python", "python_exported", to="transformers").name == "python_exported"
assert "license: mit" in str(package.make_card("python", "user/name", license="mit"))
assert package.push("python", "user/name", dry_run=True).url is None
print(json.dumps(sorted(package.FUNCTIONS)))
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_installed_program_works_in_an_empty_folder(installed, tmp_path, save_tutorial):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def start(*command, text=None, status=0):
        process = subprocess.run(
            list(map(str, command)), cwd=tmp_path, input=text, capture_output=True, text=True, env=environment
        )
        assert process.returncode == status, process.stderr[-3000:]
        return process

    def run(*arguments, **options):
        process = start(installed, *arguments, **options)
        return process.stdout + process.stderr

    python = installed.with_name("python")
    for name in ("training", "hub"):
        assert f"No module named '{name}'" in start(python, "-c", f"import {name}", status=1).stderr
    assert "Import, export and sharing" in run("--help")
    assert "demo" in run("recipes")
    assert "usage: vanilla-transformer train" in run("train", "--help")
    log = run("demo", *SMALL, "--num-processes", "2")
    assert "2 processes" in log
    assert "BLEU" in log
    assert (tmp_path / "runs" / "demo" / "all_results.json").exists()
    table = "".join(f"{number}\tzero {number}\n" for number in range(200))
    for split in ("train", "val", "test"):
        (tmp_path / f"{split}.tsv").write_text(table)
    files = ("--train-file", "train.tsv", "--validation-file", "val.tsv", "--test-file", "test.tsv")
    own = ("train", "demo", "--corpus", "files", "--data-dir", ".", *files, "--output-dir", "runs/own")
    assert "2 processes" in run(*own, *SMALL, "--num-processes", "2")
    assert run("translate", "runs/demo", text="A dog sleeps.\n") is not None
    (tmp_path / "test.en").write_text("A dog sleeps.\n")
    (tmp_path / "test.de").write_text("Ein Hund schläft.\n")
    scores = start(installed, "score", "runs/demo", "--source", "test.en", "--reference", "test.de", "--json").stdout
    assert json.loads(scores)["bleu"]["score"] >= 0
    run("average", "runs/demo", "--output", "mean")
    run("export", "mean", "exported", "--to", "transformers")
    run("export", "mean", "for_ctranslate2", "--to", "ctranslate2")
    assert (tmp_path / "for_ctranslate2" / "model.bin").exists()
    save_tutorial(tmp_path / "model.pt")
    assert "Detected layout: notebook" in run("import", "model.pt", "imported", "--num-heads", "4")
    assert "license: mit" in run("card", "runs/demo", "user/name", "--license", "mit")
    assert "Nothing was uploaded" in run("push", "runs/demo", "user/name", "--license", "mit", "--dry-run")
    assert "vanilla-transformer train: " in run("train", "missing.yaml", status=2)
    names = json.loads(start(python, "-c", PYTHON_FUNCTIONS).stdout.splitlines()[-1])
    assert not [name for name in names if f"package.{name}(" not in PYTHON_FUNCTIONS]


UVX = shutil.which("uvx") or next((str(path) for path in Path(__file__).parents[1].glob(".venv*/bin/uvx")), None)


@pytest.mark.slow
@pytest.mark.skipif(UVX is None, reason="requires uvx, a command of uv")
def test_uvx_runs_the_demo_from_the_wheel(wheel, tmp_path):
    """The libraries are those of this environment: without a network, uv cannot install them."""
    requirements = importlib.metadata.requires("vanilla-transformer")
    names = {re.match(r"[\w.-]+", each)[0] for each in requirements} - {"vanilla-transformer"}
    (tmp_path / "overrides.txt").write_text("".join(f"{name}; sys_platform == 'none'\n" for name in sorted(names)))
    command = [UVX, "--offline", "--python", sys.executable, "--overrides", "overrides.txt"]
    command += ["--from", f"{wheel}[training]"]
    environment = os.environ | {"PYTHONPATH": sysconfig.get_paths()["purelib"], "UV_CACHE_DIR": str(tmp_path / "cache")}
    process = subprocess.run(
        [*command, "vanilla-transformer", "demo", *SMALL, "--num-processes", "1"],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    assert (tmp_path / "runs" / "demo" / "all_results.json").exists()
