"""Argument parser and error handling of the commands of `training` and `hub`.

parser = CommandLineParser("training.average", __doc__)
parser.add_argument("--num-beams", type=int)
with exit_on_user_error(parser.prog):
    run(parser.parse_args())
"""

import argparse
import json
import logging
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, TextIO

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
LAUNCHED = "VANILLA_TRANSFORMER_LAUNCHED"  # set in the processes that `train` starts: when the command started
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

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments whose option names may have underscores instead of hyphens."""
        return super().parse_known_args(normalize_option_names(sys.argv[1:] if args is None else args), namespace)

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and one line that suggests a valid option name."""
        self.exit(2, f"{self.prog}: {one_line(self.add_suggestion(message))}\n")

    def add_suggestion(self, message: str) -> str:
        """Return an error message with the valid option name that is closest to an unknown one in it."""
        known = [option.lstrip("-") for action in self._actions for option in action.option_strings]
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
    is_name = re.fullmatch(r"[\w.-]+/[\w.-]+", text) and not os.path.exists(text.partition("/")[0])
    if not is_name and not os.path.exists(text):
        raise argparse.ArgumentTypeError(f"{text} does not exist")  # `user` in `user/name` is no local directory
    return text


float_type.__name__, int_type.__name__, exponent_type.__name__ = "float", "int", "float"  # for argparse's messages
positive_int.__name__ = "int"
NUMBER_TYPES: dict[Any, Any] = {float: float_type, int: int_type}
CHECKPOINTS = "Checkpoint: directory with model and tokenizer, or repository on the Hub. Several form an ensemble."
ENGINES = ("auto", "transformers", "ctranslate2")
QUANTIZATIONS = ("int8", "int16", "float16", "bfloat16")
OPTIONS: dict[str, dict[str, Any]] = {  # options that several commands have
    "batch_size": {
        "type": positive_int,
        "help": "Sentences per batch. Default: 64; on a GPU, as many as fit into memory.",
    },
    "num_beams": {"type": positive_int, "help": "Beam size. Default: that of the generation config."},
    "length_penalty": {"type": exponent_type, "help": "Length penalty. Default: that of the generation config."},
    "max_new_tokens": {
        "type": positive_int,
        "help": "Maximum tokens of a translation. Default: as in the generation config.",
    },
    "engine": {
        "choices": ENGINES,
        "default": "auto",
        "help": "Engine that decodes. auto: ctranslate2 on a CPU for many sentences, if it supports the options.",
    },
    "quantization": {
        "choices": QUANTIZATIONS,
        "help": "Type of the weights with --engine ctranslate2. Default: float32. Others change translations.",
    },
    "device": {"help": "Device such as cpu or cuda:1. Default: a GPU, if available."},
    "source_lang": {"help": "Source language such as en. Default: that of the recipe."},
    "target_lang": {"help": "Target language such as de. Default: that of the recipe."},
    "private": {"action": "store_true", "help": "Create a private repository."},
    "replace": {
        "action": "store_true",
        "help": "Overwrite files of other users, and an earlier push of other content.",
    },
    "json": {"action": "store_true", "help": "Print the result as one JSON document."},
    "quiet": {"action": "store_true", "help": "Print no progress and no messages except errors."},
}


def add_options(parser: argparse.ArgumentParser, *keys: str) -> None:
    """Add options of `OPTIONS` to a parser."""
    for key in keys:
        parser.add_argument(option_name(key), **OPTIONS[key])


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
    """Context manager: on a user error, print one line to stderr and exit with status 2.

    Ctrl-C exits with status 130. If the reader of stdout (such as `head`) closes it, the status is 0. Messages of the
    logger `vanilla_transformer` are printed to stderr. If stderr is not a terminal, progress bars are disabled.

    Args:
        prog: Prefix of the line.
        user_errors: Exception types to treat as user errors, in addition to `ValueError` and `OSError`.
        formatter: Function that returns the message of an exception.
        quiet: Whether to print neither messages nor progress bars.
    """
    prog = command_name(prog)
    handler = logging.StreamHandler()  # prints to stderr
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR if quiet else logging.INFO)
    caught: tuple[type[Exception], ...] = (ValueError, OSError, *user_errors)
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
    except caught as error:
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
