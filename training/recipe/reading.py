"""Recipes: flat YAML files with all settings of a run, which can be overridden on the command line."""

import argparse
import dataclasses
import json
from argparse import SUPPRESS
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

import torch
import yaml
from transformers import HfArgumentParser

from vanilla_transformer.shared.command_line import (
    RENAMED_OPTIONS,
    CommandLineParser,
    closest_match,
    int_type,
    logger,
    option_name,
)

from .arguments import PARTS, RENAMED_VALUES, UNSUPPORTED, UNSUPPORTED_ADVICE, Recipe, TrainingArguments
from .packaged import find_recipe
from .resolution import resolve_minutes, resolve_recipe, validate_overrides
from .validation import LIBRARY_ERRORS

KNOWN_KEYS = [f.name for part in PARTS for f in dataclasses.fields(part)]
CHOSEN = "chosen"  # name of a recipe that rules have chosen
MAX_NESTING_DEPTH = 8  # of YAML collections; only lr_scheduler_kwargs and fsdp_config need nesting


class RecipeCommandLine(CommandLineParser, HfArgumentParser):
    """Command line with one option per dataclass field.

    An integer whose default is "auto" can also be "auto". A list can be empty.
    """

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        if options.get("default") == "auto" and options.get("type") is int:
            options["type"] = int_or_auto
        if options.get("nargs") == "+" or "--report_to" in names:
            options["nargs"] = "*"
        return super().add_argument(*names, **options)

    def error(self, message: str) -> NoReturn:
        """Raise ValueError, for the Python function as well as for the command."""
        raise ValueError(self.add_suggestion(message))


def int_or_auto(text: str) -> int | str:
    """Argparse type: an integer or "auto"."""
    return text if text == "auto" else int_type(text)


int_or_auto.__name__ = "int"  # for argparse's messages


def make_parser() -> RecipeCommandLine:
    parser = RecipeCommandLine(
        "training.train",
        "Train a Transformer from a recipe. Each key of the recipe can also be set with --key value.",
        dataclass_types=PARTS,
    )
    text = "path to the recipe, or name of a packaged one such as demo; without it, rules choose settings for data_dir"
    parser.add_argument("recipe", nargs="?", help=text)
    for action in parser._actions:
        if action.dest in UNSUPPORTED or action.option_strings[:1] and action.option_strings[0].startswith("--no-"):
            action.help = SUPPRESS
    return parser


def validate_supported_keys(parser: RecipeCommandLine, arguments: list[str]) -> None:
    """Raise ValueError if an unsupported field of `Seq2SeqTrainingArguments` differs from its default."""
    values, defaults = (vars(parser.parse_known_args(words)[0]) for words in (arguments, arguments[:1]))
    for name in sorted(UNSUPPORTED):
        value = values[name]
        if value != defaults[name] and (value or defaults[name]):
            raise ValueError(f"{name}={value} is not supported: {UNSUPPORTED_ADVICE.get(name, 'remove it')}.")


