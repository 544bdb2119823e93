"""Add translations of the training pairs in both directions: data diversification (Nguyen et al. 2020).

    vanilla-transformer diversify FORWARD BACKWARD --source D/train.en --target D/train.de --output D/diverse.tsv
    vanilla-transformer train RECIPE.yaml --data-dir D --train-file diverse.tsv

FORWARD translates from source to target, BACKWARD from target to source. Both were trained on these pairs. The table
contains each pair twice, each source with its two best translations, and the three best translations of each target
with that target. A model trained on the table overfits less. Like `distill`, the command can be resumed. The function
with the same options is `training.distillation.distilling.diversify`.
"""

from dataclasses import asdict

from vanilla_transformer.shared.command_line import CommandLineParser, checkpoint_name, existing_path

from .inference.settings import EngineSettings


def main() -> None:
    parser = CommandLineParser("training.diversify", __doc__)
    add = parser.add_argument
    add("forward", type=checkpoint_name, help="Source-to-target checkpoint: directory, or repository on the Hub.")
    add("backward", type=checkpoint_name, help="Target-to-source checkpoint.")
    add("--source", type=existing_path, required=True, help="Text file with one source sentence per line.")
    add("--target", type=existing_path, required=True, help="Text file with the translations of these lines.")
    add("--output", required=True, help="Table (.tsv) to write: source, target.")
    for side in ("forward", "backward"):
        ensemble_help = f"Checkpoints to ensemble with {side}."
        add(f"--{side}-with", nargs="+", type=checkpoint_name, default=[], help=ensemble_help)
    parser.add_settings(EngineSettings)
    options = parser.parse_options()

    from .distillation.distilling import diversify  # slow imports
    from .run.hardware import configure_malloc

    configure_malloc()
    with parser.exit_on_user_error():
        for side in ("forward", "backward"):
            options[side] = [options[side], *options.pop(f"{side}_with")]
        if table := diversify(**options):
            parser.print_result(asdict(table), table.describe())


if __name__ == "__main__":
    main()
