# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""The decoder a token a step, for `beam_search`: of one model, or of several that predict together.

Keys and values of cross-attention are computed once per source and shared by its beams. Those of self-attention are
stored in one buffer. Finished sentences leave the batch. `StaticShapeDecoder` is the variant for GPUs: static shapes.

Imports nothing of its siblings, so that it can stand in a repository of its own: a model here is a
`VanillaTransformerForConditionalGeneration`, an `attention` a `MultiHeadAttention`.

Shapes: B sentences still being translated, K beams, T tokens so far, S source length, D model width, H heads,
V target vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

logger = logging.get_logger(__name__)

CACHE_GROWTH = 32  # steps that a buffer of keys and values grows by; in place it is the first, and doubled each time


class IncrementalDecoder:
    """A model's decoder, a token a step, for K hypotheses of each of B sources.

    Args:
        model: one of ours.
        states: the encoder's output (B, S, D).
        mask: (B, S), zero at padding; None: no padding.
        beams: K.
        prompt_mask: (B, T) of the tokens to begin with, zero at padding; None: no padding.
        keep_attentions, keep_hidden_states: of a step, for `seen`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        states: torch.Tensor,
        mask: torch.Tensor | None,
        beams: int,
        prompt_mask: torch.Tensor | None = None,
        keep_attentions: bool = False,
        keep_hidden_states: bool = False,
    ):
        self.keep_attentions, self.keep_hidden_states = keep_attentions, keep_hidden_states
        self.weights: dict[str, list[torch.Tensor]] = {}  # of the last step, by layers
        self.hidden_states: list[torch.Tensor] = []
        self.decoder, self.lm_head, self.beams = model.get_decoder(), model.lm_head, beams
        self.mask = None
        if mask is not None and not mask.bool().all():
            self.mask = to_additive_mask(mask, states)  # (B, 1, 1, S)
        self.prompt_mask = None if prompt_mask is None else prompt_mask.repeat_interleave(beams, 0)  # (B * K, T)
        self.past_mask: torch.Tensor | None = None  # (B * K, 1, 1, tokens so far)
        self.sources: list[tuple[torch.Tensor, torch.Tensor]] = []  # of each layer keys and values (B, H, S, head_dim)
        for attention in (layer.cross_attn for layer in self.decoder.layers):
            key, value = self.heads(attention, *self.get_key_value_states(attention, states))
            self.sources.append((key.contiguous(), value.contiguous()))
        self.past: list[list[torch.Tensor]] = []  # of each layer keys and values: (room, B * K, H * head_dim)
        self.length = 0  # tokens in it

    @staticmethod
    def get_key_value_states(attention: Any, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of states (..., D): (..., H * head_dim)."""
        return attention.k_proj(states), attention.v_proj(states)

    @staticmethod
    def heads(attention: Any, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, S, H * head_dim) -> (B, H, S, head_dim)."""
        return attention.split_heads(key, attention.key_head_dim), attention.split_heads(
            value, attention.value_head_dim
        )

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """The next token of every hypothesis (B * K) -> logits of the one after it (B * K, V)."""
        embedded = self.decoder.embed_tokens(tokens[:, None])
        positions = torch.full((1, 1), self.length, device=tokens.device)
        if self.prompt_mask is not None:  # as the model does: positions count real tokens alone
            new = self.prompt_mask.new_ones(len(tokens), max(0, self.length + 1 - self.prompt_mask.shape[1]))
            seen = torch.cat([self.prompt_mask[:, : self.length + 1], new], 1)
            positions = (seen.long().sum(1, keepdim=True) - 1).clamp(min=0)
            self.past_mask = to_additive_mask(seen, embedded)
        logits = self.predict(embedded, positions)
        self.length += 1
        return logits

    def predict(self, embedded: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Embeddings of the new tokens (B * K, 1, D) through all layers -> logits (B * K, V)."""
        states = self.decoder.embed(embedded, positions)
        if self.keep_attentions or self.keep_hidden_states:
            self.weights, self.hidden_states = {"decoder_attentions": [], "cross_attentions": []}, []
        for i, layer in enumerate(self.decoder.layers):
            if self.keep_hidden_states:
                self.hidden_states.append(states)
            states = layer.apply_sublayer(layer.self_attn_layer_norm, states, partial(self.self_attention, i))
            states = layer.apply_sublayer(layer.cross_attn_layer_norm, states, partial(self.cross_attention, i))
            states = layer.apply_sublayer(layer.feed_forward_layer_norm, states, layer.feed_forward)
        states = self.decoder.norm(states)
        if self.keep_hidden_states:
            self.hidden_states.append(states)
        return self.lm_head(states)[:, 0]

    def seen(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """Of the last step by layers, as the model names and returns it: weights (B * K, H, 1, T) and (B * K, H, 1, S),
        and hidden states (B * K, 1, D); of what is kept."""
        seen = {name: tuple(weights) for name, weights in self.weights.items()} if self.keep_attentions else {}
        return seen | ({"decoder_hidden_states": tuple(self.hidden_states)} if self.keep_hidden_states else {})

    def self_attention(self, i: int, states: torch.Tensor) -> torch.Tensor:
        """Self-attention of layer `i` for one new token a hypothesis: (B * K, 1, D)."""
        attention = self.decoder.layers[i].self_attn
        query = attention.split_heads(attention.q_proj(states), attention.key_head_dim)
        new = self.get_key_value_states(attention, states)
        if i == len(self.past):
            self.past.append([tensor.new_empty(CACHE_GROWTH, len(states), tensor.shape[-1]) for tensor in new])
        elif self.length == len(self.past[i][0]):
            self.past[i] = [nn.functional.pad(buffer, (0, 0, 0, 0, 0, CACHE_GROWTH)) for buffer in self.past[i]]
        for buffer, tensor in zip(self.past[i], new, strict=True):
            buffer[self.length] = tensor[:, 0]
        key, value = (
            buffer[: self.length + 1].unflatten(-1, (-1, head_dim)).permute(1, 2, 0, 3)  # (B * K, H, T, head_dim)
            for buffer, head_dim in zip(self.past[i], (attention.key_head_dim, attention.value_head_dim), strict=True)
        )
        return self.attend(attention, query, key, value, self.past_mask, "decoder_attentions")

    def cross_attention(self, i: int, states: torch.Tensor) -> torch.Tensor:
        """Cross-attention of layer `i`, in which the beams of a source stand as its queries: (B * K, 1, D)."""
        attention = self.decoder.layers[i].cross_attn
        return self.attend_shared_keys(attention, states, *self.sources[i], self.mask, "cross_attentions")

    def attend_shared_keys(self, attention: Any, states, key, value, mask, name: str) -> torch.Tensor:
        """The beams of a sentence (B * K, 1, D) as queries of the same keys (B, H, S, d_k): (B * K, 1, D)."""
        query = attention.q_proj(states)
        query = query.view(-1, self.beams, query.shape[-1])
        query = attention.split_heads(query, attention.key_head_dim)  # (B, H, K, d_k)
        output = self.attend(attention, query, key, value, mask, name)
        return output.view(-1, 1, output.shape[-1])

    def attend(self, attention: Any, query, key, value, mask, name: str) -> torch.Tensor:
        if self.keep_attentions:
            scores = (query * attention.scaling) @ key.transpose(2, 3)
            weights = (scores if mask is None else scores + mask).softmax(-1)  # (B * K, H, 1, T) or (B, H, K, S)
            kept = weights if name == "decoder_attentions" else weights.transpose(1, 2).flatten(0, 1)[:, :, None]
            self.weights[name].append(kept)
            heads = weights @ value
        else:
            heads = nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=attention.scaling)
        return attention.out_proj(heads.transpose(1, 2).flatten(2))

    def keep(self, hypotheses: torch.Tensor, sentences: torch.Tensor | None) -> None:
        """Goes on with these hypotheses (indices into B * K) and, where some left, these sentences (indices into B)."""
        for layer in self.past:
            for n, buffer in enumerate(layer):
                layer[n] = buffer.new_empty(len(buffer), len(hypotheses), buffer.shape[-1])
                torch.index_select(buffer[: self.length], 1, hypotheses, out=layer[n][: self.length])
        self.prompt_mask = None if self.prompt_mask is None else self.prompt_mask[hypotheses]
        if sentences is not None:
            self.sources = [(key[sentences], value[sentences]) for key, value in self.sources]
            self.mask = None if self.mask is None else self.mask[sentences]


