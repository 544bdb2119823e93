"""What the commands of `training` and `hub` share: how options are spelled, and how a mistake ends them.

parser = CommandLine("training.average", __doc__)
parser.add_argument("--num_beams", type=int)
with one_line_errors(parser.prog):
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

from transformers.utils.logging import disable_progress_bar

MAX_EXPONENT = 100  # of a length: any more, and no number is large enough for it
RENAMED_OPTIONS = {  # options of earlier versions and keys of their recipes: the present names
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
INT_LIMIT = 2**31  # for seeds and counters of torch


class CommandLineParser(argparse.ArgumentParser):
    """Options are written with underscores, as a recipe's keys are; with dashes they are the same.

    A mistake ends the program with one line on stderr, which has the nearest right name of an unknown option, and
    status 2.

    Args:
        prog: the command as one types it behind `python -m`.
        doc: the module's docstring; its first paragraph is the description in `--help`.
    """

    def __init__(self, prog: str, doc: str | None = None, **options: Any):
        description = " ".join((doc or "").partition("\n\n")[0].split()) or None
        super().__init__(**{"prog": prog, "description": description, "allow_abbrev": False, **options})

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """As argparse does; but numbers are finite, and whole ones such as torch can count with."""
        if "type" in options:
            options["type"] = NUMBER_TYPES.get(options["type"], options["type"])
        return super().add_argument(*names, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args(normalize_option_names(sys.argv[1:] if args is None else args), namespace)

    def error(self, message: str) -> NoReturn:
        known = [option.lstrip("-") for action in self._actions for option in action.option_strings]
        for word in re.findall(r"(?<!\S)--(\w+)", message):
            if word not in known and RENAMED_OPTIONS.get(word) in known:
                message += f"; it is now called --{RENAMED_OPTIONS[word]}"
                break
            if word not in known and (name := closest_match(word, known)):
                message += f"; did you mean --{name}?"
                break
        self.exit(2, f"{self.prog}: {one_line(message)}\n")


def float_type(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return value


def int_type(text: str) -> int:
    value = int(text)
    if abs(value) >= INT_LIMIT:
        raise argparse.ArgumentTypeError(f"{text[:50]} is not between -2^31 and 2^31")
    return value


def exponent_type(text: str) -> float:
    """The type of an option that lengths are raised to the power of."""
    value = float_type(text)
    if abs(value) > MAX_EXPONENT:
        raise argparse.ArgumentTypeError(f"{text[:50]} is not between -{MAX_EXPONENT} and {MAX_EXPONENT}")
    return value


float_type.__name__, int_type.__name__, exponent_type.__name__ = "float", "int", "float"  # in messages of argparse
NUMBER_TYPES: dict[Any, Any] = {float: float_type, int: int_type}


def closest_match(word: str, names: Iterable[str]) -> str | None:
    """The name that a mistyped word was probably meant to be; None: it is like none of them."""
    return next(iter(get_close_matches(word, names, n=1)), None)


def normalize_option_names(arguments: Sequence[str]) -> list[str]:
    """The arguments with underscores in the names of options, up to a bare `--`: `--num-beams=5` is `--num_beams=5`."""
    found: list[str] = []
    for i, argument in enumerate(arguments):
        if argument == "--":
            return [*found, *arguments[i:]]
        name, equals, value = argument.partition("=")
        is_option = name.startswith("--") and not re.search(r"\s", name)
        found.append("--" + name[2:].replace("-", "_") + equals + value if is_option else argument)
    return found


def format_error(error: Exception) -> str:
    """What an error says, without the numbers of the operating system, and never nothing."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}."
    return str(error) or type(error).__name__


@contextmanager
def exit_on_user_error(
    prog: str, *more: type[Exception], formatter: Callable[[Exception], str] = format_error
) -> Iterator[None]:
    """Within it what a user can mend ends the program: one line on stderr, and status 2.

    Bars of progress are for a terminal: elsewhere that line stands alone.

    Ctrl-C ends it with status 130, and a reader of its output that has seen enough, as `head` has, with status 0.

    Args:
        prog: begins the line.
        more: errors of a user besides `ValueError` and `OSError`.
        in_words: what the line says of an error.
    """
    caught: tuple[type[Exception], ...] = (ValueError, OSError, *more)
    if not sys.stderr.isatty():
        disable_progress_bar()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as training/ and hub/ have it until all is imported
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
        sys.stdout.flush()  # what cannot be written is told here, and not by Python at the very end
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
    """What stdout still holds goes nowhere: Python would try to write it once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def one_line(text: str) -> str:
    return " ".join(text.split())
