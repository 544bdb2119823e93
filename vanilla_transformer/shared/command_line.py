"""Argument parser and error handling of the commands of `training` and `hub`.

parser = CommandLineParser("training.distill", __doc__)
parser.add_argument("output", type=new_path, help="Path of the table.")
parser.add_settings(DistillationSettings)  # a dataclass: an option for each field
options = parser.parse_options()
with parser.exit_on_user_error():
    table = distill(**options)  # accepts the same fields as keyword arguments
    parser.print_result(asdict(table), table.describe())
"""

import argparse
import inspect
import json
import logging
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import Field, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NoReturn, TextIO, get_args, get_origin

MAX_EXPONENT = 100  # for `length_penalty`; with a greater exponent, length**exponent overflows
RENAMED_OPTIONS = {  # old name of an option or recipe key -> new name
    "attention": "attn_implementation",
    "attention_lines": "attention_plot_lines",
    "bad_lines": "on_bad_lines",
    "codes": "bpe_codes",
    "data": "fairseq_data",
    "lines": "benchmarks",
    "overlap": "on_eval_overlap",
    "per_line": "per_pair_output",
    "processes": "num_processes",
    "samples": "num_bootstrap_samples",
    "step": "step_mode",
    "tokenizer_pairs": "tokenizer_max_train_pairs",
    "tokenizer_size": "tokenizer_vocab_size",
    "vocabulary_multiple": "pad_vocab_to_multiple_of",
}
SUBCOMMANDS = {"import_checkpoint": "import", "model_card": "card"}  # module -> subcommand, if the names differ
LAUNCHED = "VANILLA_TRANSFORMER_LAUNCHED"  # environment variable of started processes: start time of `train`
OUT_OF_MEMORY = "Out of memory. Use smaller batches: with --max-tokens in training, with --batch-size otherwise"
logger = logging.getLogger("vanilla_transformer")
INT_LIMIT = 2**31  # integer options must be smaller, because they are stored in 32 bits


def command_name(module: str) -> str:
    """Return the name of the running command: `module` in a clone, the subcommand in the console program."""
    return sys.argv[0] if sys.argv[:1] and sys.argv[0].startswith("vanilla-transformer ") else module


def start_of_command(module: str) -> str:
    """Return the first words of a command line: `vanilla-transformer push`, or in a clone `python -m hub.push`."""
    if Path(*sys.argv[:1]).parent.name in ("training", "hub"):
        return f"python -m {module}"
    name = module.rpartition(".")[2]
    return f"vanilla-transformer {SUBCOMMANDS.get(name, name)}"


class CommandLineParser(argparse.ArgumentParser):
    """Argument parser whose options have hyphens. Underscores, as in recipe keys, are accepted as well.

    An invalid option ends the program with status 2 and one line on stderr, which suggests the closest option name.
    `prog` is the name of the module. The first paragraph of its docstring `doc` is the description in `--help`.
    """

    def __init__(self, prog: str, doc: str | None = None, **options: Any):
        description = " ".join((doc or "").partition("\n\n")[0].split()) or None
        super().__init__(**{"prog": command_name(prog), "description": description, "allow_abbrev": False, **options})

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """Add an argument as argparse does, but reject infinite numbers and integers that torch cannot represent."""
        if "type" in options:
            options["type"] = NUMBER_TYPES.get(options["type"], options["type"])
        return super().add_argument(*dict.fromkeys(normalize_option_names(names)), **options)

    def add_settings(self, settings: type, *names: str) -> None:
        """Add an option for each field of a settings class, or only for the fields `names`. See `option`."""
        for each in own_fields_first(settings):
            if each.name in (names or (each.name,)):
                options = argparse_options(each)
                self.add_argument(options.pop("name", option_name(each.name)), **options)

    def parse_options(self) -> dict[str, Any]:
        """Parse the command line. Stores --json and --quiet as attributes, and returns the other arguments."""
        add_options(self, *(key for key in OPTIONS if option_name(key) not in self._option_string_actions))
        options = vars(self.parse_args())
        self.json, self.quiet = options.pop("json", False), options.pop("quiet")
        return options

    def exit_on_user_error(self, *user_errors: type[Exception], **options: Any) -> AbstractContextManager[None]:
        """Return the context manager `exit_on_user_error` of this command."""
        return exit_on_user_error(self.prog, *user_errors, quiet=self.quiet, **options)

    def print_result(self, result: Any, text: str = "") -> None:
        """Print a result as a text, or with --json as a JSON document."""
        print_result(result, self.json, text)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments whose option names may have underscores instead of hyphens."""
        return super().parse_known_args(normalize_option_names(sys.argv[1:] if args is None else args), namespace)

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and one line that suggests a valid option name."""
        self.exit(2, f"{self.prog}: {one_line(self.add_suggestion(message))}\n")

    def add_suggestion(self, message: str) -> str:
        """Return an error message with the valid option name that is closest to an unknown one in it."""
        known = [
            option.lstrip("-")
            for action in self._actions
            for option in action.option_strings
            if action.help != argparse.SUPPRESS
        ]
        for word in re.findall(r"(?<!\S)--([\w-]+)", message):
            renamed = option_name(RENAMED_OPTIONS.get(word.replace("-", "_"), ""))
            if word not in known and renamed[2:] in known:
                return f"{message}; it was renamed to {renamed}"
            if word not in known and (name := closest_match(word, known)):
                return f"{message}; did you mean --{name}?"
        return message


