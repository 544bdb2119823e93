"""Create training pairs for a student from translations of one teacher or an ensemble.

    vanilla-transformer distill runs/one runs/two --source D/train.en --output D/distilled.tsv
    vanilla-transformer distill runs/one --source D/train.en --target D/train.de --output D/nearest.tsv  # interpolation
    vanilla-transformer train multi30k_student --data-dir D --train-file distilled.tsv
    torchrun --nproc-per-node 8 -m training.distill runs/one --source D/mono.en --output D/mono.tsv --min-score -0.7

This is sequence-level knowledge distillation (Kim and Rush 2016). The text can be larger than the memory. After an
interruption, the same command resumes and writes the same table. `D/distilled.tsv.parts` contains the progress. The
function with the same options is `training.distillation.distilling.distill`.
"""

from dataclasses import asdict

from vanilla_transformer.shared.command_line import CommandLineParser, existing_path

from .distillation.settings import DistillationSettings
from .inference.settings import CHECKPOINTS


def main() -> None:
    parser = CommandLineParser("training.distill", __doc__)
    parser.add_argument("teachers", **CHECKPOINTS | {"metavar": "teacher"})
    source_help = "Text file with one source sentence per line."
    parser.add_argument("--source", type=existing_path, required=True, help=source_help)
    parser.add_argument("--output", required=True, help="Table (.tsv) to write: source, translation.")
    parser.add_settings(DistillationSettings)
    options = parser.parse_options()

    from .distillation.distilling import distill  # slow imports
    from .run.hardware import configure_malloc

    configure_malloc()
    with parser.exit_on_user_error():
        if table := distill(**options):
            parser.print_result(asdict(table), table.describe())


if __name__ == "__main__":
    main()
