"""Resolution of a recipe: values that depend on other keys, and checks of their combinations."""

import math
from collections.abc import Container
from multiprocessing import get_all_start_methods, get_start_method
from pathlib import Path
from typing import Any

from transformers import IntervalStrategy, SchedulerType
from transformers.trainer_utils import SaveStrategy

from vanilla_transformer.shared.command_line import MAX_EXPONENT, option_name

from .arguments import MACHINE_KEYS, UNKNOWN_UPDATES, Recipe, TrainingArguments, former_tokens_per_update, use_dataset
from .validation import METRICS, validate_metric, validate_model, validate_training_setup, validate_values

WARMUP_RATIO = 0.1  # with `minutes`
LOWER_IS_BETTER = ("loss", "ter", "token_error_rate", "character_error_rate", "per", "wer")  # two of earlier versions


def resolve_recipe(recipe: Recipe) -> None:
    """Set values that depend on other keys. Raise ValueError for invalid values and combinations."""
    training = recipe.training
    validate_values([recipe.data, recipe.tokenizer, recipe.model, training, recipe.decoding])
    if training.base_model is None:
        validate_model(vars(recipe.model))
    validate_tokens_per_update(training, recipe.explicit_keys)
    validate_streaming(recipe)
    validate_used_data_keys(recipe)
    validate_combinations(recipe)
    validate_evaluated_checkpoints(training)
    resolve_checkpoint_selection(recipe)
    validate_metric(training, recipe.decoding.metric)
    resolve_base_model(recipe)
    if training.learning_rate is None:
        if training.lr_scheduler_type != "inverse_sqrt" or training.warmup_steps < 1:
            raise ValueError("learning_rate is required unless lr_scheduler_type=inverse_sqrt and warmup_steps >= 1.")
        training.learning_rate = (recipe.model.d_model * training.warmup_steps) ** -0.5
    if training.bf16:
        training.precision = "bf16"
    validate_training_setup(training)


def validate_combinations(recipe: Recipe) -> None:
    """Raise ValueError for settings that contradict each other, or that require another one."""
    for message, is_active in (find_data_conflicts(recipe) | find_training_conflicts(recipe)).items():
        if is_active:
            raise ValueError(message)


def find_data_conflicts(recipe: Recipe) -> dict[str, Any]:
    """Return messages about data, tokenizer and decoding, with whether they apply."""
    data, tokenizer, training, decoding = recipe.data, recipe.tokenizer, recipe.training, recipe.decoding
    files = [name for name in (data.train_file, data.validation_file, data.test_file) if name]
    has_columns = use_dataset(data) or any(Path(name).suffix != ".tsv" for name in files)
    folder = str(training.output_dir)
    return {
        f"output_dir={folder} is also data_dir. Set another --output-dir, so that no data are lost.": (
            data.corpus == "files" and Path(data.data_dir).resolve() == Path(folder).resolve()
        ),
        f"length_penalty={decoding.length_penalty} must be from -{MAX_EXPONENT} to {MAX_EXPONENT}.": (
            abs(decoding.length_penalty) > MAX_EXPONENT
        ),
        f"tokenizer_vocab_size={tokenizer.tokenizer_vocab_size} must be at least 5.": (
            tokenizer.tokenizer_vocab_size < 5 and tokenizer.tokenizer_path is None
        ),
        "bpe_dropout requires tokenizer_type=bpe.": tokenizer.bpe_dropout and tokenizer.tokenizer_type != "bpe",
        "bpe_dropout does not support dataloader_num_workers here: forked processes have the same random numbers. "
        "Remove one of them.": (
            tokenizer.bpe_dropout
            and training.dataloader_num_workers
            and (get_start_method(allow_none=True) or get_all_start_methods()[0]) == "fork"
        ),
        "moses requires tokenizer_type=bpe or unigram.": (
            tokenizer.moses and tokenizer.tokenizer_type not in ("bpe", "unigram")
        ),
        "both_directions requires shared_vocabulary.": data.both_directions and not tokenizer.shared_vocabulary,
        f"source_lang={data.source_lang} is also target_lang: both sides would be the same files or columns. Set two "
        f"names, such as src and tgt for train.src and train.tgt, or use .tsv files.": (
            data.corpus == "files" and data.source_lang == data.target_lang and has_columns
        ),
    }


