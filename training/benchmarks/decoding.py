"""Decoding, compared with the native Transformers class that fits the model, with the same weights and sources."""

import argparse
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import sacrebleu
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.generation_vanilla_transformer import beam_search
from vanilla_transformer.shared.loading import load_model, load_tokenizer
from vanilla_transformer.shared.text_lines import read_lines

from .models import SENTENCE_LENGTH, SIZES, build_variants

NUM_RANDOM_TOKENS = 30  # per translation of random text
Decoder = Callable[[], list[list[int]]]


def quantize_int8(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy whose linear layers have int8 weights and dynamically quantized int8 activations."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_  # an extra of dev

    model = copy.deepcopy(model)
    quantize_(model, Int8DynamicActivationInt8WeightConfig(set_inductor_config=False))
    return model


class DecodingBenchmark:
    """Sources, sorted by length into batches, and the decoders to compare."""

    def __init__(self, arguments: argparse.Namespace, size: str, device: torch.device):
        self.device = device
        self.tokenizer: Any = None
        if arguments.model:
            self.model, self.tokenizer = load_model(arguments.model), load_tokenizer(arguments.model)
            if (model_type := self.model.config.model_type) != VanillaTransformerConfig.model_type:
                raise ValueError(f"--model {arguments.model} must be a vanilla_transformer model, got {model_type}.")
        else:
            self.model = VanillaTransformerForConditionalGeneration(copy.deepcopy(SIZES[size]))
        if arguments.source:
            sources = self.tokenizer(read_lines(arguments.source)[: arguments.sentences])["input_ids"]
            self.limits = {"max_new_tokens": 80}
        else:
            sources = torch.randint(4, self.model.config.vocab_size, (arguments.sentences, SENTENCE_LENGTH)).tolist()
            self.model.generation_config.eos_token_id = None  # a random model ends anywhere
            self.limits = {"max_new_tokens": NUM_RANDOM_TOKENS}
        self.peer, self.variants = build_variants(self.model.eval(), device)
        self.references = read_lines(arguments.reference)[: arguments.sentences] if arguments.reference else None
        self.order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
        self.batches = []
        for start in range(0, len(sources), arguments.batch_size):
            rows = [torch.tensor(sources[i]) for i in self.order[start : start + arguments.batch_size]]
            ids = pad_sequence(rows, batch_first=True, padding_value=self.model.config.pad_token_id)
            mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
            self.batches.append({"input_ids": ids.to(device), "attention_mask": mask.to(device)})

    def decoders(self, options: dict[str, Any]) -> dict[str, Decoder]:
        """Return the decoders by name: functions that return the ids of all translations, without special tokens."""
        models = {name: (model, dict[str, Any]()) for name, model in self.variants.items()}
        sdpa, search = self.variants["Vanilla sdpa"], {"custom_generate": beam_search}
        models["Vanilla beam_search"] = sdpa, search
        models["Vanilla beam_search, bf16"] = copy.deepcopy(sdpa).to(torch.bfloat16), search
        if self.device.type == "cpu":
            models["Vanilla beam_search, int8"] = quantize_int8(sdpa), search
        else:  # with a static cache, generate() compiles the forward pass
            for name in ("Vanilla sdpa", f"{self.peer} sdpa"):
                models[f"{name} static"] = models[name][0], {"cache_implementation": "static"}
        return {name: partial(self.generate, model, options | extra) for name, (model, extra) in models.items()}

    @torch.no_grad()
    def generate(self, model: PreTrainedModel, options: dict[str, Any]) -> list[list[int]]:
        """Return the ids of all translations, without the decoder start token, up to the first EOS token."""
        rows = []
        for batch in self.batches:
            rows += [row[1:] for row in model.generate(**batch, **self.limits, **options).tolist()]
        eos_id = self.model.generation_config.eos_token_id
        return [row[: row.index(eos_id)] if eos_id in row else row for row in rows]

    def bleu(self, rows: list[list[int]]) -> float:
        texts = [""] * len(rows)
        for i, row in zip(self.order, rows, strict=True):
            texts[i] = self.tokenizer.decode(row, skip_special_tokens=True)
        return sacrebleu.corpus_bleu(texts, [self.references]).score
