"""Turns one of our checkpoints into a model that others run without our code.

    python -m hub.export runs/mine OUT --to marian                             # transformers' MarianMTModel
    python -m hub.export runs/mine OUT --to ctranslate2 --quantization int8    # for CTranslate2, an engine for serving

The folder that it writes is whole, or not there at all.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hub.folders import write_whole
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.to_marian import to_marian

QUANTIZATIONS = ("int8", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16")

MARIAN = """{out} is a MarianMTModel. To load it, with transformers alone:
    model = AutoModelForSeq2SeqLM.from_pretrained("{out}")
    tokenizer = AutoTokenizer.from_pretrained("{source}")"""
CTRANSLATE2 = """{out} is a model for CTranslate2. To translate, with ctranslate2 and transformers alone:
    source, target = (AutoTokenizer.from_pretrained(folder) for folder in ("{source}", "{target}"))
    tokens = source.convert_ids_to_tokens(source("a sentence").input_ids)
    best = ctranslate2.Translator("{out}").translate_batch([tokens], beam_size=5)[0].hypotheses[0]
    print(target.decode(target.convert_tokens_to_ids(best)))"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="hub.export", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="folder of a model of ours with its tokenizer, or a repository on the Hub")
    parser.add_argument("out", type=Path, help="folder to be made")
    parser.add_argument("--to", choices=("marian", "ctranslate2"), required=True, help="what to make")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="of CTranslate2's weights; default: float32")
    arguments = parser.parse_args()
    try:
        run(arguments.checkpoint, arguments.out, arguments.to, arguments.quantization)
    except (ValueError, OSError) as error:
        print(f"hub.export: {error}", file=sys.stderr)
        sys.exit(2)


def run(checkpoint: str, out: Path, to: str, quantization: str | None) -> None:
    if out.exists():
        raise ValueError(f"{out} exists already: give a folder that does not.")
    if quantization and to != "ctranslate2":
        raise ValueError(f"--quantization is for --to ctranslate2, not for --to {to}.")
    model, tokenizer = load(checkpoint)
    save = marian_saver(model) if to == "marian" else ctranslate2_saver(model, tokenizer, quantization)

    def write(folder: Path) -> None:
        save(folder)
        save_tokenizer(tokenizer, folder)

    write_whole(out, write)
    sides = [out / "source_tokenizer", out / "target_tokenizer"] if has_two_sides(tokenizer) else [out, out]
    print((MARIAN if to == "marian" else CTRANSLATE2).format(out=out, source=sides[0], target=sides[1]))


def load(checkpoint: str) -> tuple[VanillaTransformerForConditionalGeneration, PreTrainedTokenizerBase]:
    """A model of ours, in float32, and its tokenizer. Raises ValueError for any other."""
    try:
        model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{checkpoint} cannot be loaded: {str(error).strip().splitlines()[0]}") from error
    if model.config.model_type != VanillaTransformerConfig.model_type:
        raise ValueError(f"{checkpoint} is a {model.config.model_type}, not a model of ours.")
    return model.float().eval(), AutoTokenizer.from_pretrained(checkpoint)


def marian_saver(model: VanillaTransformerForConditionalGeneration) -> Callable[[Path], None]:
    return to_marian(model).save_pretrained


def ctranslate2_saver(
    model: VanillaTransformerForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, quantization: str | None
) -> Callable[[Path], None]:
    try:
        from hub.to_ctranslate2 import to_ctranslate2
    except ModuleNotFoundError as error:
        raise ValueError(f"--to ctranslate2 needs {error.name}: pip install '.[hub]'") from error
    spec = to_ctranslate2(model, tokenizer, quantization)
    return lambda folder: spec.save(str(folder))


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """As stock tokenizers: one in `folder`, or one a side in its folders source_tokenizer and target_tokenizer."""
    if not has_two_sides(tokenizer):
        tokenizer.save_pretrained(folder)
        return
    special = {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    for side in ("source", "target"):
        one = getattr(tokenizer, f"{side}_tokenizer")
        stock = PreTrainedTokenizerFast(tokenizer_object=one, **special)
        stock.save_pretrained(folder / f"{side}_tokenizer")


def has_two_sides(tokenizer: PreTrainedTokenizerBase) -> bool:
    return hasattr(tokenizer, "target_tokenizer")


if __name__ == "__main__":
    main()
