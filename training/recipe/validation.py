"""Validation of a recipe before the data are read: names, ranges, packages, optimizer and schedule."""

import re
from dataclasses import fields
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AttentionInterface, SchedulerType, Trainer, get_scheduler
from transformers.activations import ACT2FN
from transformers.integrations import get_reporting_integration_callbacks
from transformers.training_args import OptimizerNames

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.shared.command_line import closest_match

from .arguments import MACHINE_KEYS, TrainingArguments
from .rules import MAX_MINUTES

METRICS = {  # metrics of an evaluation, by the recipe's `metric`
    "translation": ["loss", "bleu", "chrf", "ter", "bleu_tokenized_lc"],
    "sequence": ["loss", "exact_match", "token_error_rate", "character_error_rate"],
}
NON_NEGATIVE_KEYS = {
    *("seed", "data_seed", "warmup_steps", "max_grad_norm", "rdrop_alpha", "simcut_alpha", "lora_rank"),
    *("validation_size", "test_size", "layer_norm_eps", "init_std", "dataloader_num_workers"),
}
MIN_ONE_KEYS = {
    *("tokens_per_update", "max_length", "buffer_size", "tokenizer_max_train_pairs", "pad_vocab_to_multiple_of"),
    *("average_checkpoints", "num_beams", "max_new_tokens", "generation_num_beams", "per_device_eval_batch_size"),
    *("save_total_limit", "early_stopping_patience", "d_model", "encoder_attention_heads", "decoder_attention_heads"),
    *("max_length_ratio", *MACHINE_KEYS),
}
MINIMA = dict.fromkeys(NON_NEGATIVE_KEYS, 0) | dict.fromkeys(MIN_ONE_KEYS, 1)
POSITIVE_KEYS = {"minutes", "logging_steps", "eval_steps", "save_steps", "num_train_epochs"}
FRACTION_KEYS = {"ema_decay", "label_smoothing_factor"}  # and all that end with "dropout"
# exception types that libraries raise for invalid settings
LIBRARY_ERRORS = ValueError, TypeError, ImportError, RuntimeError, AttributeError, KeyError, ArithmeticError
MAX_PARAMETERS = 4 * 10**12  # more than fit into the memory of any machine


def validate_values(parts: list[Any]) -> None:
    """Raise ValueError for values that are invalid independently of the other keys."""
    values = {f.name: getattr(part, f.name) for part in parts for f in fields(part)}
    for name, value in values.items():
        if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
            raise ValueError(f"{name}={value!r} contains a NUL or surrogate character. Remove it.")
        if value in (None, "auto"):
            continue
        if name in MINIMA and value < MINIMA[name]:
            raise ValueError(f"{name}={value} is invalid: it must be at least {MINIMA[name]}.")
        if name in POSITIVE_KEYS and value <= 0:
            raise ValueError(f"{name}={value} is invalid: it must be greater than 0.")
        if name == "minutes" and value > MAX_MINUTES:
            raise ValueError(f"minutes={value:g} is invalid: it must be at most {MAX_MINUTES} (a year).")
        if name == "train_fraction" and not 0 < value <= 1:
            raise ValueError(f"{name}={value} is invalid: it must be greater than 0 and at most 1.")
        if (name in FRACTION_KEYS or name.endswith("dropout")) and not 0 <= value < 1:
            raise ValueError(f"{name}={value} is invalid: it must be at least 0 and less than 1.")
    if values["max_steps"] == 0 or values["max_steps"] < -1:
        raise ValueError(f"max_steps={values['max_steps']} is invalid: it must be at least 1, or -1 for epochs.")
    if invalid := [line for line in values["attention_plot_lines"] if line < 1]:
        raise ValueError(f"attention_plot_lines={invalid[0]} is invalid: sentence numbers are 1-based.")
    if not values["output_dir"].strip():
        raise ValueError("output_dir is empty. Set it to a directory.")


def validate_model(values: dict[str, Any]) -> None:
    if values["activation_function"] not in ACT2FN:
        known = closest_match(values["activation_function"], ACT2FN) or "relu, gelu or silu"
        raise ValueError(f"activation_function={values['activation_function']} is unknown. Did you mean {known}?")
    try:
        VanillaTransformerConfig(**values)
    except StrictDataclassError as error:
        raise ValueError(str(error)) from error
    layers = values["encoder_layers"] + values["decoder_layers"]
    inner = values["d_model"] + values["encoder_ffn_dim"] + values["decoder_ffn_dim"]
    if layers > 10_000 or layers * values["d_model"] * inner > MAX_PARAMETERS:
        raise ValueError(f"{layers} layers of d_model={values['d_model']} do not fit into memory. Use a smaller model.")


def validate_attention(args: TrainingArguments) -> None:
    """Raise ValueError for an unknown attention implementation, or one that this device does not support."""
    name = args.attn_implementation
    if name == "auto" or "/" in name:  # with "/": a kernel on the Hub
        return
    if args.device.type == "cpu" and name.startswith(("flash", "flex")):
        raise ValueError(f"attn_implementation={name} requires a GPU. Use eager, sdpa or auto.")
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_ffn_dim", "decoder_ffn_dim"), 1)
    config = VanillaTransformerConfig.from_size("tiny", vocab_size=8, **sizes)
    model = VanillaTransformerForConditionalGeneration(config)
    try:
        model.set_attn_implementation(name)
    except LIBRARY_ERRORS as error:
        known = ", ".join(["auto", "eager", *AttentionInterface().valid_keys()])
        raise ValueError(f"attn_implementation={name} cannot be used ({error}). Use one of {known}.") from error


def validate_metric(args: TrainingArguments, metric: str) -> None:
    """Raise ValueError if evaluations do not compute `metric_for_best_model`."""
    if args.metric_for_best_model is None:
        return
    known = METRICS[metric] if args.predict_with_generate else ["loss"]
    name = args.metric_for_best_model.removeprefix("eval_")
    if name not in known:
        renamed = " `per` was renamed to `token_error_rate`." * (name == "per")
        renamed += " For `wer`, use `exact_match` and remove `greater_is_better`." * (name == "wer")
        raise ValueError(
            f"metric_for_best_model={args.metric_for_best_model} is not computed with these settings. Available: "
            f"{', '.join(known)}.{renamed}"
        )


def validate_training_setup(args: TrainingArguments) -> None:
    """Set up attention, optimizer, schedule and reporting callbacks once. Raise ValueError if one of them fails."""
    validate_attention(args)
    weight = nn.Linear(1, 1)
    try:
        optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(args, weight)  # type: ignore[arg-type]
        optimizer = optimizer_class(weight.parameters(), **options, weight_decay=args.weight_decay)
    except LIBRARY_ERRORS as error:
        name = OptimizerNames(args.optim).value
        raise ValueError(f"optim={name} cannot be created with these settings: {error}") from error
    try:
        get_scheduler(args.lr_scheduler_type, optimizer, 0, 10**6, args.lr_scheduler_kwargs)
    except LIBRARY_ERRORS as error:
        setting = f"lr_scheduler_type={SchedulerType(args.lr_scheduler_type).value}"
        options = args.lr_scheduler_kwargs
        raise ValueError(f"{setting} cannot be created with lr_scheduler_kwargs={options}: {error}") from error
    try:
        for report in get_reporting_integration_callbacks(args.report_to):
            report()
    except LIBRARY_ERRORS as error:
        raise ValueError(f"report_to={', '.join(args.report_to)}: {error}") from error
