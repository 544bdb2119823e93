"""A recipe is one YAML file with every setting of a run: data, tokenizer, model, training, decoding.

Keys are flat. Those of the model are the fields of `VanillaTransformerConfig`, those of training the supported ones of
`Seq2SeqTrainingArguments` and a few more. Each can be overridden on the command line (`--max_steps 500`); an unknown
one is rejected.
"""

import dataclasses
import json
import math
import sys
from argparse import SUPPRESS
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
import yaml
from transformers import HfArgumentParser

from training.arguments import (
    INSTEAD,
    RENAMED_VALUES,
    UNSUPPORTED,
    DataArguments,
    DecodingArguments,
    ModelArguments,
    TokenizerArguments,
    TrainingArguments,
)
from training.run.validation import (
    LIBRARY_ERRORS,
    METRICS,
    check_attention,
    check_metric,
    check_model,
    check_values,
    validate_training_setup,
)
from vanilla_transformer.shared.command_line import MAX_EXPONENT, RENAMED_OPTIONS, CommandLineParser, closest_match

LOWER_IS_BETTER = ("loss", "per", "wer", "ter")
MAX_NESTING_DEPTH = 8  # collections within each other, in the options of a schedule


@dataclass
class Recipe:
    name: str
    data: DataArguments
    tokenizer: TokenizerArguments
    model: Any
    training: TrainingArguments
    decoding: DecodingArguments
    given: frozenset[str] = frozenset()  # the keys that recipe or command line give a value

    def values(self) -> dict[str, Any]:
        """Every setting by its key; of the Trainer's many those that differ from their defaults."""
        values = {name: value for part in (self.data, self.tokenizer, self.model) for name, value in vars(part).items()}
        if self.training.base_model is not None:  # which has its own
            values = {name: value for name, value in values.items() if name in self.given or name in vars(self.data)}
        defaults = {f.name: f.default for f in dataclasses.fields(TrainingArguments)}  # made ones would reset devices
        own = set(TrainingArguments.__annotations__)
        for name, value in self.training.to_dict().items():
            if name in UNSUPPORTED | {"run_name", "hub_token", "use_cpu"}:  # the latter belong to the machine
                continue
            if name in own or value not in (defaults.get(name), [], None):
                values[name] = str(value) if isinstance(value, Path) else value
        return values | vars(self.decoding)

    def defaults(self) -> dict[str, Any]:
        """What a key means that is left out; with `base_model` none of those that it answers."""
        parts: list[Any] = [self.data, self.training, self.decoding]
        if self.training.base_model is None:
            parts += [self.tokenizer, self.model]
        return {each.name: each.default for part in parts for each in dataclasses.fields(part)}

    def to_yaml(self) -> str:
        """The settings in the form of a recipe."""
        return yaml.safe_dump(self.values(), sort_keys=False, allow_unicode=True)


class RecipeCommandLine(CommandLineParser, HfArgumentParser):
    """Options out of the fields of dataclasses."""


def make_parser() -> RecipeCommandLine:
    parser = RecipeCommandLine(
        "training.train",
        "Trains a Transformer as a recipe says. Any key of the recipe can be given as --key value.",
        dataclass_types=(DataArguments, TokenizerArguments, ModelArguments, TrainingArguments, DecodingArguments),
    )
    parser.add_argument("recipe", help="path of the recipe, such as training/recipes/demo.yaml")
    for action in parser._actions:
        if action.dest in UNSUPPORTED or action.option_strings[:1] and action.option_strings[0].startswith("--no_"):
            action.help = SUPPRESS
    return parser


def validate_support(parser: RecipeCommandLine, arguments: list[str]) -> None:
    """Raises ValueError if a field of the Trainer that is not supported has another value than its default."""
    given, defaults = (vars(parser.parse_known_args(words)[0]) for words in (arguments, arguments[:1]))
    for name in sorted(UNSUPPORTED):
        value = given[name]
        if value != defaults[name] and (value or defaults[name]):
            raise ValueError(f"{name}={value} is not supported: {INSTEAD.get(name, 'leave it out')}.")


