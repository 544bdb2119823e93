"""Export a vanilla_transformer checkpoint to a format that runs without this package.

    python -m hub.export runs/mine OUT --to transformers                       # the native class that fits the model
    python -m hub.export runs/mine OUT --to ctranslate2 --quantization int8    # for CTranslate2, an inference engine
    python -m hub.export runs/mine OUT --to onnx                               # for onnxruntime and for browsers
    python -m hub.export runs/mine OUT --to argos                              # for Argos Translate and LibreTranslate

The output directory is written atomically.
"""

from argparse import ArgumentTypeError
from pathlib import Path

from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.shared.atomic_io import validate_new_dir, write_dir_atomically
from vanilla_transformer.shared.command_line import CommandLineParser, exit_on_user_error
from vanilla_transformer.shared.loading import load_model, load_tokenizer

from .exporting.tokenizer import prepare_for_export, save_tokenizer, tokenizer_dirs
from .hub_errors import import_with_extra
from .run_files import read_mapping

TARGETS = ("transformers", "ctranslate2", "argos", "onnx")  # modules of hub.exporting: to_*.py
CTRANSLATE2_TYPES = ("int8", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16")
QUANTIZATIONS = {"ctranslate2": CTRANSLATE2_TYPES, "argos": CTRANSLATE2_TYPES, "onnx": ("int8", "fp16")}
Codes = tuple[str | None, str | None]  # language codes of source and target


def main() -> None:
    parser = CommandLineParser("hub.export", __doc__)
    parser.add_argument("checkpoint", help="Path to a checkpoint with its tokenizer, or a repository on the Hub.")
    parser.add_argument("out", type=Path, help="Path of the new directory. It must not exist.")
    parser.add_argument("--to", type=target_name, choices=TARGETS, required=True, help="The format to export to.")
    choices = sorted({each for types in QUANTIZATIONS.values() for each in types})
    by_target = "; ".join(f"{to}: {', '.join(types)}" for to, types in QUANTIZATIONS.items())
    parser.add_argument("--quantization", choices=choices, help=f"Type of the weights. Default: float32. {by_target}.")
    for side in ("source_lang", "target_lang"):
        parser.add_argument(f"--{side}", help="With argos: language code such as en. Default: the code in the recipe.")
    arguments = parser.parse_args()
    languages = (arguments.source_lang, arguments.target_lang)
    with exit_on_user_error(parser.prog):
        run(arguments.checkpoint, arguments.out, arguments.to, arguments.quantization, languages)


def target_name(text: str) -> str:
    """Return the value of `--to`. Raise ArgumentTypeError for `marian`, a target of earlier versions."""
    if text == "marian":
        raise ArgumentTypeError("marian was removed. Use --to transformers, which exports to MarianMTModel if it fits")
    return text


def run(checkpoint: str, out: Path, to: str, quantization: str | None, languages: Codes = (None, None)) -> None:
    disable_progress_bar()  # an error must be a single line on stderr
    validate_new_dir(out)
    types = QUANTIZATIONS.get(to)
    if quantization and types and quantization not in types:
        raise ValueError(f"--to {to} does not support --quantization {quantization}. Use one of {', '.join(types)}.")
    if any(languages) and to != "argos":
        raise ValueError(f"--source-lang and --target-lang require --to argos, got --to {to}. Remove them.")
    target = import_with_extra(f".exporting.to_{to}", f"--to {to}")
    model, tokenizer = load(checkpoint, to)
    extra = (resolve_languages(checkpoint, languages),) if to == "argos" else ()
    save_model = target.convert(model, tokenizer, quantization, *extra)

    def write(folder: Path) -> None:
        save_model(folder)
        if to != "argos":  # an Argos package contains the tokenizer
            save_tokenizer(tokenizer, folder)

    write_dir_atomically(out, write)
    source_dir, target_dir = tokenizer_dirs(tokenizer, out)
    print(target.USAGE.format(out=out, source=source_dir, target=target_dir))


def resolve_languages(checkpoint: str, codes: Codes) -> tuple[str, str]:
    """Return the source and target language codes. The default is that of the run's recipe, or ""."""
    recipe = read_mapping(Path(checkpoint) / "recipe.yaml")
    source, target = codes
    return source or recipe.text("source_lang") or "", target or recipe.text("target_lang") or ""


def load(checkpoint: str, to: str) -> tuple[VanillaTransformerForConditionalGeneration, PreTrainedTokenizerBase]:
    """Return a float32 model and its tokenizer, prepared for a target. Raise ValueError for other model types."""
    model = load_model(checkpoint)
    if (model_type := model.config.model_type) != VanillaTransformerConfig.model_type:
        raise ValueError(f"{checkpoint} has the model type {model_type}, expected vanilla_transformer.")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            f"{checkpoint} has a PEFT adapter. Call merge_and_unload() on the PeftModel, and save the result."
        )
    return prepare_for_export(model.float(), load_tokenizer(checkpoint), to)


if __name__ == "__main__":
    main()
