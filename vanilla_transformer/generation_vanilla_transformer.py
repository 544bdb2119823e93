# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""The paper's decoding (section 6.1): beam search with a length penalty, and its greedy limit, as a callable.

    model.generate(**batch, custom_generate=beam_search)                                # what generate() gives, faster
    model.generate(**batch, custom_generate=beam_search, num_beams=4, alpha=0.6, extra_tokens=50)         # the paper's
    model.generate(**batch, custom_generate=beam_search, ensemble=[other, third])       # the mean of several models

Faster, because keys and values of cross-attention are computed once a source and shared by its beams, those of
self-attention lie in one buffer, and a sentence that is done leaves the batch.

Shapes: B sentences still being translated, K beams, T tokens so far, S source length, V target vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput, GenerateEncoderDecoderOutput

if TYPE_CHECKING:
    from .modeling_vanilla_transformer import MultiHeadAttention, VanillaTransformerForConditionalGeneration

NEVER = -1.0e9  # the score of what is not there
ROOM = 32  # steps that a buffer of keys and values grows by


class IncrementalDecoder:
    """A model's decoder, a token a step, for K hypotheses of each of B sources.

    Args:
        model: one of ours.
        states: the encoder's output (B, S, D).
        mask: (B, S), zero at padding; None: no padding.
        beams: K.
    """

    def __init__(
        self,
        model: VanillaTransformerForConditionalGeneration,
        states: torch.Tensor,
        mask: torch.Tensor | None,
        beams: int,
    ):
        self.decoder, self.lm_head, self.beams = model.get_decoder(), model.lm_head, beams
        self.mask = None
        if mask is not None and not mask.bool().all():
            self.mask = torch.zeros(mask.shape, dtype=states.dtype, device=states.device)
            self.mask = self.mask.masked_fill(mask == 0, torch.finfo(states.dtype).min)[:, None, None]  # (B, 1, 1, S)
        self.sources = [self.keys_and_values(layer.cross_attn, states) for layer in self.decoder.layers]
        self.past: list[list[torch.Tensor]] = []  # of each layer keys and values: (room, B * K, H * head_dim)
        self.length = 0  # tokens in it

    @staticmethod
    def keys_and_values(attention: MultiHeadAttention, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key = attention.split_heads(attention.k_proj(states), attention.key_head_dim)
        value = attention.split_heads(attention.v_proj(states), attention.value_head_dim)
        return key.contiguous(), value.contiguous()

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """The next token of every hypothesis (B * K) -> logits of the one after it (B * K, V)."""
        positions = torch.full((1, 1), self.length, device=tokens.device)
        states = self.decoder.embed(self.decoder.embed_tokens(tokens[:, None]), positions)
        for i, layer in enumerate(self.decoder.layers):
            states = layer.residual(layer.self_attn_layer_norm, states, partial(self.attend_to_past, i))
            states = layer.residual(layer.cross_attn_layer_norm, states, partial(self.attend_to_source, i))
            states = layer.residual(layer.feed_forward_layer_norm, states, layer.feed_forward)
        self.length += 1
        return self.lm_head(self.decoder.norm(states))[:, 0]

    def attend_to_past(self, i: int, states: torch.Tensor) -> torch.Tensor:
        """Self-attention of layer `i` for one new token a hypothesis: (B * K, 1, D)."""
        attention = self.decoder.layers[i].self_attn
        query = attention.split_heads(attention.q_proj(states), attention.key_head_dim)
        new = attention.k_proj(states), attention.v_proj(states)
        if i == len(self.past):
            self.past.append([tensor.new_empty(ROOM, len(states), tensor.shape[-1]) for tensor in new])
        elif self.length == len(self.past[i][0]):
            self.past[i] = [nn.functional.pad(buffer, (0, 0, 0, 0, 0, ROOM)) for buffer in self.past[i]]
        for buffer, tensor in zip(self.past[i], new, strict=True):
            buffer[self.length] = tensor[:, 0]
        key, value = (
            buffer[: self.length + 1].unflatten(-1, (-1, head_dim)).permute(1, 2, 0, 3)  # (B * K, H, T, head_dim)
            for buffer, head_dim in zip(self.past[i], (attention.key_head_dim, attention.value_head_dim), strict=True)
        )
        return self.attend(attention, query, key, value, None)

    def attend_to_source(self, i: int, states: torch.Tensor) -> torch.Tensor:
        """Cross-attention of layer `i`, in which the beams of a source stand as its queries: (B * K, 1, D)."""
        attention = self.decoder.layers[i].cross_attn
        query = attention.q_proj(states).view(-1, self.beams, attention.q_proj.out_features)
        query = attention.split_heads(query, attention.key_head_dim)  # (B, H, K, d_k)
        output = self.attend(attention, query, *self.sources[i], self.mask)
        return output.view(-1, 1, output.shape[-1])

    @staticmethod
    def attend(attention: MultiHeadAttention, query, key, value, mask) -> torch.Tensor:
        heads = nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=attention.scaling)
        return attention.out_proj(heads.transpose(1, 2).flatten(2))

    def keep(self, hypotheses: torch.Tensor, sentences: torch.Tensor | None) -> None:
        """Goes on with these hypotheses (indices into B * K) and, where some left, these sentences (indices into B)."""
        for layer in self.past:
            for n, buffer in enumerate(layer):
                layer[n] = buffer.new_empty(len(buffer), len(hypotheses), buffer.shape[-1])
                torch.index_select(buffer[: self.length], 1, hypotheses, out=layer[n][: self.length])
        if sentences is not None:
            self.sources = [(key[sentences], value[sentences]) for key, value in self.sources]
            self.mask = None if self.mask is None else self.mask[sentences]


