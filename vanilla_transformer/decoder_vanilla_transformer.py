# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""Incremental decoder for `beam_search`: the layers of the model, with a cache that beams share.

The K hypotheses of a sentence are K positions of one decoder input (B, K, D), so cross-attention reads the keys and
values of a sentence only once. In self-attention, the cache has one entry per token and beam, which is never moved.
A mask selects the entries of the earlier tokens of a hypothesis. When beams are reordered, only the mask changes.

This module imports no other module of the package, so that it can be published separately. `model` arguments are
`VanillaTransformerForConditionalGeneration` objects.

Shapes: B sentences, K beams, T tokens so far, C capacity in tokens, S source length, D hidden size, H heads,
V target vocabulary.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import logging

logger = logging.get_logger(__name__)

INITIAL_CAPACITY = 32  # tokens; full buffers are doubled


class IncrementalDecoder:
    """Decoder that processes one token per step, for K hypotheses of each of B sentences.

    It is also the cache, which `MultiHeadAttention` reads and extends like an `EncoderDecoderCache`.

    With `is_static`, all tensors keep their shapes and addresses, so that a step can be captured once as a CUDA graph
    and replayed with a single launch (see `supports_cuda_graphs`). Sentences are then never removed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        states: torch.Tensor,  # encoder output (B, S, D)
        mask: torch.Tensor | None,  # source mask, zero at padding (B, S); None means no padding
        num_beams: int,  # hypotheses per sentence (K)
        prompt_mask: torch.Tensor | None = None,  # mask of the decoder prompt, zero at padding (B, T)
        is_static: bool = False,
    ):
        self.decoder, self.lm_head, self.states = model.get_decoder(), model.lm_head, states
        self.num_beams, self.is_static, self.prompt_mask = num_beams, is_static, prompt_mask
        self.use_cuda_graph = is_static and supports_cuda_graphs(model)
        self.source_mask = None if mask is None or mask.bool().all() else to_additive_mask(mask, states)[:, None, None]
        self.replay: Callable[[], torch.Tensor] | None = None  # replays the captured step
        size, device = len(states), states.device
        self.cross_attention_cache = DynamicCache()
        self.is_updated: dict[int, bool] = {}  # whether the cache of a layer has the keys and values of the source
        self.buffers: list[list[torch.Tensor]] = []  # keys and values of each layer (B, H, C * K, head_dim)
        self.capacity = self.length = 0  # tokens
        self.slots = torch.arange(num_beams, device=device)  # positions of the new tokens in the buffers
        self.tokens = torch.zeros((size, num_beams), dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)  # of the new tokens, including padding
        self.counts = torch.zeros((size, 1), dtype=torch.long, device=device)  # tokens without padding
        self.own_beam_mask = to_additive_mask(torch.eye(num_beams, device=device), states).repeat(size, 1, 1)
        self.ancestry_mask = self.own_beam_mask[..., :0]  # (B, K, C * K), zero at the beams to attend to

    @property
    def self_attention_cache(self) -> IncrementalDecoder:
        """This object, which `MultiHeadAttention` extends with `update`."""
        return self

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the keys and values of the new tokens (B, H, K, head_dim), and return those of all tokens."""
        if layer_idx == len(self.buffers):
            shape = (*key.shape[:2], self.capacity * self.num_beams)
            self.buffers.append([each.new_zeros(*shape, each.shape[-1]) for each in (key, value)])
        keys, values = self.buffers[layer_idx]
        if self.is_static:
            return keys.index_copy_(2, self.slots, key), values.index_copy_(2, self.slots, value)
        start, end = self.length * self.num_beams, (self.length + 1) * self.num_beams
        keys[:, :, start:end], values[:, :, start:end] = key, value
        return keys[:, :, :end], values[:, :, :end]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append one token to each hypothesis (B, K) and return the logits of the next one (B * K, V).

        With `is_static`, the next step overwrites the logits.
        """
        self.tokens = self.tokens.copy_(tokens) if self.is_static else tokens
        if self.length == self.capacity:
            self.grow_buffers()
        elif self.use_cuda_graph and self.replay is None:
            try:
                self.replay = capture_cuda_graph(self.run_step, tokens.device)
            except RuntimeError as error:  # the capture failed before the step changed any state
                logger.warning_once(f"beam_search cannot capture CUDA graphs and will be slower: {error}")
                self.use_cuda_graph = False
        logits = self.run_step() if self.replay is None else self.replay()
        self.length += 1
        return logits

    def grow_buffers(self) -> None:
        """Double the capacity. The next step has to be captured again."""
        added = self.capacity or INITIAL_CAPACITY
        self.capacity += added
        padding = (0, added * self.num_beams)
        self.buffers = [[nn.functional.pad(each, (0, 0, *padding)) for each in layer] for layer in self.buffers]
        masked = torch.finfo(self.own_beam_mask.dtype).min
        self.ancestry_mask = nn.functional.pad(self.ancestry_mask, padding, value=masked)
        if self.prompt_mask is not None:
            missing = max(0, self.capacity - self.prompt_mask.shape[1])
            self.prompt_mask = nn.functional.pad(self.prompt_mask, (0, missing), value=1)
        self.replay = None

    def run_step(self) -> torch.Tensor:
        """Apply the model to `self.tokens` and return logits (B * K, V)."""
        positions, own_beam_mask = self.position[None], self.own_beam_mask
        if self.prompt_mask is not None:  # as in the model, padding is neither counted nor attended to
            is_real = self.prompt_mask.index_select(1, self.position)  # (B, 1)
            self.counts += is_real
            positions = (self.counts - 1).clamp(min=0)
            own_beam_mask = own_beam_mask.masked_fill(is_real[..., None] == 0, torch.finfo(own_beam_mask.dtype).min)
        self_mask: torch.Tensor | None = self.ancestry_mask[:, None]  # (B, 1, K, C * K)
        if self.is_static:
            self.ancestry_mask.index_copy_(2, self.slots, own_beam_mask)
        elif self.num_beams == 1 and self.prompt_mask is None:
            self_mask = None
        else:
            end = (self.length + 1) * self.num_beams
            self.ancestry_mask[..., end - self.num_beams : end] = own_beam_mask
            self_mask = self.ancestry_mask[:, None, :, :end]
        hidden_states = self.decoder.embed(self.decoder.embed_tokens(self.tokens), positions)
        masks = {"attention_mask": self_mask, "encoder_attention_mask": self.source_mask}
        for layer in self.decoder.layers:
            hidden_states = layer(hidden_states, self.states, **masks, cache=self)
        self.position += 1
        self.slots += self.num_beams
        return self.lm_head(self.decoder.norm(hidden_states)).flatten(0, 1)

    def reorder_cache(self, parents: torch.Tensor | None, sentences: torch.Tensor | None) -> None:
        """Keep some sentences, by index, then continue each hypothesis from its parent beam (B, K).

        None keeps all sentences, or the order of the beams.
        """
        if sentences is not None:
            end = self.length * self.num_beams
            for layer in self.buffers:
                for i, each in enumerate(layer):
                    layer[i] = each.new_empty(len(sentences), *each.shape[1:])
                    torch.index_select(each[:, :, :end], 0, sentences, out=layer[i][:, :, :end])
            for source in self.cross_attention_cache.layers:  # after the first step, `states` have no effect
                source.keys = source.keys.index_select(0, sentences)
                source.values = source.values.index_select(0, sentences)
            for name in ("source_mask", "prompt_mask", "counts", "own_beam_mask", "ancestry_mask"):
                value = getattr(self, name)
                setattr(self, name, None if value is None else value.index_select(0, sentences))
        if parents is not None:
            reordered = self.ancestry_mask.gather(1, parents[..., None].expand_as(self.ancestry_mask))
            self.ancestry_mask.copy_(reordered)


def is_async_device(device: torch.device) -> bool:
    """Return whether computations are asynchronous, so that reading a value waits for them."""
    return device.type != "cpu"


def supports_cuda_graphs(model: Any) -> bool:
    """Return whether a step can be captured: on a CUDA device, without quantized weights."""
    return model.device.type == "cuda" and not getattr(model, "is_quantized", False)


def to_additive_mask(mask: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Convert a mask (...), zero at padding, to the mask that is added to attention scores."""
    zeros = torch.zeros(mask.shape, dtype=states.dtype, device=states.device)
    return zeros.masked_fill(mask == 0, torch.finfo(states.dtype).min)


