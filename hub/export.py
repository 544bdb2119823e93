"""Turns one of our checkpoints into a model that others run without our code.

    python -m hub.export runs/mine OUT --to transformers                       # the class of transformers that fits
    python -m hub.export runs/mine OUT --to ctranslate2 --quantization int8    # for CTranslate2, an engine for serving
    python -m hub.export runs/mine OUT --to onnx                               # for onnxruntime and for browsers
    python -m hub.export runs/mine OUT --to argos                              # for Argos Translate and LibreTranslate

The folder that it writes is whole, or not there at all.
"""

import importlib
from pathlib import Path
from types import ModuleType

from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from hub.atomic_dirs import validate_new_dir, write_dir_atomically
from hub.exporting.tokenizer import prepare, save_tokenizer, tokenizer_folders
from hub.run_files import read_record
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.shared.command_line import CommandLineParser, exit_on_user_error
from vanilla_transformer.shared.loading import load_model, load_tokenizer

TARGETS = ("transformers", "marian", "ctranslate2", "argos", "onnx")  # modules of hub.exporting: to_*.py
OF_CTRANSLATE2 = ("int8", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16")
QUANTIZATIONS = {"ctranslate2": OF_CTRANSLATE2, "argos": OF_CTRANSLATE2, "onnx": ("int8", "fp16")}


def main() -> None:
    parser = CommandLineParser("hub.export", __doc__)
    parser.add_argument("checkpoint", help="folder of a model of ours with its tokenizer, or a repository on the Hub")
    parser.add_argument("out", type=Path, help="folder to be made")
    parser.add_argument("--to", choices=TARGETS, required=True, help="what to make")
    choices = sorted({each for known in QUANTIZATIONS.values() for each in known})
    of_targets = "; ".join(f"{to}: {', '.join(known)}" for to, known in QUANTIZATIONS.items())
    parser.add_argument("--quantization", choices=choices, help=f"of the weights; default: float32. {of_targets}")
    for side in ("source_lang", "target_lang"):
        parser.add_argument(f"--{side}", help="for argos: a code such as en; default: that of the run's recipe")
    arguments = parser.parse_args()
    languages = (arguments.source_lang, arguments.target_lang)
    with exit_on_user_error(parser.prog):
        run(arguments.checkpoint, arguments.out, arguments.to, arguments.quantization, languages)


def run(
    checkpoint: str,
    out: Path,
    to: str,
    quantization: str | None,
    languages: tuple[str | None, str | None] = (None, None),
) -> None:
    disable_progress_bar()  # on stderr, where an error is to be one line
    validate_new_dir(out)
    known = QUANTIZATIONS.get(to)
    if quantization and known and quantization not in known:
        raise ValueError(f"--to {to} has no --quantization {quantization}: choose one of {', '.join(known)}.")
    if any(languages) and to != "argos":
        raise ValueError(f"--source_lang and --target_lang are for --to argos, not for --to {to}. Leave them out.")
    target = import_target(to)
    model, tokenizer = load(checkpoint, to)
    more = (resolve_languages(checkpoint, languages),) if to == "argos" else ()
    save_model = target.convert(model, tokenizer, quantization, *more)

    def write(folder: Path) -> None:
        save_model(folder)
        if to != "argos":  # whose file holds it
            save_tokenizer(tokenizer, folder)

    write_dir_atomically(out, write)
    source_folder, target_folder = tokenizer_folders(tokenizer, out)
    print(target.USAGE.format(out=out, source=source_folder, target=target_folder))


def resolve_languages(checkpoint: str, given: tuple[str | None, str | None]) -> tuple[str, str]:
    """Codes of source and target, as given or as the recipe of the run has them; "" where nothing tells."""
    recipe = read_record(Path(checkpoint) / "recipe.yaml")
    source, target = (
        code or recipe.text(key) or "" for code, key in zip(given, ("source_lang", "target_lang"), strict=True)
    )
    return source, target


def import_target(name: str) -> ModuleType:
    """A target's module: see `hub.exporting`. Raises ValueError where what it needs is not installed."""
    try:
        return importlib.import_module(f"hub.exporting.to_{name}")
    except ModuleNotFoundError as error:
        raise ValueError(f"--to {name} needs {error.name}: pip install '.[hub]'") from error


def load(checkpoint: str, to: str) -> tuple[VanillaTransformerForConditionalGeneration, PreTrainedTokenizerBase]:
    """A model of ours, in float32, and its tokenizer, prepared for a target. Raises ValueError for any other."""
    model = load_model(checkpoint)
    if model.config.model_type != VanillaTransformerConfig.model_type:
        raise ValueError(f"{checkpoint} is a {model.config.model_type}, not a model of ours.")
    return prepare(model.float(), load_tokenizer(checkpoint), to)


if __name__ == "__main__":
    main()
