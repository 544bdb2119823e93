# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""Decoding loops of `beam_search`: single-beam decoding (greedy or sampling) and beam search.

On a CPU, finished sentences are removed from the batch. On a GPU, that would require a synchronization at every
token. There, all sentences stay in the batch, finished ones are left unchanged, and completion is checked only every
few tokens. The result is the same.

This module imports only `IncrementalDecoder` and `Ensemble`, so that it can be published in a separate repository.

Shapes: B sentences in the batch, K beams, W candidates, T tokens so far, N rows (sentences or hypotheses),
V target vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn

from .incremental_decoding_vanilla_transformer import Ensemble

MASKED_SCORE = -1.0e9  # masks hypotheses; finite, so that masked ones can still be compared
EMPTY_SCORE = 1.5 * MASKED_SCORE  # score if there are fewer than K finished hypotheses; below all other scores
RANK_OFFSET = 10_000  # exceeds the number of candidates
DONE_CHECK_INTERVAL = 8  # tokens between two checks for completion on a GPU


@dataclass
class DecodingTask:
    """Inputs and options of a decoding loop, and the per-step outputs that it collects.

    With `keep_batch`, all sentences stay in the batch until the last one finishes, in the row order of `generate()`. It
    is required for reproducible sampling, for per-step outputs, and for processors or criteria that depend on the row
    index. With `static_shapes`, they also stay, and completion is checked only every few tokens.
    """

    decoder: Ensemble
    prompt: torch.Tensor  # decoder prompt, (B, T), or (N, T) in `decode_single_beam`
    limits: torch.Tensor  # maximum length of each sequence, including the prompt, (B) or (N)
    eos_ids: torch.Tensor
    pad_id: int
    process: Callable | None = None  # logits processors: ids (N, T), scores (N, V) -> scores
    criteria: tuple = ()  # stopping criteria: ids (N, T), scores of all steps or None -> booleans (N)
    do_sample: bool = False
    keep_batch: bool = False
    pad_finished: bool = True  # whether finished sequences that stay in the batch get `pad_id`
    requested_outputs: frozenset = frozenset()  # per-step outputs: "scores", "logits", "states" (of the decoder)
    return_beam_indices: bool = False
    streamer: Any = None  # receives the tokens of each step; only used by `decode_single_beam`
    glossary: Any = None  # `LexicalConstraints` or None
    max_length_bound: int | None = None  # for the bound of `early_stopping="never"`; defaults to `limits`
    static_shapes: bool = False
    outputs: dict[str, list] = field(default_factory=dict)  # collected per-step outputs

    @property
    def has_fixed_batch(self) -> bool:
        """Whether finished sentences stay in the batch, so that its size is fixed."""
        return self.keep_batch or self.static_shapes

    def should_check_done(self, length: int) -> bool:
        """Return whether to check for completion at this length."""
        return not self.static_shapes or length % DONE_CHECK_INTERVAL == 0

    def process_scores(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Apply the logits processors to scores (N, V)."""
        if self.process is not None:
            scores = self.process(ids, scores)
        if "scores" in self.requested_outputs:
            self.outputs.setdefault("scores", []).append(scores.clone())
        return scores

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run one decoder step and return logits (N, V)."""
        logits = self.decoder.step(tokens)
        if "logits" in self.requested_outputs:
            self.outputs.setdefault("logits", []).append(logits.clone())
        if "states" in self.requested_outputs:
            for name, value in self.decoder.last_step_outputs().items():
                self.outputs.setdefault(name, []).append(value)
        return logits

    def meets_stopping_criteria(self, ids: torch.Tensor) -> torch.Tensor:
        """Return which of the sequences (N, T + 1) meet a stopping criterion (N)."""
        scores = tuple(self.outputs["scores"]) if "scores" in self.outputs else None
        is_done = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        for criterion in self.criteria:
            is_done = is_done | criterion(ids, scores)
        return is_done


def decode_single_beam(task: DecodingTask) -> torch.Tensor:
    """Decode greedily or by sampling until each sequence has ended or reached its limit, and return ids (N, T)."""
    start, max_length = task.prompt.shape[1], int(task.limits.max())
    tokens = torch.full((len(task.prompt), max_length), task.pad_id, device=task.prompt.device)
    tokens[:, :start] = task.prompt
    active = torch.arange(len(task.prompt), device=task.prompt.device)  # rows in the batch
    unfinished = torch.ones_like(active, dtype=torch.bool)  # all True unless finished rows stay in the batch
    lengths = torch.full_like(active, start)  # only updated if finished rows stay in the batch
    for length in range(1, max_length):
        logits = task.step(tokens[active, length - 1])
        if length < start:
            continue
        if task.process is not None or task.requested_outputs:
            logits = task.process_scores(tokens[active, :length], logits)
        new = torch.multinomial(logits.softmax(-1), 1)[:, 0] if task.do_sample else best_token(logits)
        if task.has_fixed_batch:
            new = torch.where(unfinished if task.pad_finished else task.limits[active] > length, new, task.pad_id)
        tokens[active, length] = new
        if task.streamer is not None:
            task.streamer.put(new.cpu())
        is_active = ~torch.isin(new, task.eos_ids) & (task.limits[active] > length + 1)
        if task.criteria:
            is_active &= ~task.meets_stopping_criteria(tokens[active, : length + 1])
        if task.has_fixed_batch:
            lengths += unfinished
            unfinished &= is_active
            if task.should_check_done(length) and not unfinished.any():
                break
            continue
        if is_active.all():
            continue
        rows = is_active.nonzero()[:, 0]
        active = active[rows]
        if not len(active):
            return tokens[:, : length + 1]
        task.decoder.reorder_cache(rows, rows)
    return tokens[:, : int(lengths.max())] if task.has_fixed_batch else tokens


@dataclass
class BeamSearchOutput:
    """Result of beam search, with n hypotheses per sentence."""

    tokens: torch.Tensor  # (B * n, T)
    scores: torch.Tensor  # (B * n)
    beam_indices: torch.Tensor | None  # (B * n, T - prompt), row of the parent hypothesis of each new token, -1 = end


def run_beam_search(
    task: DecodingTask,
    num_beams: int,
    num_candidates: int,
    num_return: int,
    penalty: Callable[[Any], Any],
    early_stopping: bool | str,
) -> BeamSearchOutput:
    """Run beam search.

    Each step selects the W (`num_candidates`) best continuations of the K hypotheses of a sentence. W is chosen so that
    at least K of them do not end: the K best of these are the next hypotheses. A continuation that ends can become a
    result only if it is among the K best of all W.
    """
    prompt, limits, pad_id = task.prompt, task.limits, task.pad_id
    device, start, max_length = prompt.device, prompt.shape[1], int(limits.max())
    result = torch.full((len(prompt), num_return, max_length), pad_id, device=device)
    result_scores = torch.full((len(prompt), num_return), EMPTY_SCORE, device=device)
    active = torch.arange(len(prompt), device=device)  # sentences in the batch
    unfinished = torch.ones_like(active, dtype=torch.bool)  # all True unless finished sentences stay in the batch
    hypotheses = prompt[:, None].expand(-1, num_beams, -1).contiguous()  # (B, K, T)
    scores = torch.full((len(prompt), num_beams), MASKED_SCORE, device=device)
    scores[:, 0] = 0.0  # the search starts with one hypothesis
    finished = torch.full((len(prompt), num_beams, max_length), pad_id, device=device)
    finished_scores = torch.full((len(prompt), num_beams), EMPTY_SCORE, device=device)
    is_filled = torch.zeros((len(prompt), num_beams), dtype=torch.bool, device=device)  # `finished` has a result
    history_length = max_length - start if task.return_beam_indices else 0
    history = torch.empty((len(prompt), num_beams, 0), dtype=torch.int32, device=device)  # parent row of each token
    finished_history = torch.full((len(prompt), num_beams, history_length), -1, dtype=torch.int32, device=device)
    result_history = finished_history[:, :num_return].clone()
    result_length: int | torch.Tensor = start  # length of the longest finished sequence
    for length in range(1, start):
        task.step(hypotheses[:, :, length - 1].flatten())

    for length in range(start, max_length):  # number of tokens before the step
        new_length = length + 1 - start  # generated tokens after the step
        log_probs = task.step(hypotheses[:, :, -1].flatten()).log_softmax(-1)
        if task.process is not None or task.requested_outputs:
            log_probs = task.process_scores(hypotheses.flatten(0, 1), log_probs)
        if task.glossary is None:
            values, ids, parents = select_continuations(task, log_probs, scores, num_candidates)  # (B, W)
        else:
            remaining = limits[active] - length - 1
            values, ids, parents, has_all_terms = select_constrained_continuations(
                task, log_probs, scores, hypotheses, active, remaining, num_candidates
            )
        sequences = torch.cat([gather_beams(hypotheses, parents), ids[..., None]], -1)  # (B, W, T + 1)
        has_ended = torch.isin(ids, task.eos_ids) | (limits[active] <= length + 1)[:, None]
        if task.criteria:
            has_ended = has_ended | task.meets_stopping_criteria(sequences.flatten(0, 1)).view_as(has_ended)
        if task.return_beam_indices:
            rows = (parents + active[:, None] * num_beams).int()
            new_history = torch.cat([gather_beams(history, parents), rows[..., None]], -1)

        is_result = has_ended & (torch.arange(num_candidates, device=device) < num_beams)
        if task.static_shapes or is_result.any():
            is_new = is_result & unfinished[:, None]
            result_length = torch.where(is_new.any(), length + 1, result_length) if task.static_shapes else length + 1
            padded = nn.functional.pad(sequences, (0, max_length - length - 1), value=pad_id)
            candidates = torch.add(values / penalty(new_length), ~is_new, alpha=2 * MASKED_SCORE)
            candidates = torch.cat([finished_scores, candidates], 1)
            is_filled = torch.cat([is_filled, is_result if task.glossary is None else is_result & has_all_terms], 1)
            order = candidates.topk(num_beams).indices
            if task.glossary is not None:  # results without all terms rank last
                order = candidates.argsort(descending=True, stable=True)
                is_incomplete = is_filled.logical_not().int().gather(1, order)
                order = order.gather(1, is_incomplete.argsort(stable=True)[:, :num_beams])
            if task.static_shapes:  # finished sentences are left unchanged
                order = torch.where(unfinished[:, None], order, torch.arange(num_beams, device=device))
            finished_scores, is_filled = candidates.gather(1, order), is_filled.gather(1, order)
            finished = gather_beams(torch.cat([finished, padded], 1), order)
            if task.return_beam_indices:
                padded = nn.functional.pad(new_history, (0, max_length - length - 1), value=-1)
                finished_history = gather_beams(torch.cat([finished_history, padded], 1), order)
        if task.glossary is None:
            scores, order = torch.add(values, has_ended, alpha=MASKED_SCORE).topk(num_beams)
            best_scores = scores
        else:  # keep the order of beam allocation; after K results, ignore hypotheses without all terms
            values = torch.add(values, has_ended, alpha=MASKED_SCORE)
            is_masked = values < MASKED_SCORE / 2
            ranks = torch.add(-torch.arange(num_candidates, device=device), is_masked, alpha=-RANK_OFFSET)
            order = ranks.topk(num_beams).indices
            scores, best_first = values.gather(1, order).sort(descending=True)
            order = order.gather(1, best_first)
            has_all_results = is_filled[:, num_return - 1 if early_stopping == "exact" else -1, None]
            is_ignored = has_all_results & ~has_all_terms.gather(1, order)
            best_scores = scores.masked_fill(is_ignored, -math.inf).amax(1, keepdim=True)
        hypotheses, parents = gather_beams(sequences, order), parents.gather(1, order)

        longest = limits[active] if task.max_length_bound is None else torch.full_like(active, task.max_length_bound)
        is_active = may_improve(
            best_scores, finished_scores, is_filled, penalty, new_length, longest - start, num_return, early_stopping
        )
        is_active &= limits[active] > length + 1
        if task.return_beam_indices:
            history = gather_beams(new_history, order)
        if not task.keep_batch and (task.criteria or task.process is not None):
            is_active &= ~has_ended.all(-1)
        if task.has_fixed_batch:
            unfinished &= is_active
            if task.should_check_done(length) and (not unfinished.any() or (task.keep_batch and has_ended.all())):
                break
            task.decoder.reorder_cache((active[:, None] * num_beams + parents).flatten(), None)
            continue
        if not is_active.all():
            done = active[~is_active]
            result[done] = finished[~is_active, :num_return]
            result_scores[done] = finished_scores[~is_active, :num_return]
            if task.return_beam_indices:
                result_history[done] = finished_history[~is_active, :num_return]
                history, finished_history = history[is_active], finished_history[is_active]
            active = active[is_active]
            if not len(active):
                break
            hypotheses, scores, parents = hypotheses[is_active], scores[is_active], parents[is_active]
            finished, finished_scores, is_filled = finished[is_active], finished_scores[is_active], is_filled[is_active]
            unfinished = unfinished[is_active]
        rows = is_active.nonzero()[:, 0]
        task.decoder.reorder_cache((rows[:, None] * num_beams + parents).flatten(), None if is_active.all() else rows)
    if task.has_fixed_batch:
        result, result_scores = finished[:, :num_return], finished_scores[:, :num_return]
        result_history = finished_history[:, :num_return]
    beam_indices = None
    if task.return_beam_indices:
        new = int((result_history >= 0).sum(-1).max())
        result_length, beam_indices = start + new, result_history[..., :new].flatten(0, 1)
    return BeamSearchOutput(result[..., : int(result_length)].flatten(0, 1), result_scores.flatten(), beam_indices)


def select_constrained_continuations(
    task: DecodingTask,
    log_probs: torch.Tensor,
    scores: torch.Tensor,
    hypotheses: torch.Tensor,
    active: torch.Tensor,
    remaining: torch.Tensor,
    num_candidates: int,
) -> tuple[torch.Tensor, ...]:
    """Select the W continuations of each sentence with `LexicalConstraints.select_candidates`."""
    values, ids = best_tokens(log_probs, min(num_candidates, log_probs.shape[-1]))
    shape = (*scores.shape, -1)  # (B, K, ...)
    best = scores[..., None] + values.view(shape), ids.view(shape)
    log_probs = log_probs.view(shape)
    select = task.glossary.select_candidates
    return select(*best, log_probs, scores, hypotheses, active, task.eos_ids, remaining, num_candidates)


def select_continuations(
    task: DecodingTask, log_probs: torch.Tensor, scores: torch.Tensor, num_candidates: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Select the W best continuations of each sentence, or sample them.

    `log_probs` are those of the next token (B * K, V), `scores` those of the hypotheses (B, K).
    Return scores, token ids and parent beams, each (B, W).
    """
    num_beams = scores.shape[1]
    if task.keep_batch:
        size = log_probs.shape[-1]
        totals = (scores[..., None] + log_probs.view(-1, num_beams, size)).flatten(1)  # (B, K * V)
        if task.do_sample:
            picks = torch.multinomial(totals.softmax(-1), num_candidates)
            values = totals.gather(1, picks)
        else:
            values, picks = totals.topk(num_candidates)
        return values, picks % size, picks // size
    values, ids = best_tokens(log_probs, min(num_candidates, log_probs.shape[-1]))  # (B * K, n)
    num_tokens = values.shape[-1]
    totals = scores[..., None] + values.view(-1, num_beams, num_tokens)
    values, picks = totals.flatten(1).topk(num_candidates)  # (B, W)
    return values, ids.view(len(scores), -1).gather(1, picks), picks // num_tokens


def best_token(logits: torch.Tensor) -> torch.Tensor:
    """Return `logits.argmax(-1)` of (rows, V). Finding the best block first takes a fifth of the time on a CPU."""
    rows, size = logits.shape
    block = block_size(size)
    if not block:
        return logits.argmax(-1)
    blocks = logits.view(rows, -1, block)
    chosen = blocks.amax(-1).argmax(-1)  # (rows)
    return chosen * block + blocks[torch.arange(rows, device=logits.device), chosen].argmax(-1)


def best_tokens(log_probs: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `log_probs.topk(n)` of (rows, V).

    The n best tokens are in the n blocks of the vocabulary with the largest maxima. Finding these blocks first is
    nearly twice as fast on a CPU.
    """
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


def gather_beams(tokens: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Select rows (B, n, T) of `tokens` (B, K, T) by `order` (B, n)."""
    return tokens.gather(1, order[..., None].expand(-1, -1, tokens.shape[-1]))


def may_improve(
    scores: torch.Tensor,
    finished: torch.Tensor,
    is_filled: torch.Tensor,
    penalty: Callable[[Any], Any],
    new_length: int,
    limits: torch.Tensor,
    num_return: int,
    early_stopping: bool | str,
) -> torch.Tensor:
    """Return whether the search of each sentence can still improve its results (B).

    `early_stopping="exact"` compares the worst of `num_return` results with the best score that a hypothesis can reach
    at its limit. "never" does so for K results, and False with the score at `new_length`. True only requires K results.
    """
    if early_stopping == "exact":
        bound = scores[:, 0] / penalty(limits)
        return (bound > finished.masked_fill(~is_filled, EMPTY_SCORE)[:, num_return - 1]) & (
            scores[:, 0] > MASKED_SCORE / 2
        )
    full = is_filled.all(-1)
    if early_stopping is True:
        return ~full
    bound = scores[:, 0] / penalty(limits if early_stopping == "never" else new_length)
    return bound > torch.where(full, finished[:, -1], MASKED_SCORE)


__all__ = ["DecodingTask", "decode_single_beam", "run_beam_search"]
