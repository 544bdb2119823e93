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
    existing_path,
    new_path,
    positive_int,
    start_of_command,
)


def main() -> None:
    parser = CommandLineParser("training.average", __doc__)
    add = parser.add_argument
    checkpoints_help = "Checkpoints, or one run with --last or --best."
    add("checkpoints", type=existing_path, nargs="+", metavar="checkpoint", help=checkpoints_help)
    output_help = "Path to write the averaged model and its tokenizer to."
    add("--output", type=new_path, required=True, help=output_help)
    selection = parser.add_mutually_exclusive_group()
    selection.add_argument("--last", type=positive_int, metavar="N", help="Average the last N checkpoints of the run.")
    selection.add_argument("--best", type=positive_int, metavar="N", help="Average the best N checkpoints of the run.")
    reject_former_order(parser, sys.argv[1:])
    options = parser.parse_options()

    from .run.checkpoints import average, choose_checkpoints  # slow imports

    with parser.exit_on_user_error():
        output = options.pop("output")
        checkpoints = choose_checkpoints(**options)
        average(checkpoints, output)
        result = {"output": output, "checkpoints": checkpoints}
        parser.print_result(result, f"{output}: mean of {', '.join(map(str, checkpoints))}")


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
