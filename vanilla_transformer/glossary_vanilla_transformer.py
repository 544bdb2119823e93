# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""Lexical constraints for `beam_search`, from glossaries. Checkpoints do not contain this module.

Shapes: B sentences, K beams, N hypotheses, T tokens so far, V target vocabulary.
C terms per sentence, R variants of the terms of a sentence, L tokens per variant.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import regex as re  # its \w includes combining marks
import torch
from torch import nn

NO_TOKEN_ID = -1  # matches no token
MAX_CONSTRAINT_TOKENS = 10_000  # exceeds the number of tokens of all terms of a sentence
MASKED_SCORE = -1.0e9  # masks continuations; finite, so that masked ones can still be compared
WORD = (  # part of a word of a script with spaces between words; in other scripts, each character is a word
    r"(?:\p{No}|[^\W\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u9fff\uf900-\ufaff"
    r"\uff66-\uff9f\U00020000-\U0003ffff\u20dd-\u20e4\ufe00-\ufe0f\U000e0100-\U000e01ef])"  # the last: marks of symbols
)
JOINER = "[.'’-]"  # "U.S." does not occur in "U.S.A."
WORD_START = rf"(?:(?<!{WORD})|(?!{WORD}|{JOINER}))"  # "%" may follow a digit
WORD_END = rf"(?:(?!{WORD})|(?<!{WORD}|{JOINER}))"
FIRST_BYTE = "[\u00c2-\u00f4]"  # of a character, in the vocabularies of byte-level BPE and ByT5
WORD_BYTE = "[\u00c3-\u00df\u00ea-\u00ed]"  # of letters that form words; E0 and E1 also begin Thai and Khmer