def to_additive_mask(mask: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """A mask (B, S), zero at padding, as what is added to scores (B, 1, 1, S), in the states' dtype."""
    zeros = torch.zeros(mask.shape, dtype=states.dtype, device=states.device)
    return zeros.masked_fill(mask == 0, torch.finfo(states.dtype).min)[:, None, None]


class StaticShapeDecoder(IncrementalDecoder):
    """The same for a GPU, whose time goes into the launches of small kernels: all tensors keep their shapes and places,
    so that a step can be recorded once and repeated with a single launch.

    Keys and values stay where they were written. The beams of a sentence attend to those of all of them, and a mask,
    which alone changes its order, says from which each descends.

    Args:
        model, states, mask, beams, prompt_mask: as in `IncrementalDecoder`.
        recorded: a step is recorded where one of its size has been taken.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        states: torch.Tensor,
        mask: torch.Tensor | None,
        beams: int,
        prompt_mask: torch.Tensor | None = None,
        recorded: bool = False,
    ):
        super().__init__(model, states, mask, beams, prompt_mask)
        self.recorded = recorded
        self.repeat: Callable[[], torch.Tensor] | None = None  # a step that was recorded
        self.room = 0  # tokens that the buffers hold
        rows = len(states) * beams
        self.tokens = torch.zeros(rows, dtype=torch.long, device=states.device)
        self.cache_position = torch.zeros(1, dtype=torch.long, device=states.device)  # of the new tokens in the buffers
        self.counts = torch.zeros((rows, 1), dtype=torch.long, device=states.device)  # real tokens so far
        self.self_mask = to_additive_mask(torch.eye(beams, device=states.device), states)[:, 0].repeat(
            len(states), 1, 1
        )
        self.ancestry_mask = self.self_mask[
            :, :0
        ]  # (B * K, room, K), added to scores: zero where a hypothesis descends from

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """As `IncrementalDecoder.step`. The next step overwrites the logits."""
        self.tokens.copy_(tokens)
        if self.length == self.room:
            self.grow()
        elif self.recorded and self.repeat is None:
            try:
                self.repeat = record(self.run_step, tokens.device)
            except RuntimeError as error:  # of the GPU: recording is refused, and nothing of the step has been done
                logger.warning_once(f"beam_search cannot record its steps here, which makes it slower: {error}")
                self.recorded = False
        self.length += 1
        return self.run_step() if self.repeat is None else self.repeat()

    def grow(self) -> None:
        """Makes twice the room, or the first; the next step is not yet recorded."""
        more = self.room or CACHE_GROWTH
        self.room += more
        self.past = [[nn.functional.pad(each, (0, 0, 0, 0, 0, more)) for each in layer] for layer in self.past]
        self.ancestry_mask = nn.functional.pad(
            self.ancestry_mask, (0, 0, 0, more), value=torch.finfo(self.self_mask.dtype).min
        )
        if self.prompt_mask is not None:
            missing = max(0, self.room - self.prompt_mask.shape[1])
            self.prompt_mask = nn.functional.pad(self.prompt_mask, (0, missing), value=1)
        self.repeat = None

    def run_step(self) -> torch.Tensor:
        """A step from what the buffers hold, which goes on with them: logits (B * K, V)."""
        positions, self_mask = self.cache_position[None], self.self_mask
        if self.prompt_mask is not None:  # positions count real tokens alone, and these alone are seen
            is_real = self.prompt_mask.index_select(1, self.cache_position)  # (B * K, 1)
            self.counts += is_real
            positions = (self.counts - 1).clamp(min=0)
            self_mask = self_mask.masked_fill(is_real[..., None] == 0, torch.finfo(self_mask.dtype).min)
        self.ancestry_mask.index_copy_(1, self.cache_position, self_mask)
        logits = self.predict(self.decoder.embed_tokens(self.tokens[:, None]), positions)
        self.cache_position += 1
        return logits

    def self_attention(self, i: int, states: torch.Tensor) -> torch.Tensor:
        """As `IncrementalDecoder.self_attention`; the buffers are (B, room, K, H * head_dim)."""
        attention = self.decoder.layers[i].self_attn
        new = [each.view(-1, 1, self.beams, each.shape[-1]) for each in self.get_key_value_states(attention, states)]
        if i == len(self.past):
            self.past.append([each.new_zeros(len(each), self.room, *each.shape[2:]) for each in new])
        for buffer, each in zip(self.past[i], new, strict=True):
            buffer.index_copy_(1, self.cache_position, each)
        key, value = self.heads(attention, *(buffer.flatten(1, 2) for buffer in self.past[i]))
        mask = self.ancestry_mask.view(len(key), 1, self.beams, -1)  # (B, 1, K, room * K)
        return self.attend_shared_keys(attention, states, key, value, mask, "decoder_attentions")

    def keep(self, hypotheses: torch.Tensor, sentences: torch.Tensor | None) -> None:
        """Goes on with these hypotheses, each of the same sentence as the one that it takes the place of."""
        self.ancestry_mask.copy_(self.ancestry_mask[hypotheses])


LAST_GRAPHS: dict[Any, tuple[Any, Any]] = {}  # of each stream: where its last graph was recorded, and that graph


def record(function: Callable[[], torch.Tensor], device: torch.device) -> Callable[[], torch.Tensor]:
    """A function of tensors that stay in their places, as a CUDA graph, which has its result always in the same place.

    It has been called before, so that its kernels are there. A graph takes the memory of the last one of its stream.
    (Not `torch.compile`, which takes most of a minute for each shape, nor `torch.cuda.graph`, which first gives back
    all of the memory that is kept for reuse.)
    """
    with torch.cuda.device(device):
        current = torch.cuda.current_stream()
        stream, last = LAST_GRAPHS.get(current) or (torch.cuda.Stream(), None)
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=last and last.pool(), capture_error_mode="thread_local")
            try:
                result = function()
            finally:
                graph.capture_end()
        current.wait_stream(stream)
        LAST_GRAPHS[current] = stream, graph

    def repeat() -> torch.Tensor:
        graph.replay()
        return result

    return repeat


class Ensemble:
    """Several decoders that predict together: the mean of their probabilities."""

    def __init__(self, decoders: Sequence[IncrementalDecoder]):
        self.decoders = decoders

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """As `IncrementalDecoder.step`; of several models log-probabilities instead of logits."""
        logits = [decoder.step(tokens).float() for decoder in self.decoders]
        if len(logits) == 1:
            return logits[0]
        return torch.stack([each.log_softmax(-1) for each in logits]).logsumexp(0) - math.log(len(logits))

    def seen(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """As `IncrementalDecoder.seen`, of the first."""
        return self.decoders[0].seen()

    def keep(self, hypotheses: torch.Tensor, sentences: torch.Tensor | None) -> None:
        for decoder in self.decoders:
            decoder.keep(hypotheses, sentences)


__all__ = ["Ensemble", "StaticShapeDecoder", "IncrementalDecoder"]
