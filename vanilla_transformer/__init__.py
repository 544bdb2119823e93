"""The encoder-decoder of "Attention Is All You Need" as a model of Hugging Face transformers.

Importing it registers the model with `AutoConfig`, `AutoModel`, `AutoModelForSeq2SeqLM` and `AutoTokenizer`. The
commands delay the registration until a name is first used, so that they can report some errors without importing torch.

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
    "average": "training.run.checkpoints",
    "distill": "training.distillation.distilling",
    "diversify": "training.distillation.distilling",
    "export": "hub.exporting.exporter",
    "import_checkpoint": "hub.importing.importer",
    "make_card": "hub.publishing.card",
    "push": "hub.publishing.upload",
    "score": "training.inference.scoring",
    "train": "training.run.training",
    "translate": "training.inference.translation",
}


def is_command() -> bool:
    """Return whether this process runs the console program, or a command of a clone."""
    script, clone = Path(*sys.argv[:1]), Path(__file__).parents[1]
    if script == Path("-m"):  # python -m vanilla_transformer, or one of its modules, as `launch` does
        return any(word == __name__ or word.startswith(f"{__name__}.") for word in sys.orig_argv)
    in_clone = (clone / "pyproject.toml").exists() and bool({clone / "training", clone / "hub"} & {*script.parents})
    return script.stem == "vanilla-transformer" or in_clone


def __getattr__(name: str) -> Any:
    if name not in (*__all__, *FUNCTIONS):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{FUNCTIONS.get(name, 'shared.registration')}", __name__), name)


_loggers = {each: each.level for each in map(logging.getLogger, ("torchao", "torch.utils._pytree"))}
for _logger in _loggers:  # they warn while transformers imports an installed torchao
    _logger.setLevel(logging.ERROR)
if TYPE_CHECKING or not is_command():
    from .shared.registration import (
        TranslationPipeline,
        VanillaTransformerConfig,
        VanillaTransformerForConditionalGeneration,
        VanillaTransformerModel,
        VanillaTransformerTokenizer,
        beam_search,
    )

    for _logger, _level in _loggers.items():
        _logger.setLevel(_level)
