"""Export of a checkpoint to a format that runs without this package."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.shared.atomic_io import validate_new_dir, write_dir_atomically
from vanilla_transformer.shared.command_line import accept_settings
from vanilla_transformer.shared.loading import load_model, load_tokenizer
from vanilla_transformer.shared.transformers_conversion import validate_no_adapter

from ..hub_errors import import_with_extra
from ..run_files import read_mapping
from . import QUANTIZATIONS, TARGETS, ExportSettings
from .tokenizer import prepare_for_export, save_tokenizer


@accept_settings(ExportSettings)
def export(checkpoint: str | Path, output: str | Path, **options: Any) -> Path:
    """Convert a checkpoint for other libraries. The new directory is written atomically.

    Args:
        checkpoint: Directory of a checkpoint with its tokenizer, or a repository on the Hub.
        output: Path of the new directory.
        options: Fields of `ExportSettings`.

    Returns:
        The path of the new directory.

    Raises:
        ValueError: If the format cannot represent the model, an argument is not supported, or `output` exists.
    """
    settings = ExportSettings(**options)
    to, quantization = settings.to, settings.quantization
    if to not in TARGETS:
        raise ValueError(f"to={to} is not supported. Use one of {', '.join(TARGETS)}.")
    output = Path(output)
    validate_new_dir(output)
    types = QUANTIZATIONS.get(to)
    if quantization and types and quantization not in types:
        raise ValueError(f"--to {to} does not support --quantization {quantization}. Use one of {', '.join(types)}.")
    if (settings.source_lang or settings.target_lang) and to != "argos":
        raise ValueError(f"--source-lang and --target-lang require --to argos, got --to {to}. Remove them.")
    target = import_with_extra(f".exporting.to_{to}", f"--to {to}")
    model, tokenizer = load(checkpoint, to)
    arguments = [model, tokenizer, quantization]
    if to == "argos":
        recipe = read_mapping(Path(checkpoint) / "recipe.yaml")
        arguments.append([getattr(settings, key) or recipe.text(key) for key in ("source_lang", "target_lang")])
    save_model = target.convert(*arguments)

    def write(folder: Path) -> None:
        save_model(folder)
        if to != "argos":  # an Argos package contains the tokenizer
            save_tokenizer(tokenizer, folder)

    write_dir_atomically(output, write)
    return output


def usage(folder: Path, to: str) -> str:
    sides = [each if (each := folder / f"{side}_tokenizer").exists() else folder for side in ("source", "target")]
    text: str = import_with_extra(f".exporting.to_{to}", f"--to {to}").USAGE
    return text.format(out=folder, source=sides[0], target=sides[1])


def load(checkpoint: str | Path, to: str) -> tuple[VanillaTransformerForConditionalGeneration, PreTrainedTokenizerBase]:
    """Return a float32 model and its tokenizer, prepared for a target. Raise ValueError for other model types."""
    model = load_model(str(checkpoint))
    if (model_type := model.config.model_type) != VanillaTransformerConfig.model_type:
        raise ValueError(f"{checkpoint} has the model type {model_type}, expected vanilla_transformer.")
    validate_no_adapter(model, str(checkpoint))
    return prepare_for_export(model.float(), load_tokenizer(str(checkpoint)), to)
