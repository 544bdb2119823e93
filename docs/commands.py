"""Write `commands.md` from the parsers of the subcommands: `python docs/commands.py`."""

import argparse
import importlib
import sys
from pathlib import Path
from textwrap import fill
from unittest.mock import patch

PAGE = Path(__file__).with_suffix(".md")
HEAD = """# Commands

This page lists the subcommands of `vanilla-transformer` with their options. `vanilla-transformer SUBCOMMAND --help`
prints the same. You can write underscores instead of the hyphens in the name of an option. In a clone,
`python -m` and the name of its module also run a subcommand.

Results are printed to standard output, messages and progress to standard error. The exit status is 0, 1 (a check
failed), 2 (a mistake of the user, described in one line), 130 (Ctrl-C) or 143 (stopped).

(`docs/commands.py` writes this page from the parsers. Do not edit it by hand.)
"""
WITHOUT_PARSER = {
    "demo": "`vanilla-transformer demo` is `vanilla-transformer train demo`, and has the same options.",
    "recipes": "- **`--json`**: Print data, hardware, time and score of each recipe as one JSON document.\n"
    "- **`show NAME`**: Print one recipe.",
}

TRAIN = """The argument is a recipe file, or the name of a packaged recipe. Without it, the settings are chosen from the
data in `--data-dir`, and from `--minutes`. The options are the [keys of a recipe](recipe_keys.md), such as
`--max-steps 500`, and:

"""


class Parsing(BaseException):
    """Signal that carries the parser out of a command that starts to parse its arguments."""


def stop(parser: argparse.ArgumentParser, *arguments: object, **options: object) -> None:
    raise Parsing(parser)


def find_parser(module: str, program: str) -> argparse.ArgumentParser:
    """Return the argument parser of a command without running the command."""
    with patch.object(sys, "argv", [program]), patch.object(argparse.ArgumentParser, "parse_known_args", stop):
        try:
            importlib.import_module(module).main()
        except Parsing as signal:
            return signal.args[0]
    raise AssertionError(f"{module} does not parse arguments")


def page() -> str:
    """Return the text of the page for the current code."""
    sys.path.insert(0, str(PAGE.parents[1]))  # training/ and hub/ of this clone
    from vanilla_transformer.program import PROGRAM, SUBCOMMANDS

    parts = [HEAD]
    for group, commands in SUBCOMMANDS.items():
        parts.append(f"\n## {group}\n")
        for name, (module, description) in commands.items():
            clone = f" (`python -m {module.removesuffix('.__main__')}`)" if module else ""
            parts.append(f"\n### {name}\n\n" + fill(f"{description[0].upper()}{description[1:]}{clone}.", 120) + "\n\n")
            if name in WITHOUT_PARSER:
                parts += [fill(line, 120) + "\n" for line in WITHOUT_PARSER[name].splitlines()]
                continue
            parts += [TRAIN] if name == "train" else []
            parser = find_parser(module, f"{PROGRAM} {name}")
            parts += [entry(action) for action in parser._actions if action.dest != "help"]
    return "".join(parts)


def entry(action: argparse.Action) -> str:
    """Return a list item with the names of an argument, its value, choices and help text."""
    metavar = (action.metavar or action.dest).upper()
    value = "" if action.nargs == 0 or not action.option_strings else f" {metavar}"
    names = ", ".join(f"`{name}{value}`" for name in action.option_strings) or f"`{metavar}`"
    choices = f" One of {', '.join(f'`{choice}`' for choice in action.choices)}." if action.choices else ""
    text = " ".join((action.help or "").split()) % {"default": action.default}
    required = " Required." if action.required and action.option_strings else ""
    item = f"- **{names}**:{choices}{required} {text.replace('**', '^')}".replace("<", "&lt;")
    return fill(item, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
