# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""Incremental decoder with a KV cache for `beam_search`: one model or an ensemble.

Keys and values of cross-attention are computed once per source and shared by its beams. Those of self-attention are
stored in one buffer per layer. Finished sentences are removed from the batch. `StaticShapeDecoder` is for GPUs.

This module imports no other module of the package, so that it can be published separately. `model` arguments are
`VanillaTransformerForConditionalGeneration` objects, `attention` arguments are `MultiHeadAttention` modules.

Shapes: B sentences, K beams, T tokens so far, S source length, D hidden size, H heads, V target vocabulary.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

logger = logging.get_logger(__name__)

CACHE_GROWTH = 32  # tokens that are added to a full KV buffer; initial capacity in `StaticShapeDecoder`


class IncrementalDecoder:
    """Decoder that processes one token per step, for K hypotheses of each of B sources.

    Args:
        model: A `VanillaTransformerForConditionalGeneration`.
        states: Encoder output (B, S, D).
        mask: Source mask, zero at padding (B, S). Defaults to no padding.
        beams: Number of hypotheses per source (K).
        prompt_mask: Mask of the decoder prompt, zero at padding (B, T). Defaults to no padding.
        output_attentions: Whether `last_step_outputs` returns attention weights.
        output_hidden_states: Whether `last_step_outputs` returns hidden states.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        states: torch.Tensor,
        mask: torch.Tensor | None,
        beams: int,
        prompt_mask: torch.Tensor | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ):
        self.output_attentions, self.output_hidden_states = output_attentions, output_hidden_states
        self.attentions: dict[str, list[torch.Tensor]] = {}  # by layer, (B * K, H, 1, T) and (B * K, H, 1, S)
        self.hidden_states: list[torch.Tensor] = []  # by layer, (B * K, 1, D)
        self.decoder, self.lm_head, self.beams = model.get_decoder(), model.lm_head, beams
        self.mask = None if mask is None or mask.bool().all() else to_additive_mask(mask, states)  # (B, 1, 1, S)
        self.prompt_mask = None if prompt_mask is None else prompt_mask.repeat_interleave(beams, 0)  # (B * K, T)
        self.past_mask: torch.Tensor | None = None  # (B * K, 1, 1, tokens so far)
        self.cross_attention_cache: list[tuple[torch.Tensor, torch.Tensor]] = []  # (B, H, S, head_dim) per layer
        for attention in (layer.cross_attn for layer in self.decoder.layers):
            key, value = self.split_key_value_heads(attention, *self.get_key_value_states(attention, states))
            self.cross_attention_cache.append((key.contiguous(), value.contiguous()))
        self.self_attention_cache: list[list[torch.Tensor]] = []  # keys and values, (capacity, B * K, H * head_dim)
        self.length = 0  # cached tokens

    @staticmethod
    def get_key_value_states(attention: Any, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Project states (..., D) to keys and values (..., H * head_dim)."""
        return attention.k_proj(states), attention.v_proj(states)

    @staticmethod
    def split_key_value_heads(attention: Any, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Reshape keys and values (B, S, H * head_dim) to (B, H, S, head_dim)."""
        split = attention.split_heads
        return split(key, attention.key_head_dim), split(value, attention.value_head_dim)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append one token to every hypothesis (B * K) and return the logits of the next one (B * K, V)."""
        embedded = self.decoder.embed_tokens(tokens[:, None])
        positions = torch.full((1, 1), self.length, device=tokens.device)
        if self.prompt_mask is not None:  # as in the model, positions do not count padding
            new = self.prompt_mask.new_ones(len(tokens), max(0, self.length + 1 - self.prompt_mask.shape[1]))
            mask = torch.cat([self.prompt_mask[:, : self.length + 1], new], 1)
            positions = (mask.long().sum(1, keepdim=True) - 1).clamp(min=0)
            self.past_mask = to_additive_mask(mask, embedded)
        logits = self.predict(embedded, positions)
        self.length += 1
        return logits

    def predict(self, embedded: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Apply all layers to the embeddings of the new tokens (B * K, 1, D) and return logits (B * K, V)."""
        states = self.decoder.embed(embedded, positions)
        if self.output_attentions or self.output_hidden_states:
            self.attentions, self.hidden_states = {"decoder_attentions": [], "cross_attentions": []}, []
        for i, layer in enumerate(self.decoder.layers):
            if self.output_hidden_states:
                self.hidden_states.append(states)
            states = layer.apply_sublayer(layer.self_attn_layer_norm, states, partial(self.self_attention, i))
            states = layer.apply_sublayer(layer.cross_attn_layer_norm, states, partial(self.cross_attention, i))
            states = layer.apply_sublayer(layer.feed_forward_layer_norm, states, layer.feed_forward)
        states = self.decoder.norm(states)
        if self.output_hidden_states:
            self.hidden_states.append(states)
        return self.lm_head(states)[:, 0]

    def last_step_outputs(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """Return the requested attention weights and hidden states of the last step, by layer."""
        outputs = {name: tuple(each) for name, each in self.attentions.items()} if self.output_attentions else {}
        return outputs | ({"decoder_hidden_states": tuple(self.hidden_states)} if self.output_hidden_states else {})

    def self_attention(self, i: int, states: torch.Tensor) -> torch.Tensor:
        """Apply the self-attention of layer `i` to one new token per hypothesis (B * K, 1, D)."""
        attention = self.decoder.layers[i].self_attn
        query = attention.split_heads(attention.q_proj(states), attention.key_head_dim)
        new = self.get_key_value_states(attention, states)
        if i == len(self.self_attention_cache):
            self.self_attention_cache.append([each.new_empty(CACHE_GROWTH, len(each), each.shape[-1]) for each in new])
        buffers = self.self_attention_cache[i]
        if self.length == len(buffers[0]):
            buffers[:] = [nn.functional.pad(buffer, (0, 0, 0, 0, 0, CACHE_GROWTH)) for buffer in buffers]
        for buffer, each in zip(buffers, new, strict=True):
            buffer[self.length] = each[:, 0]
        key, value = (
            buffer[: self.length + 1].unflatten(-1, (-1, head_dim)).permute(1, 2, 0, 3)  # (B * K, H, T, head_dim)
            for buffer, head_dim in zip(buffers, (attention.key_head_dim, attention.value_head_dim), strict=True)
        )
        return self.attend(attention, query, key, value, self.past_mask, "decoder_attentions")

    def cross_attention(self, i: int, states: torch.Tensor) -> torch.Tensor:
        """Apply the cross-attention of layer `i`, with the beams of a source as its queries (B * K, 1, D)."""
        attention = self.decoder.layers[i].cross_attn
        return self.attend_shared_keys(attention, states, *self.cross_attention_cache[i], self.mask, "cross_attentions")

    def attend_shared_keys(self, attention: Any, states, key, value, mask, name: str) -> torch.Tensor:
        """Attend from all beams of a sentence (B * K, 1, D) to the same keys (B, H, S, d_k)."""
        query = attention.q_proj(states)
        query = query.view(-1, self.beams, query.shape[-1])
        query = attention.split_heads(query, attention.key_head_dim)  # (B, H, K, d_k)
        output = self.attend(attention, query, key, value, mask, name)
        return output.view(-1, 1, output.shape[-1])

    def attend(self, attention: Any, query, key, value, mask, name: str) -> torch.Tensor:
        """Apply scaled dot-product attention and the output projection. With "eager", call the model's own function."""
        if self.output_attentions or attention.config._attn_implementation == "eager":
            attend = sys.modules[type(attention).__module__].scaled_dot_product_attention
            heads, weights = attend(attention, query, key, value, mask, attention.scaling)
        else:
            heads = nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=attention.scaling)
            heads = heads.transpose(1, 2)
        if self.output_attentions:  # weights (B * K, H, 1, T) or (B, H, K, S)
            rows = weights if name == "decoder_attentions" else weights.transpose(1, 2).flatten(0, 1)[:, :, None]
            self.attentions[name].append(rows)
        return attention.out_proj(heads.flatten(2))

    def reorder_cache(self, hypotheses: torch.Tensor, sentences: torch.Tensor | None) -> None:
        """Select hypotheses by index (0 to B * K - 1) and, unless all sentences remain, sentences (0 to B - 1)."""
        for layer in self.self_attention_cache:
            for n, buffer in enumerate(layer):
                layer[n] = buffer.new_empty(len(buffer), len(hypotheses), buffer.shape[-1])
                torch.index_select(buffer[: self.length], 1, hypotheses, out=layer[n][: self.length])
        self.prompt_mask = None if self.prompt_mask is None else self.prompt_mask[hypotheses]
        if sentences is not None:
            self.cross_attention_cache = [(k[sentences], v[sentences]) for k, v in self.cross_attention_cache]
            self.mask = None if self.mask is None else self.mask[sentences]


def to_additive_mask(mask: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Convert a mask (B, S), zero at padding, to the mask that is added to attention scores (B, 1, 1, S)."""
    zeros = torch.zeros(mask.shape, dtype=states.dtype, device=states.device)
    return zeros.masked_fill(mask == 0, torch.finfo(states.dtype).min)[:, None, None]


class StaticShapeDecoder(IncrementalDecoder):
    """GPU variant of `IncrementalDecoder` that avoids kernel-launch overhead.

    All tensors keep their shapes and addresses, so a step can be captured once as a CUDA graph and replayed with a
    single launch. Keys and values stay with the beam that computed them. When beams are reordered, only
    `ancestry_mask` changes. It selects, for each earlier token of a hypothesis, the beam that computed it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        states: torch.Tensor,
        mask: torch.Tensor | None,
        beams: int,
        prompt_mask: torch.Tensor | None = None,
        use_cuda_graph: bool = False,
    ):
        super().__init__(model, states, mask, beams, prompt_mask)
        self.use_cuda_graph = use_cuda_graph
        self.replay: Callable[[], torch.Tensor] | None = None  # replays the captured step
        self.capacity = 0  # tokens that fit into the buffers
        rows = len(states) * beams
        self.tokens = torch.zeros(rows, dtype=torch.long, device=states.device)
        self.cache_position = torch.zeros(1, dtype=torch.long, device=states.device)  # buffer index of the new tokens
        self.counts = torch.zeros((rows, 1), dtype=torch.long, device=states.device)  # tokens without padding
        identity = torch.eye(beams, device=states.device)
        self.own_beam_mask = to_additive_mask(identity, states)[:, 0].repeat(len(states), 1, 1)  # (B * K, 1, K)
        self.ancestry_mask = self.own_beam_mask[:, :0]  # (B * K, capacity, K), zero at the beams to attend to

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append one token to every hypothesis. The next step overwrites the returned logits."""
        self.tokens.copy_(tokens)
        if self.length == self.capacity:
            self.grow_buffers()
        elif self.use_cuda_graph and self.replay is None:
            try:
                self.replay = capture_cuda_graph(self.run_step, tokens.device)
            except RuntimeError as error:  # the capture failed before the step changed any state
                logger.warning_once(f"beam_search cannot capture CUDA graphs and will be slower: {error}")
                self.use_cuda_graph = False
        self.length += 1
        return self.run_step() if self.replay is None else self.replay()

    def grow_buffers(self) -> None:
        """Double the capacity of the buffers. The next step has to be captured again."""
        added = self.capacity or CACHE_GROWTH
        self.capacity += added
        cache, padding = self.self_attention_cache, (0, 0, 0, 0, 0, added)
        self.self_attention_cache = [[nn.functional.pad(buffer, padding) for buffer in layer] for layer in cache]
        masked = torch.finfo(self.own_beam_mask.dtype).min
        self.ancestry_mask = nn.functional.pad(self.ancestry_mask, (0, 0, 0, added), value=masked)
        if self.prompt_mask is not None:
            missing = max(0, self.capacity - self.prompt_mask.shape[1])
            self.prompt_mask = nn.functional.pad(self.prompt_mask, (0, missing), value=1)
        self.replay = None

    def run_step(self) -> torch.Tensor:
        """Run one step that reads and writes only tensors with fixed addresses, and return logits (B * K, V)."""
        positions, own_beam_mask = self.cache_position[None], self.own_beam_mask
        if self.prompt_mask is not None:  # padding is neither counted by positions nor attended to
            is_real = self.prompt_mask.index_select(1, self.cache_position)  # (B * K, 1)
            self.counts += is_real
            positions = (self.counts - 1).clamp(min=0)
            own_beam_mask = own_beam_mask.masked_fill(is_real[..., None] == 0, torch.finfo(own_beam_mask.dtype).min)
        self.ancestry_mask.index_copy_(1, self.cache_position, own_beam_mask)
        logits = self.predict(self.decoder.embed_tokens(self.tokens[:, None]), positions)
        self.cache_position += 1
        return logits

    def self_attention(self, i: int, states: torch.Tensor) -> torch.Tensor:
        """Apply the self-attention of layer `i`, with buffers (B, capacity, K, H * head_dim)."""
        attention = self.decoder.layers[i].self_attn
        new = [each.view(-1, 1, self.beams, each.shape[-1]) for each in self.get_key_value_states(attention, states)]
        cache = self.self_attention_cache
        if i == len(cache):
            cache.append([each.new_zeros(len(each), self.capacity, *each.shape[2:]) for each in new])
        for buffer, each in zip(cache[i], new, strict=True):
            buffer.index_copy_(1, self.cache_position, each)
        key, value = self.split_key_value_heads(attention, *(buffer.flatten(1, 2) for buffer in cache[i]))
        mask = self.ancestry_mask.view(len(key), 1, self.beams, -1)  # (B, 1, K, capacity * K)
        return self.attend_shared_keys(attention, states, key, value, mask, "decoder_attentions")

    def reorder_cache(self, hypotheses: torch.Tensor, sentences: torch.Tensor | None) -> None:
        """Reorder the hypotheses within each sentence. Sentences are never removed."""
        self.ancestry_mask.copy_(self.ancestry_mask[hypotheses])


class GraphsOfThread(threading.local):
    """The last captured graph of each stream. Threads share none: a replay overwrites the results of the same pool."""

    def __init__(self) -> None:
        self.by_stream: dict[Any, tuple[Any, Any]] = {}  # current stream -> capture stream, last captured graph


LAST_GRAPHS = GraphsOfThread()


def capture_cuda_graph(function: Callable[[], torch.Tensor], device: torch.device) -> Callable[[], torch.Tensor]:
    """Capture a function as a CUDA graph and return a function that replays it.

    The tensors of the function must keep their addresses, and it must have been called before, so that its kernels are
    loaded. The graph reuses the memory pool of the last graph that its thread captured for the same stream.

    `torch.compile` would take most of a minute per shape. `torch.cuda.graph` would first release all cached memory.
    """
    with torch.cuda.device(device):
        current = torch.cuda.current_stream()
        stream, last = LAST_GRAPHS.by_stream.get(current) or (torch.cuda.Stream(), None)
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=last and last.pool(), capture_error_mode="thread_local")
            try:
                result = function()
            finally:
                graph.capture_end()
        current.wait_stream(stream)
        LAST_GRAPHS.by_stream[current] = stream, graph

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay


class Ensemble:
    """Decoders whose probabilities are averaged."""

    def __init__(self, decoders: Sequence[IncrementalDecoder]):
        self.decoders = decoders

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run one step. Return the logits of a single model, or the log-probabilities of several."""
        logits = [decoder.step(tokens).float() for decoder in self.decoders]
        if len(logits) == 1:
            return logits[0]
        return torch.stack([each.log_softmax(-1) for each in logits]).logsumexp(0) - math.log(len(logits))

    def last_step_outputs(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """Return the outputs of the first decoder at the last step."""
        return self.decoders[0].last_step_outputs()

    def reorder_cache(self, hypotheses: torch.Tensor, sentences: torch.Tensor | None) -> None:
        """Select hypotheses and sentences in all decoders."""
        for decoder in self.decoders:
            decoder.reorder_cache(hypotheses, sentences)


__all__ = ["Ensemble", "StaticShapeDecoder", "IncrementalDecoder"]
