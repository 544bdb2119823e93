"""Recipes: flat YAML files with all settings of a run, which can be overridden on the command line."""

import argparse
import dataclasses
import json
import math
import sys
from argparse import SUPPRESS
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
import yaml
from transformers import HfArgumentParser

from training.arguments import (
    MACHINE_KEYS,
    RENAMED_VALUES,
    UNSUPPORTED,
    UNSUPPORTED_ADVICE,
    DataArguments,
    DecodingArguments,
    ModelArguments,
    TokenizerArguments,
    TrainingArguments,
    former_tokens_per_update,
)
from training.data.hub_datasets import use_dataset
from training.run.validation import (
    LIBRARY_ERRORS,
    METRICS,
    validate_attention,
    validate_metric,
    validate_model,
    validate_training_setup,
    validate_values,
)
from vanilla_transformer.shared.command_line import (
    MAX_EXPONENT,
    RENAMED_OPTIONS,
    CommandLineParser,
    closest_match,
    int_type,
)

LOWER_IS_BETTER = ("loss", "per", "wer", "ter")
MAX_NESTING_DEPTH = 8  # of YAML collections; only lr_scheduler_kwargs and fsdp_config need nesting


@dataclass
class Recipe:
    """All settings of a run."""

    name: str  # file name without `.yaml`
    data: DataArguments
    tokenizer: TokenizerArguments
    model: Any
    training: TrainingArguments
    decoding: DecodingArguments
    explicit_keys: frozenset[str] = frozenset()  # set in the recipe or on the command line

    def to_dict(self) -> dict[str, Any]:
        """Return all settings, except fields of `Seq2SeqTrainingArguments` that have their default value."""
        values = {name: value for part in (self.data, self.tokenizer, self.model) for name, value in vars(part).items()}
        if self.training.base_model is not None:  # the rest comes from the checkpoint
            kept = self.explicit_keys | vars(self.data).keys()
            values = {name: value for name, value in values.items() if name in kept}
        # from the fields, because creating an instance would reset the device state of Accelerate
        defaults = {f.name: f.default for f in dataclasses.fields(TrainingArguments)}
        own = set(TrainingArguments.__annotations__)
        for name, value in self.training.to_dict().items():
            if name in UNSUPPORTED | MACHINE_KEYS | {"run_name", "hub_token", "use_cpu"}:  # depend on the machine
                continue
            if name in own or value not in (defaults.get(name), [], None):
                values[name] = str(value) if isinstance(value, Path) else value
        return values | vars(self.decoding)

    def defaults(self) -> dict[str, Any]:
        """Return the default of each key, without those that `base_model` determines."""
        parts: list[Any] = [self.data, self.training, self.decoding]
        if self.training.base_model is None:
            parts += [self.tokenizer, self.model]
        return {each.name: each.default for part in parts for each in dataclasses.fields(part)}

    def to_yaml(self) -> str:
        """Return the settings as the text of a recipe."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)


class RecipeCommandLine(CommandLineParser, HfArgumentParser):
    """Command line with one option per dataclass field. An integer whose default is "auto" can also be "auto"."""

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        if options.get("default") == "auto" and options.get("type") is int:
            options["type"] = int_or_auto
        return super().add_argument(*names, **options)


def int_or_auto(text: str) -> int | str:
    """Argparse type: an integer or "auto"."""
    return text if text == "auto" else int_type(text)


int_or_auto.__name__ = "int"  # for argparse's messages


def make_parser() -> RecipeCommandLine:
    """Create the command-line parser of `training.train`."""
    parser = RecipeCommandLine(
        "training.train",
        "Train a Transformer from a recipe. Each key of the recipe can also be set with --key value.",
        dataclass_types=(DataArguments, TokenizerArguments, ModelArguments, TrainingArguments, DecodingArguments),
    )
    parser.add_argument("recipe", help="path to the recipe, such as training/recipes/demo.yaml")
    for action in parser._actions:
        if action.dest in UNSUPPORTED or action.option_strings[:1] and action.option_strings[0].startswith("--no_"):
            action.help = SUPPRESS
    return parser


def validate_supported_keys(parser: RecipeCommandLine, arguments: list[str]) -> None:
    """Raise ValueError if an unsupported field of `Seq2SeqTrainingArguments` differs from its default."""
    values, defaults = (vars(parser.parse_known_args(words)[0]) for words in (arguments, arguments[:1]))
    for name in sorted(UNSUPPORTED):
        value = values[name]
        if value != defaults[name] and (value or defaults[name]):
            raise ValueError(f"{name}={value} is not supported: {UNSUPPORTED_ADVICE.get(name, 'remove it')}.")


def read_recipe(arguments: list[str] | None = None) -> Recipe:
    """Read `RECIPE.yaml [--key value ...]` from `sys.argv[1:]` by default. Exit with status 2 if it is invalid."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = make_parser()
    null_keys: list[str] = []
    names = (word.lstrip("-").partition("=")[0].replace("-", "_") for word in arguments if word.startswith("--"))
    keys = options = {name.removeprefix("no_") for name in names}
    if arguments and arguments[0].startswith("-") and not {"-h", "--help"} & set(arguments):
        parser.error(f"the path to a recipe must be the first argument, before {arguments[0].partition('=')[0]}.")
    if arguments and not arguments[0].startswith("-"):
        try:
            values = _read_yaml(arguments[0], parser)
        except ValueError as error:
            parser.error(str(error))
        null_keys = [name for name, value in values.items() if value is None and name not in keys]
        keys = options | {name for name, value in values.items() if value is not None}
        # without `use_cpu`, processes on CPUs would not connect
        device = [] if torch.accelerator.is_available() else ["--use_cpu=true"]
        arguments = [arguments[0], *device, *_to_arguments(values), *arguments[1:]]  # the last value counts
    try:
        validate_supported_keys(parser, arguments)
        *parts, positional, unknown = parser.parse_args_into_dataclasses(
            arguments, return_remaining_strings=True, look_for_args_file=False
        )
    except (OSError, *LIBRARY_ERRORS) as error:  # raised by transformers
        parser.error(str(error))
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    data, tokenizer, model, training, decoding = parts
    recipe = Recipe(Path(positional.recipe).stem, data, tokenizer, model, training, decoding, frozenset(keys))
    for part in parts:
        for f in dataclasses.fields(part):
            if f.name in null_keys and f.default is not None:
                if type(None) not in get_args(get_type_hints(type(part))[f.name]):
                    parser.error(f"{positional.recipe}: {f.name} must not be null. Set a value, or remove the key.")
                setattr(part, f.name, None)
    try:
        resolve_recipe(recipe)
        validate_overrides(recipe, options)
    except ValueError as error:
        parser.error(str(error))
    return recipe


