# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""The two loops of decoding, for `beam_search`: each hypothesis by itself (greedy or drawn), and beams.

On a CPU sentences leave the batch as they are done. A GPU would have to be waited for at each token to know which, so
there all of them stay in their places, what is done is left as it is, and only every few tokens it is asked whether
all are. The result is the same.

Imports nothing of its siblings but the decoder a step, so that it can stand in a repository of its own.

Shapes: B sentences still being translated, K beams, T tokens so far, N hypotheses of all sentences, V target
vocabulary.
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

MASKED_SCORE = -1.0e9  # the score of what is not there
EMPTY = 1.5 * MASKED_SCORE  # of a result that no hypothesis fills, not even one that continues what is not there
RANK_OFFSET = 10_000  # more continuations than are looked at
DONE_CHECK_INTERVAL = 8  # tokens from one look at the device to the next


@dataclass
class DecodingTask:
    """What a loop is given, and what it is to keep beside its result.

    Args:
        decoder: gives the logits of a step.
        prompt: (B, T), tokens to begin with; of `decode_single_beam` (N, T).
        limits: (B) or (N), the longest that each may get, with the prompt.
        eos_ids: (n), tokens that end a hypothesis.
        pad_id: stands behind the end.
        process: (ids (N, T), scores (N, V)) -> scores, the logits processors; None: there are none.
        criteria: other reasons to stop: (ids (N, T), scores of each step or None) -> (N), booleans.
        is_drawn: tokens are drawn by their probability.
        together: all sentences stay until the last is done, row by row as in `generate()`: for draws in its order, for
            what is kept of every step, and for processors and criteria that may know their rows by number.
        keeps_padding: of those that stay, what has ended goes on with `pad_id`.
        keep: names of what is kept of each step: "scores", "logits", or "states" (of the decoder).
        keeps_parents: of `run_beam_search`, for `Found.parents`.
        streamer: gets the tokens of each step, where hypotheses are grown by themselves.
        glossary: terms that have to occur, which share out the beams; None: there are none.
        horizon: the length that early_stopping="never" takes for the limit; None: `limits`.
        in_place: all sentences stay, and nothing is asked from the device but every few tokens whether all are done.
    """

    decoder: Ensemble
    prompt: torch.Tensor
    limits: torch.Tensor
    eos_ids: torch.Tensor
    pad_id: int
    process: Callable | None = None
    criteria: tuple = ()
    do_sample: bool = False
    together: bool = False
    keeps_padding: bool = True
    keep: frozenset = frozenset()
    return_beam_indices: bool = False
    streamer: Any = None
    glossary: Any = None
    max_length_bound: int | None = None
    in_place: bool = False
    kept: dict[str, list] = field(default_factory=dict)

    @property
    def keeps_finished(self) -> bool:
        """Whether no sentence leaves before the last is done."""
        return self.together or self.in_place

    def should_check_done(self, length: int) -> bool:
        """Whether it is asked at this length if all are done."""
        return not self.in_place or length % DONE_CHECK_INTERVAL == 0

    def process_scores(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores (N, V) by the processors."""
        if self.process is not None:
            scores = self.process(ids, scores)
        if "scores" in self.keep:
            self.kept.setdefault("scores", []).append(scores.clone())
        return scores

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """As `Ensemble.step`: logits (N, V)."""
        logits = self.decoder.step(tokens)
        if "logits" in self.keep:
            self.kept.setdefault("logits", []).append(logits.clone())
        if "states" in self.keep:
            for name, value in self.decoder.seen().items():
                self.kept.setdefault(name, []).append(value)
        return logits

    def meets_stopping_criteria(self, ids: torch.Tensor) -> torch.Tensor:
        """By another criterion than an end or a limit: booleans (N) for ids (N, T + 1)."""
        scores = tuple(self.kept["scores"]) if "scores" in self.kept else None
        stopped = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        for criterion in self.criteria:
            stopped = stopped | criterion(ids, scores)
        return stopped


def decode_single_beam(task: DecodingTask) -> torch.Tensor:
    """The likeliest token each time, or one drawn, until each hypothesis has ended or is at its limit: ids (N, T)."""
    start, longest = task.prompt.shape[1], int(task.limits.max())
    tokens = torch.full((len(task.prompt), longest), task.pad_id, device=task.prompt.device)
    tokens[:, :start] = task.prompt
    active = torch.arange(len(task.prompt), device=task.prompt.device)  # rows of tokens that go on
    unfinished = torch.ones_like(active, dtype=torch.bool)  # of them; only where all stay, others are among them
    lengths = torch.full_like(active, start)  # where all stay
    for length in range(1, longest):
        logits = task.step(tokens[active, length - 1])
        if length < start:
            continue
        if task.process is not None or task.keep:
            logits = task.process_scores(tokens[active, :length], logits)
        new = torch.multinomial(logits.softmax(-1), 1)[:, 0] if task.do_sample else best_token(logits)
        if task.keeps_finished:
            new = torch.where(unfinished if task.keeps_padding else task.limits[active] > length, new, task.pad_id)
        tokens[active, length] = new
        if task.streamer is not None:
            task.streamer.put(new.cpu())
        going = ~torch.isin(new, task.eos_ids) & (task.limits[active] > length + 1)
        if task.criteria:
            going &= ~task.meets_stopping_criteria(tokens[active, : length + 1])
        if task.keeps_finished:
            lengths += unfinished
            unfinished &= going
            if task.should_check_done(length) and not unfinished.any():
                break
            continue
        if going.all():
            continue
        rows = going.nonzero()[:, 0]
        active = active[rows]
        if not len(active):
            return tokens[:, : length + 1]
        task.decoder.keep(rows, rows)
    return tokens[:, : int(lengths.max())] if task.keeps_finished else tokens


@dataclass
class BeamSearchOutput:
    """What beam search found: ids (B * n, T), scores (B * n), and on request for each new token the row of the
    hypothesis (B * n, T - prompt) that it continued, -1 behind the end."""

    tokens: torch.Tensor
    scores: torch.Tensor
    parents: torch.Tensor | None


def run_beam_search(
    task: DecodingTask,
    num_beams: int,
    width: int,
    num_return: int,
    penalty: Callable[[Any], Any],
    early_stopping: bool | str,
) -> BeamSearchOutput:
    """Beam search.

    At every step each sentence has K hypotheses. Of their continuations the W (`width`) best are looked at, enough for
    K that do not end: those among the first K that end are candidates for the result, the K best of the others go on.
    """
    prompt, limits, pad_id = task.prompt, task.limits, task.pad_id
    device, start, longest = prompt.device, prompt.shape[1], int(limits.max())
    result = torch.full((len(prompt), num_return, longest), pad_id, device=device)
    result_scores = torch.full((len(prompt), num_return), EMPTY, device=device)
    active = torch.arange(len(prompt), device=device)  # rows of the result that go on
    is_open = torch.ones_like(active, dtype=torch.bool)  # of them; only where all stay, others are among them
    running = prompt[:, None].expand(-1, num_beams, -1).contiguous()  # (B, K, T)
    scores = torch.full((len(prompt), num_beams), MASKED_SCORE, device=device)
    scores[:, 0] = 0.0  # one hypothesis to begin with, not K equal ones
    finished = torch.full((len(prompt), num_beams, longest), pad_id, device=device)
    finished_scores = torch.full((len(prompt), num_beams), EMPTY, device=device)
    is_there = torch.zeros((len(prompt), num_beams), dtype=torch.bool, device=device)  # of the finished; with all terms
    # the rows that each token continued, where they are kept; else nothing
    steps = longest - start if task.return_beam_indices else 0
    history = torch.empty((len(prompt), num_beams, 0), dtype=torch.int32, device=device)
    finished_history = torch.full((len(prompt), num_beams, steps), -1, dtype=torch.int32, device=device)
    result_history = finished_history[:, :num_return].clone()
    used: int | torch.Tensor = start  # tokens of the longest finished hypothesis
    for length in range(1, start):
        task.step(running[:, :, length - 1].flatten())

    for length in range(start, longest):  # of the tokens that are there; one is added
        new = length + 1 - start  # tokens behind the prompt
        log_probs = task.step(running[:, :, -1].flatten()).log_softmax(-1)
        if task.process is not None or task.keep:
            log_probs = task.process_scores(running.flatten(0, 1), log_probs)
        if task.glossary is None:
            values, ids, parents = select_continuations(task, log_probs, scores, width)  # (B, W)
        else:
            room = limits[active] - length - 1
            values, ids, parents, is_whole = select_constrained_continuations(
                task, log_probs, scores, running, active, room, width
            )
        grown = torch.cat([gather_beams(running, parents), ids[..., None]], -1)  # (B, W, T + 1)
        ended = torch.isin(ids, task.eos_ids) | (limits[active] <= length + 1)[:, None]
        if task.criteria:
            ended = ended | task.meets_stopping_criteria(grown.flatten(0, 1)).view_as(ended)
        if task.return_beam_indices:
            rows = (parents + active[:, None] * num_beams).int()
            grown_history = torch.cat([gather_beams(history, parents), rows[..., None]], -1)

        among_first = ended & (torch.arange(width, device=device) < num_beams)
        if task.in_place or among_first.any():
            is_new = among_first & is_open[:, None]
            used = torch.where(is_new.any(), length + 1, used) if task.in_place else length + 1
            padded = nn.functional.pad(grown, (0, longest - length - 1), value=pad_id)
            candidates = torch.add(values / penalty(new), ~is_new, alpha=2 * MASKED_SCORE)
            candidates = torch.cat([finished_scores, candidates], 1)
            is_there = torch.cat([is_there, among_first if task.glossary is None else among_first & is_whole], 1)
            order = candidates.topk(num_beams).indices
            if task.glossary is not None:  # a result that lacks a term is worse than any other
                order = candidates.argsort(descending=True, stable=True)
                lacks = is_there.logical_not().int().gather(1, order)
                order = order.gather(1, lacks.argsort(stable=True)[:, :num_beams])
            if task.in_place:  # what is done stays as it is
                order = torch.where(is_open[:, None], order, torch.arange(num_beams, device=device))
            finished_scores, is_there = candidates.gather(1, order), is_there.gather(1, order)
            finished = gather_beams(torch.cat([finished, padded], 1), order)
            if task.return_beam_indices:
                padded = nn.functional.pad(grown_history, (0, longest - length - 1), value=-1)
                finished_history = gather_beams(torch.cat([finished_history, padded], 1), order)
        if task.glossary is None:
            scores, order = torch.add(values, ended, alpha=MASKED_SCORE).topk(num_beams)
            hopes = scores
        else:  # by turns, not by score; and none that lacks a term is waited for once there are K results
            values = torch.add(values, ended, alpha=MASKED_SCORE)
            turns = torch.add(-torch.arange(width, device=device), (values < MASKED_SCORE / 2), alpha=-RANK_OFFSET)
            order = turns.topk(num_beams).indices
            scores, best_first = values.gather(1, order).sort(descending=True)
            order = order.gather(1, best_first)
            enough = is_there[:, num_return - 1 if early_stopping == "exact" else -1, None]
            hopes = scores.masked_fill(enough & ~is_whole.gather(1, order), -math.inf).amax(1, keepdim=True)
        running, parents = gather_beams(grown, order), parents.gather(1, order)

        ends = limits[active] if task.max_length_bound is None else torch.full_like(active, task.max_length_bound)
        going = may_improve(hopes, finished_scores, is_there, penalty, new, ends - start, num_return, early_stopping)
        going &= limits[active] > length + 1
        if task.return_beam_indices:
            history = gather_beams(grown_history, order)
        if not task.together and (task.criteria or task.process is not None):
            going &= ~ended.all(-1)
        if task.keeps_finished:
            is_open &= going
            if task.should_check_done(length) and (not is_open.any() or (task.together and ended.all())):
                break
            task.decoder.keep((active[:, None] * num_beams + parents).flatten(), None)
            continue
        if not going.all():
            gone = active[~going]
            result[gone], result_scores[gone] = finished[~going, :num_return], finished_scores[~going, :num_return]
            if task.return_beam_indices:
                result_history[gone] = finished_history[~going, :num_return]
                history, finished_history = history[going], finished_history[going]
            active = active[going]
            if not len(active):
                break
            running, scores, parents = running[going], scores[going], parents[going]
            finished, finished_scores, is_there = finished[going], finished_scores[going], is_there[going]
            is_open = is_open[going]
        rows = going.nonzero()[:, 0]
        sentences = None if going.all() else rows
        task.decoder.keep((rows[:, None] * num_beams + parents).flatten(), sentences)
    if task.keeps_finished:
        result, result_scores = finished[:, :num_return], finished_scores[:, :num_return]
        result_history = finished_history[:, :num_return]
    kept = None
    if task.return_beam_indices:
        new = int((result_history >= 0).sum(-1).max())
        used, kept = start + new, result_history[..., :new].flatten(0, 1)
    return BeamSearchOutput(result[..., : int(used)].flatten(0, 1), result_scores.flatten(), kept)


def select_constrained_continuations(
    task: DecodingTask,
    log_probs: torch.Tensor,
    scores: torch.Tensor,
    running: torch.Tensor,
    active: torch.Tensor,
    room: torch.Tensor,
    width: int,
) -> tuple[torch.Tensor, ...]:
    """As `select_continuations`, by `Glossary.select_continuations`."""
    values, ids = best_tokens(log_probs, min(width, log_probs.shape[-1]))
    shape = (*scores.shape, -1)  # (B, K, ...)
    best = scores[..., None] + values.view(shape), ids.view(shape)
    log_probs = log_probs.view(shape)
    return task.glossary.select_candidates(*best, log_probs, scores, running, active, task.eos_ids, room, width)


def select_continuations(
    task: DecodingTask, log_probs: torch.Tensor, scores: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The W best continuations of a sentence's hypotheses, or W drawn ones: scores, ids and parents, each (B, W).

    Args:
        log_probs: (B * K, V) of the next token.
        scores: (B, K) of the hypotheses.
    """
    num_beams = scores.shape[1]
    if task.together:
        size = log_probs.shape[-1]
        totals = (scores[..., None] + log_probs.view(-1, num_beams, size)).flatten(1)  # (B, K * V)
        if task.do_sample:
            picks = torch.multinomial(totals.softmax(-1), width)
            values = totals.gather(1, picks)
        else:
            values, picks = totals.topk(width)
        return values, picks % size, picks // size
    values, ids = best_tokens(log_probs, min(width, log_probs.shape[-1]))  # (B * K, W), or all that there are
    looked_at = values.shape[-1]
    totals = scores[..., None] + values.view(-1, num_beams, looked_at)
    values, picks = totals.flatten(1).topk(width)  # (B, W)
    return values, ids.view(len(scores), -1).gather(1, picks), picks // looked_at


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


def gather_beams(tokens: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Rows (B, n, T) of `tokens` (B, K, T) by `order` (B, n)."""
    return tokens.gather(1, order[..., None].expand(-1, -1, tokens.shape[-1]))


def may_improve(
    scores: torch.Tensor,
    finished: torch.Tensor,
    is_there: torch.Tensor,
    penalty: Callable[[Any], Any],
    new: int,
    limits: torch.Tensor,
    num_return: int,
    early_stopping: bool | str,
) -> torch.Tensor:
    """Whether each sentence's search goes on (B): by the best running and the worst of the finished hypotheses.

    "exact": a running one that went on without a loss to its limit would be better than one of the results. The others
    as in `generate()`, which waits for K finished ones: False compares with the length so far, "never" with the limit,
    True stops when there are K.
    """
    if early_stopping == "exact":
        bound = scores[:, 0] / penalty(limits)
        return (bound > finished.masked_fill(~is_there, EMPTY)[:, num_return - 1]) & (scores[:, 0] > MASKED_SCORE / 2)
    full = is_there.all(-1)
    if early_stopping is True:
        return ~full
    bound = scores[:, 0] / penalty(limits if early_stopping == "never" else new)
    return bound > torch.where(full, finished[:, -1], MASKED_SCORE)


__all__ = ["DecodingTask", "decode_single_beam", "run_beam_search"]
