"""A model of ours as a `MarianMTModel`, or not at all: of the classes of transformers the one with most readers."""

from functools import partial

from hub.exporting import transformers
from vanilla_transformer.shared.stock import MARIAN

USAGE = transformers.USAGE
convert = partial(transformers.convert, stock=MARIAN)
