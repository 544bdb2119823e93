"""Generate the model card of a checkpoint: Hub metadata and a description, with figures from its saved results.

    vanilla-transformer card runs/mine user/name --license cc-by-4.0      # in a clone also: python -m hub.model_card

The data sets are those that the run logged when it read the data, not those in its recipe. The card states which values
are unknown.
"""

import argparse
import re
from argparse import ArgumentTypeError
from functools import partial

from vanilla_transformer.shared.command_line import (
    CommandLineParser,
    add_options,
    existing_path,
    exit_on_user_error,
    print_result,
)


def add_metadata_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for metadata that only the owner knows."""
    parser.add_argument("--license", type=license_id, help="License identifier of the Hub, such as cc-by-4.0.")
    parser.add_argument(
        "--dataset", action="append", default=[], type=hub_id, dest="datasets", metavar="DATASET",
        help="Hub id of the training data. The option can be repeated.",
    )  # fmt: skip
    parser.add_argument("--base-model", type=hub_id, help="Hub id of the model that was fine-tuned.")


def license_id(text: str) -> str:
    """Return the value of `--license`. Raise ArgumentTypeError if it is not a license identifier."""
    if not re.fullmatch(r"[a-z][a-z0-9]*([.+-]+[a-z0-9]+)*\+{0,2}", text):
        raise ArgumentTypeError(f"{text!r} is not a license of https://huggingface.co/docs/hub/repositories-licenses")
    return text


def hub_id(text: str) -> str:
    """Return the value of an option. Raise ArgumentTypeError if it is not a Hub id."""
    from .run_files import is_repository

    if not is_repository(text):
        raise ArgumentTypeError(f"{text!r} is not a Hub id. Use the form user/name.")
    return text


def main() -> None:
    parser = CommandLineParser("hub.model_card", __doc__)
    parser.add_argument("checkpoint", type=existing_path, help="Path to the checkpoint directory.")
    parser.add_argument("repo_id", help="Name of the repository on the Hub, user/name.")
    add_metadata_options(parser)
    add_options(parser, "json", "quiet")
    arguments = vars(parser.parse_args())
    as_json, quiet = arguments.pop("json"), arguments.pop("quiet")
    from .hub_errors import hub_error_message  # slow imports
    from .publishing.card import make_card

    formatter = partial(hub_error_message, repo_id=arguments["repo_id"])
    with exit_on_user_error(parser.prog, formatter=formatter, quiet=quiet):
        card = make_card(**arguments)
        print_result({"metadata": card.data.to_dict(), "text": card.text}, as_json, str(card))


if __name__ == "__main__":
    main()
