"""Settings of runs for which the user specifies data, but no recipe file."""

import dataclasses
import logging
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

import torch

from vanilla_transformer.shared.command_line import logger

from ..data.discovery import discover_files
from ..data.files import read_file
from ..data.hub_datasets import read_dataset
from ..inference.translators import read_run_recipe
from ..recipe.arguments import DataArguments, Recipe, use_dataset
from ..recipe.reading import read_options, read_recipe, split_null_options
from ..recipe.rules import NORMS, Choice, choose_held_out, choose_settings, summarize_data
from .distributed import count_cores
from .output_dir import is_trained

DATA_OPTIONS = "data_dir", "train_file", "validation_file", "test_file", "source_lang", "target_lang"


def read_or_choose_recipe(arguments: list[str], settings: Mapping[str, Any] | None = None) -> Recipe:
    """Read the recipe of a command. Without one, choose its settings from the data and the time.

    An interrupted run keeps its settings. The choice is the same in every process. For the arguments, see
    `read_recipe`; the recipe is optional.
    """
    given = {} if arguments[:1] and not arguments[0].startswith("-") else read_options(arguments, settings or {})
    if not {"data_dir", "train_file", "dataset_name"} & given.keys():
        return read_recipe(arguments, settings)
    given = {name: value for name, value in given.items() if value is not None or name.endswith("_file")}
    if given.get("streaming"):
        raise ValueError("streaming requires a recipe, because the rules read all training pairs. Specify one.")
    uses_dataset = "dataset_name" in given and given.get("data_dir") in (None, given["dataset_name"])
    data = {} if uses_dataset else discover_files(**{name: given.get(name) for name in DATA_OPTIONS})
    choices = {name: Choice(value, "") for name, value in data.items() if name not in given}
    # with only a train_file, its directory becomes data_dir, and the names of the files are relative to it
    located = {name: value for name, value in data.items() if given.get(name) is not None}
    arguments, given = [*arguments, *(f"--{name}={value}" for name, value in located.items())], given | located
    if "output_dir" not in given:
        name = Path(str(data.get("data_dir", given.get("dataset_name")))).resolve().name
        choices["output_dir"] = Choice(f"runs/{name}", "named after the data; --output-dir changes it")
    keys = {name: choice.value for name, choice in choices.items()} | given
    corpus = read_splits(keys)
    train = corpus["train"]
    if not len(train):
        raise ValueError("the train set has no pairs.")
    summary = summarize_data(train.sources, train.targets, given.get("tokenizer_type"))
    choices |= choose_settings(summary, *find_devices(bool(given.get("use_cpu"))), given)
    missing = [split for split in ("validation", "test") if data.get(f"{split}_file", corpus.get(split, "")) is None]
    held_out = choose_held_out(len(train), [split for split in missing if f"{split}_file" not in given])
    choices |= {name: choice for name, choice in held_out.items() if name not in given}
    folder = Path(keys["output_dir"])
    if is_trained(folder):
        saved = read_run_recipe(folder)
        folders = [Path(str(each["data_dir"])).resolve() for each in (saved, keys) if each.get("data_dir")]
        if "output_dir" not in given and len(set(folders)) > 1:
            raise ValueError(f"{folder} contains a run on the data in {folders[0]}. Set another --output-dir.")
        present = {"output_dir", *data}  # come from the present files and command instead
        choices = {
            name: choice if name in present else choice._replace(value=saved[name])
            for name, choice in choices.items()
            if name in present or name in saved  # without a value, an earlier version had the default
        }
    # for an option with the value None, the choice of the rules is the default
    arguments, null_options = split_null_options(arguments)
    arguments += [f"--{name}=null" for name in null_options if name not in choices]
    settings = {name: value for name, value in (settings or {}).items() if value is not None or name not in choices}
    recipe = read_recipe(arguments, settings, {name: choice.value for name, choice in choices.items()})
    recipe.reasons = {name: choice.reason for name, choice in choices.items() if choice.reason}
    return recipe


def read_splits(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the training pairs of a recipe with these keys. Messages are suppressed, because the run repeats them.

    For a dataset, return all splits, with None for missing validation or test data.
    """
    names = {f.name for f in dataclasses.fields(DataArguments)}
    arguments = DataArguments(**{name: value for name, value in keys.items() if name in names})
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        if use_dataset(arguments):
            return dict.fromkeys(("validation", "test")) | read_dataset(arguments)
        return {"train": read_file(arguments, arguments.train_file)}
    finally:
        logger.setLevel(level)


def find_devices(use_cpu: bool) -> tuple[str, int]:
    """Return the type and number of the devices for training: CPU cores or accelerators."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return ("cpu", count_cores()) if use_cpu or device is None else (device.type, torch.accelerator.device_count())


def with_safer_settings(recipe: Recipe) -> tuple[Recipe, str]:
    """Return a copy of a recipe whose learning rate is chosen by rules, with safer settings, and what it changes.

    Pre-norm, with its learning rate and warm-up, replaces post-norm chosen by the rules. In other cases, the learning
    rate is halved.
    """
    safe = dataclasses.replace(recipe, model=copy(recipe.model), training=copy(recipe.training), reasons={})
    if has_chosen_post_norm(recipe):
        safe.model.norm_position = "pre"
        safe.training.learning_rate, safe.training.warmup_steps = NORMS["pre"]  # for d_model 128, as post-norm
        return safe, "pre-norm"
    assert safe.training.learning_rate is not None
    safe.training.learning_rate /= 2
    return safe, f"learning_rate {safe.training.learning_rate:g}"


def has_chosen_post_norm(recipe: Recipe) -> bool:
    return "norm_position" in recipe.reasons and recipe.model.norm_position == "post"


def describe_choice(recipe: Recipe) -> str:
    """Return the settings that rules have chosen, with one reason per line."""
    values = recipe.to_dict()
    rows: dict[str, list[str]] = {}
    for name, reason in recipe.reasons.items():
        rows.setdefault(reason, []).append(f"{name} {values[name]}")
    lines = [f"  {reason}: {', '.join(settings)}" for reason, settings in rows.items()]
    return "\n".join(["settings without a recipe (an option or a recipe overrides them):", *lines])
