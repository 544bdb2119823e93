"""The console program `vanilla-transformer SUBCOMMAND`. It imports torch only when a subcommand runs.

vanilla-transformer demo
vanilla-transformer train multi30k_en_de --data-dir DIR
vanilla-transformer translate runs/demo --input source.en
"""

import importlib.resources
import json
import re
import signal
import sys
from typing import Any, NoReturn

from . import __version__
from .shared.command_line import closest_match, discard_output

PROGRAM = "vanilla-transformer"
SUBCOMMANDS = {  # group: {name: (module, description)}
    "Data and training": {
        "demo": ("training.train", "train on the built-in corpus, score, translate: 5 minutes on 2 cores"),
        "train": ("training.train", "train a model from a recipe and score it"),
        "average": ("training.average", "average the weights of checkpoints"),
        "distill": ("training.distill", "translate training data with teachers, to train a student"),
        "diversify": ("training.diversify", "add translations in both directions to training data"),
        "benchmark": ("training.benchmark", "measure the speed of training and decoding"),
        "recipes": ("", "list the recipes with data, time and score (--json); `recipes show NAME` prints one"),
    },
    "Using a model": {
        "translate": ("training.translate", "translate text with a checkpoint or an ensemble"),
        "score": ("training.score", "score translations of a checkpoint"),
        "space": ("hub.space.__main__", "show or publish a web page that translates"),
    },
    "Import, export and sharing": {
        "import": ("hub.import_checkpoint", "convert a .pt file or a native Transformers model"),
        "export": ("hub.export", "convert a checkpoint for transformers, CTranslate2, ONNX or Argos"),
        "push": ("hub.push", "upload a checkpoint to the Hugging Face Hub"),
        "card": ("hub.model_card", "write the model card of a checkpoint"),
    },
}


def main() -> None:
    """Run the subcommand in `sys.argv`."""
    try:
        run_subcommand()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of stdout, such as `head`, has closed it
        discard_output(sys.stdout)


def run_subcommand() -> None:
    """Run the subcommand in `sys.argv`. Exits with status 2 if it does not exist."""
    name, arguments = (sys.argv[1] if len(sys.argv) > 1 else "--help"), sys.argv[2:]
    commands = {each: command for group in SUBCOMMANDS.values() for each, command in group.items()}
    if name in ("-h", "--help"):
        print(help_text())
    elif name == "--version":
        print(f"{PROGRAM} {__version__}")
    elif name == "recipes":
        show_recipes(arguments)
    elif name not in commands:
        close = closest_match(name, commands)
        exit_with_error(f"unknown subcommand {name!r}" + (f"; did you mean {close}?" if close else ". See --help."))
    else:
        run(name, commands[name][0], ["demo", *arguments] if name == "demo" else arguments)


def run(name: str, module: str, arguments: list[str]) -> None:
    """Run the `main()` of a module, as `python -m MODULE` does. Exits with status 2 if a library is missing."""
    sys.argv = [f"{PROGRAM} {name}", *arguments]
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # imports take seconds: meanwhile, Ctrl-C exits without a traceback
    try:
        importlib.import_module(f".{module}", __package__).main()
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("vanilla_transformer"):
            raise
        extra = module.partition(".")[0]
        exit_with_error(f'{name} requires {error.name}. Run: pip install "{PROGRAM}[{extra}]"')


def help_text() -> str:
    """Return the list of subcommands."""
    lines = [f"usage: {PROGRAM} SUBCOMMAND ...", "", "`SUBCOMMAND --help` lists the options of a subcommand."]
    for group, commands in SUBCOMMANDS.items():
        lines += ["", f"{group}:", *(f"  {name:<10} {text}" for name, (_, text) in commands.items())]
    return "\n".join(lines)


def show_recipes(arguments: list[str]) -> None:
    """Print the data, time and score of all recipes, as text or JSON, or the file of one recipe."""
    folder: Any = importlib.resources.files(f"{__package__}.training") / "recipes"
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.yaml"))}
    if arguments in ([], ["--json"]):
        recipes = {name: describe_recipe(text) for name, text in texts.items()}
        if arguments:
            print(json.dumps(recipes, indent=2, ensure_ascii=False))
            return
        for name, facts in recipes.items():
            measured = "{time} on {hardware}: {score}".format(**facts) if facts["score"] else "NOT RUN BY US"
            print(f"{name:<20} {facts['data']}\n{'':<20} {measured}")
    elif len(arguments) == 2 and arguments[0] == "show" and arguments[1] in texts:
        print(texts[arguments[1]], end="")
    elif {"-h", "--help"} & {*arguments}:
        print(f"usage: {PROGRAM} recipes [--json]\n       {PROGRAM} recipes show NAME")
    else:
        exit_with_error(f"{' '.join(arguments)} is not a recipe. Use `recipes` or `recipes show NAME`.")


def describe_recipe(text: str) -> dict[str, str | None]:
    """Return data, hardware, time and score from the comment at the top of a recipe. None if it was not run."""
    lines = [line[1:] for line in text.splitlines() if line.startswith("#")]
    comment = " ".join("\0" if line.startswith("    ") else line.strip() for line in lines)  # \0: example commands
    data = re.split(r"\. |[.:]? ?\0", comment)[0]
    measured = re.search(r"Measured on (.+?): ([\d.]+ minutes).*?[,;] (.+?)\.( See .*| docs.*)?$", comment)
    facts = measured.groups() if measured else (None, None, None)
    return {"data": data, **dict(zip(("hardware", "time", "score"), facts, strict=False))}


def exit_with_error(message: str) -> NoReturn:
    """Print one line to stderr and exit with status 2."""
    print(f"{PROGRAM}: {message}", file=sys.stderr)
    sys.exit(2)
