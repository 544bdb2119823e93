"""Export to `MarianMTModel`, the native Transformers class that most other libraries can load."""

from functools import partial

from hub.exporting import to_transformers
from vanilla_transformer.shared.transformers_conversion import MARIAN

USAGE = to_transformers.USAGE
convert = partial(to_transformers.convert, architecture=MARIAN)
