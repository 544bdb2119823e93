"""Write `recipe_keys.md` from the help texts in `training/recipe/arguments.py`: `python docs/recipe_keys.py`."""

import argparse
import dataclasses
import sys
from pathlib import Path
from textwrap import fill

PAGE = Path(__file__).with_suffix(".md")
HEAD = """# Recipe keys

This page lists the keys of a recipe with their defaults. In a recipe, a key is one line, such as `max_steps: 500`. On
the command line, it is an option, such as `--max-steps 500`, which takes precedence over the recipe. In a recipe, write
`None` as `null`.

The keys for training are fields of `transformers.Seq2SeqTrainingArguments`, and additional ones. Fields that are not
listed here are not supported.

(`docs/recipe_keys.py` writes this page from the help texts of `training.train`. Do not edit it by hand.)
"""
SECTIONS = {
    "DataArguments": ("Data", "Files or dataset, and filters."),
    "TokenizerArguments": ("Tokenizer", "Type and vocabulary of the tokenizer."),
    "ModelArguments": ("Model", "Fields of `VanillaTransformerConfig`. The defaults are the paper's base model."),
    "DecodingArguments": ("Decoding and scoring", "Translation and metrics of the test set."),
}
TRAINING = {  # sections of the training keys; the last one contains the remaining keys
    "Training: output, duration, initial model": "output_dir max_steps num_train_epochs seed data_seed base_model "
    "lora_rank",
    "Training: batches and hardware": "tokens_per_update num_processes max_tokens "
    "gradient_accumulation_steps precision "
    "attn_implementation step_mode fsdp fsdp_config torch_compile activation_checkpointing bf16 use_cpu "
    "dataloader_pin_memory dataloader_num_workers ddp_timeout",
    "Training: optimizer and schedule": "learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps optim "
    "adam_beta1 adam_beta2 adam_epsilon weight_decay max_grad_norm",
    "Training: regularization and averaging": "label_smoothing_factor rdrop_alpha simcut_alpha ema_decay "
    "average_checkpoints average_by",
    "Training: evaluation, checkpoints, logging": "",
}


def page() -> str:
    """Return the text of the page for the current code."""
    sys.path.insert(0, str(PAGE.parents[1]))  # training/ is not installed
    from training.recipe.reading import make_parser

    parser = make_parser()
    actions = {action.dest: action for action in parser._actions if action.help != argparse.SUPPRESS}
    parts = [HEAD]
    for kind in parser.dataclass_types:
        fields = {field.name: field for field in dataclasses.fields(kind) if field.name in actions}
        if kind.__name__ in SECTIONS:
            title, text = SECTIONS[kind.__name__]
            parts.append(f"\n## {title}\n\n{text}\n\n")
            parts += [entry(actions[name], field) for name, field in fields.items()]
            continue
        listed = " ".join(TRAINING.values()).split()
        for title, names in TRAINING.items():
            parts.append(f"\n## {title}\n\n")
            parts += [
                entry(actions[name], fields[name]) for name in names.split() or [n for n in fields if n not in listed]
            ]
    return "".join(parts)


def entry(action: argparse.Action, field: dataclasses.Field) -> str:
    """Return a list item with key, default, choices and help text."""
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    text = " ".join((action.help or "").split())
    text = text.replace("**", "^").replace("<", "&lt;")  # Markdown would read bold text and a tag
    choices = f" One of {', '.join(f'`{choice}`' for choice in action.choices)}." if action.choices else ""
    item = f"- **`{field.name}`** (default `{default}`):{choices} {text}"
    return fill(item, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
