"""More pairs out of the same pairs: data diversification (Nguyen et al. 2020, "Data Diversification: A Simple Strategy
For Neural Machine Translation").

    python -m training.diversify FORWARD BACKWARD --source D/train.en --target D/train.de --output D/diverse.tsv
    python -m training.train RECIPE.yaml --data_dir D --train_file diverse.tsv

FORWARD translates from source to target, BACKWARD from target to source; both were trained on these pairs. Written is
each pair twice, then each source with its two best translations, then the three best translations of each target with
it. A fresh model that learns from this sees the same captions in many wordings and learns fewer of them by heart.

It is `training.distill` there and back, and goes on where it was interrupted as that does.
"""

import argparse
from pathlib import Path

from training.distill import validate_languages
from training.distillation.candidate_selection import TableSection
from training.distillation.pair_table import PairTableBuilder
from training.run.distributed import main_process_reports_first
from training.run.hardware import configure_malloc
from vanilla_transformer.shared.command_line import CommandLineParser, exit_on_user_error

COPIES_PER_PAIR, FORWARD_NBEST, BACKWARD_NBEST = 2, 2, 3  # of a pair; translations of its source; of its target


def main() -> None:
    parser = CommandLineParser("training.diversify", __doc__)
    parser.add_argument("forward", help="checkpoint that translates from source to target, a folder or on the Hub")
    parser.add_argument("backward", help="checkpoint that translates from target to source")
    parser.add_argument("--source", type=Path, required=True, help="text file, a sentence a line")
    parser.add_argument("--target", type=Path, required=True, help="text file, its translations line by line")
    parser.add_argument("--output", type=Path, required=True, help="table (.tsv) to be made: source, target")
    for side in ("forward", "backward"):
        parser.add_argument(f"--{side}_with", nargs="+", default=[], help=f"further checkpoints, together with {side}")
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
    pieces = [
        TableSection(forward, source, target, nbest=FORWARD_NBEST, keep_copies=True),
        TableSection(backward, target, source, nbest=BACKWARD_NBEST, keep_copies=True, backward=True),
    ]
    table = PairTableBuilder(arguments.output, pieces, COPIES_PER_PAIR)
    with main_process_reports_first(table):
        table.build()


if __name__ == "__main__":
    main()