def resolve_recipe(recipe: Recipe) -> None:
    """Set values that depend on other keys. Raise ValueError for invalid values and combinations."""
    data, tokenizer, training, decoding = recipe.data, recipe.tokenizer, recipe.training, recipe.decoding
    validate_values([data, tokenizer, recipe.model, training, decoding])
    fractions = {"bpe_dropout": tokenizer.bpe_dropout, "ema_decay": training.ema_decay}
    fractions |= {"label_smoothing_factor": training.label_smoothing_factor}
    fractions |= {name: value for name, value in vars(recipe.model).items() if name.endswith("dropout")}
    for name, value in fractions.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value} is invalid: it must be at least 0 and less than 1.")
    if abs(decoding.length_penalty) > MAX_EXPONENT:
        raise ValueError(f"length_penalty={decoding.length_penalty} must be from -{MAX_EXPONENT} to {MAX_EXPONENT}.")
    if training.base_model is None:
        validate_model(vars(recipe.model))
    if tokenizer.tokenizer_vocab_size < 5 and tokenizer.tokenizer_path is None:
        raise ValueError(f"tokenizer_vocab_size={tokenizer.tokenizer_vocab_size} must be at least 5.")
    if tokenizer.bpe_dropout and tokenizer.tokenizer_type != "bpe":
        raise ValueError("bpe_dropout requires tokenizer_type=bpe.")
    if tokenizer.moses and tokenizer.tokenizer_type not in ("bpe", "unigram"):
        raise ValueError("moses requires tokenizer_type=bpe or unigram.")
    if training.rdrop_alpha and training.simcut_alpha:
        raise ValueError("rdrop_alpha and simcut_alpha cannot be combined. Remove one of them.")
    if data.both_directions and not tokenizer.shared_vocabulary:
        raise ValueError("both_directions requires shared_vocabulary.")
    if data.max_length_ratio is not None and data.max_length_ratio < 1:
        raise ValueError(f"max_length_ratio={data.max_length_ratio} is invalid: it must be at least 1.")
    validate_tokens_per_update(training, recipe.explicit_keys)
    if data.streaming:
        validate_streaming(data, tokenizer, training)
    validate_used_data_keys(data)
    evaluates = training.eval_strategy != "no"
    sources = data.validation_file or data.dataset_name or data.validation_size
    if evaluates and (data.corpus == "random" or not (data.corpus == "demo" or sources)):
        raise ValueError("eval_strategy requires validation data. Set validation_file or validation_size.")
    uses_metric = training.average_by == "best" or training.early_stopping_patience is not None
    if uses_metric and (not evaluates or (training.average_by == "best" and training.save_strategy == "no")):
        raise ValueError(
            "early_stopping_patience requires eval_strategy. average_by=best requires eval_strategy and save_strategy."
        )
    validate_checkpoint_strategy(training)
    if training.average_checkpoints > 1 and training.save_strategy == "no":
        raise ValueError("average_checkpoints requires save_strategy=steps or save_strategy=epoch.")
    if uses_metric and "metric_for_best_model" not in recipe.explicit_keys:  # transformers may have set "loss"
        training.metric_for_best_model = default_metric(decoding.metric, training.predict_with_generate)
    if training.metric_for_best_model is not None and "greater_is_better" not in recipe.explicit_keys:
        training.greater_is_better = training.metric_for_best_model.removeprefix("eval_") not in LOWER_IS_BETTER
    plateau = training.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")
    if plateau and training.greater_is_better and isinstance(training.lr_scheduler_kwargs, dict | None):
        training.lr_scheduler_kwargs = {"mode": "max"} | (training.lr_scheduler_kwargs or {})
    validate_metric(training, decoding.metric)
    validate_attention(training)
    resolve_base_model(recipe)
    if training.learning_rate is None:
        if training.lr_scheduler_type != "inverse_sqrt" or training.warmup_steps < 1:
            raise ValueError("learning_rate is required unless lr_scheduler_type=inverse_sqrt and warmup_steps >= 1.")
        training.learning_rate = (recipe.model.d_model * training.warmup_steps) ** -0.5
    if training.bf16 and training.precision in ("fp32", "fp16"):
        raise ValueError(f"bf16=true contradicts precision={training.precision}. Remove bf16.")
    if training.bf16:
        training.precision = "bf16"
    validate_training_setup(training)


