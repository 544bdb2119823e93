# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""Decoding loops of `beam_search`: greedy search and beam search.

On a CPU, finished sentences are removed from the batch. On a GPU, removing them would require a synchronization at each
token. There, all sentences stay in the batch, finished ones are left unchanged, and completion is checked only every
few tokens. The result is the same.

This module imports only the incremental decoder, so that it can be published in a separate repository.

Shapes: B sentences in the batch, K beams, W candidates, n hypotheses, T tokens so far, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from .decoder_vanilla_transformer import Ensemble

MASKED_SCORE = -1.0e9  # score of unused beams
EMPTY_SCORE = 1.5 * MASKED_SCORE  # score of an empty slot for a finished hypothesis, below that of any continuation
DONE_CHECK_INTERVAL = 8  # tokens between two checks for completion on a GPU


@dataclass
class DecodingInputs:
    """Inputs of a decoding loop."""

    decoder: Ensemble
    prompt: torch.Tensor  # decoder prompt (B, T)
    limits: torch.Tensor  # maximum length of each sequence, including the prompt (B)
    eos_ids: torch.Tensor
    pad_id: int
    logits_processor: Callable | None  # ids (N, T), scores (N, V) -> scores, for N hypotheses
    is_static: bool  # whether finished sentences stay in the batch
    penalty: Callable[[Any], Any]  # number of tokens -> length penalty, the divisor of the log-probability


