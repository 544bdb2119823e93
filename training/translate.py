"""Translates lines of text: from stdin to stdout, or file to file.

    echo "A dog runs." | python -m training.translate runs/demo
    python -m training.translate runs/demo --input source.en --output target.de --num_beams 5
    python -m training.translate runs/demo --input source.en --nbest 3      # columns: line, score, translation

One line comes out for each that goes in, in the same order, though batches are made by length. A line that cannot be
translated comes out empty, and the reason goes to stderr with its number; the others are not touched by it.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from training.hardware import keep_memory
from vanilla_transformer import TranslationPipeline


def main() -> None:
    parser = argparse.ArgumentParser(prog="training.translate", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="folder of a model with its tokenizer, or a repository on the Hub")
    parser.add_argument("--input", type=Path, help="text file; default: stdin")
    parser.add_argument("--output", type=Path, help="file to be made; default: stdout")
    parser.add_argument("--batch_size", type=int, default=64, help="sentences a batch (default: %(default)s)")
    parser.add_argument("--num_beams", type=int, help="beam size; default: the checkpoint's")
    parser.add_argument("--length_penalty", type=float, help="default: the checkpoint's")
    parser.add_argument("--max_new_tokens", type=int, help="longest translation; default: the checkpoint's")
    parser.add_argument("--nbest", type=int, default=1, help="translations a line; they come with scores")
    parser.add_argument("--scores", action="store_true", help="print columns: line, score, translation")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ...; default: a GPU where there is one")
    arguments = parser.parse_args()
    keep_memory()
    try:
        run(arguments)
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # the reader has seen enough, as `head` has
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        print(f"training.translate: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def run(arguments: argparse.Namespace) -> None:
    for name in ("batch_size", "nbest", "num_beams", "max_new_tokens"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            raise ValueError(f"--{name} {getattr(arguments, name)}: give a number of at least 1.")
    if arguments.output is not None and arguments.output.exists():
        raise ValueError(f"{arguments.output} exists already: give a file that does not.")
    if arguments.nbest > 1 and (arguments.num_beams or arguments.nbest) < arguments.nbest:
        raise ValueError(f"--nbest {arguments.nbest} needs as many beams: --num_beams {arguments.num_beams} are fewer.")
    translator = load(arguments.checkpoint, arguments.device)
    options: dict[str, Any] = {
        name: getattr(arguments, name)
        for name in ("num_beams", "length_penalty", "max_new_tokens")
        if getattr(arguments, name) is not None
    }
    if arguments.nbest > 1:
        beams = max(arguments.nbest, translator.model.generation_config.num_beams or 1)
        options = {"num_beams": beams} | options | {"num_return_sequences": arguments.nbest}
    if options.get("num_beams") == 1 and "length_penalty" not in options:
        options["length_penalty"] = None  # the checkpoint's is for its beams
    with_scores = arguments.scores or arguments.nbest > 1
    options |= {"return_scores": with_scores, "progress": sys.stderr.isatty() or arguments.output is not None}

    source: BinaryIO = arguments.input.open("rb") if arguments.input else sys.stdin.buffer
    sink: TextIO = arguments.output.open("w", encoding="utf-8") if arguments.output else sys.stdout
    with source, sink if arguments.output else nullcontext():
        lines = decoded(source)
        if sys.stdin.isatty() and not arguments.input:  # somebody types: answer each line at once
            results: Iterable = (result for line in lines for result in translator([line], **options))
        else:
            results = translator(lines, batch_size=arguments.batch_size, **options)
        for number, result in enumerate(results, start=1):
            for candidate in result if isinstance(result, list) else [result]:
                if "error" in candidate:
                    print(f"line {number} is not translated: {candidate['error']}", file=sys.stderr)
                text = " ".join(candidate["translation_text"].splitlines())
                sink.write(f"{number}\t{candidate.get('score', 0.0):.4f}\t{text}\n" if with_scores else f"{text}\n")
            if sink is sys.stdout:
                sink.flush()


def load(checkpoint: str, device: str | None = None) -> TranslationPipeline:
    """A checkpoint's translator; raises ValueError or OSError where it has none."""
    import vanilla_transformer  # noqa: F401  # registers the model

    if Path(checkpoint).exists() and not (Path(checkpoint) / "config.json").exists():
        raise ValueError(f"{checkpoint} is no checkpoint: it has no config.json.")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint).to(device).eval()
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    except (RuntimeError, OSError, KeyError) as error:
        raise ValueError(f"{checkpoint} cannot be loaded: {str(error).strip().splitlines()[0]}") from error
    return TranslationPipeline(model=model, tokenizer=tokenizer)


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
