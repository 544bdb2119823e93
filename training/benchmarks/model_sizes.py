"""The random models and the random text that are measured where no trained model is given."""

from typing import Any

from vanilla_transformer import VanillaTransformerConfig

TRAINED_SCALE_INIT: dict[str, Any] = {
    "initialization": "normal"
}  # logits as small as a trained model's: huge ones cost exp() time
SIZES = {
    "t128": VanillaTransformerConfig.from_size("tiny", **TRAINED_SCALE_INIT),
    "d256": VanillaTransformerConfig.from_size(
        "tiny",
        d_model=256,
        encoder_layers=3,
        decoder_layers=3,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        **TRAINED_SCALE_INIT,
    ),
    "base": VanillaTransformerConfig.from_size("base", vocab_size=10_000, **TRAINED_SCALE_INIT),
    "big": VanillaTransformerConfig.from_size("big", vocab_size=37_000, **TRAINED_SCALE_INIT),
}
WMT_SIZES = SIZES | {
    "base": VanillaTransformerConfig.from_size("base", vocab_size=37_000, **TRAINED_SCALE_INIT)
}  # as on the paper's data
SENTENCE_LENGTH = 16  # tokens of a sentence of random text, about Multi30k's mean
NUM_PADDING_TOKENS = 2  # tokens of padding on every second sentence