def find_training_conflicts(recipe: Recipe) -> dict[str, Any]:
    """Return messages about losses, evaluations, checkpoints and base models, with whether they apply."""
    training = recipe.training
    evaluates, saves = training.eval_strategy != "no", training.save_strategy != "no"
    averages_best = training.average_by == "best"
    averages = training.ema_decay or training.average_checkpoints > 1 or averages_best
    return {
        "rdrop_alpha and simcut_alpha cannot be combined. Remove one of them.": (
            training.rdrop_alpha and training.simcut_alpha
        ),
        "eval_strategy requires validation data. Set validation_file or validation_size.": (
            evaluates and not has_validation_data(recipe)
        ),
        "early_stopping_patience requires eval_strategy.": (
            training.early_stopping_patience is not None and not evaluates
        ),
        "average_by=best requires eval_strategy and save_strategy.": averages_best and not (evaluates and saves),
        "save_strategy=best is not supported. Use steps or epoch, and average_by: best.": (
            training.save_strategy == "best"
        ),
        "average_checkpoints requires save_strategy=steps or save_strategy=epoch.": (
            training.average_checkpoints > 1 and not saves
        ),
        f"bf16=true contradicts precision={training.precision}. Remove bf16.": (
            training.bf16 and training.precision in ("fp32", "fp16")
        ),
        "base_model requires learning_rate: its default is for randomly initialized models.": (
            training.base_model is not None and training.learning_rate is None
        ),
        "lora_rank requires base_model, because LoRA cannot train a randomly initialized model.": (
            training.lora_rank and training.base_model is None
        ),
        "lora_rank cannot be combined with ema_decay, average_checkpoints or average_by.": (
            training.lora_rank and averages
        ),
    }


def resolve_checkpoint_selection(recipe: Recipe) -> None:
    """Set the metric that selects checkpoints, and its direction, also for a schedule that follows it."""
    training = recipe.training
    uses_metric = training.average_by == "best" or training.early_stopping_patience is not None
    if uses_metric and "metric_for_best_model" not in recipe.explicit_keys:  # transformers may have set "loss"
        training.metric_for_best_model = default_metric(recipe.decoding.metric, training.predict_with_generate)
    if training.metric_for_best_model is not None and "greater_is_better" not in recipe.explicit_keys:
        training.greater_is_better = training.metric_for_best_model.removeprefix("eval_") not in LOWER_IS_BETTER
    plateau = training.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")
    if plateau and training.greater_is_better and isinstance(training.lr_scheduler_kwargs, dict | None):
        training.lr_scheduler_kwargs = {"mode": "max"} | (training.lr_scheduler_kwargs or {})


def resolve_minutes(recipe: Recipe, keys: Container[str]) -> None:
    """Set schedule, warm-up and evaluations of a run with `minutes`, which replaces the updates of a recipe.

    Raises ValueError for those of `keys` that contradict `minutes`. The other keys of the recipe are replaced.
    """
    training = recipe.training
    if training.minutes is None:
        return
    for name in (name for name in ("max_steps", "num_train_epochs") if name in keys):
        raise ValueError(f"{name}={getattr(training, name):g} contradicts minutes={training.minutes:g}. Remove one.")
    if "lr_scheduler_type" in keys and training.lr_scheduler_type != "linear":
        raise ValueError(f"minutes requires lr_scheduler_type=linear, not {training.lr_scheduler_type}.")
    if training.learning_rate is None:
        raise ValueError("minutes requires learning_rate: its default is for lr_scheduler_type=inverse_sqrt.")
    if training.warmup_steps >= 1:
        if "warmup_steps" in keys:
            raise ValueError(f"minutes requires a ratio as warmup_steps, such as 0.1, not {training.warmup_steps:g}.")
        has_updates = "warmup_steps" in recipe.explicit_keys and training.max_steps > 0
        training.warmup_steps = min(0.5, training.warmup_steps / training.max_steps) if has_updates else WARMUP_RATIO
    training.max_steps, training.lr_scheduler_type = UNKNOWN_UPDATES, SchedulerType.LINEAR
    training.num_train_epochs = TrainingArguments.num_train_epochs  # the default, which `recipe.yaml` omits
    resolve_evaluations(recipe, keys)


