"""Argument parser and error handling of the commands of `training` and `hub`.

parser = CommandLineParser("training.average", __doc__)
parser.add_argument("--num-beams", type=int)
with exit_on_user_error(parser.prog):
    run(parser.parse_args())
"""

import argparse
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, NoReturn

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
INT_LIMIT = 2**31  # integer options must be smaller, because they are stored in 32 bits


def command_name(module: str) -> str:
    """Return the name of the running command: `module` in a clone, the subcommand in the console program."""
    return sys.argv[0] if sys.argv[:1] and sys.argv[0].startswith("vanilla-transformer ") else module


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
        known = [option.lstrip("-") for action in self._actions for option in action.option_strings]
        for word in re.findall(r"(?<!\S)--([\w-]+)", message):
            renamed = option_name(RENAMED_OPTIONS.get(word.replace("-", "_"), ""))
            if word not in known and renamed[2:] in known:
                message += f"; it was renamed to {renamed}"
                break
            if word not in known and (name := closest_match(word, known)):
                message += f"; did you mean --{name}?"
                break
        self.exit(2, f"{self.prog}: {one_line(message)}\n")


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


float_type.__name__, int_type.__name__, exponent_type.__name__ = "float", "int", "float"  # for argparse's messages
NUMBER_TYPES: dict[Any, Any] = {float: float_type, int: int_type}


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
    prog: str, *user_errors: type[Exception], formatter: Callable[[Exception], str] = format_error
) -> Iterator[None]:
    """Context manager: on a user error, print one line to stderr and exit with status 2.

    Ctrl-C exits with status 130. If the reader of stdout (such as `head`) closes it, the status is 0. If stderr is
    not a terminal, progress bars are disabled.

    Args:
        prog: Prefix of the line.
        user_errors: Exception types to treat as user errors, in addition to `ValueError` and `OSError`.
        formatter: Function that returns the message of an exception.
    """
    prog = command_name(prog)
    caught: tuple[type[Exception], ...] = (ValueError, OSError, *user_errors)
    if not sys.stderr.isatty():
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
        discard_stdout()
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(130)
    except caught as error:
        print(f"{prog}: {one_line(formatter(error))}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:
            discard_stdout()
        sys.exit(2)


def discard_stdout() -> None:
    """Discard buffered output, which Python would try to write again at shutdown."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def one_line(text: str) -> str:
    """Replace each run of white space by one space."""
    return " ".join(text.split())
