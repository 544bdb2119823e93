# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""Logits processors of `generate()` for `beam_search`: the same scores, the common ones in a fraction of the time.

transformers' own copy all scores at every step. Those below change in place the few that they mean.

Imports nothing of its siblings, so that it can stand in a repository of its own.

Shapes: N hypotheses, T tokens so far, V target vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as stock

Process = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # ids (N, T), scores (N, V) -> scores (N, V)


def prepare(processors: LogitsProcessorList, vocab_size: int) -> tuple[Process | None, bool]:
    """All of them as one function, which may change the scores it gets, or None where there is none; and whether each
    looks at a row alone, so that rows may leave."""
    if not processors:
        return None, True
    steps: list[Process] = [
        EQUALS[type(each)](each, vocab_size) if type(each) in EQUALS else each for each in processors
    ]

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for step in steps:
            scores = step(ids, scores)
        return scores

    return process, all(goes_by_rows(each) for each in processors)


def goes_by_rows(processor: Any) -> bool:
    """Whether scores of a row depend on that row alone, whatever its number. Unknown of a processor of the user's."""
    if isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor):  # one for each row
        return False
    return type(processor) in EQUALS or type(processor) in BY_ROWS


def existing(ids: Iterable[int] | torch.Tensor, vocab_size: int) -> torch.Tensor:
    ids = torch.as_tensor(ids).flatten()
    return ids[(ids >= 0) & (ids < vocab_size)]


def banning(ids: torch.Tensor, applies: Callable[[int], bool]) -> Process:
    """No token of `ids` where so many tokens are there."""

    def process(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill_(1, ids.to(scores.device), -math.inf) if applies(tokens.shape[1]) else scores

    return process


def forcing(token: Any, applies: Callable[[int], bool]) -> Process:
    """This token alone where so many tokens are there."""

    def process(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if applies(tokens.shape[1]):
            scores.fill_(-math.inf)
            scores[:, token] = 0.0
        return scores

    return process


def min_length(own: Any, vocab_size: int) -> Process:
    return banning(existing(own.eos_token_id, vocab_size), lambda length: length < own.min_length)


def min_new_tokens(own: Any, vocab_size: int) -> Process:
    longest = own.prompt_length_to_skip + own.min_new_tokens
    return banning(existing(own.eos_token_id, vocab_size), lambda length: length < longest)


def suppress(own: Any, vocab_size: int) -> Process:
    return banning(existing(own.suppress_tokens, vocab_size), lambda length: True)


def suppress_at_begin(own: Any, vocab_size: int) -> Process:
    return banning(existing(own.begin_suppress_tokens, vocab_size), lambda length: length == own.begin_index)


def forced_bos(own: Any, vocab_size: int) -> Process:
    return forcing(own.bos_token_id, lambda length: length == 1)


def forced_eos(own: Any, vocab_size: int) -> Process:
    return forcing(own.eos_token_id, lambda length: length == own.max_length - 1)


def no_repeat_ngrams(own: Any, vocab_size: int) -> Process:
    """No n-gram twice in a row of ids: whatever followed the last n - 1 tokens before is banned."""
    size = own.ngram_size

    def process(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if tokens.shape[1] < size:
            return scores
        earlier = tokens.unfold(1, size, 1)  # (N, T - n + 1, n)
        last = tokens[:, None, tokens.shape[1] - size + 1 :]  # (N, 1, n - 1)
        rows, places = (earlier[..., :-1] == last).all(-1).nonzero(as_tuple=True)
        scores[rows, earlier[rows, places, -1]] = -math.inf
        return scores

    return process


def sequence_bias(own: Any, vocab_size: int) -> Process:
    """To the last token of each sequence its bias, where the others are the last ones of a row. Bad words: -inf."""
    if any(token >= vocab_size for sequence in own.sequence_bias for token in sequence):
        return own  # and its message
    by_length: dict[int, list[tuple[int, ...]]] = {}
    for sequence in own.sequence_bias:
        by_length.setdefault(len(sequence), []).append(sequence)
    sequences = {length: torch.tensor(group) for length, group in by_length.items()}
    biases = {length: torch.tensor([own.sequence_bias[each] for each in group]) for length, group in by_length.items()}

    def process(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for length, group in sequences.items():
            group, bias = group.to(scores.device), biases[length].to(scores)
            if length - 1 > tokens.shape[1]:
                continue
            if length == 1:
                scores.index_add_(1, group[:, 0], bias.expand(len(scores), -1))
                continue
            matches = (tokens[:, None, -(length - 1) :] == group[:, :-1]).all(-1)  # (N, sequences)
            scores.index_add_(1, group[:, -1], torch.where(matches, bias, 0.0))
        return scores

    return process


EQUALS: dict[type, Callable[[Any, int], Process]] = {
    stock.MinLengthLogitsProcessor: min_length,
    stock.MinNewTokensLengthLogitsProcessor: min_new_tokens,
    stock.NoRepeatNGramLogitsProcessor: no_repeat_ngrams,
    stock.SequenceBiasLogitsProcessor: sequence_bias,
    stock.NoBadWordsLogitsProcessor: sequence_bias,
    stock.ForcedBOSTokenLogitsProcessor: forced_bos,
    stock.ForcedEOSTokenLogitsProcessor: forced_eos,
    stock.SuppressTokensLogitsProcessor: suppress,
    stock.SuppressTokensAtBeginLogitsProcessor: suppress_at_begin,
}
BY_ROWS = {
    *(stock.RepetitionPenaltyLogitsProcessor, stock.InfNanRemoveLogitsProcessor),
    *(stock.ExponentialDecayLengthPenalty, stock.LogitNormalization),
}

__all__ = ["prepare"]
