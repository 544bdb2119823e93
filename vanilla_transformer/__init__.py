"""The encoder-decoder of "Attention Is All You Need" as a model of Hugging Face transformers.

Importing it registers the model with `AutoConfig`, `AutoModel`, `AutoModelForSeq2SeqLM` and `AutoTokenizer`. Only in
the console program, which answers `--help` without torch, this happens when a name is first used.

The Python functions of the commands, such as `push`, are imported when they are first used.
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
FUNCTIONS = {  # name: module, which may require an extra of the package
    "average": "training.run.checkpoints",
    "distill": "training.distillation.distilling",
    "diversify": "training.distillation.distilling",
    "export": "hub.exporting.exporter",
    "import_checkpoint": "hub.importing.importer",
    "make_card": "hub.publishing.card",
    "push": "hub.publishing.upload",
    "score": "training.inference.scoring",
    "translate": "training.inference.translation",
}


def __getattr__(name: str) -> Any:
    if name not in (*__all__, *FUNCTIONS):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{FUNCTIONS.get(name, 'shared.registration')}", __name__), name)


if TYPE_CHECKING or Path(*sys.argv[:1]).stem not in ("vanilla-transformer", "-m"):  # -m: of this package
    from .shared.registration import (
        TranslationPipeline,
        VanillaTransformerConfig,
        VanillaTransformerForConditionalGeneration,
        VanillaTransformerModel,
        VanillaTransformerTokenizer,
        beam_search,
    )
