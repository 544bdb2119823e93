"""A model of ours as one of transformers' own classes, for transformers alone."""

from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hub.importing.tokenizer import with_rows
from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.shared.transformers_conversion import NativeArchitecture, to_transformers

MASKED_SCORE = 1e9  # subtracted from logits of added rows: probability 0; a search would multiply infinity by 0: NaN
DEFAULT_LIMIT = 20  # tokens that generate() of transformers 5 gives where nothing sets a limit; that of 4.40 gives 19
USAGE = """{out} is a model of transformers' own. To load it, with transformers alone:
    model = AutoModelForSeq2SeqLM.from_pretrained("{out}")
    tokenizer = AutoTokenizer.from_pretrained("{source}")"""


def convert(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    quantization: str | None = None,
    stock: NativeArchitecture | None = None,
) -> Callable[[Path], None]:
    """What writes the equal model of a class of transformers into a folder.

    Args:
        stock: the class; None: the first that fits.

    Raises:
        ValueError: a `quantization`, or an architecture that the class, or none, can express; names what.
    """
    if quantization:
        raise ValueError("--quantization is for --to ctranslate2 and --to onnx, not for a model of transformers.")
    sizes = {"source": model.config.vocab_size, "target": model.lm_head.out_features}
    longest = max(sizes.values())  # transformers 4.57 loads only tables of one length
    rows = {side: [*range(size), *[0] * (longest - size)] for side, size in sizes.items()}
    theirs = to_transformers(with_rows(model, rows, MASKED_SCORE)[0], stock)
    settings = theirs.generation_config
    if settings.max_length is None and settings.max_new_tokens is None:
        settings.max_new_tokens = DEFAULT_LIMIT
    return theirs.save_pretrained
