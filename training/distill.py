"""Create training pairs for a student from translations of one teacher or an ensemble.

    python -m training.distill runs/one runs/two --source D/train.en --output D/distilled.tsv
    python -m training.distill runs/one --source D/train.en --target D/train.de --output D/nearest.tsv   # interpolation
    torchrun --nproc-per-node 8 -m training.distill runs/one --source D/mono.en --output D/mono.tsv --min-score -0.7
    python -m training.train training/recipes/multi30k_student.yaml --data-dir D --train-file distilled.tsv

This is sequence-level knowledge distillation (Kim and Rush 2016). The text can be larger than the memory. After an
interruption, the same command resumes and writes the same table. `D/distilled.tsv.parts` contains the progress.
"""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from vanilla_transformer.shared.command_line import (
    CommandLineParser,
    add_options,
    exit_on_user_error,
    exponent_type,
    option_name,
)

from .distillation.candidate_selection import TableSection
from .distillation.pair_table import PairTableBuilder
from .inference.translators import CHECKPOINTS, read_run_recipe
from .run.distributed import main_process_reports_first
from .run.hardware import configure_malloc, device_type


def main() -> None:
    parser = CommandLineParser("training.distill", __doc__)
    parser.add_argument("teacher", nargs="+", help=CHECKPOINTS)
    parser.add_argument("--source", type=Path, required=True, help="Text file with one source sentence per line.")
    target_help = "Text file with reference translations. Of the n best, the one closest to the reference is used."
    parser.add_argument("--target", type=Path, help=target_help)
    parser.add_argument(
        "--with-references", action="store_true", help="With --target: write the reference pairs first."
    )
    parser.add_argument("--output", type=Path, required=True, help="Table (.tsv) to write: source, translation.")
    nbest_help = "Translations per line. With --target: candidates per line, by default one per beam."
    parser.add_argument("--nbest", type=int, help=nbest_help)
    parser.add_argument("--num-beams", type=int, help="Beam size. Default: the first teacher's.")
    parser.add_argument("--length-penalty", type=exponent_type, help="Length penalty. Default: the first teacher's.")
    parser.add_argument("--max-new-tokens", type=int, help="Maximum translation length. Default: the first teacher's.")
    parser.add_argument("--batch-size", type=int, default=64, help="Sentences per batch (default: %(default)s).")
    score_help = "Drop translations with a lower score: log-probability / length ** length_penalty."
    parser.add_argument("--min-score", type=float, help=score_help)
    ratio_help = "Drop pairs in which one side has more than this many times the tokens of the other."
    parser.add_argument("--max-length-ratio", type=float, help=ratio_help)
    copies_help = "Keep translations that are identical to their source. By default they are dropped."
    parser.add_argument("--keep-copies", action="store_true", help=copies_help)
    add_options(parser, "engine", "quantization")
    device_help = "Device such as cpu or cuda. Default: one GPU per process, if available."
    parser.add_argument("--device", type=device_type, help=device_help)
    arguments = parser.parse_args()
    configure_malloc()
    with exit_on_user_error(parser.prog):
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    for name in ("nbest", "num_beams", "max_new_tokens", "batch_size", "max_length_ratio"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            raise ValueError(f"{option_name(name)} {getattr(arguments, name)} must be at least 1.")
    if arguments.num_beams and (arguments.nbest or 1) > arguments.num_beams:
        raise ValueError(f"--nbest {arguments.nbest} must be at most --num-beams {arguments.num_beams}.")
    if arguments.with_references and not arguments.target:
        raise ValueError("--with-references requires --target.")
    validate_languages(arguments.teacher, arguments.source)
    options = vars(arguments)
    chosen = {field.name: options[field.name] for field in fields(TableSection) if field.name in options}
    chosen |= {"teachers": tuple(arguments.teacher), "nbest": arguments.nbest or (0 if arguments.target else 1)}
    section = TableSection(**chosen, closest_to_reference=arguments.target is not None)
    table = PairTableBuilder(arguments.output, [section], int(arguments.with_references), arguments.device)
    with main_process_reports_first(table):
        table.build()


def validate_languages(teachers: Sequence[str], source: Path) -> None:
    """Raise ValueError if the teachers or the suffix of the source file have different languages."""
    first: dict[Any, Any] = {}
    for teacher in teachers:
        recipe = read_run_recipe(Path(teacher))
        languages = {key: recipe[key] for key in ("source_lang", "target_lang") if key in recipe}
        if not languages:
            continue
        message = f"{teacher} translates from {languages.get('source_lang')} to {languages.get('target_lang')}"
        if first and languages != first:
            raise ValueError(f"{message}, but {teachers[0]} does not. Use teachers of one language pair.")
        if source.suffix == f".{languages.get('target_lang')}" != f".{languages.get('source_lang')}":
            raise ValueError(f"{message}, but --source is {source}. Use a text in the source language.")
        first = first or languages


if __name__ == "__main__":
    main()