def default_metric(metric: str, predict_with_generate: bool) -> str:
    """Return the default of `metric_for_best_model`."""
    return METRICS[metric][1] if predict_with_generate else "loss"


def validate_checkpoint_strategy(training: TrainingArguments) -> None:
    """Raise ValueError for an unsupported `save_strategy`, or if `average_by=best` lacks evaluated checkpoints."""
    if training.save_strategy == "best":
        raise ValueError("save_strategy=best is not supported. Use steps or epoch, and average_by: best.")
    if training.average_by != "best":
        return
    if training.eval_strategy != training.save_strategy:
        raise ValueError("average_by=best requires the same eval_strategy and save_strategy: both steps or both epoch.")
    steps = [training.eval_steps or training.logging_steps, training.save_steps]
    if training.max_steps < 1 and min(steps) < 1 and training.save_strategy == "steps":
        raise ValueError("average_by=best requires max_steps if eval_steps or save_steps is a ratio. Set max_steps.")
    if training.max_steps > 0:
        steps = [math.ceil(training.max_steps * each) if each < 1 else each for each in steps]
    if training.save_strategy == "steps" and not (max(steps) / min(steps)).is_integer():
        raise ValueError(
            f"with average_by=best, one of eval_steps={training.eval_steps} and save_steps={training.save_steps} must "
            f"be a multiple of the other."
        )


def validate_tokens_per_update(training: TrainingArguments, explicit_keys: Container[str]) -> None:
    """Raise ValueError if a recipe of an earlier version defines the updates by other keys."""
    values = {name: getattr(training, name) for name in sorted(MACHINE_KEYS) if name in explicit_keys}
    values = {name: value for name, value in values.items() if value != "auto"}
    if values and "tokens_per_update" not in explicit_keys:
        if "gradient_accumulation_steps" in values:
            values["gradient_accumulation_steps"] = training.requested_accumulation_steps
        processes = {"num_processes": training.world_size} if training.world_size > 1 else {}
        tokens = former_tokens_per_update(values | processes)
        if tokens != training.tokens_per_update:
            raise ValueError(
                f"{', '.join(f'{name}={value}' for name, value in values.items())} requires tokens_per_update, the "
                f"number of tokens of an update. For the same updates as in earlier versions, set tokens_per_update: "
                f"{tokens}."
            )


def validate_streaming(data: DataArguments, tokenizer: TokenizerArguments, training: TrainingArguments) -> None:
    """Raise ValueError for settings that streaming does not support."""
    if training.max_steps < 1:
        raise ValueError("streaming requires max_steps, because the number of updates per epoch is unknown.")
    unsupported = {
        "corpus": data.corpus != "files",
        "both_directions": data.both_directions,
        "bpe_dropout": tokenizer.bpe_dropout > 0,
        "dataloader_num_workers": training.dataloader_num_workers > 0,  # workers would hold the state of the stream
        "on_eval_overlap": data.on_eval_overlap == "error",  # known only after reading all data
        "validation_size": data.validation_size > 0,
    }
    values = vars(data) | vars(tokenizer) | vars(training)
    if active := [f"{name}={values[name]}" for name, is_set in unsupported.items() if is_set]:
        raise ValueError(
            f"streaming does not support {', '.join(active)}. Use the defaults. Alternatives: validation_file for "
            f"validation_size, on_eval_overlap=drop for on_eval_overlap=error."
        )