class Ensemble:
    """Several decoders that predict together: the mean of their probabilities."""

    def __init__(self, decoders: list[IncrementalDecoder]):
        self.decoders = decoders

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """As `IncrementalDecoder.step`; of several models log-probabilities instead of logits."""
        logits = [decoder.step(tokens).float() for decoder in self.decoders]
        if len(logits) == 1:
            return logits[0]
        return torch.stack([each.log_softmax(-1) for each in logits]).logsumexp(0) - math.log(len(logits))

    def keep(self, hypotheses: torch.Tensor, sentences: torch.Tensor | None) -> None:
        for decoder in self.decoders:
            decoder.keep(hypotheses, sentences)


def beam_search(
    model: VanillaTransformerForConditionalGeneration,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    inputs_tensor: torch.Tensor,
    alpha: float | None = None,
    extra_tokens: int | None = None,
    ensemble: Sequence[VanillaTransformerForConditionalGeneration] = (),
    **model_kwargs: Any,
) -> torch.Tensor | GenerateEncoderDecoderOutput | GenerateBeamEncoderDecoderOutput:
    """For `generate(custom_generate=beam_search)`, which prepares the first six arguments and `model_kwargs`.

    Beam size, n-best and limits are those of `generation_config` (`num_beams`, `num_return_sequences`,
    `max_new_tokens`, ...); one beam is greedy decoding. Without the arguments below the result is that of `generate()`.

    Args:
        alpha: of the paper's length penalty: a hypothesis that ended after n tokens has the score
            log P / ((5 + n) / 6)^alpha (Wu et al. 2016, equation 14), and the search ends when no other can reach a
            better one. None: the `length_penalty` and `early_stopping` of `generate()`: log P / n^length_penalty.
        extra_tokens: a translation may have so many tokens more than its source (section 6.1: 50), instead of the
            limit in `generation_config`.
        ensemble: further models with the same vocabularies.

    Returns:
        As `generate()`: ids (B * n-best, T), or with `return_dict_in_generate` an output that also has
        `sequences_scores` (B * n-best).

    Raises:
        ValueError: something is asked for that this search does not have: sampling, processors of logits, other
            criteria to stop; or a model of the ensemble has other vocabularies.
    """
    refuse_what_is_not_here(model, generation_config, logits_processor, stopping_criteria)
    beams, best = generation_config.num_beams, generation_config.num_return_sequences
    every = max(beams, best)  # generate() has repeated each source so many times
    prompt, mask = input_ids[::every], model_kwargs.get("attention_mask")
    mask = mask if mask is None else mask[::every]
    decoders = [IncrementalDecoder(model, model_kwargs["encoder_outputs"][0][::every], mask, beams)]
    for other in ensemble:
        refuse_other_vocabularies(model, other)
        states = other.get_encoder()(inputs_tensor, attention_mask=mask).last_hidden_state
        decoders.append(IncrementalDecoder(other, states, mask, beams))
    limits = torch.full((len(prompt),), generation_config.max_length, device=prompt.device)
    if extra_tokens is not None:
        lengths = mask.sum(-1) if mask is not None else torch.full_like(limits, inputs_tensor.shape[1])
        limits = prompt.shape[1] + lengths + extra_tokens
    ends = generation_config._eos_token_tensor
    ends = torch.empty(0, dtype=torch.long, device=prompt.device) if ends is None else ends
    fill = generation_config._pad_token_tensor
    fill = int(fill) if fill is not None else 0
    decoder = Ensemble(decoders)
    wants_output = generation_config.return_dict_in_generate
    if beams == 1:
        tokens = greedy(decoder, prompt, limits, ends, fill)
        return GenerateEncoderDecoderOutput(sequences=tokens) if wants_output else tokens

    def penalty(length: torch.Tensor | int) -> Any:
        return ((5 + length) / 6) ** alpha if alpha is not None else length**generation_config.length_penalty

    stop = generation_config.early_stopping if alpha is None else "exact"
    tokens, scores = search(decoder, prompt, limits, ends, fill, beams, best, penalty, stop)
    return GenerateBeamEncoderDecoderOutput(sequences=tokens, sequences_scores=scores) if wants_output else tokens


