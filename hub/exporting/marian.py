"""A model of ours as a `MarianMTModel`, or not at all: of the classes of transformers the one with most readers."""

from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hub.exporting import transformers
from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.shared.stock import MARIAN

USAGE = transformers.USAGE


def convert(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    quantization: str | None = None,
) -> Callable[[Path], None]:
    """As `hub.exporting.transformers` does."""
    return transformers.convert(model, tokenizer, quantization, MARIAN)
