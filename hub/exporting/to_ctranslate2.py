"""Export to CTranslate2, an inference engine in C++ for serving, with optional quantization."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ctranslate2.specs import transformer_spec
from transformers import PreTrainedTokenizerBase

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.shared import ctranslate2_conversion
from vanilla_transformer.shared.vocabularies import tokens_by_id, vocabularies

USAGE = """{out} is a CTranslate2 model. To translate with ctranslate2 and transformers only:
    source, target = (AutoTokenizer.from_pretrained(folder) for folder in ("{source}", "{target}"))
    tokens = source.convert_ids_to_tokens(source("a sentence").input_ids)
    best = ctranslate2.Translator("{out}").translate_batch([tokens], beam_size=5)[0].hypotheses[0]
    print(target.decode(target.convert_tokens_to_ids(best), skip_special_tokens=True))"""


def convert(
    model: VanillaTransformerForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, quantization: str | None
) -> Callable[[Path], None]:
    """Return a function that writes the equivalent model to a directory. See `to_spec` for arguments and errors."""
    spec = to_spec(model, tokenizer, quantization)
    return lambda folder: spec.save(str(folder))


def to_spec(
    model: VanillaTransformerForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, quantization: str | None
) -> transformer_spec.TransformerSpec:
    """Return the specification of the equivalent model, with the tokens of its tokenizer.

    Raises ValueError if CTranslate2 does not support the architecture or the generation config.
    """
    config: Any = model.config
    sizes = (config.vocab_size, config.decoder_vocab_size)
    source, target = map(tokens_by_id, vocabularies(tokenizer), sizes)
    unk_token = tokenizer.unk_token or tokenizer.pad_token
    return ctranslate2_conversion.to_spec(model, source, target, unk_token, tokenizer.bos_token, quantization)