def greedy(
    decoder: Ensemble, prompt: torch.Tensor, limits: torch.Tensor, ends: torch.Tensor, fill: int
) -> torch.Tensor:
    """The likeliest token each time, until it is one of `ends` or the sentence is at its limit: ids (B, T)."""
    tokens = torch.full((len(prompt), int(limits.max())), fill, device=prompt.device)
    tokens[:, : prompt.shape[1]] = prompt
    active = torch.arange(len(prompt), device=prompt.device)  # rows of tokens that go on
    for length in range(1, tokens.shape[1]):
        logits = decoder.step(tokens[active, length - 1])
        if length < prompt.shape[1]:
            continue
        new = best_token(logits)
        tokens[active, length] = new
        going = ~torch.isin(new, ends) & (limits[active] > length + 1)
        if going.all():
            continue
        rows = going.nonzero()[:, 0]
        active = active[rows]
        if not len(active):
            return tokens[:, : length + 1]
        decoder.keep(rows, rows)
    return tokens


def search(
    decoder: Ensemble,
    prompt: torch.Tensor,
    limits: torch.Tensor,
    ends: torch.Tensor,
    fill: int,
    beams: int,
    best: int,
    penalty: Callable[[Any], Any],
    stop: bool | str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Beam search: ids (B * best, T) and scores (B * best).

    At every step each sentence has K hypotheses. Of their continuations the 2 K best are looked at: those among the
    first K that end are candidates for the result, the K best of the others go on.
    """
    device, start, longest = prompt.device, prompt.shape[1], int(limits.max())
    result = torch.full((len(prompt), best, longest), fill, device=device)
    result_scores = torch.full((len(prompt), best), NEVER, device=device)
    active = torch.arange(len(prompt), device=device)  # rows of the result that go on
    running = prompt[:, None].expand(-1, beams, -1).contiguous()  # (B, K, T)
    scores = torch.full((len(prompt), beams), NEVER, device=device)
    scores[:, 0] = 0.0  # one hypothesis to begin with, not K equal ones
    finished = torch.full((len(prompt), beams, longest), fill, device=device)
    finished_scores = torch.full((len(prompt), beams), NEVER, device=device)
    used = start  # tokens of the longest finished hypothesis
    for length in range(1, start):
        decoder.step(running[:, :, length - 1].flatten())

    for length in range(start, longest):  # of the tokens that are there; one is added
        new = length + 1 - start  # tokens behind the prompt
        log_probs = decoder.step(running[:, :, -1].flatten()).log_softmax(-1)
        values, ids = best_tokens(log_probs, min(2 * beams, log_probs.shape[-1]))  # (B * K, 2 K)
        width = values.shape[-1]
        values, picks = (scores[..., None] + values.view(-1, beams, width)).flatten(1).topk(2 * beams)  # (B, 2 K)
        ids, parents = ids.view(len(active), -1).gather(1, picks), picks // width
        grown = torch.cat([take(running, parents), ids[..., None]], -1)  # (B, 2 K, T + 1)
        ended = torch.isin(ids, ends) | (limits[active] <= length + 1)[:, None]

        among_first = ended & (torch.arange(2 * beams, device=device) < beams)
        if among_first.any():
            used = length + 1
            padded = nn.functional.pad(grown, (0, longest - length - 1), value=fill)
            candidates = torch.where(among_first, values / penalty(new), NEVER)
            finished_scores, order = torch.cat([finished_scores, candidates], 1).topk(beams)
            finished = take(torch.cat([finished, padded], 1), order)
        scores, order = torch.where(ended, NEVER, values).topk(beams)
        running, parents = take(grown, order), parents.gather(1, order)

        going = may_improve(scores, finished_scores, penalty, new, limits[active] - start, best, stop)
        if not going.all():
            gone = active[~going]
            result[gone], result_scores[gone] = finished[~going, :best], finished_scores[~going, :best]
            active = active[going]
            if not len(active):
                break
            running, scores, parents = running[going], scores[going], parents[going]
            finished, finished_scores = finished[going], finished_scores[going]
        rows = going.nonzero()[:, 0]
        sentences = None if going.all() else rows
        decoder.keep((rows[:, None] * beams + parents).flatten(), sentences)
    return result[..., :used].flatten(0, 1), result_scores.flatten()


def best_token(logits: torch.Tensor) -> torch.Tensor:
    """`logits.argmax(-1)` of (rows, V), the first of equals; on a CPU in a fifth of the time, by blocks."""
    rows, size = logits.shape
    width = block_width(size)
    if not width:
        return logits.argmax(-1)
    blocks = logits.view(rows, -1, width)
    chosen = blocks.amax(-1).argmax(-1)  # (rows)
    return chosen * width + blocks[torch.arange(rows, device=logits.device), chosen].argmax(-1)


def best_tokens(log_probs: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`log_probs.topk(n)` of (rows, V); the n blocks with the largest maxima hold the n best tokens, and finding those
    first is on a CPU nearly twice as fast."""
    rows, size = log_probs.shape
    width = block_width(size)
    if not width or size < 4 * n * width:
        return log_probs.topk(n)
    blocks = log_probs.view(rows, -1, width)
    chosen = blocks.amax(-1).topk(n).indices  # (rows, n)
    values, places = blocks.gather(1, chosen[..., None].expand(-1, -1, width)).flatten(1).topk(n)
    return values, chosen.gather(1, places // width) * width + places % width


@cache
def block_width(size: int) -> int:
    """A width near 100 that divides a vocabulary of this size, or 0."""
    return next((width for width in range(64, 257) if size % width == 0 and size > 4 * width), 0)


def take(tokens: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Rows (B, n, T) of `tokens` (B, K, T) by `order` (B, n)."""
    return tokens.gather(1, order[..., None].expand(-1, -1, tokens.shape[-1]))


def may_improve(
    scores: torch.Tensor,
    finished: torch.Tensor,
    penalty: Callable[[Any], Any],
    new: int,
    limits: torch.Tensor,
    best: int,
    stop: bool | str,
) -> torch.Tensor:
    """Whether each sentence's search goes on (B): by the best running and the worst of the finished hypotheses.

    "exact": a running one that went on without a loss to its limit would be better than one of the `best` results.
    The others as in `generate()`, which waits for K finished ones: False compares with the length so far, "never" with
    the limit, True stops when there are K.
    """
    there = finished > NEVER / 2
    if stop == "exact":
        bound = scores[:, 0] / penalty(limits)
        return (bound > finished[:, best - 1]) & (scores[:, 0] > NEVER / 2)
    full = there.all(-1)
    if stop is True:
        return ~full
    bound = scores[:, 0] / penalty(limits if stop == "never" else new)
    return ~full | (bound > finished[:, -1])


def refuse_what_is_not_here(
    model: Any, config: GenerationConfig, processors: LogitsProcessorList, criteria: StoppingCriteriaList
) -> None:
    if model.config.model_type != "vanilla_transformer":
        raise ValueError(f"beam_search decodes a vanilla_transformer, not a {model.config.model_type}.")
    known = (MaxLengthCriteria, EosTokenCriteria)
    others = [*processors, *(each for each in criteria if not isinstance(each, known))]
    if config.do_sample or others:
        wanted = "do_sample" if config.do_sample else type(others[0]).__name__
        raise ValueError(f"beam_search has no {wanted}: leave custom_generate out, and generate() does it.")


def refuse_other_vocabularies(model: Any, other: Any) -> None:
    for name in ("model_type", "vocab_size", "decoder_vocab_size"):
        first, second = getattr(model.config, name), getattr(other.config, name, None)
        if first != second:
            raise ValueError(
                f"a model of the ensemble has {name}={second}, and the first one {first}: give models of ours that "
                f"were trained with the same tokenizer."
            )


__all__ = ["beam_search"]
