"""Export to a native Transformers class."""

from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.shared.transformers_conversion import to_transformers

from ..importing.tokenizer import select_rows

MASKED_SCORE = 1e9  # subtracted from the logits of added rows; finite, because infinity times 0 is NaN in a search
DEFAULT_LIMIT = 20  # default limit of new tokens of generate() in transformers 5; 19 in transformers 4.40
USAGE = """{out} is a native Transformers model. To load it with transformers only:
    model = AutoModelForSeq2SeqLM.from_pretrained("{out}")
    source, target = (AutoTokenizer.from_pretrained(folder) for folder in ("{source}", "{target}"))
    ids = model.generate(**source("a sentence", return_tensors="pt"))
    print(target.decode(ids[0], skip_special_tokens=True))"""


def convert(
    model: VanillaTransformerForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, quantization: str | None
) -> Callable[[Path], None]:
    """Return a function that writes the equivalent native Transformers model to a directory.

    Raises ValueError if `quantization` is set, or if no native class can represent the model.
    """
    if quantization:
        raise ValueError("--quantization requires --to ctranslate2, argos or onnx. Remove it.")
    native = to_transformers(pad_to_equal_vocab_sizes(model))
    config = native.generation_config
    if config.max_length is None and config.max_new_tokens is None:
        config.max_new_tokens = DEFAULT_LIMIT
    return native.save_pretrained


def pad_to_equal_vocab_sizes(
    model: VanillaTransformerForConditionalGeneration,
) -> VanillaTransformerForConditionalGeneration:
    """Add unused rows to the smaller embedding table: transformers 4.57 requires tables of equal length."""
    sizes = {"source": model.config.vocab_size, "target": model.lm_head.out_features}
    longest = max(sizes.values())
    rows = {side: [*range(size), *[0] * (longest - size)] for side, size in sizes.items()}
    return select_rows(model, rows, MASKED_SCORE)[0]
