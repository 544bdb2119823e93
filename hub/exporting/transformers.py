"""A model of ours as one of transformers' own classes, for transformers alone."""

from collections.abc import Callable
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.shared.stock import StockClass, to_stock

NEVER = -1e9  # a logit whose probability is zero in any sum; -inf would become NaN where a search multiplies it by 0
DEFAULT_LIMIT = 20  # tokens that generate() of transformers 5 gives where nothing sets a limit; that of 4.40 gives 19
USAGE = """{out} is a model of transformers' own. To load it, with transformers alone:
    model = AutoModelForSeq2SeqLM.from_pretrained("{out}")
    tokenizer = AutoTokenizer.from_pretrained("{source}")"""


def convert(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    quantization: str | None = None,
    stock: StockClass | None = None,
) -> Callable[[Path], None]:
    """What writes the equal model of a class of transformers into a folder.

    Args:
        stock: the class; None: the first that fits.

    Raises:
        ValueError: a `quantization`, or an architecture that the class, or none, can express; names what.
    """
    if quantization:
        raise ValueError("--quantization is for --to ctranslate2 and --to onnx, not for a model of transformers.")
    theirs = with_tables_of_one_length(to_stock(model, stock))
    settings = theirs.generation_config
    if settings.max_length is None and settings.max_new_tokens is None:
        settings.max_new_tokens = DEFAULT_LIMIT
    return theirs.save_pretrained


def with_tables_of_one_length(theirs: PreTrainedModel) -> PreTrainedModel:
    """The same model with as many rows for the source's tokens as for the target's; no text has those that are added.

    transformers 4.57 loads no others. A token that is added to the target's side gets the probability zero.
    """
    config = theirs.config
    sizes = {config.vocab_size, getattr(config, "decoder_vocab_size", config.vocab_size)}
    if len(sizes) == 1:
        return theirs
    rows, state = max(sizes), theirs.state_dict()
    for name in ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"):
        state[name] = nn.functional.pad(state[name], (0, 0, 0, rows - len(state[name])))
    bias = state["final_logits_bias"]
    state["final_logits_bias"] = nn.functional.pad(bias, (0, rows - bias.shape[1]), value=NEVER)
    config_class, lengths = type(config), {"vocab_size": rows, "decoder_vocab_size": rows}
    padded = type(theirs)(config_class.from_dict(config.to_dict() | lengths))
    padded.load_state_dict(state)
    padded.generation_config = theirs.generation_config
    return padded.eval()
