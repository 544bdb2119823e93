"""Writes `recipe_keys.md`, the page with every key of a recipe, from the help texts in `training/arguments.py`.

python docs/recipe_keys.py
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from textwrap import fill

PAGE = Path(__file__).with_suffix(".md")
HEAD = """# Recipe keys

This page lists the keys of a recipe, each with its default and its meaning. In a recipe a key is one line, such as
`max_steps: 500`. On the command line it is an option, `--max_steps 500`, which takes precedence over the recipe. Where
this page says `None`, write `null` in a recipe.

The keys for training are fields of `transformers.Seq2SeqTrainingArguments` and a few more. A field that this page does
not list is not supported, and the program rejects it.

(`docs/recipe_keys.py` writes this page from the help texts of `training.train`. Do not edit the page by hand.)
"""
SECTIONS = {
    "DataArguments": ("Data", "Which text is read, and what is left out."),
    "TokenizerArguments": ("Tokenizer", "How text is split into tokens."),
    "ModelArguments": ("Model", "Fields of `VanillaTransformerConfig`. The defaults are the paper's base model."),
    "DecodingArguments": ("Decoding and scoring", "How the test set is translated and scored at the end."),
}
TRAINING = {  # the many keys of training, by what one looks for; the rest stand under the last heading
    "Training: where, how long, from what": ["output_dir", "max_steps", "num_train_epochs", "seed", "data_seed"]
    + ["base_model", "lora_rank"],
    "Training: batches and machine": [
        "max_tokens",
        "gradient_accumulation_steps",
        "num_processes",
        "precision",
        "attn_implementation",
        "step_mode",
    ]
    + ["fsdp", "fsdp_config", "torch_compile", "activation_checkpointing", "bf16", "use_cpu", "dataloader_pin_memory"]
    + ["dataloader_num_workers", "ddp_timeout"],
    "Training: optimizer and schedule": ["learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"]
    + ["optim", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm"],
    "Training: regularization and averaging": ["label_smoothing_factor", "rdrop_alpha", "simcut_alpha", "ema_decay"]
    + ["average_checkpoints", "average_by"],
    "Training: evaluation, checkpoints, logging": [],
}


def page() -> str:
    """The text of the page, as the code now is."""
    sys.path.insert(0, str(PAGE.parents[1]))  # run as a file: training/ lies beside docs/
    from training.recipe import make_parser

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
        chosen = {name for names in TRAINING.values() for name in names}
        for title, names in TRAINING.items():
            parts.append(f"\n## {title}\n\n")
            parts += [entry(actions[name], fields[name]) for name in names or [n for n in fields if n not in chosen]]
    return "".join(parts)


def entry(action: argparse.Action, field: dataclasses.Field) -> str:
    """A list item: key, default, choices, meaning."""
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    text = " ".join((action.help or "").split())
    text = text.replace("**", "^").replace("<", "&lt;")  # which Markdown would take for bold and for a tag
    choices = f" One of {', '.join(f'`{choice}`' for choice in action.choices)}." if action.choices else ""
    item = f"- **`{field.name}`** (default `{default}`):{choices} {text}"
    return fill(item, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