class LexicalConstraints:
    """Constraints of a batch: terms that must occur, with dynamic beam allocation (Post and Vilar 2018).

    Each step considers the best tokens of every hypothesis and the tokens that start or continue one of its terms.
    Hypotheses that lack the same number of constraint tokens form a bank. The beams are allocated to the banks
    round-robin, because hypotheses that contain terms are often less likely and would be pruned. Only hypotheses with
    all terms may end. Hypotheses that can no longer complete their terms within the length limit rank last.
    If the variants of two terms overlap only in part, one occurrence may satisfy both terms.
    """

    def __init__(
        self,
        terms: Sequence[Sequence[Sequence[Sequence[int]]]],  # token ids of each sentence, term and variant
        continuation_mask: torch.Tensor,  # (V), tokens that continue the previous word, if it is unfinished
        word_end_mask: torch.Tensor,  # (V), tokens that end with a letter or digit and leave the word unfinished
        term_end_mask: torch.Tensor,  # (V), the same, and tokens that end with `JOINER`
        rest_mask: torch.Tensor,  # (V), tokens that only continue the previous character, such as its second byte
    ):
        sets = [[{tuple(ids) for ids in variants} for variants in each] for each in terms]
        flat = [list(dict.fromkeys(tuple(ids) for variants in each for ids in variants)) for each in terms]
        shape = (len(flat), max(1, *map(len, flat)), max((len(ids) for row in flat for ids in row), default=1))
        self.tokens = torch.full(shape, NO_TOKEN_ID)  # (B, R, L)
        self.lengths = torch.ones(shape[:2], dtype=torch.long)  # (B, R)
        num_terms = max(1, *map(len, terms))
        self.variant_mask = torch.zeros((shape[0], num_terms, shape[1]), dtype=torch.bool)  # (B, C, R)
        # minimum occurrences of a term's variants (B, C): 1, plus 1 for each other term with a subset of its variants
        self.min_counts = torch.zeros(self.variant_mask.shape[:2], dtype=torch.long)
        for b, row in enumerate(flat):
            for r, ids in enumerate(row):
                self.tokens[b, r, : len(ids)] = torch.tensor(ids)
                self.lengths[b, r] = len(ids)
            for c, each in enumerate(sets[b]):
                self.variant_mask[b, c, : len(row)] = torch.tensor([ids in each for ids in row])
                shared = (other < each or (other == each and i < c) for i, other in enumerate(sets[b]))
                self.min_counts[b, c] = 1 + sum(shared)
        self.continuation_mask, self.word_end_mask = continuation_mask, word_end_mask
        self.term_end_mask, self.rest_mask = term_end_mask, rest_mask

    def to(self, device: torch.device, vocab_size: int) -> None:
        """Move the tensors to a device and pad the masks to the vocabulary of the model."""
        padding = (0, vocab_size - len(self.continuation_mask))
        self.continuation_mask = nn.functional.pad(self.continuation_mask, padding, value=True)
        self.word_end_mask = nn.functional.pad(self.word_end_mask, padding, value=False)
        self.term_end_mask = nn.functional.pad(self.term_end_mask, padding, value=False)
        self.rest_mask = nn.functional.pad(self.rest_mask, padding, value=False)
        for name, value in vars(self).items():
            setattr(self, name, value.to(device))

    def find_last_characters(self, hypotheses: torch.Tensor) -> torch.Tensor:
        """Replace tokens that only continue a character by the token in which it begins (B, K, T)."""
        positions = torch.arange(hypotheses.shape[-1], device=hypotheses.device).expand_as(hypotheses)
        return hypotheses.gather(-1, positions.masked_fill(self.rest_mask[hypotheses], 0).cummax(-1).values)

    def match_state(self, hypotheses: torch.Tensor, active: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Match the terms in hypotheses (B, K, T).

        Return the number of occurrences of each term that end at a word boundary (B, K, C). Also return whether a
        hypothesis ends with the first n tokens of a variant, for n from 0 to L (B, K, R, L + 1).
        """
        tokens, lengths = self.tokens[active][:, None], self.lengths[active][:, None]  # (B, 1, R, L), (B, 1, R)
        continues = self.continuation_mask[tokens[..., 0].clamp(min=0)][..., None]
        last = self.find_last_characters(hypotheses)
        # whether the first n tokens of the variant end at this position (B, K, R, T)
        matches = ~(continues & self.word_end_mask[last][:, :, None])
        complete, suffixes = matches & False, [matches[..., -1]]
        ends_word = torch.ones_like(hypotheses, dtype=torch.bool)
        ends_word[..., -1].fill_(False)  # depends on the next token
        ends_word[..., :-1] = ~(self.continuation_mask[hypotheses[..., 1:]] & self.term_end_mask[last[..., :-1]])
        for n in range(1, tokens.shape[-1] + 1):
            shorter = nn.functional.pad(matches[..., :-1], (1, 0), value=n == 1)
            matches = shorter & (hypotheses[:, :, None] == tokens[..., n - 1, None])
            suffixes.append(matches[..., -1])
            complete |= matches & ends_word[:, :, None] & (lengths == n)[..., None]
        counts = (self.variant_mask[active][:, None].float() @ complete.float()).gt(0).sum(-1)
        return counts, torch.stack(suffixes, -1)

    def count_missing_tokens(self, counts: torch.Tensor, progress: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        """Return the number of missing constraint tokens (...).

        `counts` (..., C) is the number of occurrences of each term. `progress` (..., R) is the number of tokens of each
        variant with which the hypothesis ends. It counts for terms that are missing once, and are complete or begun.
        Only one variant counts as begun, because its next token ends the others.
        """
        shape = (len(active), *[1] * (counts.ndim - 2), -1)
        excluded = ~self.variant_mask[active].view(*shape[:-1], *self.variant_mask.shape[1:])
        lengths = self.lengths[active].view(shape)[..., None, :] + excluded * MAX_CONSTRAINT_TOKENS  # (..., C, R)
        missing = self.min_counts[active].view(shape) - counts  # (..., C)
        shortest, remaining = lengths.amin(-1), lengths - progress[..., None, :]  # (..., C), (..., C, R)
        is_done = (missing < 1) | ((missing == 1) & (remaining == 0).any(-1))
        begun = (shortest[..., None] - remaining).clamp(min=0) * (~is_done & (missing == 1))[..., None]
        return shortest.masked_fill(is_done, 0).sum(-1) - begun.sum(-2).amax(-1)

    def select_candidates(
        self,
        values: torch.Tensor,  # (B, K, n), scores of the best continuations of each hypothesis
        ids: torch.Tensor,  # (B, K, n), tokens of these continuations
        log_probs: torch.Tensor,  # (B, K, V), of the next token
        scores: torch.Tensor,  # (B, K), of the hypotheses
        hypotheses: torch.Tensor,  # (B, K, T)
        active: torch.Tensor,  # (B), indices of the sentences
        eos_ids: torch.Tensor,
        remaining_length: torch.Tensor,  # (B), tokens that may follow the next one
        num_candidates: int,  # W
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Select the W continuations of each sentence, in the order of their allocation to beams.

        Return scores, token ids, parent beams, and whether the continuations contain all terms, each (B, W).
        """
        beams, size = hypotheses.shape[1], self.tokens.shape[-1]
        counts, suffixes = self.match_state(hypotheses, active)
        lengths = self.lengths[active][:, None]  # (B, 1, R)
        progress = (suffixes * torch.arange(size + 1, device=ids.device)).amax(-1).minimum(lengths)  # (B, K, R)
        variant_mask, min_counts = self.variant_mask[active][:, None], self.min_counts[active][:, None]
        complete = suffixes.gather(-1, lengths[..., None].expand(-1, beams, -1, 1))[..., 0]
        # whether a term ends here; it counts only if the next token does not continue its last word
        pending = (variant_mask & complete[:, :, None]).any(-1)  # (B, K, C)
        is_needed_again = (variant_mask & (counts + pending < min_counts)[..., None]).any(-2)  # (B, K, R)
        progress = progress.masked_fill(complete & is_needed_again, 0)
        variants = self.tokens[active][:, None].expand(-1, beams, -1, -1)  # (B, K, R, L)
        next_ids = variants.gather(-1, progress.clamp(max=size - 1)[..., None])[..., 0]  # (B, K, R)
        is_additional = (next_ids != NO_TOKEN_ID) & (progress < lengths)  # (B, K, R), to be added to the candidates
        is_additional &= (variant_mask & (counts < min_counts)[..., None]).any(-2) & (suffixes[..., 0] | (progress > 0))
        # after a complete term, also consider the best token that ends its word
        is_eos = torch.isin(torch.arange(len(self.continuation_mask), device=ids.device), eos_ids)
        lacks_any = (counts + pending < min_counts).any(-1, keepdim=True)
        is_unfinished = self.term_end_mask[self.find_last_characters(hypotheses)[..., -1:]]  # (B, K, 1)
        excluded = torch.where(is_eos, lacks_any, self.continuation_mask & is_unfinished)  # (B, K, V)
        boundary_ids = log_probs.masked_fill(excluded, -math.inf).argmax(-1, keepdim=True)
        next_ids = torch.cat([next_ids, boundary_ids], -1)
        is_additional = torch.cat([is_additional, (pending & (counts < min_counts)).any(-1, keepdim=True)], -1)
        is_additional = without_repetitions(is_additional, next_ids, ids)
        constraint_values = log_probs.gather(-1, next_ids.clamp(min=0)) + scores[..., None]
        values = torch.cat([values, constraint_values.masked_fill(~is_additional, -math.inf)], -1)
        ids = torch.cat([ids, next_ids.clamp(min=0)], -1)  # (B, K, M), M continuations per hypothesis

        # missing tokens of each continuation
        matches = suffixes[:, :, None, :, :-1] & (ids[..., None, None] == variants[:, :, None])  # (B, K, M, R, L)
        progress = (matches * torch.arange(1, size + 1, device=ids.device)).amax(-1)  # (B, K, M, R)
        is_eos = torch.isin(ids, eos_ids)
        continues = self.continuation_mask[ids] & is_unfinished & ~is_eos
        counts = counts[:, :, None] + (pending[:, :, None] & ~continues[..., None])  # (B, K, M, C)
        missing = self.count_missing_tokens(counts, progress, active)  # (B, K, M)
        values = values.masked_fill(is_eos & (missing > 0) & (remaining_length > 0)[:, None, None], -math.inf)
        cannot_complete = missing + 1 > remaining_length[:, None, None]  # these continuations are ranked last
        values, ids, missing = values.flatten(1), ids.flatten(1), missing.flatten(1)
        shortfall = (cannot_complete.flatten(1) & (missing > 0)) * (1 + missing)

        picks = allocate_beams(values, missing, shortfall)[:, :num_candidates]
        values, ids, missing = values.gather(1, picks), ids.gather(1, picks), missing.gather(1, picks)
        parents = picks // matches.shape[2]
        return values, ids, parents, (missing == 0) & (values > MASKED_SCORE / 2)

    def rank_finished(self, scores: torch.Tensor, is_complete: torch.Tensor) -> torch.Tensor:
        """Return the order of finished hypotheses (B, n): first those with all terms, and then by score."""
        order = scores.argsort(descending=True, stable=True)
        return order.gather(1, is_complete.gather(1, order).logical_not().int().argsort(stable=True))

    def select_running(
        self, scores: torch.Tensor, is_complete: torch.Tensor, num_beams: int, has_enough: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Select the running hypotheses in the order of beam allocation.

        Return indices (B, K), scores (B, K), and the best score (B). If there are enough finished hypotheses (B), the
        best score ignores running hypotheses that lack a term.
        """
        is_masked = scores < MASKED_SCORE / 2
        positions = torch.arange(scores.shape[1], device=scores.device)
        order = torch.add(-positions, is_masked, alpha=-MAX_CONSTRAINT_TOKENS).topk(num_beams).indices
        scores, best_first = scores.gather(1, order).sort(descending=True)
        order = order.gather(1, best_first)
        is_ignored = has_enough[:, None] & ~is_complete.gather(1, order)
        return order, scores, scores.masked_fill(is_ignored, -math.inf).amax(1)


def without_repetitions(is_additional: torch.Tensor, next_ids: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return `is_additional` (B, K, m) without tokens `next_ids` that are among `ids` (B, K, n) or come earlier."""
    is_additional = is_additional & ~(next_ids[..., None] == ids[:, :, None]).any(-1)
    is_equal = next_ids[..., None] == next_ids[..., None, :]
    return is_additional & ~(is_equal.tril(-1) & is_additional[..., None, :]).any(-1)


def allocate_beams(values: torch.Tensor, missing: torch.Tensor, shortfall: torch.Tensor) -> torch.Tensor:
    """Return the order of the continuations of each sentence (B, n), round-robin over their banks.

    The best continuation of each bank comes first, then the second best of each bank, and so on. The first one overall
    is the best of all banks. Continuations that cannot complete their terms, and masked ones, come last. `values`
    (B, n) are scores. The numbers of missing constraint tokens (B, n) define the banks. `shortfall` (B, n) is 0, or for
    continuations that cannot complete their terms, 1 + `missing`.
    """
    order = values.argsort(descending=True, stable=True)
    order = order.gather(1, shortfall.gather(1, order).argsort(stable=True))
    values, missing, shortfall = (each.gather(1, order) for each in (values, missing, shortfall))
    by_bank = missing.argsort(stable=True)
    positions = torch.arange(by_bank.shape[1], device=values.device).expand_as(by_bank)
    banks = missing.gather(1, by_bank)
    is_first = nn.functional.pad(banks[:, 1:] != banks[:, :-1], (1, 0), value=True)
    bank_starts = (positions * is_first).cummax(1).values
    rank = torch.empty_like(by_bank).scatter_(1, by_bank, positions - bank_starts)
    rank[:, 0].fill_(-1)
    is_masked = values < MASKED_SCORE / 2
    rank = rank + (((shortfall > 0) | is_masked).int() + is_masked) * MAX_CONSTRAINT_TOKENS
    keys = rank * MAX_CONSTRAINT_TOKENS + missing.clamp(max=MAX_CONSTRAINT_TOKENS - 1)
    return order.gather(1, keys.argsort(stable=True))


class GlossaryMatcher:
    """Matcher that finds the glossary terms of a sentence and reports which of them a translation contains.

    Terms are matched at word boundaries, ignoring case and the kind of white space. Of overlapping terms, the first and
    longest is used. Each term must be translated once. A translation that belongs to two terms of a sentence must occur
    twice. The model chooses between several translations of a term. Raises ValueError if a term or translation is not a
    string, is empty, or contains unknown tokens.
    """

    def __init__(self, glossary: Mapping[str, str | Sequence[str]], tokenizer: Any):
        self.tokenizer = tokenizer
        self.targets: dict[str, list[str]] = {}  # keys: source terms, as written and lowercased
        for source, value in glossary.items():
            targets = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]
            if not targets or not all(isinstance(each, str) and each.strip() for each in (source, *targets)):
                raise ValueError(
                    f"glossary: {source!r}: {value!r} must be a term and its translation, or a list of translations."
                )
            self.targets[normalize_white_space(source)] = [each.strip() for each in targets]
        for source in list(self.targets):
            self.targets.setdefault(source.lower(), self.targets[source])
        longest_first = sorted(self.targets, key=len, reverse=True)
        terms = "|".join(map(re.escape, longest_first)) or "(?!)"
        self.pattern = re.compile(rf"{WORD_START}(?:{terms}){WORD_END}", re.IGNORECASE)
        self.ids = {each: self.encode(each) for targets in self.targets.values() for each in targets}
        self.normalized = {each: tokenizer.decode(ids[0]).strip() for each, ids in self.ids.items()}  # e.g. lowercased
        target_tokenizer = tokenizer.stock("target") if hasattr(tokenizer, "stock") else tokenizer
        self.masks = word_boundary_masks(target_tokenizer)

    def encode(self, target: str) -> list[list[int]]:
        """Return the ids of a translation at the beginning of a text and, if they differ, after a word."""
        texts = [target, "a", f"a {target}"]
        ids, word, both = self.tokenizer(text_target=texts, add_special_tokens=False)["input_ids"]
        if not ids or self.tokenizer.unk_token_id in ids:
            raise ValueError(f"glossary: the tokenizer does not know all characters of {target!r}. Remove this entry.")
        differs = both[: len(word)] == word and both[len(word) :] not in ([], ids)
        return [ids, both[len(word) :]] if differs else [ids]

    def find(self, sentence: str) -> dict[str, list[str]]:
        """Return the terms of a sentence with its upper and lower case, and the translations of each."""
        terms: dict[str, list[str]] = {}
        for match in self.pattern.finditer(normalize_white_space(sentence)):
            term = match[0]
            targets = self.targets.get(term) or self.targets.get(term.lower())
            if targets is None:  # only `re.IGNORECASE` matches it, unlike `lower()`, such as "İstanbul"
                known = (each for each in self.targets if re.fullmatch(re.escape(each), term, re.IGNORECASE))
                targets = self.targets[next(known)]
            if (term.lower(), targets) not in [(source.lower(), each) for source, each in terms.items()]:
                terms[term] = targets
        return terms

    def build_constraints(self, sentences: Sequence[str]) -> LexicalConstraints | None:
        """Return the constraints of a batch of sentences, or None if they contain no terms."""
        terms = [
            [[ids for each in targets for ids in self.ids[each]] for targets in self.find(text).values()]
            for text in sentences
        ]
        return LexicalConstraints(terms, *self.masks) if any(terms) else None

    def report_terms(self, sentence: str, translation: str) -> list[dict[str, str | None]]:
        """Return the `source` of each term and its `target` in the translation, or None if it is missing."""
        terms = self.find(sentence)
        targets = {each for choices in terms.values() for each in choices}
        forms = {each: f"{re.escape(each)}|{re.escape(self.normalized[each])}" for each in targets}
        unused = {each: len(re.findall(rf"{WORD_START}(?:{forms[each]}){WORD_END}", translation)) for each in targets}
        matches: dict[str, str | None] = {}
        for source in sorted(terms, key=lambda source: len(terms[source])):  # fewest choices first
            usable = (each for each in terms[source] if unused[each])
            matches[source] = min(usable, key=lambda each: sum(each in texts for texts in terms.values()), default=None)
            unused |= {each: unused[each] - 1 for each in targets if each == matches[source]}
        return [{"source": source, "target": matches[source]} for source in terms]


def normalize_white_space(text: str) -> str:
    """Return a text with single spaces and in the Unicode form NFC, as most tokenizers read it."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def word_boundary_masks(tokenizer: Any) -> torch.Tensor:
    """Return the four masks of `LexicalConstraints` (4, V). Special tokens continue a word.

    Each token is decoded between two copies of a token that joins itself without a space, such as "s", "##s" or "s@@".
    If there is none, words are tokens. The bytes of incomplete characters are read from the tokens.
    """
    size = max(getattr(tokenizer, "target_encoder", tokenizer.get_vocab()).values()) + 1  # Marian: 1 or 2 vocabularies
    start = tokenizer.convert_ids_to_tokens(tokenizer(text_target="a", add_special_tokens=False)["input_ids"])
    tokens = tokenizer.convert_ids_to_tokens(list(range(size)))
    special = {*tokenizer.all_special_ids, *(id for id, token in enumerate(tokens) if token is None)}  # None: a gap

    def decode(*more: str) -> str:
        return tokenizer.convert_tokens_to_string([*start, *more])

    candidates = ([token] for id, token in enumerate(tokens) if id not in special)
    joins = (each for each in candidates if re.match(WORD, decode(*each, *each)[len(decode(*each)) :]))
    opener: list[str] = next(joins, [])
    before = len(decode(*opener))
    after = len(decode(*opener, *opener)) - before
    texts = ["" if id in special else decode(*opener, token, *opener)[before:] for id, token in enumerate(tokens)]
    texts = [text[: len(text) - after] for text in texts]
    pieces = [re.sub("^<0x([0-9A-F]{2})>$", lambda byte: chr(int(byte[1], 16)), token or "") for token in tokens]
    rests = [id not in special and is_rest(text, pieces[id]) for id, text in enumerate(texts)]
    texts = [text if id in special else complete_characters(text, pieces[id]) for id, text in enumerate(texts)]
    continues = [id in special or rests[id] or bool(re.match(WORD, text)) for id, text in enumerate(texts)]
    ends = [[bool(re.match(each, text[-1:])) for text in texts] for each in (WORD, f"{WORD}|{JOINER}")]
    return torch.tensor([continues, *ends, rests])


def is_rest(text: str, piece: str) -> bool:
    """Return whether a token consists of bytes that continue a character. They are decoded as U+FFFD or as ""."""
    return not text.strip("\ufffd") and not re.search(f"{FIRST_BYTE}|\ufffd", piece)


def complete_characters(text: str, piece: str) -> str:
    """Replace incomplete characters at the ends of a token by "a" if their first byte is that of a letter, else "?"."""
    first, last = re.match(WORD_BYTE, piece), re.findall(FIRST_BYTE, piece)[-1:]
    text = re.sub("^(?:\ufffd|$)", "a" if first else "?", text)
    return re.sub("\ufffd$", "a" if last and re.match(WORD_BYTE, last[0]) else "?", text)


__all__ = ["LexicalConstraints", "GlossaryMatcher"]
