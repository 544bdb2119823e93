# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""What `beam_search` may not say, and what it must: logits processors of `generate()`, and glossaries.

transformers' own processors copy all scores at every step; those below change in place the few that they mean.

Imports nothing of its siblings, so that it can stand in a repository of its own.

Shapes: B sentences, K beams, N hypotheses, T tokens so far, V target vocabulary, R variants of a sentence's terms, C
terms of a sentence, L tokens of a variant.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import LogitsProcessorList
from transformers.generation import logits_process as stock

Process = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # ids (N, T), scores (N, V) -> scores (N, V)


def build_logits_processor(
    processors: LogitsProcessorList, vocab_size: int, device: torch.device
) -> tuple[Process | None, bool]:
    """All of them as one function, which may change the scores it gets, or None where there is none; and whether each
    looks at a row alone, so that rows may leave."""
    if not processors:
        return None, True
    with device:  # where they make what they hold
        steps: list[Process] = [
            IN_PLACE_EQUIVALENTS[type(each)](each, vocab_size) if type(each) in IN_PLACE_EQUIVALENTS else each
            for each in processors
        ]

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for step in steps:
            scores = step(ids, scores)
        return scores

    return process, all(is_row_independent(each) for each in processors)


def is_row_independent(processor: Any) -> bool:
    """Whether scores of a row depend on that row alone, whatever its number. Unknown of a processor of the user's."""
    if isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor):  # one for each row
        return False
    return type(processor) in IN_PLACE_EQUIVALENTS or type(processor) in ROW_INDEPENDENT_PROCESSORS


def valid_token_ids(ids: Iterable[int] | torch.Tensor, vocab_size: int) -> torch.Tensor:
    ids = torch.as_tensor(ids).flatten()
    return ids[(ids >= 0) & (ids < vocab_size)]


