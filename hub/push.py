"""Publish a checkpoint on the Hub: weights, tokenizer, model code and model card.

    vanilla-transformer push runs/mine user/name --license cc-by-4.0 --dry-run    # in a clone also: python -m hub.push
    vanilla-transformer push runs/mine user/name --license cc-by-4.0 --private

Before the upload, a new process without this package loads the model from the files and translates a sentence. The
upload is a single commit: if it fails, the repository is unchanged, and you can push again. Files that others have
written or changed in the repository are overwritten only with --replace. If the repository contains an earlier push of
something else, --replace deletes it. Without --replace, this is an error.
"""

from functools import partial
from typing import TYPE_CHECKING

from vanilla_transformer.shared.command_line import CommandLineParser, existing_path

from .publishing import PushSettings

if TYPE_CHECKING:
    from .publishing.upload import PushResult


def main() -> None:
    parser = CommandLineParser("hub.push", __doc__)
    parser.add_argument("checkpoint", type=existing_path, help="Path to the checkpoint directory.")
    parser.add_argument("repo_id", help="Name of the repository, user/name.")
    parser.add_settings(PushSettings)
    options = parser.parse_options()
    from .hub_errors import TransportError, hub_error_message  # slow imports
    from .publishing.upload import push

    formatter = partial(hub_error_message, repo_id=options["repo_id"])
    with parser.exit_on_user_error(TransportError, formatter=formatter):
        result = push(**options)
        parser.print_result(vars(result), summarize(result))


def summarize(result: "PushResult") -> str:
    """Return a text with the uploaded files, or with --dry-run the files to upload and the card."""
    from .commits import MANIFEST_NAME  # slow import

    lines = [f"Removed from recipe.yaml: {', '.join(result.removed_keys)}"] if result.removed_keys else []
    source, translation = result.example
    lines += [f"The files load without the package. Translation of {source!r}: {translation!r}"]
    lines += [f"{size:>14,}  {name}" for name, size in result.files.items()]
    lines += [f"{'file list':>14}  {MANIFEST_NAME}"]
    if result.url is None:
        return "\n".join([*lines, "", result.card, "Nothing was uploaded."])
    at_revision = f', revision="{result.revision}"' if result.revision != "main" else ""
    call = f'AutoModelForSeq2SeqLM.from_pretrained("{result.repo_id}"{at_revision}, trust_remote_code=True)'
    lines += [result.url, call]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
