"""Add translations of the training pairs in both directions: data diversification (Nguyen et al. 2020).

    python -m training.diversify FORWARD BACKWARD --source D/train.en --target D/train.de --output D/diverse.tsv
    python -m training.train RECIPE.yaml --data-dir D --train-file diverse.tsv

FORWARD translates from source to target, BACKWARD from target to source. Both were trained on these pairs. The table
contains each pair twice, each source with its two best translations, and the three best translations of each target
with that target. A model trained on the table overfits less. Like `training.distill`, the command can be resumed.
"""

import argparse
from pathlib import Path
from typing import Any

from vanilla_transformer.shared.command_line import CommandLineParser, add_options, exit_on_user_error

from .distill import validate_languages
from .distillation.candidate_selection import TableSection
from .distillation.pair_table import PairTableBuilder
from .run.distributed import main_process_reports_first
from .run.hardware import configure_malloc

COPIES_PER_PAIR, FORWARD_NBEST, BACKWARD_NBEST = 2, 2, 3


def main() -> None:
    parser = CommandLineParser("training.diversify", __doc__)
    parser.add_argument("forward", help="Source-to-target checkpoint: directory, or repository on the Hub.")
    parser.add_argument("backward", help="Target-to-source checkpoint.")
    parser.add_argument("--source", type=Path, required=True, help="Text file with one source sentence per line.")
    parser.add_argument("--target", type=Path, required=True, help="Text file with the translations of these lines.")
    parser.add_argument("--output", type=Path, required=True, help="Table (.tsv) to write: source, target.")
    for side in ("forward", "backward"):
        parser.add_argument(f"--{side}_with", nargs="+", default=[], help=f"Checkpoints to ensemble with {side}.")
    add_options(parser, "engine", "quantization")
    arguments = parser.parse_args()
    configure_malloc()
    with exit_on_user_error(parser.prog):
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    source, target = arguments.source, arguments.target
    forward = (arguments.forward, *arguments.forward_with)
    backward = (arguments.backward, *arguments.backward_with)
    validate_languages(forward, source)
    validate_languages(backward, target)
    options: dict[str, Any] = {"keep_copies": True, "engine": arguments.engine, "quantization": arguments.quantization}
    sections = [
        TableSection(forward, source, target, nbest=FORWARD_NBEST, **options),
        TableSection(backward, target, source, nbest=BACKWARD_NBEST, backward=True, **options),
    ]
    table = PairTableBuilder(arguments.output, sections, COPIES_PER_PAIR)
    with main_process_reports_first(table):
        table.build()


if __name__ == "__main__":
    main()
