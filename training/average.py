"""Average the weights of several checkpoints (section 6.1: "obtained by averaging the last 5 checkpoints").

    vanilla-transformer average RUN/checkpoint-800 RUN/checkpoint-1000 --output OUT
    vanilla-transformer average RUN --last 5 --output OUT
    vanilla-transformer average RUN --best 5 --output OUT       # by the evaluation metric of the run

The function with the same options is `training.run.checkpoints.average`.
"""

import os
import shlex
import sys

from vanilla_transformer.shared.command_line import (
    CommandLineParser,
    add_options,
    existing_path,
    exit_on_user_error,
    new_path,
    positive_int,
    print_result,
    start_of_command,
)


def make_parser() -> CommandLineParser:
    parser = CommandLineParser("training.average", __doc__)
    checkpoints_help = "Checkpoints, or one run with --last or --best."
    parser.add_argument("checkpoint", type=existing_path, nargs="+", help=checkpoints_help)
    output_help = "Path to write the averaged model and its tokenizer to."
    parser.add_argument("--output", type=new_path, required=True, help=output_help)
    selection = parser.add_mutually_exclusive_group()
    selection.add_argument("--last", type=positive_int, metavar="N", help="Average the last N checkpoints of the run.")
    selection.add_argument("--best", type=positive_int, metavar="N", help="Average the best N checkpoints of the run.")
    add_options(parser, "json", "quiet")
    return parser


def main() -> None:
    parser = make_parser()
    reject_former_order(parser, sys.argv[1:])
    arguments = parser.parse_args()

    from .run.checkpoints import average, choose_checkpoints  # slow imports

    with exit_on_user_error(parser.prog, quiet=arguments.quiet):
        checkpoints = choose_checkpoints(arguments.checkpoint, last=arguments.last, best=arguments.best)
        output = average(checkpoints, arguments.output)
        result = {"output": output, "checkpoints": checkpoints}
        print_result(result, arguments.json, f"{output}: mean of {', '.join(map(str, checkpoints))}")


def reject_former_order(parser: CommandLineParser, arguments: list[str]) -> None:
    """Exit with the new command if the first path is the output, as in earlier versions."""
    out, *others = arguments or [""]
    has_output = any(each.partition("=")[0] == "--output" for each in arguments)
    if has_output or out.startswith("-") or is_model(out):
        return
    if any(map(is_model, others)) or (not os.path.exists(out) and any(map(os.path.exists, others))):
        command = f"{start_of_command('training.average')} {shlex.join([*others, '--output', out])}"
        parser.error(f"the output is now an option. Run: {command}")


def is_model(folder: str) -> bool:
    return os.path.exists(f"{folder}/config.json")


if __name__ == "__main__":
    main()