def resolve_evaluations(recipe: Recipe, keys: Container[str]) -> None:
    """Set the evaluations and checkpoints of a run with `minutes`, whose epochs and updates are not known."""
    training = recipe.training
    is_unset = "eval_strategy" not in recipe.explicit_keys and has_validation_data(recipe)
    replaces_epochs = "eval_strategy" not in keys and "save_strategy" not in keys
    if is_unset or (training.eval_strategy == "epoch" and replaces_epochs):
        training.eval_strategy = IntervalStrategy.STEPS
    if training.save_strategy == "epoch" and replaces_epochs:
        training.save_strategy = SaveStrategy.STEPS
    if "eval_steps" not in keys:  # `TimeBudget` requests them
        if "save_steps" not in keys:
            training.save_steps = UNKNOWN_UPDATES
        training.eval_steps = training.save_steps if training.average_by == "best" else UNKNOWN_UPDATES
    if training.eval_delay and training.eval_steps == UNKNOWN_UPDATES:
        raise ValueError(f"with minutes, eval_delay={training.eval_delay:g} requires eval_steps. Set it or remove it.")
    for name in ("eval_steps", "save_steps", "logging_steps"):
        if 0 < (value := getattr(training, name) or 0) < 1:
            raise ValueError(f"with minutes, {name}={value:g} must be an integer, not a ratio. Change or remove it.")


def has_validation_data(recipe: Recipe) -> bool:
    data = recipe.data
    has_files = data.validation_file or data.dataset_name or data.validation_size
    return data.corpus == "demo" or (data.corpus == "files" and bool(has_files))


def default_metric(metric: str, predict_with_generate: bool) -> str:
    return METRICS[metric][1] if predict_with_generate else "loss"


def validate_evaluated_checkpoints(training: TrainingArguments) -> None:
    """Raise ValueError if `average_by=best` lacks evaluated checkpoints."""
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


def validate_streaming(recipe: Recipe) -> None:
    """Raise ValueError for settings that streaming does not support."""
    data, tokenizer, training = recipe.data, recipe.tokenizer, recipe.training
    if not data.streaming:
        return
    if training.max_steps < 1:
        raise ValueError("streaming requires max_steps, because the number of updates per epoch is unknown.")
    unsupported = {
        f"corpus={data.corpus}": data.corpus != "files",
        f"both_directions={data.both_directions}": data.both_directions,
        f"bpe_dropout={tokenizer.bpe_dropout}": tokenizer.bpe_dropout > 0,
        # workers would hold the state of the stream
        f"dataloader_num_workers={training.dataloader_num_workers}": training.dataloader_num_workers > 0,
        f"on_eval_overlap={data.on_eval_overlap}": data.on_eval_overlap == "error",  # known only after reading all data
        f"validation_size={data.validation_size}": data.validation_size > 0,
        f"test_size={data.test_size}": data.test_size > 0,
        f"train_fraction={data.train_fraction}": data.train_fraction < 1,
    }
    if active := [setting for setting, is_set in unsupported.items() if is_set]:
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
        reasons["num_train_epochs"] = f"max_steps={training.max_steps}. Add --max-steps -1"
    for kind in ("eval", "save", "logging"):
        name = f"{kind}_strategy"
        if (strategy := getattr(training, name)) != "steps" and name not in options:
            reasons[f"{kind}_steps"] = f"{name}={strategy.value}. Add {option_name(name)} steps"
    for name in sorted(reasons.keys() & options):
        raise ValueError(f"{name} has no effect with {reasons[name]}.")


def validate_used_data_keys(recipe: Recipe) -> None:
    """Raise ValueError for settings of the data that a generated corpus does not use."""
    data, defaults = recipe.data, recipe.defaults()
    used = {"corpus", "max_length", "max_length_ratio", "buffer_size", "train_fraction"}
    used |= vars(data).keys() if data.corpus == "files" else set()
    for name in sorted(vars(data).keys() - used):
        if (value := getattr(data, name)) != defaults[name]:
            raise ValueError(f"corpus={data.corpus} does not use {name}={value}. Set corpus=files, or remove {name}.")


def resolve_base_model(recipe: Recipe) -> None:
    """Make a local `base_model` absolute. Raise ValueError for keys that it determines."""
    training = recipe.training
    if training.base_model is None:
        return
    keys = {*vars(recipe.model), *vars(recipe.tokenizer)} & recipe.explicit_keys
    if invalid := sorted(name for name in keys if not name.endswith("dropout")):
        raise ValueError(f"{invalid[0]} is determined by base_model={training.base_model}. Remove {invalid[0]}.")
    if training.base_model.startswith(".") or Path(training.base_model).exists():  # not a Hub repository
        training.base_model = str(Path(training.base_model).resolve())
