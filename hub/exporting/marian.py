"""A model of ours for transformers alone, as a `MarianMTModel`."""

from collections.abc import Callable
from pathlib import Path

from torch import nn
from transformers import MarianConfig, MarianMTModel, PreTrainedTokenizerBase

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.to_marian import to_marian

NEVER = -1e9  # a logit whose probability is zero in any sum; -inf would become NaN where a search multiplies it by 0
USAGE = """{out} is a MarianMTModel. To load it, with transformers alone:
    model = AutoModelForSeq2SeqLM.from_pretrained("{out}")
    tokenizer = AutoTokenizer.from_pretrained("{source}")"""


def convert(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    quantization: str | None = None,
) -> Callable[[Path], None]:
    """What writes the equal `MarianMTModel` into a folder.

    Raises:
        ValueError: a `quantization`, or an architecture that `MarianMTModel` cannot express; names what.
    """
    if quantization:
        raise ValueError("--quantization is for --to ctranslate2, not for --to marian.")
    return with_tables_of_one_length(to_marian(model)).save_pretrained


def with_tables_of_one_length(marian: MarianMTModel) -> MarianMTModel:
    """The same model with as many rows for the source's tokens as for the target's; no text has those that are added.

    transformers 4.57 loads no others. A token that is added to the target's side gets the probability zero.
    """
    config = marian.config
    rows = max(config.vocab_size, config.decoder_vocab_size)
    if config.vocab_size == config.decoder_vocab_size:
        return marian
    state = marian.state_dict()
    for name in ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"):
        state[name] = nn.functional.pad(state[name], (0, 0, 0, rows - len(state[name])))
    bias = state["final_logits_bias"]
    state["final_logits_bias"] = nn.functional.pad(bias, (0, rows - bias.shape[1]), value=NEVER)
    sizes = {"vocab_size": rows, "decoder_vocab_size": rows}
    padded = MarianMTModel(MarianConfig.from_dict(config.to_dict() | sizes))
    padded.load_state_dict(state)
    padded.generation_config = marian.generation_config
    return padded.eval()