def read_recipe(arguments: list[str] | None = None) -> Recipe:
    """Reads `RECIPE.yaml [--key value ...]` from the command line. A mistake ends the program with a message, status 2.

    Args:
        arguments: instead of `sys.argv[1:]`.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = make_parser()
    nulls: list[str] = []
    given = {word.lstrip("-").partition("=")[0].replace("-", "_") for word in arguments if word.startswith("--")}
    if arguments and arguments[0].startswith("-") and not {"-h", "--help"} & set(arguments):
        parser.error(f"give the path of a recipe first, and {arguments[0].partition('=')[0]} behind it.")
    if arguments and not arguments[0].startswith("-"):
        try:
            values = _read_yaml(arguments[0], parser)
        except ValueError as error:
            parser.error(str(error))
        nulls = [name for name, value in values.items() if value is None and name not in given]
        given |= {name for name, value in values.items() if value is not None}
        device = [] if torch.accelerator.is_available() else ["--use_cpu=true"]  # else processes do not meet
        arguments = [arguments[0], *device, *_as_arguments(values), *arguments[1:]]  # the last of two wins
    try:
        validate_support(parser, arguments)
        *parts, positional, unknown = parser.parse_args_into_dataclasses(
            arguments, return_remaining_strings=True, look_for_args_file=False
        )
    except (OSError, *LIBRARY_ERRORS) as error:  # of transformers' own checks
        parser.error(str(error))
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    data, tokenizer, model, training, decoding = parts
    recipe = Recipe(Path(positional.recipe).stem, data, tokenizer, model, training, decoding, frozenset(given))
    for part in parts:
        for f in dataclasses.fields(part):
            if f.name in nulls and f.default is not None:  # others have been None all along
                if type(None) not in get_args(get_type_hints(type(part))[f.name]):
                    parser.error(f"{positional.recipe}: {f.name} is null, but needs a value.")
                setattr(part, f.name, None)
    try:
        check(recipe)
    except ValueError as error:
        parser.error(str(error))
    return recipe


def check(recipe: Recipe) -> None:
    """Resolves what depends on other keys. Raises ValueError for values that cannot be or contradict each other."""
    data, tokenizer, training, decoding = recipe.data, recipe.tokenizer, recipe.training, recipe.decoding
    check_values([data, tokenizer, recipe.model, training, decoding])
    shares = {"bpe_dropout": tokenizer.bpe_dropout, "ema_decay": training.ema_decay}
    shares |= {"label_smoothing_factor": training.label_smoothing_factor}
    shares |= {name: value for name, value in vars(recipe.model).items() if name.endswith("dropout")}
    for name, value in shares.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value}: give a number from 0 up to, not including, 1.")
    if abs(decoding.length_penalty) > MAX_EXPONENT:
        raise ValueError(f"length_penalty={decoding.length_penalty}: give a number such as 1.0.")
    if training.base_model is None:
        check_model(vars(recipe.model))
    if tokenizer.tokenizer_vocab_size < 5 and tokenizer.tokenizer_path is None:
        raise ValueError(
            f"tokenizer_vocab_size={tokenizer.tokenizer_vocab_size}: four are special tokens, so give more."
        )
    if tokenizer.bpe_dropout and tokenizer.tokenizer_type != "bpe":
        raise ValueError("bpe_dropout needs tokenizer_type=bpe.")
    if tokenizer.moses and tokenizer.tokenizer_type not in ("bpe", "unigram"):
        raise ValueError("moses needs tokenizer_type=bpe or unigram: the others have tokens of their own.")
    if training.rdrop_alpha and training.simcut_alpha:
        raise ValueError("rdrop_alpha and simcut_alpha: each has a second pass of its own; leave one out.")
    if data.both_directions and not tokenizer.shared_vocabulary:
        raise ValueError("both_directions needs shared_vocabulary.")
    if data.max_length_ratio is not None and data.max_length_ratio < 1:
        raise ValueError(f"max_length_ratio={data.max_length_ratio}: give a number of at least 1.")
    if data.streaming:
        validate_streaming(data, tokenizer, training)
    evaluates = training.eval_strategy != "no"
    sources = data.validation_file or data.dataset_name or data.validation_size
    if evaluates and (data.corpus == "random" or not (data.corpus == "demo" or sources)):
        raise ValueError("eval_strategy needs validation data: give validation_file or validation_size.")
    by_metric = training.average_by == "best" or training.early_stopping_patience is not None
    if by_metric and (not evaluates or (training.average_by == "best" and training.save_strategy == "no")):
        raise ValueError(
            "average_by=best and early_stopping_patience need eval_strategy; the former save_strategy, too."
        )
    check_saves(training)
    if training.average_checkpoints > 1 and training.save_strategy == "no":
        raise ValueError("average_checkpoints needs save_strategy: steps or epoch.")
    if by_metric and training.metric_for_best_model is None:
        training.metric_for_best_model = default_metric(decoding.metric, training.predict_with_generate)
    if training.metric_for_best_model is not None and "greater_is_better" not in recipe.given:
        training.greater_is_better = training.metric_for_best_model.removeprefix("eval_") not in LOWER_IS_BETTER
    plateau = training.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")
    if plateau and training.greater_is_better and isinstance(training.lr_scheduler_kwargs, dict | None):
        training.lr_scheduler_kwargs = {"mode": "max"} | (training.lr_scheduler_kwargs or {})
    check_metric(training, decoding.metric)
    check_attention(training)
    check_start(recipe)
    if training.learning_rate is None:
        if training.lr_scheduler_type != "inverse_sqrt" or training.warmup_steps < 1:
            raise ValueError("learning_rate is needed: the paper's peak goes with inverse_sqrt and warmup_steps alone.")
        training.learning_rate = (recipe.model.d_model * training.warmup_steps) ** -0.5
    if training.bf16 and training.precision == "fp32":
        raise ValueError("bf16=true contradicts precision=fp32: leave bf16 out.")
    if training.bf16:
        training.precision = "bf16"
    validate_training_setup(training)


def default_metric(metric: str, predicts: bool) -> str:
    """Return what checkpoints are compared by if no `metric_for_best_model` is given."""
    return METRICS[metric][1] if predicts else "loss"


def check_saves(training: TrainingArguments) -> None:
    """Raises ValueError for strategies that are not supported, or that save checkpoints without an evaluation."""
    if training.save_strategy == "best":
        raise ValueError("save_strategy=best is not supported: give steps or epoch, and average_by: best.")
    if training.average_by != "best":
        return
    if training.eval_strategy != training.save_strategy:
        raise ValueError("average_by=best needs the same eval_strategy and save_strategy: both steps, or both epoch.")
    steps = [training.eval_steps or training.logging_steps, training.save_steps]
    if training.max_steps < 1 and min(steps) < 1 and training.save_strategy == "steps":
        raise ValueError(
            f"average_by=best needs max_steps with shares such as eval_steps={training.eval_steps}: give numbers of "
            f"updates for eval_steps and save_steps."
        )
    if training.max_steps > 0:
        steps = [math.ceil(training.max_steps * each) if each < 1 else each for each in steps]
    if training.save_strategy == "steps" and not (max(steps) / min(steps)).is_integer():
        raise ValueError(
            f"average_by=best compares evaluated checkpoints, but eval_steps={training.eval_steps} and "
            f"save_steps={training.save_steps} differ: let one be a multiple of the other."
        )


def validate_streaming(data: DataArguments, tokenizer: TokenizerArguments, training: TrainingArguments) -> None:
    """Raise ValueError for settings that do not work with a stream of training data."""
    if training.max_steps < 1:
        raise ValueError("streaming needs max_steps: how many updates there are in an epoch is not known.")
    unsupported = {
        "corpus": data.corpus != "files",
        "both_directions": data.both_directions,
        "bpe_dropout": tokenizer.bpe_dropout > 0,
        "dataloader_num_workers": training.dataloader_num_workers > 0,  # they would keep the state of the stream
        "on_eval_overlap": data.on_eval_overlap == "error",  # known only after a pass
        "validation_size": data.validation_size > 0,
    }
    values = vars(data) | vars(tokenizer) | vars(training)
    if found := [f"{name}={values[name]}" for name, is_set in unsupported.items() if is_set]:
        raise ValueError(
            f"streaming does not support {', '.join(found)}: use the default value. (Instead of validation_size, set "
            f"validation_file; instead of on_eval_overlap=error, on_eval_overlap=drop.)"
        )


def check_start(recipe: Recipe) -> None:
    """Raises ValueError for keys that contradict the model to begin with, or where its result is to go."""
    training = recipe.training
    if training.base_model is not None:
        own = {*vars(recipe.model), *vars(recipe.tokenizer)} & recipe.given
        if wrong := sorted(name for name in own if not name.endswith("dropout")):
            raise ValueError(f"{wrong[0]} is settled by base_model={training.base_model}: leave it out.")
        if training.learning_rate is None:
            raise ValueError("base_model needs a learning_rate: the paper's is for fresh weights.")
        if training.base_model.startswith(".") or Path(training.base_model).exists():  # a folder, no repository
            training.base_model = str(Path(training.base_model).resolve())
    if training.lora_rank and training.base_model is None:
        raise ValueError("lora_rank needs a base_model: fresh weights have to be trained as a whole.")
    averaged = training.ema_decay or training.average_checkpoints > 1 or training.average_by == "best"
    if training.lora_rank and averaged:
        raise ValueError(
            "lora_rank goes with neither ema_decay nor average_checkpoints and average_by: leave these out."
        )


def _read_yaml(path: str, parser: HfArgumentParser) -> dict[str, Any]:
    """The keys of a recipe with their values as they are written, as `_as_arguments` wants them: a text, a list of
    texts, a dict, or None. (YAML itself would take the language `no` for False, and the folder 1.10 for 1.1.)

    Raises:
        ValueError: it is no recipe; says where and why.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        nested = 0
        for event in yaml.parse(text, yaml.SafeLoader):
            nested += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or nested > MAX_NESTING_DEPTH:
                line = event.start_mark.line + 1 if event.start_mark else 0
                raise ValueError(f"{path}, line {line}: a recipe has keys and values, no more.")
        root = yaml.compose(text, yaml.SafeLoader)
    except OSError as error:
        raise ValueError(f"cannot read the recipe {path}: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{path}{place} is not YAML: {getattr(error, 'problem', None) or error}.") from error
    if not isinstance(root, yaml.MappingNode) or not root.value:
        raise ValueError(f"{path} holds no keys: a recipe has lines such as 'max_steps: 500'.")
    kinds = {action.dest: action for action in parser._actions}
    known = [name for part in parser.dataclass_types for name in (f.name for f in dataclasses.fields(part))]
    values: dict[str, Any] = {}
    for key, node in root.value:
        name, place = str(key.value), f"{path}, line {key.start_mark.line + 1}"
        if RENAMED_OPTIONS.get(name) in known:
            print(f"{place}: {name} is now called {RENAMED_OPTIONS[name]}", file=sys.stderr)
            if isinstance(node, yaml.ScalarNode):
                node.value = RENAMED_VALUES.get(node.value, node.value)
            name = RENAMED_OPTIONS[name]
        if name not in known:
            close = closest_match(name, known)
            hint = INSTEAD.get(name) or (f"did you mean {close!r}?" if close else "")
            raise ValueError(f"{path}: unknown key {name[:100]!r}" + (f"; {hint}" if hint else "."))
        if name in values:
            raise ValueError(f"{place}: {name} stands there a second time; which one counts?")
        values[name] = _value(node, name, place, kinds[name].nargs == "+" or name == "report_to")
    return values


def _value(node: yaml.Node, name: str, place: str, is_list: bool) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return None if node.tag.endswith(":null") else node.value
    values = [getattr(each, "value", None) for each in node.value]
    if is_list and all(isinstance(value, str) and not value.startswith("--") for value in values):
        return values
    if isinstance(node, yaml.MappingNode) and name in TrainingArguments._VALID_DICT_FIELDS:
        try:
            return json.dumps(yaml.safe_load(yaml.serialize(node)), allow_nan=False)
        except (TypeError, ValueError, yaml.YAMLError) as error:  # a date, a set
            raise ValueError(f"{place}: the value of {name} cannot be used ({error}).") from error
    raise ValueError(f"{place}: {name} needs {'a list of values' if is_list else 'one value'}.")


def _as_arguments(values: dict[str, Any]) -> list[str]:
    """Keys of a recipe as they would stand on the command line, so that both are checked alike."""
    arguments = []
    for name, value in values.items():
        if isinstance(value, list):
            arguments += [f"--{name}", *value]
        elif value is not None:
            arguments.append(f"--{name}={value}")
    return arguments
