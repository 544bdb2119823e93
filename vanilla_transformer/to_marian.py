"""A model of ours as transformers' `MarianMTModel`, which the world loads without our code."""

from transformers import MarianMTModel

from .modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .shared.stock import MARIAN, to_stock


def to_marian(model: VanillaTransformerForConditionalGeneration) -> MarianMTModel:
    """A `MarianMTModel` with equal logits. Raises ValueError for an architecture that it cannot express."""
    return to_stock(model, MARIAN)
