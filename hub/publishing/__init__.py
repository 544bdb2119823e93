"""Publication on the Hub: model card and upload."""

import re
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vanilla_transformer.shared.command_line import option


def license_id(text: str) -> str:
    """Return the value of `--license`. Raise ArgumentTypeError if it is not a license identifier."""
    if not re.fullmatch(r"[a-z][a-z0-9]*([.+-]+[a-z0-9]+)*\+{0,2}", text):
        raise ArgumentTypeError(f"{text!r} is not a license of https://huggingface.co/docs/hub/repositories-licenses")
    return text


def hub_id(text: str) -> str:
    """Return the value of an option. Raise ArgumentTypeError if it is not a Hub id."""
    from ..run_files import is_repository  # slow import

    if not is_repository(text):
        raise ArgumentTypeError(f"{text!r} is not a Hub id. Use the form user/name.")
    return text


@dataclass(frozen=True, kw_only=True)
class CardSettings:
    """Metadata that only the owner knows: options of `card` and `make_card`."""

    license: str | None = option(None, "License identifier of the Hub, such as cc-by-4.0.", type=license_id)
    datasets: Sequence[str] | None = option(
        None, "Hub id of the training data. The option can be repeated.", name="--dataset", action="append",
        type=hub_id, metavar="DATASET",
    )  # fmt: skip
    base_model: str | None = option(None, "Hub id of the model that was fine-tuned.", type=hub_id)


@dataclass(frozen=True, kw_only=True)
class UploadSettings:
    """Options of all uploads."""

    private: bool = option(False, "Create a private repository.")
    replace: bool = option(False, "Overwrite files that others changed, and delete an earlier push of something else.")


@dataclass(frozen=True, kw_only=True)
class PushSettings(UploadSettings, CardSettings):
    """Options of `push`."""

    revision: str = option("main", "Branch, created if it is missing. Default: %(default)s.")
    message: str = option("Upload of the checkpoint", "The commit message.")
    dry_run: bool = option(False, "Only print the files and the card.")
    card: Literal["generated", "local", "keep"] | None = option(
        None, "Model card. generated (default): from the results. local: README.md of the checkpoint. keep: no change."
    )