def make_ban_processor(ids: torch.Tensor, applies: Callable[[int], bool]) -> Process:
    """No token of `ids` where so many tokens are there."""

    def process(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill_(1, ids.to(scores.device), -math.inf) if applies(tokens.shape[1]) else scores

    return process


def make_force_processor(token: Any, applies: Callable[[int], bool]) -> Process:
    """This token alone where so many tokens are there."""

    def process(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if applies(tokens.shape[1]):
            scores.fill_(-math.inf)
            scores[:, token] = 0.0
        return scores

    return process


def make_min_length_processor(own: Any, vocab_size: int) -> Process:
    return make_ban_processor(valid_token_ids(own.eos_token_id, vocab_size), lambda length: length < own.min_length)


def make_min_new_tokens_processor(own: Any, vocab_size: int) -> Process:
    longest = own.prompt_length_to_skip + own.min_new_tokens
    return make_ban_processor(valid_token_ids(own.eos_token_id, vocab_size), lambda length: length < longest)


def make_suppress_processor(own: Any, vocab_size: int) -> Process:
    return make_ban_processor(valid_token_ids(own.suppress_tokens, vocab_size), lambda length: True)


def make_begin_suppress_processor(own: Any, vocab_size: int) -> Process:
    return make_ban_processor(
        valid_token_ids(own.begin_suppress_tokens, vocab_size), lambda length: length == own.begin_index
    )


def make_forced_bos_processor(own: Any, vocab_size: int) -> Process:
    return make_force_processor(own.bos_token_id, lambda length: length == 1)


def make_forced_eos_processor(own: Any, vocab_size: int) -> Process:
    return make_force_processor(own.eos_token_id, lambda length: length == own.max_length - 1)


def make_no_repeat_ngram_processor(own: Any, vocab_size: int) -> Process:
    """No n-gram twice in a row of ids: whatever followed the last n - 1 tokens before is banned."""
    size = own.ngram_size

    def process(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if tokens.shape[1] < size:
            return scores
        earlier = tokens.unfold(1, size, 1)  # (N, T - n + 1, n)
        last = tokens[:, None, tokens.shape[1] - size + 1 :]  # (N, 1, n - 1)
        is_there = (earlier[..., :-1] == last).all(-1)  # (N, T - n + 1)
        bans = torch.zeros_like(is_there, dtype=scores.dtype).masked_fill_(is_there, -math.inf)
        return scores.scatter_add_(1, earlier[..., -1], bans)  # nothing is asked from the device

    return process


def make_sequence_bias_processor(own: Any, vocab_size: int) -> Process:
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


IN_PLACE_EQUIVALENTS: dict[type, Callable[[Any, int], Process]] = {
    stock.MinLengthLogitsProcessor: make_min_length_processor,
    stock.MinNewTokensLengthLogitsProcessor: make_min_new_tokens_processor,
    stock.NoRepeatNGramLogitsProcessor: make_no_repeat_ngram_processor,
    stock.SequenceBiasLogitsProcessor: make_sequence_bias_processor,
    stock.NoBadWordsLogitsProcessor: make_sequence_bias_processor,
    stock.ForcedBOSTokenLogitsProcessor: make_forced_bos_processor,
    stock.ForcedEOSTokenLogitsProcessor: make_forced_eos_processor,
    stock.SuppressTokensLogitsProcessor: make_suppress_processor,
    stock.SuppressTokensAtBeginLogitsProcessor: make_begin_suppress_processor,
}
ROW_INDEPENDENT_PROCESSORS = {
    *(stock.RepetitionPenaltyLogitsProcessor, stock.InfNanRemoveLogitsProcessor),
    *(stock.ExponentialDecayLengthPenalty, stock.LogitNormalization),
}

NO_TOKEN_ID = -1  # an id that no token has
MAX_CONSTRAINT_TOKENS = 10_000  # more tokens than a sentence's terms have
MASKED_SCORE = -1.0e9  # the score of what is not there
WORD = (  # a letter or digit of a script with spaces between words; in any other, each character is a word
    r"[^\W\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u9fff\uf900-\ufaff"
    r"\uff66-\uff9f\U00020000-\U0003ffff]"
)


class LexicalConstraints:
    """Terms that have to occur: dynamic beam allocation (Post and Vilar 2018), for all sentences at once.

    Each step looks at the best tokens of every hypothesis and at those that begin or go on with one of its terms. The
    beams are dealt out in turns to hypotheses that lack equally many tokens, so that those that begin a term are not
    crowded out by the likelier ones without it. Only what has every term may end, and a term is begun in time for it.

    What a hypothesis has is read off its tokens, so there is nothing to carry along.

    Args:
        terms: of each sentence, each as its variants, each as its ids; one of the variants has to occur. (B, C, R, L)
        continuing: (V), whether a token goes on with the word before it: behind a term there is none, which "cat" is
            in "cat s". None: no token does.
        in_word: (V), whether a token ends in a word, with which one of those would go on. None: no token does.
    """

    def __init__(
        self,
        terms: Sequence[Sequence[Sequence[Sequence[int]]]],
        continuing: torch.Tensor | None = None,
        in_word: torch.Tensor | None = None,
    ):
        flat = [[(c, ids) for c, variants in enumerate(each) for ids in variants] for each in terms]
        shape = (len(flat), max(1, *map(len, flat)), max((len(ids) for row in flat for _, ids in row), default=1))
        self.tokens = torch.full(shape, NO_TOKEN_ID)  # (B, R, L)
        self.lengths = torch.ones(shape[:2], dtype=torch.long)  # (B, R)
        self.of_term = torch.zeros((shape[0], max(1, *map(len, terms)), shape[1]), dtype=torch.bool)  # (B, C, R)
        for b, row in enumerate(flat):
            for r, (c, ids) in enumerate(row):
                self.tokens[b, r, : len(ids)] = torch.tensor(ids)
                self.lengths[b, r], self.of_term[b, c, r] = len(ids), True
        # how often its variants have to stand there, as other terms need the same ones (B, C)
        self.needed = torch.zeros(self.of_term.shape[:2], dtype=torch.long)
        for b, own in enumerate(terms):
            sets = [{tuple(ids) for ids in variants} for variants in own]
            for c, each in enumerate(sets):
                self.needed[b, c] = 1 + sum(other < each or (other == each and i < c) for i, other in enumerate(sets))
        self.continuing, self.in_word = continuing, in_word

    def to(self, device: torch.device, vocab_size: int) -> LexicalConstraints:
        """Moves it to a device, for a model that may have more tokens than the tokenizer."""
        for name in ("tokens", "lengths", "of_term", "needed", "continuing", "in_word"):
            value = getattr(self, name)
            if value is not None and name in ("continuing", "in_word"):
                value = nn.functional.pad(value, (0, vocab_size - len(value)), value=name == "continuing")
            setattr(self, name, value if value is None else value.to(device))
        return self

    def read(self, running: torch.Tensor, active: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of hypotheses (B, K, T): how often each term stands in them and a word ends behind it (B, K, C), and
        whether their last n tokens are the first n of each variant (B, K, R, L + 1), n from 0."""
        tokens, lengths = self.tokens[active][:, None], self.lengths[active][:, None]  # (B, 1, R, L), (B, 1, R)
        size, last = tokens.shape[-1], running.shape[-1] - 1
        # (B, K, R, T): the variant's first n tokens end there
        matches = torch.ones((*running.shape[:2], tokens.shape[2], last + 1), dtype=torch.bool, device=running.device)
        if self.continuing is not None and self.in_word is not None:
            matches = ~(self.continuing[tokens[..., 0].clamp(min=0)][..., None] & self.in_word[running][:, :, None])
        ends, suffixes = matches & False, [matches[..., -1]]
        ends_word = torch.ones_like(running, dtype=torch.bool)
        ends_word[..., -1].fill_(False)  # not yet known
        if self.continuing is not None:
            ends_word[..., :-1] = ~self.continuing[running[..., 1:]]
        for n in range(1, size + 1):
            earlier = nn.functional.pad(matches[..., :-1], (1, 0), value=n == 1)
            matches = earlier & (running[:, :, None] == tokens[..., n - 1, None])
            suffixes.append(matches[..., -1])
            ends |= matches & ends_word[:, :, None] & (lengths == n)[..., None]
        counts = (self.of_term[active][:, None].float() @ ends.float()).gt(0).sum(-1)
        return counts, torch.stack(suffixes, -1)

    def count_missing_tokens(self, counts: torch.Tensor, progress: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        """Tokens that are missing (...) where terms stand so often (..., C) and variants have so many tokens (..., R).
        What is begun counts for one term."""
        shape = (len(active), *[1] * (counts.ndim - 2), -1)
        others = ~self.of_term[active].view(*shape[:-1], *self.of_term.shape[1:])
        missing = self.needed[active].view(shape) - counts  # (..., C)
        lengths = self.lengths[active].view(shape)
        first, further = (
            (lengths - has)[..., None, :].masked_fill(others, MAX_CONSTRAINT_TOKENS).amin(-1) for has in (progress, 0)
        )
        return torch.where(missing == 1, first, further).masked_fill(missing < 1, 0).sum(-1)

    def select_candidates(
        self,
        values: torch.Tensor,
        ids: torch.Tensor,
        log_probs: torch.Tensor,
        scores: torch.Tensor,
        running: torch.Tensor,
        active: torch.Tensor,
        eos_ids: torch.Tensor,
        room: torch.Tensor,
        width: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The W continuations that are looked at, in the order of their turns: scores, ids and parents (B, W), and
        whether each may be a result.

        Args:
            values, ids: (B, K, n), the best of each hypothesis, with the scores of the whole.
            log_probs: (B, K, V), of the next token.
            scores: (B, K), of the hypotheses.
            room: (B), tokens that a hypothesis may still get behind this one.
        """
        beams = running.shape[1]
        counts, suffixes = self.read(running, active)
        size = self.tokens.shape[-1]
        progress = (suffixes * torch.arange(size + 1, device=ids.device)).amax(-1)  # (B, K, R)
        progress = progress.minimum(self.lengths[active][:, None])
        of_term, needed = self.of_term[active][:, None], self.needed[active][:, None]  # (B, 1, C, R), (B, 1, C)
        complete = suffixes.gather(-1, self.lengths[active][:, None, :, None].expand(-1, beams, -1, 1))[..., 0]
        pending = (of_term & complete[:, :, None]).any(-1)  # (B, K, C), as far as no word goes on there
        again = (of_term & (counts + pending < needed)[..., None]).any(-2)  # (B, K, R)
        progress = progress.masked_fill(complete & again, 0)
        variants = self.tokens[active][:, None].expand(-1, beams, -1, -1)  # (B, K, R, L)
        following = variants.gather(-1, progress.clamp(max=size - 1)[..., None])[..., 0]  # (B, K, R)
        useful = (following != NO_TOKEN_ID) & (progress < self.lengths[active][:, None])
        useful &= (of_term & (counts < needed)[..., None]).any(-2) & (suffixes[..., 0] | (progress > 0))
        if self.continuing is not None:  # behind a complete term also the best token that ends its word
            is_end = torch.isin(torch.arange(len(self.continuing), device=ids.device), eos_ids)
            lacks_any = (counts + pending < needed).any(-1, keepdim=True)
            excluded = torch.where(is_end, lacks_any, self.continuing)  # (B, K, V)
            bounds = log_probs.masked_fill(excluded, -math.inf).argmax(-1, keepdim=True)
            following = torch.cat([following, bounds], -1)
            useful = torch.cat([useful, (pending & (counts < needed)).any(-1, keepdim=True)], -1)
        useful &= ~(following[..., None] == ids[:, :, None]).any(-1)  # (B, K, R + 1) they are among the best anyway
        equal = following[..., None] == following[..., None, :]  # of two variants with the same next token the first
        useful &= ~(equal.tril(-1) & useful[..., None, :]).any(-1)
        forced = log_probs.gather(-1, following.clamp(min=0)) + scores[..., None]
        forced = forced.masked_fill(~useful, -math.inf)
        values, ids = torch.cat([values, forced], -1), torch.cat([ids, following.clamp(min=0)], -1)  # (B, K, M)

        # what each of them would have
        candidates = ids[..., None, None]  # (B, K, M, 1, 1)
        grown = suffixes[:, :, None, :, :-1] & (candidates == variants[:, :, None])  # (B, K, M, R, L)
        new = (grown * torch.arange(1, size + 1, device=ids.device)).amax(-1)  # (B, K, M, R)
        ends = torch.isin(ids, eos_ids)
        goes_on = torch.zeros_like(ends) if self.continuing is None else self.continuing[ids] & ~ends
        met = counts[:, :, None] + (pending[:, :, None] & ~goes_on[..., None])  # (B, K, M, C)
        lacks = self.count_missing_tokens(met, new, active)  # (B, K, M)
        values = values.masked_fill(ends & (lacks > 0) & (room > 0)[:, None, None], -math.inf)
        late = lacks + 1 > room[:, None, None]  # no time for all of it and the end, as far as anything else is there
        values, ids, lacks = values.flatten(1), ids.flatten(1), lacks.flatten(1)
        keys = values + MASKED_SCORE * (late.flatten(1) & (lacks > 0)) * (1 + lacks)

        # in turns: the best of each number of missing tokens, then the second best of each, ...
        keys, order = keys.sort(descending=True)
        lacks, values, ids = lacks.gather(1, order), values.gather(1, order), ids.gather(1, order)
        parents = order // (order.shape[1] // beams)
        groups = lacks.argsort(stable=True)  # those that lack equally many stand together, the best first
        places = torch.arange(groups.shape[1], device=ids.device).expand_as(groups)
        grouped = lacks.gather(1, groups)
        is_first = nn.functional.pad(grouped[:, 1:] != grouped[:, :-1], (1, 0), value=True)
        firsts = (places * is_first).cummax(1).values
        turn = torch.empty_like(groups).scatter_(1, groups, places - firsts)
        turn[:, 0].fill_(-1)  # the best of all always goes on
        turn = turn + ((keys < MASKED_SCORE / 2) + (values < MASKED_SCORE / 2).int()) * MAX_CONSTRAINT_TOKENS
        picks = (turn * MAX_CONSTRAINT_TOKENS + lacks.clamp(max=MAX_CONSTRAINT_TOKENS - 1)).argsort(stable=True)[
            :, :width
        ]
        values, lacks = values.gather(1, picks), lacks.gather(1, picks)
        return values, ids.gather(1, picks), parents.gather(1, picks), (lacks == 0) & (values > MASKED_SCORE / 2)


class GlossaryMatcher:
    """A glossary in words: finds the terms of a sentence, and says which of them its translation has.

    Args:
        words: a source term's translation, or several of which the model chooses one. Terms are found at the bounds of
            words and in any case; of overlapping ones the first, and of those the longest. Each is forced once;
            several terms with the same translation need it several times.
        tokenizer: of the model.

    Raises:
        ValueError: a term or a translation is no text, is empty, or has what the tokenizer does not know.
    """

    def __init__(self, words: Mapping[str, str | Sequence[str]], tokenizer: Any):
        self.tokenizer = tokenizer
        self.targets: dict[str, list[str]] = {}  # as they were written, and in lower case where that is still free
        for source, given in words.items():
            targets = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
            if not targets or not all(isinstance(each, str) and each.strip() for each in (source, *targets)):
                raise ValueError(f"glossary: {source!r} is to become {given!r}: give a text, or several.")
            self.targets[source.strip()] = [each.strip() for each in targets]
        for source in list(self.targets):
            self.targets.setdefault(source.lower(), self.targets[source])
        longest_first = sorted(self.targets, key=len, reverse=True)
        self.pattern = re.compile(
            rf"(?<!{WORD})(?:{'|'.join(map(re.escape, longest_first)) or '(?!)'})(?!{WORD})", re.IGNORECASE
        )
        self.ids = {each: self.encode(each) for targets in self.targets.values() for each in targets}
        self.spelled = {each: tokenizer.decode(ids[0]).strip() for each, ids in self.ids.items()}  # as in lower case
        self.continuing, self.in_word = word_bounds(
            tokenizer.stock("target") if hasattr(tokenizer, "stock") else tokenizer
        )

    def encode(self, target: str) -> list[list[int]]:
        """Return the ids of a translation at the beginning of a text and, if they differ, of one after a word."""
        texts = [target, "a", f"a {target}"]
        ids, word, both = self.tokenizer(text_target=texts, add_special_tokens=False)["input_ids"]
        if not ids or self.tokenizer.unk_token_id in ids:
            raise ValueError(f"glossary: the tokenizer does not know all of {target!r}: take this term out.")
        is_other = both[: len(word)] == word and both[len(word) :] not in ([], ids)
        return [ids, both[len(word) :]] if is_other else [ids]

    def find(self, sentence: str) -> dict[str, list[str]]:
        """The terms of a sentence as they stand there, and the translations of each."""
        found: dict[str, list[str]] = {}
        for match in self.pattern.finditer(sentence):
            targets = self.targets.get(match[0]) or self.targets.get(match[0].lower()) or self.other_case(match[0])
            if (match[0].lower(), targets) not in [(source.lower(), own) for source, own in found.items()]:
                found[match[0]] = targets
        return found

    def other_case(self, term: str) -> list[str]:
        """The translations of a term of which `lower` makes another one than the pattern, such as "İstanbul"."""
        return next(own for each, own in self.targets.items() if re.fullmatch(re.escape(each), term, re.IGNORECASE))

    def build_constraints(self, sentences: Sequence[str]) -> LexicalConstraints | None:
        """For a batch of sentences; None: there are no terms in it."""
        terms = [
            [[ids for each in targets for ids in self.ids[each]] for targets in self.find(text).values()]
            for text in sentences
        ]
        return LexicalConstraints(terms, self.continuing, self.in_word) if any(terms) else None

    def met(self, sentence: str, translation: str) -> list[dict[str, str | None]]:
        """Of each term of the sentence its `source`, and its `target` in the translation; None: it is not there."""
        found = self.find(sentence)
        targets = {each for own in found.values() for each in own}
        forms = {each: f"{re.escape(each)}|{re.escape(self.spelled[each])}" for each in targets}
        left = {each: len(re.findall(rf"(?<!{WORD})(?:{forms[each]})(?!{WORD})", translation)) for each in targets}
        met: dict[str, str | None] = {}
        for source in sorted(found, key=lambda source: len(found[source])):  # the fewest choices first
            there = (each for each in found[source] if left[each])
            met[source] = min(there, key=lambda target: sum(target in own for own in found.values()), default=None)
            left |= {each: left[each] - 1 for each in targets if each == met[source]}
        return [{"source": source, "target": met[source]} for source in found]


def word_bounds(tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each token (V) whether it continues the word before it, as special tokens do: a text lacks them; and whether
    it ends in a word."""
    start = tokenizer.convert_ids_to_tokens(tokenizer("a", add_special_tokens=False)["input_ids"])
    shortest = len(tokenizer.convert_tokens_to_string(start))
    special = set(tokenizer.all_special_ids)
    tails = [
        "" if id in special else tokenizer.convert_tokens_to_string([*start, token])[shortest:]
        for id, token in enumerate(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))
    ]
    begins, ends = ([bool(re.match(WORD, tail[place])) for tail in tails] for place in (slice(1), slice(-1, None)))
    return torch.tensor([id in special or begin for id, begin in enumerate(begins)]), torch.tensor(ends)


__all__ = ["LexicalConstraints", "GlossaryMatcher", "build_logits_processor"]
