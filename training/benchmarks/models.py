"""The compared models: random models of this package, the native classes that fit them, and random text."""

import copy
import re
from typing import Any

import torch
from transformers import PreTrainedModel

from vanilla_transformer import VanillaTransformerConfig as Config
from vanilla_transformer.shared.transformers_conversion import to_transformers

# Logits as small as those of a trained model: exp() takes longer for huge ones
TRAINED_SCALE_INIT: dict[str, Any] = {"initialization": "normal"}
D256 = {"d_model": 256, "encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512}
SIZES = {
    "t128": Config.from_size("tiny", **TRAINED_SCALE_INIT),
    "d256": Config.from_size("tiny", **D256 | TRAINED_SCALE_INIT),
    "base": Config.from_size("base", vocab_size=10_000, **TRAINED_SCALE_INIT),
    "big": Config.from_size("big", vocab_size=37_000, **TRAINED_SCALE_INIT),
}
SENTENCE_LENGTH = 16  # tokens per sentence of random text, about the mean of Multi30k
NUM_PADDING_TOKENS = 2  # padding tokens in every second sentence


def build_variants(model: PreTrainedModel, device: torch.device) -> tuple[str, dict[str, Any]]:
    """Return the short name of the native class that fits a model, such as Marian, and the models to compare, by name.

    These are copies of both with each attention implementation, such as "Marian sdpa".
    """
    native = to_transformers(model)
    peer = re.sub("MTModel$|ForConditionalGeneration$", "", type(native).__name__)
    variants = {}
    for name, each in (("Vanilla", model), (peer, native)):
        for attention in ("eager", "sdpa"):
            variants[f"{name} {attention}"] = variant = copy.deepcopy(each).to(device).train(model.training)
            variant.set_attn_implementation(attention)
    return peer, variants


def make_batch(sentences: int, vocab_size: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return random tokens (B, SENTENCE_LENGTH), with padding at the end of every second sentence."""
    source, labels = torch.randint(4, vocab_size, (2, sentences, SENTENCE_LENGTH), device=device)
    mask = torch.ones_like(source)
    mask[::2, -NUM_PADDING_TOKENS:] = 0
    labels[::2, -NUM_PADDING_TOKENS:] = -100
    return {"input_ids": source * mask, "attention_mask": mask, "labels": labels}