def greedy_search(inputs: DecodingInputs, return_scores: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Decode greedily until each sequence has ended or reached its limit. Return ids (B, T) and scores (B) or None."""
    start, max_length = inputs.prompt.shape[1], int(inputs.limits.max())
    tokens = torch.full((len(inputs.prompt), max_length), inputs.pad_id, device=inputs.prompt.device)
    tokens[:, :start] = inputs.prompt
    active = torch.arange(len(tokens), device=tokens.device)  # sentences in the batch
    unfinished = torch.ones_like(active, dtype=torch.bool)  # all True unless finished sentences stay in the batch
    lengths = torch.full_like(active, start)
    totals = torch.zeros(len(tokens), device=tokens.device)  # log-probabilities
    for length in range(1, max_length):
        logits = inputs.decoder.step(tokens[active, length - 1, None])
        if length < start:
            continue
        if inputs.logits_processor is not None:
            logits = inputs.logits_processor(tokens[active, :length], logits)
        new = best_token(logits)
        if return_scores:
            totals[active] += logits.log_softmax(-1).gather(1, new[:, None])[:, 0] * unfinished
        if inputs.is_static:
            new = torch.where(unfinished, new, inputs.pad_id)
        tokens[active, length] = new
        is_active = ~torch.isin(new, inputs.eos_ids) & (inputs.limits[active] > length + 1)
        if inputs.is_static:
            lengths += unfinished
            unfinished &= is_active
            if length % DONE_CHECK_INTERVAL == 0 and not unfinished.any():
                break
        elif not is_active.all():
            lengths[active[~is_active]] = length + 1
            sentences = is_active.nonzero()[:, 0]
            active, unfinished = active[sentences], unfinished[sentences]
            if not len(active):
                break
            inputs.decoder.reorder_cache(None, sentences)
    scores = totals / inputs.penalty((lengths - start).clamp(min=1)) if return_scores else None
    return tokens[:, : int(lengths.max())], scores


def compute_limits(
    models: Sequence[PreTrainedModel],
    max_length: int,
    prompts: torch.Tensor,
    extra_tokens: int | None,
    mask: torch.Tensor | None,
    states: torch.Tensor,
) -> torch.Tensor:
    """Return the maximum length of each sequence (B), including prompts (B, T). Raise ValueError for long prompts."""
    if extra_tokens is None:
        return torch.full((len(prompts),), max_length, device=prompts.device)
    sizes = mask.sum(-1) if mask is not None else torch.full((len(prompts),), states.shape[1])
    limits = prompts.shape[1] + (sizes + extra_tokens).clamp(min=1).to(prompts.device)
    configs = [each.config for each in models if each.config.position_embedding_type == "learned"]
    positions = min((each.max_position_embeddings for each in configs), default=None)
    if positions is not None and positions <= (size := prompts.shape[1]):
        raise ValueError(f"A decoder prompt of {size} tokens fills all {positions} positions. Shorten the prompt.")
    return limits if positions is None else limits.clamp(max=positions)


def make_length_penalty(
    length_penalty: float | None, alpha: float | None, max_length: int
) -> Callable[[torch.Tensor | int], Any]:
    """Return the length penalty of `generate()`, or with `alpha` that of the paper. Raise ValueError on overflow.

    The score of a hypothesis of n tokens is its log-probability / penalty(n).
    """
    name, exponent = ("length_penalty", length_penalty) if alpha is None else ("alpha", alpha)
    exponent = 1.0 if exponent is None else float(exponent)

    def penalty(length: torch.Tensor | int) -> Any:
        return length**exponent if alpha is None else ((5 + length) / 6) ** exponent

    try:
        penalty(max_length)
    except OverflowError as error:
        raise ValueError(f"{name}={exponent} overflows. Set it to a value such as 1.0.") from error
    return penalty


class BeamHypotheses(NamedTuple):
    """The n best finished hypotheses of each sentence. Empty slots have low scores.

    `steps` contains the token and the beam index (see `beam_indices` of `generate()`) of each position. They are in one
    tensor, so that a single `gather` selects both. Both are -1 after the end, and beam indices are -1 in the prompt.
    """

    steps: torch.Tensor  # (B, n, T, 2)
    scores: torch.Tensor  # log-probabilities, divided by the length penalty (B, n)
    is_complete: torch.Tensor  # whether there is a hypothesis, and it has all terms of the glossary (B, n)

    @classmethod
    def create(cls, size: int, n: int, length: int, device: torch.device) -> BeamHypotheses:
        """Create empty slots for hypotheses of `length` tokens."""
        steps = torch.full((size, n, length, 2), -1, device=device)
        scores = torch.full((size, n), EMPTY_SCORE, device=device)
        return cls(steps, scores, torch.zeros_like(scores, dtype=torch.bool))

    def select_sentences(self, sentences: torch.Tensor) -> BeamHypotheses:
        return BeamHypotheses(*(each.index_select(0, sentences) for each in self))

    def copy_to(self, other: BeamHypotheses, sentences: torch.Tensor) -> None:
        """Copy the best hypotheses of each sentence to the sentences (B) of `other`."""
        for target, value in zip(other, self, strict=True):
            target[sentences] = value[:, : target.shape[1]]


class Candidates(NamedTuple):
    """The W best continuations of each sentence."""

    steps: torch.Tensor  # as in `BeamHypotheses` (B, W, T, 2)
    scores: torch.Tensor  # log-probabilities (B, W)
    parents: torch.Tensor  # beams that they continue (B, W)
    has_all_terms: torch.Tensor | None  # whether they have all terms of the glossary (B, W), if there is one


@dataclass
class BeamSearch:
    """Beam search for the K best hypotheses of each sentence.

    Each step selects the W best continuations of the K running hypotheses of a sentence. W is chosen so that at least K
    of them do not end: the K best of these are the next running hypotheses. A continuation that ends can become a
    finished hypothesis only if it is among the K best of all W.
    """

    inputs: DecodingInputs
    num_beams: int  # K
    num_candidates: int  # W
    num_return_sequences: int
    early_stopping: bool | str  # as in `generate()`, or "exact"
    glossary: Any = None  # `LexicalConstraints` or None

    def run(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ids (B * n, T), scores (B * n) and beam indices (B * n, new tokens) of the n best hypotheses."""
        prompt, limits, decoder = self.inputs.prompt, self.inputs.limits, self.inputs.decoder
        start, end, size, device = prompt.shape[1], int(limits.max()), len(prompt), prompt.device
        results = BeamHypotheses.create(size, self.num_return_sequences, end, device)
        finished = BeamHypotheses.create(size, self.num_beams, end, device)
        running = torch.stack([prompt, torch.full_like(prompt, -1)], -1)[:, None].repeat(1, self.num_beams, 1, 1)
        scores = torch.full((size, self.num_beams), MASKED_SCORE, device=device)
        scores[:, 0] = 0.0  # the search starts with one hypothesis
        active = torch.arange(size, device=device)  # sentences in the batch
        unfinished = torch.ones_like(active, dtype=torch.bool)  # all True unless finished sentences stay in the batch
        for length in range(1, start):
            decoder.step(running[..., length - 1, 0])
        for length in range(start, end):  # number of tokens before the step
            candidates = self.select_candidates(running, scores, active)
            has_ended = torch.isin(candidates.steps[..., -1, 0], self.inputs.eos_ids)
            has_ended = has_ended | (limits[active] <= length + 1)[:, None]
            finished = self.update_finished(finished, candidates, has_ended, unfinished)
            order, scores, best_scores = self.select_running(candidates, has_ended, finished)
            running, parents = gather_steps(candidates.steps, order), candidates.parents.gather(1, order)
            is_active = self.may_improve(best_scores, finished, active, length + 1) & (limits[active] > length + 1)
            if self.inputs.logits_processor is not None:
                is_active &= ~has_ended.all(-1)
            sentences = None
            if self.inputs.is_static:
                unfinished &= is_active
                if length % DONE_CHECK_INTERVAL == 0 and not unfinished.any():
                    break
            elif not is_active.all():
                sentences, done = is_active.nonzero()[:, 0], (~is_active).nonzero()[:, 0]
                finished.select_sentences(done).copy_to(results, active[done])
                finished, active = finished.select_sentences(sentences), active[sentences]
                running, scores = running.index_select(0, sentences), scores[sentences]
                parents, unfinished = parents[sentences], unfinished[sentences]
                if not len(active):
                    break
            decoder.reorder_cache(parents, sentences)
        finished.copy_to(results, active)
        is_empty = results.scores == EMPTY_SCORE  # if there are fewer hypotheses, the best one is repeated
        steps = torch.where(is_empty[..., None, None], results.steps[:, :1], results.steps)
        tokens, rows = steps.flatten(0, 1).unbind(-1)
        num_new = int((rows >= 0).sum(-1).max())
        tokens = tokens.masked_fill(tokens < 0, self.inputs.pad_id)[:, : start + num_new]
        return tokens, results.scores.flatten(), rows[:, start : start + num_new].int()

    def select_candidates(self, running: torch.Tensor, scores: torch.Tensor, active: torch.Tensor) -> Candidates:
        """Return the W best continuations of the running hypotheses (B, K, T, 2) with their scores (B, K)."""
        log_probs = self.inputs.decoder.step(running[..., -1, 0]).log_softmax(-1)
        if self.inputs.logits_processor is not None:
            log_probs = self.inputs.logits_processor(running[..., 0].flatten(0, 1), log_probs)
        values, ids = best_tokens(log_probs, min(self.num_candidates, log_probs.shape[-1]))  # (B * K, tokens)
        shape = (*scores.shape, values.shape[-1])
        values, ids, has_all_terms = scores[..., None] + values.view(shape), ids.view(shape), None
        if self.glossary is None:
            values, picks = values.flatten(1).topk(self.num_candidates)  # (B, W)
            ids, parents = ids.flatten(1).gather(1, picks), picks // shape[-1]
        else:
            remaining = self.inputs.limits[active] - running.shape[2] - 1
            values, ids, parents, has_all_terms = self.glossary.select_candidates(
                values, ids, log_probs.view(*scores.shape, -1), scores, running[..., 0], active, self.inputs.eos_ids,
                remaining, self.num_candidates,
            )  # fmt: skip
        step = torch.stack([ids, torch.add(parents, active[:, None], alpha=self.num_beams)], -1)  # (B, W, 2)
        steps = torch.cat([gather_steps(running, parents), step[:, :, None]], 2)
        return Candidates(steps, values, parents, has_all_terms)

    def update_finished(
        self, finished: BeamHypotheses, candidates: Candidates, has_ended: torch.Tensor, unfinished: torch.Tensor
    ) -> BeamHypotheses:
        """Return the K best of the finished hypotheses and of the candidates that have ended."""
        is_result = has_ended & (torch.arange(self.num_candidates, device=has_ended.device) < self.num_beams)
        if not self.inputs.is_static and not is_result.any():
            return finished
        length = candidates.steps.shape[2]
        scores = candidates.scores / self.inputs.penalty(length - self.inputs.prompt.shape[1])
        scores = torch.cat([finished.scores, torch.add(scores, ~is_result, alpha=2 * MASKED_SCORE)], 1)
        is_complete = is_result if candidates.has_all_terms is None else is_result & candidates.has_all_terms
        is_complete = torch.cat([finished.is_complete, is_complete], 1)
        if self.glossary is None:
            order = scores.topk(self.num_beams).indices
        else:
            order = self.glossary.rank_finished(scores, is_complete)[:, : self.num_beams]
        if self.inputs.is_static:  # finished sentences are left unchanged
            order = torch.where(unfinished[:, None], order, torch.arange(self.num_beams, device=order.device))
        padded = nn.functional.pad(candidates.steps, (0, 0, 0, finished.steps.shape[2] - length), value=-1)
        steps = gather_steps(torch.cat([finished.steps, padded], 1), order)
        return BeamHypotheses(steps, scores.gather(1, order), is_complete.gather(1, order))

    def select_running(
        self, candidates: Candidates, has_ended: torch.Tensor, finished: BeamHypotheses
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return indices (B, K) and scores (B, K) of the next running hypotheses, and the best score (B)."""
        scores = torch.add(candidates.scores, has_ended, alpha=MASKED_SCORE)
        if self.glossary is None:
            scores, order = scores.topk(self.num_beams)
            return order, scores, scores[:, 0]
        required = self.num_return_sequences if self.early_stopping == "exact" else self.num_beams
        has_enough = finished.is_complete[:, required - 1]
        return self.glossary.select_running(scores, candidates.has_all_terms, self.num_beams, has_enough)

    def may_improve(
        self, best_scores: torch.Tensor, finished: BeamHypotheses, active: torch.Tensor, length: int
    ) -> torch.Tensor:
        """Return whether the search of each sentence can still improve its finished hypotheses (B).

        With `early_stopping=True`, it cannot if there are K finished hypotheses. Otherwise, the worst of them is
        compared with the score of running hypotheses at the current `length` (False) or at their limit ("never",
        "exact"). With "exact", only the returned hypotheses count.
        """
        start, penalty, limits = self.inputs.prompt.shape[1], self.inputs.penalty, self.inputs.limits[active]
        if self.early_stopping == "exact":
            worst = finished.scores.masked_fill(~finished.is_complete, EMPTY_SCORE)[:, self.num_return_sequences - 1]
            return (best_scores / penalty(limits - start) > worst) & (best_scores > MASKED_SCORE / 2)
        is_full = finished.is_complete.all(-1)
        if self.early_stopping is True:
            return ~is_full
        bound = best_scores / penalty(limits - start if self.early_stopping == "never" else length - start)
        return bound > torch.where(is_full, finished.scores[:, -1], MASKED_SCORE)


def gather_steps(steps: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Select hypotheses (B, m, T, 2) of `steps` (B, n, T, 2) by `order` (B, m)."""
    return steps.gather(1, order[..., None, None].expand(-1, -1, *steps.shape[2:]))


def best_token(logits: torch.Tensor) -> torch.Tensor:
    """Return `logits.argmax(-1)` of (rows, V). On a CPU, finding the best block first is five times as fast."""
    rows, size = logits.shape
    block = block_size(size)
    if not block:
        return logits.argmax(-1)
    blocks = logits.view(rows, -1, block)
    chosen = blocks.amax(-1).argmax(-1)  # (rows)
    return chosen * block + blocks[torch.arange(rows, device=logits.device), chosen].argmax(-1)


def best_tokens(log_probs: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `log_probs.topk(n)` of (rows, V). On a CPU, finding the n best blocks first is nearly twice as fast."""
    rows, size = log_probs.shape
    block = block_size(size)
    if not block or size < 4 * n * block:
        return log_probs.topk(n)
    blocks = log_probs.view(rows, -1, block)
    chosen = blocks.amax(-1).topk(n).indices  # (rows, n)
    values, positions = blocks.gather(1, chosen[..., None].expand(-1, -1, block)).flatten(1).topk(n)
    return values, chosen.gather(1, positions // block) * block + positions % block


@cache
def block_size(size: int) -> int:
    """Return a block size between 64 and 256 that divides the vocabulary size, or 0 if there is none."""
    return next((block for block in range(64, 257) if size % block == 0 and size > 4 * block), 0)


__all__ = ["BeamSearch", "DecodingInputs", "compute_limits", "greedy_search", "make_length_penalty"]
