"""Generate the model card of a checkpoint: Hub metadata and a description, with figures from its saved results.

    vanilla-transformer card runs/mine user/name --license cc-by-4.0      # in a clone also: python -m hub.model_card

The data sets are those that the run logged when it read the data, not those in its recipe. The card states which values
are unknown.
"""

from functools import partial

from vanilla_transformer.shared.command_line import CommandLineParser, existing_path

from .publishing import CardSettings


def main() -> None:
    parser = CommandLineParser("hub.model_card", __doc__)
    parser.add_argument("checkpoint", type=existing_path, help="Path to the checkpoint directory.")
    parser.add_argument("repo_id", help="Name of the repository on the Hub, user/name.")
    parser.add_settings(CardSettings)
    options = parser.parse_options()
    from .hub_errors import hub_error_message  # slow imports
    from .publishing.card import make_card

    with parser.exit_on_user_error(formatter=partial(hub_error_message, repo_id=options["repo_id"])):
        card = make_card(**options)
        parser.print_result({"metadata": card.data.to_dict(), "text": card.text}, str(card))


if __name__ == "__main__":
    main()
