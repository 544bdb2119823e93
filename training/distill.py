"""Pairs for a student: what one teacher or several together translate a text to. Sequence-level knowledge distillation
(Kim and Rush 2016, "Sequence-Level Knowledge Distillation").

    python -m training.distill runs/one runs/two --source D/train.en --output D/distilled.tsv
    python -m training.distill runs/one --source D/train.en --target D/train.de --output D/nearest.tsv   # interpolation
    torchrun --nproc-per-node 8 -m training.distill runs/one --source D/mono.en --output D/mono.tsv --min_score -0.7
    python -m training.train training/recipes/multi30k_student.yaml --data_dir D --train_file distilled.tsv

The text may be larger than the memory. However the command ends, the same command goes on where it was, and the table
is in the end the same. `D/distilled.tsv.parts` holds what is done until then.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.distillation.candidate_selection import TableSection
from training.distillation.pair_table import PairTableBuilder
from training.run.distributed import main_process_reports_first
from training.run.hardware import configure_malloc, device_type
from training.translators import CHECKPOINTS, read_run_recipe
from vanilla_transformer.shared.command_line import CommandLineParser, exit_on_user_error, exponent_type


def main() -> None:
    parser = CommandLineParser("training.distill", __doc__)
    parser.add_argument("teacher", nargs="+", help=CHECKPOINTS)
    parser.add_argument("--source", type=Path, required=True, help="text file to translate, a sentence a line")
    parser.add_argument(
        "--target", type=Path, help="its translations by people: of the n best the one nearest to them is taken"
    )
    parser.add_argument("--with_references", action="store_true", help="with --target: write these pairs first, too")
    parser.add_argument("--output", type=Path, required=True, help="table (.tsv) to be made: source, translation")
    parser.add_argument(
        "--nbest",
        type=int,
        help="translations a line, each a pair; with --target those to choose from (default: all beams)",
    )
    parser.add_argument("--num_beams", type=int, help="beam size; default: the first teacher's")
    parser.add_argument("--length_penalty", type=exponent_type, help="default: the first teacher's")
    parser.add_argument("--max_new_tokens", type=int, help="longest translation; default: the first teacher's")
    parser.add_argument("--batch_size", type=int, default=64, help="sentences a batch (default: %(default)s)")
    parser.add_argument(
        "--min_score", type=float, help="leave out what scores less, log-probability / length ** length_penalty"
    )
    parser.add_argument(
        "--max_length_ratio",
        type=float,
        help="leave out pairs of which one side has more than so many times the tokens",
    )
    parser.add_argument(
        "--keep_copies", action="store_true", help="keep translations that are their source; else they are left out"
    )
    parser.add_argument(
        "--device", type=device_type, help="cpu, cuda, ...; default: a GPU a process, where there is one"
    )
    arguments = parser.parse_args()
    configure_malloc()
    with exit_on_user_error(parser.prog):
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    for name in ("nbest", "num_beams", "max_new_tokens", "batch_size", "max_length_ratio"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            raise ValueError(f"--{name} {getattr(arguments, name)}: give a number of at least 1.")
    if arguments.num_beams and (arguments.nbest or 1) > arguments.num_beams:
        raise ValueError(f"--nbest {arguments.nbest} needs as many beams: --num_beams {arguments.num_beams} are fewer.")
    if arguments.with_references and not arguments.target:
        raise ValueError("--with_references needs --target: give the text that holds them.")
    validate_languages(arguments.teacher, arguments.source)
    options = vars(arguments)
    names = ("num_beams", "length_penalty", "max_new_tokens", "batch_size", "min_score", "max_length_ratio")
    piece = TableSection(
        teachers=tuple(arguments.teacher),
        source=arguments.source,
        target=arguments.target,
        nbest=arguments.nbest or (0 if arguments.target else 1),
        closest_to_reference=arguments.target is not None,
        keep_copies=arguments.keep_copies,
        **{name: options[name] for name in names},
    )
    table = PairTableBuilder(arguments.output, [piece], int(arguments.with_references), arguments.device)
    with main_process_reports_first(table):
        table.build()


def validate_languages(teachers: Sequence[str], source: Path) -> None:
    """Raises ValueError where the teachers' recipes, or the ending of the text's name, tell that they do not fit."""
    first: dict[Any, Any] = {}
    for teacher in teachers:
        recipe = read_run_recipe(Path(teacher))
        languages = {key: recipe[key] for key in ("source_lang", "target_lang") if key in recipe}
        if not languages:
            continue
        told = f"{teacher} translates from {languages.get('source_lang')} to {languages.get('target_lang')}"
        if first and languages != first:
            raise ValueError(f"{told}, and {teachers[0]} does not: give teachers of one language pair.")
        if source.suffix == f".{languages.get('target_lang')}" != f".{languages.get('source_lang')}":
            raise ValueError(f"{told}, but --source is {source}: give a text in the other language.")
        first = first or languages


if __name__ == "__main__":
    main()
