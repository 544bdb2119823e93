"""Export targets: one module `to_<target>` per choice of `hub.export --to`.

`convert(model, tokenizer, quantization)` returns a function that writes the model to a directory. It raises ValueError
for architectures that the target does not support. `USAGE` explains how to load the exported model. In it, `{out}` is
the directory of the model, and `{source}` and `{target}` are the directories of its tokenizers.
"""

from argparse import ArgumentTypeError
from dataclasses import MISSING, dataclass

from vanilla_transformer.shared.command_line import option

TARGETS = ("transformers", "ctranslate2", "argos", "onnx")
CTRANSLATE2_TYPES = ("int8", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16")
QUANTIZATIONS = {"ctranslate2": CTRANSLATE2_TYPES, "argos": CTRANSLATE2_TYPES, "onnx": ("int8", "fp16")}
LANGUAGE_HELP = "With argos: language code such as en. Default: that of the recipe."


def target_name(text: str) -> str:
    """Return the value of `--to`. Raise ArgumentTypeError for `marian`, a target of earlier versions."""
    if text == "marian":
        raise ArgumentTypeError("marian was removed. Use --to transformers, which exports to MarianMTModel if it fits")
    return text


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """Options of the command, and of `export`."""

    to: str = option(MISSING, "The format to export to.", type=target_name, choices=TARGETS, required=True)
    quantization: str | None = option(
        None,
        "Data type of the weights. Default: float32. "
        + "; ".join(f"{target}: {', '.join(types)}" for target, types in QUANTIZATIONS.items())
        + ".",
        choices=sorted({each for types in QUANTIZATIONS.values() for each in types}),
    )
    source_lang: str | None = option(None, LANGUAGE_HELP)
    target_lang: str | None = option(None, LANGUAGE_HELP)
