"""Configurations of the random models and shape of the random text, for benchmarks without a trained model."""

from typing import Any

from vanilla_transformer import VanillaTransformerConfig as Config

# Logits as small as those of a trained model: exp() takes longer for huge ones
TRAINED_SCALE_INIT: dict[str, Any] = {"initialization": "normal"}
D256 = {"d_model": 256, "encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512}
SIZES = {
    "t128": Config.from_size("tiny", **TRAINED_SCALE_INIT),
    "d256": Config.from_size("tiny", **D256 | TRAINED_SCALE_INIT),
    "base": Config.from_size("base", vocab_size=10_000, **TRAINED_SCALE_INIT),
    "big": Config.from_size("big", vocab_size=37_000, **TRAINED_SCALE_INIT),
}
# With the vocabulary size of the paper's data
WMT_SIZES = SIZES | {"base": Config.from_size("base", vocab_size=37_000, **TRAINED_SCALE_INIT)}
SENTENCE_LENGTH = 16  # tokens per sentence of random text, about the mean of Multi30k
NUM_PADDING_TOKENS = 2  # padding tokens in every second sentence
