"""The encoder-decoder of "Attention Is All You Need" as a model of Hugging Face transformers.

Importing it registers the model with `AutoConfig`, `AutoModel`, `AutoModelForSeq2SeqLM` and `AutoTokenizer`. Only in
the commands, which answer some mistakes without torch, this happens when a name is first used.

The Python functions of the commands, such as `train`, are imported when they are first used.
"""

import logging
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
    "train": "training.run.training",
}
_SCRIPT, _CLONE = Path(*sys.argv[:1]), Path(__file__).parents[1]
IS_COMMAND = _SCRIPT.stem == "vanilla-transformer" or bool({_CLONE / "training", _CLONE / "hub"} & {*_SCRIPT.parents})


def __getattr__(name: str) -> Any:
    if name not in (*__all__, *FUNCTIONS):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{FUNCTIONS.get(name, 'shared.registration')}", __name__), name)


if IS_COMMAND and not TYPE_CHECKING:
    for _name in ("torchao", "torch.utils._pytree"):  # they warn while transformers imports an installed torchao
        logging.getLogger(_name).setLevel(logging.ERROR)
else:
    from .shared.registration import (
        TranslationPipeline,
        VanillaTransformerConfig,
        VanillaTransformerForConditionalGeneration,
        VanillaTransformerModel,
        VanillaTransformerTokenizer,
        beam_search,
    )