def float_type(text: str) -> float:
    """Convert an option to a finite float."""
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return value


def int_type(text: str) -> int:
    """Convert an option to an integer below `INT_LIMIT`."""
    value = int(text)
    if abs(value) >= INT_LIMIT:
        raise argparse.ArgumentTypeError(f"{text[:50]} is not between -2^31 and 2^31")
    return value


def exponent_type(text: str) -> float:
    """Convert an option such as `length_penalty`, an exponent applied to the sequence length."""
    value = float_type(text)
    if abs(value) > MAX_EXPONENT:
        raise argparse.ArgumentTypeError(f"{text[:50]} is not between -{MAX_EXPONENT} and {MAX_EXPONENT}")
    return value


def positive_int(text: str) -> int:
    """Convert an option to an integer of at least 1."""
    if (value := int_type(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text[:50]} must be at least 1")
    return value


def existing_path(text: str) -> Path:
    """Convert an option to the path of a file or directory that exists."""
    if not os.path.exists(text):  # unlike `Path.exists`, without an error if the name is too long
        raise argparse.ArgumentTypeError(f"{text} does not exist")
    return Path(text)


def new_path(text: str) -> Path:
    """Convert an option to a path that does not exist yet."""
    if os.path.exists(text):
        raise argparse.ArgumentTypeError(f"{text} already exists. Choose another path")
    return Path(text)


def checkpoint_name(text: str) -> str:
    """Convert an option to a directory that exists, or a name such as `user/name` on the Hub."""
    folder = text.partition("/")[0]
    is_name = re.fullmatch(r"[\w.-]+/[\w.-]+", text) and folder != "runs" and not os.path.exists(folder)
    if not is_name and not os.path.exists(text):
        raise argparse.ArgumentTypeError(f"{text} does not exist")  # `user` in `user/name` is not a local directory
    return text


float_type.__name__, int_type.__name__, exponent_type.__name__ = "float", "int", "float"  # for argparse's messages
positive_int.__name__ = "int"
NUMBER_TYPES: dict[Any, Any] = {float: float_type, int: int_type}
OPTIONS: dict[str, dict[str, Any]] = {  # options that most commands have
    "json": {"action": "store_true", "help": "Print the result as one JSON document."},
    "quiet": {"action": "store_true", "help": "Print no progress and no messages except errors."},
}


def add_options(parser: argparse.ArgumentParser, *keys: str) -> None:
    """Add options of `OPTIONS` to a parser."""
    for key in keys:
        parser.add_argument(option_name(key), **OPTIONS[key])


def option(default: Any, text: str, **argparse_options: Any) -> Any:
    """Return a field of a settings class: an option of a command, and a keyword argument of its Python function.

    `argparse_options` are `name`, if it is not the name of the field, and arguments of `add_argument` such as `type`.
    """
    return field(default=default, metadata={"help": text, **argparse_options})


def own_fields_first(settings: type) -> list[Field]:
    """Return the fields of a settings class, and then those of its base classes."""
    known = {each.name: each for each in fields(settings)}
    return [known[name] for base in settings.__mro__ for name in inspect.get_annotations(base)]


def argparse_options(setting: Field) -> dict[str, Any]:
    """Return `name`, if it is not the name of the field, and the arguments of `add_argument` for a field."""
    types = {setting.type, *get_args(setting.type)}  # such as int | None
    implied: dict[str, Any] = {}
    if setting.default is False:
        implied = {"action": "store_true"}
    elif int in types or float in types:
        implied = {"type": positive_int if int in types else float}
    elif choices := [choice for each in types for choice in get_args(each) if get_origin(each) is Literal]:
        implied = {"choices": choices}
    return {"dest": setting.name, "default": setting.default, **implied, **setting.metadata}


def accept_settings(settings: type) -> Callable[[Any], Any]:
    """Return a decorator for functions that construct a settings class from their `**options`.

    The fields of the class are listed in the signature of the function. In its docstring, they replace `options: ...`.
    """
    known = own_fields_first(settings)
    lines = [f"{each.name}: {each.metadata['help']}".replace("%(default)s", str(each.default)) for each in known]

    def decorate(function: Any) -> Any:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        more = inspect.signature(settings).parameters
        function.__signature__ = signature.replace(parameters=[*own, *(more[each.name] for each in known)])
        function.__doc__ = re.sub(
            r"( +)options: .*", lambda match: match[1] + f"\n{match[1]}".join(lines), function.__doc__
        )
        return function

    return decorate


def print_result(result: Any, as_json: bool, text: str = "") -> None:
    """Print the result of a command to stdout: a JSON document for programs, or a text for people."""
    print(json.dumps(result, indent=2, ensure_ascii=False, default=str) if as_json else text)


def shows_progress() -> bool:
    """Return whether to show progress bars: if stderr is a terminal, and without --quiet."""
    return sys.stderr.isatty() and logger.isEnabledFor(logging.WARNING)


def option_name(key: str) -> str:
    """Return the option of a recipe key or argument: `--num-beams` for num_beams."""
    return "--" + key.replace("_", "-")


def closest_match(word: str, names: Iterable[str]) -> str | None:
    """Return the name that is closest to a mistyped word, or None if none is similar."""
    return next(iter(get_close_matches(word, names, n=1)), None)


def normalize_option_names(arguments: Sequence[str]) -> list[str]:
    """Replace underscores in option names, up to a bare `--`: `--num_beams=5` becomes `--num-beams=5`."""
    normalized: list[str] = []
    for i, argument in enumerate(arguments):
        if argument == "--":
            return [*normalized, *arguments[i:]]
        name, equals, value = argument.partition("=")
        is_option = name.startswith("--") and not re.search(r"\s", name)
        normalized.append("--" + name[2:].replace("_", "-") + equals + value if is_option else argument)
    return normalized


def format_error(error: Exception) -> str:
    """Return a non-empty error message without errno."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}."
    return str(error) or type(error).__name__


@contextmanager
def exit_on_user_error(
    prog: str,
    *user_errors: type[Exception],
    formatter: Callable[[Exception], str] = format_error,
    quiet: bool = False,
) -> Iterator[None]:
    """Context manager: on a user error or if memory is too small, print one line to stderr and exit with status 2.

    Ctrl-C exits with status 130. If the reader of stdout (such as `head`) closes it, the status is 0. Messages of the
    logger `vanilla_transformer` are printed to stderr. If stderr is not a terminal, progress bars are disabled.
    User errors are `ValueError`, `OSError` and `user_errors`. The line consists of `prog` and `formatter(error)`. With
    `quiet`, neither messages nor progress bars are printed.
    """
    prog = command_name(prog)
    handler = logging.StreamHandler()  # prints to stderr
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR if quiet else logging.INFO)
    caught: tuple[type[Exception], ...] = (ValueError, OSError, *user_errors)
    handled: tuple[type[Exception], ...] = (*caught, RuntimeError, MemoryError)
    if quiet or not sys.stderr.isatty():
        from transformers.utils.logging import disable_progress_bar  # slow import

        disable_progress_bar()
    if sys.platform == "win32":  # in a pipe or file, the encoding of Windows lacks most characters
        sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set during the imports of training/ and hub/
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
        sys.stdout.flush()  # raise write errors here, not at interpreter shutdown
    except BrokenPipeError:
        discard_output(sys.stdout)
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(130)
    except handled as error:
        if not isinstance(error, caught):
            if not isinstance(error, MemoryError) and not re.search("out of memory|can't allocate memory", str(error)):
                raise
            error = ValueError(f"{OUT_OF_MEMORY} ({format_error(error)[:200]})")
        print(f"{prog}: {one_line(formatter(error))}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:
            discard_output(sys.stdout)
        sys.exit(2)
    finally:
        logger.removeHandler(handler)


def discard_output(stream: TextIO) -> None:
    """Discard buffered output of stdout or stderr, which Python would try to write again at shutdown."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def one_line(text: str) -> str:
    """Replace each run of white space by one space."""
    return " ".join(text.split())
