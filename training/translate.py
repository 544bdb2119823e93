"""Translates lines of text: from stdin to stdout, or file to file.

    echo "A dog runs." | python -m training.translate runs/demo
    python -m training.translate runs/demo --input source.en --output target.de --num_beams 5
    python -m training.translate runs/demo --input source.en --nbest 3      # columns: line, score, translation
    python -m training.translate runs/demo --input source.en --glossary terms.tsv
    python -m training.translate runs/one runs/two --input source.en        # together: the mean of their probabilities

One line comes out for each that goes in, in the same order, though batches are made by length. A line that cannot be
translated comes out empty, and the reason goes to stderr with its number; the others are not touched by it.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from training.loading import CHECKPOINTS, load_translator, n_best_options
from training.outputs import whole
from training.run.hardware import keep_memory, usable_device
from vanilla_transformer.shared.command_line import CommandLine, exponent, one_line_errors
from vanilla_transformer.shared.lines import as_cell, read_lines


def main() -> None:
    parser = CommandLine("training.translate", __doc__)
    parser.add_argument("checkpoint", nargs="+", help=CHECKPOINTS)
    parser.add_argument("--input", type=Path, help="text file; default: stdin")
    parser.add_argument("--output", type=Path, help="file to be made; default: stdout")
    parser.add_argument("--batch_size", type=int, default=64, help="sentences a batch (default: %(default)s)")
    parser.add_argument("--num_beams", type=int, help="beam size; default: the checkpoint's")
    parser.add_argument("--length_penalty", type=exponent, help="default: the checkpoint's")
    parser.add_argument("--max_new_tokens", type=int, help="longest translation; default: the checkpoint's")
    parser.add_argument("--nbest", type=int, default=1, help="translations a line; they come with scores")
    parser.add_argument(
        "--glossary", type=Path, help="a term a line: the source's, a tab, and its translation, or several with tabs"
    )
    parser.add_argument("--scores", action="store_true", help="print columns: line, score, translation")
    parser.add_argument(
        "--device", type=usable_device, help="cpu, cuda, cuda:1, ...; default: a GPU where there is one"
    )
    arguments = parser.parse_args()
    keep_memory()
    with one_line_errors(parser.prog):
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    for name in ("batch_size", "nbest", "num_beams", "max_new_tokens"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            raise ValueError(f"--{name} {getattr(arguments, name)}: give a number of at least 1.")
    if arguments.output is not None and arguments.output.exists():
        raise ValueError(f"{arguments.output} exists already: give a file that does not.")
    if arguments.nbest > 1 and (arguments.num_beams or arguments.nbest) < arguments.nbest:
        raise ValueError(f"--nbest {arguments.nbest} needs as many beams: --num_beams {arguments.num_beams} are fewer.")
    translator = load_translator(arguments.checkpoint, arguments.device)
    options: dict[str, Any] = {
        name: getattr(arguments, name)
        for name in ("num_beams", "length_penalty", "max_new_tokens")
        if getattr(arguments, name) is not None
    }
    if arguments.nbest > 1:
        options = n_best_options(translator, arguments.nbest) | options
    if options.get("num_beams") == 1 and "length_penalty" not in options:
        options["length_penalty"] = None  # the checkpoint's is for its beams
    with_scores = arguments.scores or arguments.nbest > 1
    options |= {"return_scores": with_scores, "progress": sys.stderr.isatty()}
    if arguments.glossary:
        options["glossary"] = read_glossary(arguments.glossary)
    terms: list[bool] = []  # whether each is met

    with ExitStack() as files:
        source = files.enter_context(arguments.input.open("rb")) if arguments.input else sys.stdin.buffer
        sink: TextIO = sys.stdout
        if arguments.output:
            path = files.enter_context(whole(arguments.output))
            sink = files.enter_context(path.open("w", encoding="utf-8"))
        lines = decoded(source)
        if sys.stdin.isatty() and not arguments.input:  # somebody types: answer each line at once
            results: Iterable = (result for line in lines for result in translator([line], **options))
        else:
            results = translator(lines, batch_size=arguments.batch_size, **options)
        for number, result in enumerate(results, start=1):
            for candidate in result if isinstance(result, list) else [result]:
                if "error" in candidate:
                    print(f"line {number} is not translated: {candidate['error']}", file=sys.stderr)
                text = as_cell(candidate["translation_text"])
                terms += [each["target"] is not None for each in candidate.get("terms", ())]
                sink.write(f"{number}\t{candidate.get('score', 0.0):.4f}\t{text}\n" if with_scores else f"{text}\n")
            if sink is sys.stdout:
                sink.flush()
    if arguments.glossary:
        print(f"glossary: {sum(terms)} of {len(terms)} terms met", file=sys.stderr)


def read_glossary(path: Path) -> dict[str, list[str]]:
    """Source terms and their translations. Raises ValueError for a line without a tab, and for a term given twice."""
    glossary: dict[str, list[str]] = {}
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        source, *targets = (each.strip() for each in line.split("\t"))
        if not source or not targets or not all(targets):
            raise ValueError(f"{path}, line {number}: {line[:80]!r}: give a term, a tab, and its translation.")
        if source in glossary:
            raise ValueError(f"{path}, line {number}: {source!r} a second time: put its translations into one line.")
        glossary[source] = targets
    return glossary


def decoded(lines: BinaryIO) -> Iterator[str]:
    """Lines as text; one that is not UTF-8 is told, and is blank."""
    for number, line in enumerate(lines, start=1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            place = f"byte {line[error.start]:#04x}"
            print(f"line {number} is not translated: not UTF-8 ({place})", file=sys.stderr)
            yield ""


if __name__ == "__main__":
    main()
