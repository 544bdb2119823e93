"""A model of ours as a `MarianMTModel`, or not at all: of the classes of transformers the one with most readers."""

from functools import partial

from hub.exporting import to_transformers
from vanilla_transformer.shared.transformers_conversion import MARIAN

USAGE = to_transformers.USAGE
convert = partial(to_transformers.convert, stock=MARIAN)