# The last captured graph of each stream, per thread: graphs of different threads must not share a memory pool,
# because the replay of one would overwrite the results of the other
LAST_GRAPHS = threading.local()


def capture_cuda_graph(function: Callable[[], torch.Tensor], device: torch.device) -> Callable[[], torch.Tensor]:
    """Capture a function as a CUDA graph and return a function that replays it.

    The tensors of the function must keep their addresses, and it must have been called before, so that its kernels are
    loaded. The graph reuses the memory pool of the last graph that its thread captured for the same stream.

    `torch.compile` would take most of a minute per shape. `torch.cuda.graph` would first release all cached memory.
    """
    with torch.cuda.device(device):
        current = torch.cuda.current_stream()
        last_graphs: Any = vars(LAST_GRAPHS)  # of this thread: current stream -> capture stream, last captured graph
        stream, last = last_graphs.get(current) or (torch.cuda.Stream(), None)
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=last and last.pool(), capture_error_mode="thread_local")
            try:
                result = function()
            finally:
                graph.capture_end()
        current.wait_stream(stream)
        last_graphs[current] = stream, graph

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay


class Ensemble:
    """Decoders of one or more models, whose probabilities are averaged. `args` are those of `IncrementalDecoder`."""

    def __init__(self, models: Sequence[PreTrainedModel], states: Sequence[torch.Tensor], *args: Any):
        self.decoders = [IncrementalDecoder(*each, *args) for each in zip(models, states, strict=True)]
        self.vocab_size = models[0].config.decoder_vocab_size

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run one step. Return the logits of a single model, or the log-probabilities of several."""
        logits = [decoder.step(tokens).float() for decoder in self.decoders]
        if len(logits) == 1:
            return logits[0]
        return torch.stack([each.log_softmax(-1) for each in logits]).logsumexp(0) - math.log(len(logits))

    def reorder_cache(self, parents: torch.Tensor | None, sentences: torch.Tensor | None) -> None:
        """Select sentences and hypotheses in all decoders."""
        for decoder in self.decoders:
            decoder.reorder_cache(parents, sentences)


__all__ = ["Ensemble", "IncrementalDecoder"]