def validate_overrides(recipe: Recipe, options: set[str]) -> None:
    """Raise ValueError for command-line options that have no effect because of the other keys of the recipe."""
    data, tokenizer, training = recipe.data, recipe.tokenizer, recipe.training
    reasons: dict[str, str] = {}
    if use_dataset(data):
        advice = f"dataset_name={data.dataset_name}. To use files, set data_dir"
        reasons |= dict.fromkeys(("train_file", "validation_file", "test_file"), advice)
    if tokenizer.tokenizer_path is not None:
        trained = vars(tokenizer).keys() - {"tokenizer_path", "bpe_dropout", "pad_vocab_to_multiple_of"}
        reasons |= dict.fromkeys(trained, f"tokenizer_path={tokenizer.tokenizer_path}. Remove one of the two")
    if training.max_steps > 0 and "max_steps" not in options:
        reasons["num_train_epochs"] = f"max_steps={training.max_steps}. Add --max_steps -1"
    for kind in ("eval", "save", "logging"):
        name = f"{kind}_strategy"
        if (strategy := getattr(training, name)) != "steps" and name not in options:
            reasons[f"{kind}_steps"] = f"{name}={strategy.value}. Add --{name} steps"
    for name in sorted(reasons.keys() & options):
        raise ValueError(f"{name} has no effect with {reasons[name]}.")


def validate_used_data_keys(data: DataArguments) -> None:
    """Raise ValueError for settings of the data that a generated corpus does not use."""
    used = vars(data).keys() if data.corpus == "files" else {"corpus", "max_length", "max_length_ratio", "buffer_size"}
    for name in sorted(vars(data).keys() - used):
        if (value := getattr(data, name)) != getattr(DataArguments, name):
            raise ValueError(f"corpus={data.corpus} does not use {name}={value}. Set corpus=files, or remove {name}.")


def resolve_base_model(recipe: Recipe) -> None:
    """Make a local `base_model` absolute. Raise ValueError for keys that contradict `base_model` or `lora_rank`."""
    training = recipe.training
    if training.base_model is not None:
        keys = {*vars(recipe.model), *vars(recipe.tokenizer)} & recipe.explicit_keys
        if invalid := sorted(name for name in keys if not name.endswith("dropout")):
            raise ValueError(f"{invalid[0]} is determined by base_model={training.base_model}. Remove {invalid[0]}.")
        if training.learning_rate is None:
            raise ValueError("base_model requires learning_rate: its default is for randomly initialized models.")
        if training.base_model.startswith(".") or Path(training.base_model).exists():  # not a Hub repository
            training.base_model = str(Path(training.base_model).resolve())
    if training.lora_rank and training.base_model is None:
        raise ValueError("lora_rank requires base_model, because LoRA cannot train a randomly initialized model.")
    averages = training.ema_decay or training.average_checkpoints > 1 or training.average_by == "best"
    if training.lora_rank and averages:
        raise ValueError("lora_rank cannot be combined with ema_decay, average_checkpoints or average_by.")


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
    known = [name for part in parser.dataclass_types for name in (f.name for f in dataclasses.fields(part))]
    values: dict[str, Any] = {}
    for key, node in root.value:
        name, location = str(key.value), f"{path}, line {key.start_mark.line + 1}"
        if RENAMED_OPTIONS.get(name) in known:
            print(f"{location}: {name} was renamed to {RENAMED_OPTIONS[name]}", file=sys.stderr)
            if isinstance(node, yaml.ScalarNode):
                node.value = RENAMED_VALUES.get(node.value, node.value)
            name = RENAMED_OPTIONS[name]
        if name not in known:
            close = closest_match(name, known)
            hint = UNSUPPORTED_ADVICE.get(name) or (f"did you mean {close!r}?" if close else "")
            raise ValueError(f"{location}: unknown key {name[:100]!r}" + (f"; {hint}" if hint else "."))
        if name in values:
            raise ValueError(f"{location}: duplicate key {name!r}. Remove one of the two entries.")
        values[name] = _read_value(node, name, location, actions[name].nargs == "+" or name == "report_to")
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


def _to_arguments(values: dict[str, Any]) -> list[str]:
    """Convert the keys of a recipe to command-line arguments, so that both are validated in the same way."""
    arguments = []
    for name, value in values.items():
        if isinstance(value, list):
            arguments += [f"--{name}", *value]
        elif value is not None:
            arguments.append(f"--{name}={value}")
    return arguments