def read_options(arguments: list[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return only the keys that options and `settings` set, with their values."""
    arguments, null_options = split_null_options(arguments)
    parser = make_parser()
    for action in parser._actions:
        action.default = SUPPRESS
    values = {name: _to_text(name, value) for name, value in settings.items()}
    namespace, _ = parser.parse_known_args([CHOSEN, *_to_arguments(values), *arguments])
    nulls = {name: None for name, value in settings.items() if value is None}
    return dict.fromkeys(null_options) | nulls | {k: v for k, v in vars(namespace).items() if k != "recipe"}


def read_recipe(
    arguments: list[str], settings: Mapping[str, Any] | None = None, chosen: Mapping[str, Any] | None = None
) -> Recipe:
    """Read a recipe. Raises ValueError if the recipe or an option is invalid.

    Args:
        arguments: `RECIPE [--key value ...]`, as on the command line. Only options if there are `chosen` keys.
        settings: Keys and Python values, which have precedence over the recipe.
        chosen: Keys and Python values that replace the recipe.
    """
    arguments, null_options = split_null_options(arguments)
    parser, settings = make_parser(), dict.fromkeys(null_options) | dict(settings or {})
    names = (word.lstrip("-").partition("=")[0].replace("-", "_") for word in arguments if word.startswith("--"))
    set_keys = (name for name, value in settings.items() if value is not None)  # None means the default
    options = {*set_keys, *(name.removeprefix("no_") for name in names)}
    if repeated := sorted(options.intersection(null_options)):
        raise ValueError(f"{option_name(repeated[0])} has a value and null. Remove one of the two.")
    for name in settings:
        validate_key(name)
    if chosen is None:
        if not arguments or arguments[0].startswith("-"):
            position = ", before ".join(["the path to a recipe must be the first argument", *arguments[:1]])
            raise ValueError(f"{position}. To train on your files without a recipe, use --data-dir.")
        path, arguments = find_recipe(arguments[0]), arguments[1:]
        values = _read_yaml(path, parser)
    else:
        path, values = CHOSEN, {name: _to_text(name, value) for name, value in chosen.items()}
    replaces_updates = "minutes" in options and values.get("minutes") is None
    values |= {name: _to_text(name, value) for name, value in settings.items()}
    null_keys = [name for name, value in values.items() if value is None and name not in options]
    keys = options | {name for name, value in values.items() if value is not None}
    # without `use_cpu`, processes on CPUs would not connect
    device = [] if torch.accelerator.is_available() else ["--use_cpu=true"]
    arguments = [path, *device, *_to_arguments(values), *arguments]  # the last value counts
    try:
        validate_supported_keys(parser, arguments)
        *parts, _, unknown = parser.parse_args_into_dataclasses(
            arguments, return_remaining_strings=True, look_for_args_file=False
        )
    except (OSError, *LIBRARY_ERRORS) as error:  # raised by transformers
        raise ValueError(str(error)) from error
    if unknown:
        hint = "" if chosen is None else ". A recipe must be the first argument"
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    data, tokenizer, model, training, decoding = parts
    recipe = Recipe(Path(path).stem, data, tokenizer, model, training, decoding, frozenset(keys))
    for part in parts:
        for f in dataclasses.fields(part):
            if f.name in null_keys and f.default is not None:
                if type(None) not in get_args(get_type_hints(type(part))[f.name]):
                    raise ValueError(f"{path}: {f.name} must not be null. Set a value, or remove the key.")
                setattr(part, f.name, None)
    resolve_minutes(recipe, options if replaces_updates else recipe.explicit_keys)
    resolve_recipe(recipe)
    validate_overrides(recipe, options)
    return recipe


def split_null_options(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the arguments without options such as `--test-file null`, which means None as in YAML, and their keys."""
    kept: list[str] = []
    keys: list[str] = []
    for word in arguments:
        follows_option = bool(kept) and kept[-1].startswith("--") and "=" not in kept[-1]
        name, _, value = (f"{kept.pop()}=null" if word == "null" and follows_option else word).partition("=")
        if value == "null" and name.startswith("--"):
            keys.append(name.removeprefix("--").replace("-", "_"))
        else:
            kept.append(word)
    return kept, keys


def validate_key(name: str, location: str = "") -> None:
    if name not in KNOWN_KEYS:
        renamed, close = RENAMED_OPTIONS.get(name), closest_match(name, KNOWN_KEYS)
        hint = UNSUPPORTED_ADVICE.get(name) or (f"did you mean {close!r}?" if close else "")
        hint = f"it was renamed to {renamed!r}." if renamed in KNOWN_KEYS else hint
        raise ValueError(f"{location}unknown key {name[:100]!r}" + (f"; {hint}" if hint else "."))


def _read_yaml(path: str, parser: HfArgumentParser) -> dict[str, Any]:
    """Read the keys and values of a recipe: strings, lists of strings, None, or JSON for mappings.

    Scalars stay text, because YAML would convert the language `no` to False and the directory 1.10 to 1.1.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        depth = 0
        for event in yaml.parse(text, yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > MAX_NESTING_DEPTH:
                line = event.start_mark.line + 1 if event.start_mark else 0
                raise ValueError(f"{path}, line {line}: anchors and deep nesting are not supported.")
        root = yaml.compose(text, yaml.SafeLoader)
    except OSError as error:
        raise ValueError(f"cannot read the recipe {path}: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line_hint = f", line {mark.line + 1}" if mark else ""
        reason = str(getattr(error, "problem", None) or error)
        reason += ". Remove the quotes of paths with backslashes" if "escape character" in reason else ""
        raise ValueError(f"{path}{line_hint} is not valid YAML: {reason}.") from error
    if not isinstance(root, yaml.MappingNode) or not root.value:
        raise ValueError(f"{path} contains no keys. A recipe has lines such as 'max_steps: 500'.")
    actions = {action.dest: action for action in parser._actions}
    values: dict[str, Any] = {}
    for key, node in root.value:
        name, location = str(key.value), f"{path}, line {key.start_mark.line + 1}"
        if RENAMED_OPTIONS.get(name) in KNOWN_KEYS:
            logger.warning(f"{location}: {name} was renamed to {RENAMED_OPTIONS[name]}")
            if isinstance(node, yaml.ScalarNode):
                node.value = RENAMED_VALUES.get(node.value, node.value)
            name = RENAMED_OPTIONS[name]
        validate_key(name, f"{location}: ")
        if name in values:
            raise ValueError(f"{location}: duplicate key {name!r}. Remove one of the two entries.")
        values[name] = _read_value(node, name, location, actions[name].nargs == "*")
    return values


def _read_value(node: yaml.Node, name: str, location: str, is_list: bool) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return None if node.tag.endswith(":null") else node.value
    values = [getattr(each, "value", None) for each in node.value]
    if is_list and all(isinstance(value, str) and not value.startswith("--") for value in values):
        return values
    if isinstance(node, yaml.MappingNode) and name in TrainingArguments._VALID_DICT_FIELDS:
        try:
            return json.dumps(yaml.safe_load(yaml.serialize(node)), allow_nan=False)
        except (TypeError, ValueError, yaml.YAMLError) as error:  # such as a date or a set
            raise ValueError(f"{location}: the value of {name} cannot be used ({error}).") from error
    raise ValueError(f"{location}: {name} must be {'a list of values' if is_list else 'a single value'}.")


def _to_text(name: str, value: Any) -> Any:
    """Convert a Python value to the form of `_read_yaml`."""
    if isinstance(value, list | tuple):
        return [str(each) for each in value]
    if isinstance(value, Mapping):
        try:
            return json.dumps(dict(value), allow_nan=False)
        except (TypeError, ValueError) as error:  # such as a date or nan
            raise ValueError(f"the value of {name} cannot be used ({error}).") from error
    return None if value is None else str(value.value if isinstance(value, Enum) else value)


def _to_arguments(values: dict[str, Any]) -> list[str]:
    """Convert the keys of a recipe to command-line arguments, so that both are validated in the same way."""
    arguments = []
    for name, value in values.items():
        if isinstance(value, list):
            arguments += [f"--{name}", *value]
        elif value is not None:
            arguments.append(f"--{name}={value}")
    return arguments
