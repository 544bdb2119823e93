"""Entry point of `generate(custom_generate=REPOSITORY)`: calls `beam_search`."""

from typing import Any

from transformers import GenerationMixin

from .generation_vanilla_transformer import beam_search, prepare_custom_generate_kwargs

# transformers copies only the modules that this file imports
from .decoder_vanilla_transformer import IncrementalDecoder  # noqa: F401
from .beam_search_vanilla_transformer import BeamSearch  # noqa: F401


def generate(model: Any, **kwargs: Any) -> Any:
    return GenerationMixin.generate(model, **prepare_custom_generate_kwargs(model, beam_search, kwargs))
