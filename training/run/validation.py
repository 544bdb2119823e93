"""What can be known of a recipe before any work is done: names, ranges, packages, optimizer and schedule.

Optimizer, schedule and reports are made as training will make them, for one weight alone: what they refuse is then told
at once, not after the data have been read.
"""

import re
from dataclasses import fields
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AttentionInterface, SchedulerType, Trainer, get_scheduler
from transformers.activations import ACT2FN
from transformers.integrations import get_reporting_integration_callbacks
from transformers.training_args import OptimizerNames

from training.arguments import TrainingArguments
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.shared.command_line import closest_match

METRICS = {  # what an evaluation tells, by the recipe's `metric`
    "translation": ["loss", "bleu", "chrf", "ter", "bleu_tokenized_lc"],
    "sequence": ["loss", "exact_match", "wer", "per"],
}
NON_NEGATIVE_KEYS = {
    *("seed", "data_seed", "warmup_steps", "max_grad_norm", "rdrop_alpha", "simcut_alpha", "lora_rank"),
    "validation_size",
    *("layer_norm_eps", "init_std", "dataloader_num_workers"),
}
MIN_ONE_KEYS = {
    *(
        "max_tokens",
        "max_length",
        "buffer_size",
        "tokenizer_max_train_pairs",
        "pad_vocab_to_multiple_of",
        "num_processes",
    ),
    *("average_checkpoints", "gradient_accumulation_steps", "num_beams", "max_new_tokens", "generation_num_beams"),
    *("per_device_eval_batch_size", "save_total_limit", "early_stopping_patience", "d_model"),
    *("encoder_attention_heads", "decoder_attention_heads"),
}
POSITIVE_KEYS = {"logging_steps", "eval_steps", "save_steps", "num_train_epochs"}
LIBRARY_ERRORS = (
    ValueError,
    TypeError,
    ImportError,
    RuntimeError,
    AttributeError,
    KeyError,
    ArithmeticError,
)  # by libraries
MAX_PARAMETERS = 4 * 10**12  # weights: more than any machine holds


def check_values(parts: list[Any]) -> None:
    """Raises ValueError for a number or text that no run could use, whatever the other keys are."""
    values = {f.name: getattr(part, f.name) for part in parts for f in fields(part)}
    for name, value in values.items():
        least = 0 if name in NON_NEGATIVE_KEYS else 1 if name in MIN_ONE_KEYS else None
        if least is not None and value is not None and value < least:
            raise ValueError(f"{name}={value}: give a number of at least {least}.")
        if name in POSITIVE_KEYS and value is not None and value <= 0:
            raise ValueError(f"{name}={value}: give a number above 0.")
    if wrong := [line for line in values["attention_plot_lines"] if line < 1]:
        raise ValueError(f"attention_plot_lines={wrong[0]}: sentences are counted from 1.")
    for name, value in values.items():
        if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
            raise ValueError(f"{name}={value!r} holds a character that no name can have: remove it.")
    if not values["output_dir"].strip():
        raise ValueError("output_dir is empty: name a folder.")


def check_model(values: dict[str, Any]) -> None:
    """Raises ValueError for fields of the configuration that fit no model."""
    if values["activation_function"] not in ACT2FN:
        known = closest_match(values["activation_function"], ACT2FN) or "relu, gelu or silu"
        raise ValueError(f"activation_function={values['activation_function']} is not known: did you mean {known}?")
    try:
        VanillaTransformerConfig(**values)
    except StrictDataclassError as error:
        raise ValueError(str(error)) from error
    layers = values["encoder_layers"] + values["decoder_layers"]
    width = values["d_model"] + values["encoder_ffn_dim"] + values["decoder_ffn_dim"]
    if layers > 10_000 or layers * values["d_model"] * width > MAX_PARAMETERS:
        raise ValueError(f"{layers} layers of d_model={values['d_model']} are more than a machine holds: give less.")


def check_attention(args: TrainingArguments) -> None:
    """Raises ValueError for an implementation of attention that is not there, or not for this device."""
    name = args.attn_implementation
    if name == "auto" or "/" in name:  # the latter is a kernel on the Hub
        return
    if args.device.type == "cpu" and name.startswith(("flash", "flex")):
        raise ValueError(f"attn_implementation={name} needs a GPU: choose eager, sdpa or auto.")
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_ffn_dim", "decoder_ffn_dim"), 1)
    model = VanillaTransformerForConditionalGeneration(
        VanillaTransformerConfig.from_size("tiny", vocab_size=8, **sizes)
    )
    try:
        model.set_attn_implementation(name)
    except LIBRARY_ERRORS as error:
        known = ["auto", "eager", *AttentionInterface().valid_keys()]
        raise ValueError(
            f"attn_implementation={name} cannot be used ({error}): choose one of {', '.join(known)}."
        ) from error


def check_metric(args: TrainingArguments, metric: str) -> None:
    """Raises ValueError where no evaluation tells the metric_for_best_model."""
    if args.metric_for_best_model is None:
        return
    known = METRICS[metric] if args.predict_with_generate else ["loss"]
    if args.metric_for_best_model.removeprefix("eval_") not in known:
        raise ValueError(
            f"metric_for_best_model={args.metric_for_best_model}: with these settings an evaluation tells "
            f"{', '.join(known)}."
        )


def validate_training_setup(args: TrainingArguments) -> None:
    """Raises ValueError where optimizer, schedule or reports cannot be made: a package is missing, or an argument does
    not fit."""
    weight = nn.Linear(1, 1)
    try:
        make, options = Trainer.get_optimizer_cls_and_kwargs(args, weight)  # type: ignore[arg-type]
        optimizer = make(weight.parameters(), **options, weight_decay=args.weight_decay)
    except LIBRARY_ERRORS as error:
        name = OptimizerNames(args.optim).value
        raise ValueError(f"optim={name} cannot be made with these settings: {error}") from error
    try:
        get_scheduler(args.lr_scheduler_type, optimizer, 0, 10**6, args.lr_scheduler_kwargs)
    except LIBRARY_ERRORS as error:
        kind, given = SchedulerType(args.lr_scheduler_type).value, args.lr_scheduler_kwargs
        raise ValueError(
            f"lr_scheduler_type={kind} cannot be made with lr_scheduler_kwargs={given}: {error}"
        ) from error
    try:
        for report in get_reporting_integration_callbacks(args.report_to):
            report()
    except LIBRARY_ERRORS as error:
        raise ValueError(f"report_to={', '.join(args.report_to)}: {error}") from error
