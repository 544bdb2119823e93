"""Decoding: the same sources by our model, and by MarianMT with its weights."""

import argparse
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import sacrebleu
import torch
from torch import nn
from transformers import PreTrainedModel

from training.benchmarks.model_sizes import SENTENCE_LENGTH, SIZES
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.generation_vanilla_transformer import beam_search
from vanilla_transformer.shared.loading import load_model, load_tokenizer
from vanilla_transformer.shared.text_lines import read_lines
from vanilla_transformer.shared.transformers_conversion import to_marian

NEW = 30  # tokens of each translation of random text
Decoder = Callable[[], list[list[int]]]


def quantize_int8(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose linear layers have weights of 8 bits, and inputs that are brought to 8 bits as they come."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_  # an extra of dev

    model = copy.deepcopy(model)
    quantize_(model, Int8DynamicActivationInt8WeightConfig(set_inductor_config=False))
    return model


class DecodingBenchmark:
    """Sources in batches of like length, and everything that translates them: functions without arguments that return
    the ids of every translation, without special tokens."""

    def __init__(self, arguments: argparse.Namespace, size: str, device: torch.device):
        self.device = device
        self.tokenizer: Any = None
        if arguments.model:
            self.ours, self.tokenizer = load_model(arguments.model), load_tokenizer(arguments.model)
            if self.ours.config.model_type != VanillaTransformerConfig.model_type:
                raise ValueError(f"--model {arguments.model}: a {self.ours.config.model_type}, and no model of ours.")
        else:
            self.ours = VanillaTransformerForConditionalGeneration(copy.deepcopy(SIZES[size]))
        if arguments.source:
            lines = read_lines(arguments.source)[: arguments.sentences]
            sources = self.tokenizer(lines)["input_ids"]
            self.limits = {"max_new_tokens": 80}
        else:
            sources = torch.randint(4, self.ours.config.vocab_size, (arguments.sentences, SENTENCE_LENGTH)).tolist()
            self.ours.generation_config.eos_token_id = None  # else nobody knows when a random model ends
            self.limits = {"max_new_tokens": NEW}
        self.references = None
        if arguments.reference:
            self.references = read_lines(arguments.reference)[: arguments.sentences]
        self.order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
        pad_id = self.ours.config.pad_token_id
        self.batches = []
        for start in range(0, len(sources), arguments.batch_size):
            rows = [torch.tensor(sources[i]) for i in self.order[start : start + arguments.batch_size]]
            ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_id)
            mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
            self.batches.append({"input_ids": ids.to(device), "attention_mask": mask.to(device)})

    def decoders(self, options: dict[str, Any]) -> dict[str, Decoder]:
        models: dict[str, tuple[PreTrainedModel, dict[str, Any]]] = {}
        for name, model in (("ours", self.ours), ("Marian", to_marian(self.ours))):
            for attention in ("eager", "sdpa"):
                own = copy.deepcopy(model).to(self.device).eval()
                own.set_attn_implementation(attention)
                models[f"{name} {attention}"] = own, {}
        own, search = models["ours sdpa"][0], {"custom_generate": beam_search}
        models["ours beam_search"] = own, search
        models["ours beam_search, bf16"] = copy.deepcopy(own).to(torch.bfloat16), search
        if self.device.type == "cpu":
            models["ours beam_search, int8"] = quantize_int8(own), search
        else:  # generate() compiles a static cache
            for name in ("ours sdpa", "Marian sdpa"):
                models[f"{name} static"] = models[name][0], {"cache_implementation": "static"}
        return {name: partial(self.generate, model, options | own) for name, (model, own) in models.items()}

    @torch.no_grad()
    def generate(self, model: PreTrainedModel, options: dict[str, Any]) -> list[list[int]]:
        rows = []
        for batch in self.batches:
            rows += model.generate(**batch, **self.limits, **options).tolist()
        return [self.plain(row) for row in rows]

    def plain(self, row: list[int]) -> list[int]:
        """Without the start, and up to the end."""
        row = row[1:]
        eos_id = self.ours.generation_config.eos_token_id
        return row[: row.index(eos_id)] if eos_id in row else row

    def bleu(self, rows: list[list[int]]) -> float:
        texts = [""] * len(rows)
        for i, row in zip(self.order, rows, strict=True):
            texts[i] = self.tokenizer.decode(row, skip_special_tokens=True)
        return sacrebleu.corpus_bleu(texts, [self.references]).score
