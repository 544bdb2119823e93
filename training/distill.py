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

from vanilla_transformer.shared.command_line import (
    CHECKPOINTS,
    CommandLineParser,
    add_options,
    checkpoint_name,
    existing_path,
    exit_on_user_error,
    positive_int,
    print_result,
)


def make_parser() -> CommandLineParser:
    parser = CommandLineParser("training.distill", __doc__)
    add = parser.add_argument
    add("teacher", nargs="+", type=checkpoint_name, help=CHECKPOINTS)
    add("--source", type=existing_path, required=True, help="Text file with one source sentence per line.")
    target_help = "Text file with reference translations. The closest of the n best translations is used."
    add("--target", type=existing_path, help=target_help)
    add("--with-references", action="store_true", help="With --target: write the reference pairs first.")
    add("--output", required=True, help="Table (.tsv) to write: source, translation.")
    nbest_help = "Translations per line. With --target: candidates per line, by default one per beam."
    add("--nbest", type=positive_int, help=nbest_help)
    score_help = "Drop translations with a lower score: log-probability / length ** length_penalty."
    add("--min-score", type=float, help=score_help)
    ratio_help = "Drop pairs in which one side has more than this many times the tokens of the other."
    add("--max-length-ratio", type=float, help=ratio_help)
    copies_help = "Keep translations that are identical to their source. By default they are dropped."
    add("--keep-copies", action="store_true", help=copies_help)
    add_options(parser, "num_beams", "length_penalty", "max_new_tokens", "batch_size", "engine", "quantization")
    add_options(parser, "device", "json", "quiet")
    return parser


def main() -> None:
    parser = make_parser()
    options = vars(parser.parse_args())

    from .distillation.distilling import distill  # slow imports
    from .run.hardware import configure_malloc

    configure_malloc()
    as_json, quiet = options.pop("json"), options.pop("quiet")
    with exit_on_user_error(parser.prog, quiet=quiet):
        if table := distill(options.pop("teacher"), options.pop("source"), options.pop("output"), **options):
            print_result(asdict(table), as_json, table.describe())


if __name__ == "__main__":
    main()
