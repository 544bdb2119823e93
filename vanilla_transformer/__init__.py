"""The encoder-decoder of "Attention Is All You Need" as a model of Hugging Face transformers.

Importing it registers the model with `AutoConfig`, `AutoModel`, `AutoModelForSeq2SeqLM` and `AutoTokenizer`. Only in
the console program, which answers `--help` without torch, this happens when a name is first used.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0.dev0"
__all__ = [
    "TranslationPipeline",
    "VanillaTransformerConfig",
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerModel",
    "VanillaTransformerTokenizer",
    "beam_search",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".shared.registration", __name__), name)


if TYPE_CHECKING or Path(*sys.argv[:1]).stem != "vanilla-transformer":
    from .shared.registration import (
        TranslationPipeline,
        VanillaTransformerConfig,
        VanillaTransformerForConditionalGeneration,
        VanillaTransformerModel,
        VanillaTransformerTokenizer,
        beam_search,
    )
