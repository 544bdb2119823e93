# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""What a model thinks of given translations: which words translate each other, and how probable each token is.

    align(model, tokenizer, ["The dog sleeps."], ["Der Hund schläft."])[0]
    # [((0, 3), (0, 3)), ((4, 7), (4, 8)), ((8, 14), (9, 16)), ((14, 15), (16, 17))]: spans of characters

Both are read off one pass over the finished translation (teacher forcing), so that decoding need not know of it.

Shapes: B sentences, S source tokens, T target tokens, L layers, H heads, V target vocabulary.
"""

import copy
import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from transformers import PreTrainedModel

Span = tuple[int, int]  # the first character, and the one behind the last
Link = tuple[Span, Span]  # of a word of the source, of a word of the target
Heads = list[list[int]]  # [layer, head], counted from 0, as Whisper's `alignment_heads`

MAX_LOGITS_PER_BATCH = 2**24  # of a batch: 64 MiB of float32
MAX_ATTENTION_WEIGHTS_PER_BATCH = 2**20  # attention weights that a layer's head makes of one batch: 4 MiB of float32
UNSEGMENTED_SCRIPTS = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR")  # a word a character, there


def align(
    model: PreTrainedModel,
    tokenizer: Any,
    sources: Sequence[str],
    targets: Sequence[str],
    heads: Heads | None = None,
    batch_size: int = 64,
) -> list[list[Link]]:
    """Links each word of the targets to the word of its source that cross-attention (section 3.2.3) looks at most.

    Args:
        model: one of ours, or another encoder-decoder of transformers that has eager attention.
        tokenizer: a fast one, which knows where its tokens stand in the text.
        sources, targets: pairs; the model's own translations, or anybody's.
        heads: whose attention is averaged: [layer, head] each. None: `model.generation_config.alignment_heads`, which
            training leaves there (`choose_alignment_heads`), or else all heads of all layers.
        batch_size: pairs a batch, at most.

    Returns:
        For each pair its links, in the target's order; words are those of `word_spans`.

    Raises:
        ValueError: the tokenizer is not a fast one, or a sentence is beyond the model's last position.
    """
    if heads is None:
        heads = getattr(model.generation_config, "alignment_heads", None)
    found: list[list[Link]] = [[] for _ in sources]
    for i, words, others, weights in word_attention(model, tokenizer, sources, targets, batch_size):
        if heads is None:
            chosen = weights.flatten(0, 1)
        else:
            chosen = torch.stack([weights[layer, head] for layer, head in heads])
        best = chosen.mean(0).argmax(-1).tolist()
        found[i] = [(words[word], other) for word, other in zip(best, others, strict=True)]
    return found


def choose_alignment_heads(
    model: PreTrainedModel, tokenizer: Any, sources: Sequence[str], targets: Sequence[str]
) -> Heads | None:
    """The heads whose attention agrees best with what the model needs of the source, on some held-out pairs.

    What a target word needs most is the source word without which it becomes least probable: exact and slow, as it
    takes a pass for each word ("prediction difference" in Li et al. 2019, "On the Word Alignment from Neural Machine
    Translation"). Heads are ranked by how often they look at that word, and as many of the first ones are taken as
    agree best when averaged. Some twenty pairs are enough.

    Returns:
        [layer, head] of each, for `model.generation_config.alignment_heads`; None where no source has two words.
    """
    seen = []
    model = eager_copy(model)
    for i, words, _, weights in word_attention(model, tokenizer, sources, targets, batch_size=16):
        if len(words) > 1:  # one word is right for every head
            seen.append((weights, prediction_difference_alignment(model, tokenizer, sources[i], targets[i])))
    if not seen:
        return None
    hits = sum(((weights.argmax(-1) == need).sum(-1) for weights, need in seen), torch.tensor(0))  # (L, H)
    ranking = hits.flatten().argsort(descending=True, stable=True)
    agreed = torch.zeros(len(ranking), dtype=torch.long)
    for weights, need in seen:
        means = weights.flatten(0, 1)[ranking].cumsum(0)  # of the first n heads, times n
        agreed += (means.argmax(-1) == need).sum(-1)
    first = ranking[: int(agreed.argmax()) + 1]
    return [[index // hits.shape[1], index % hits.shape[1]] for index in sorted(first.tolist())]


def prediction_difference_alignment(model: PreTrainedModel, tokenizer: Any, source: str, target: str) -> torch.Tensor:
    """For each word of the target, the place of that of the source's several words that it needs most."""
    pair = Pairs(model, tokenizer, [source], [target])
    holds, spelled = pair.token_word_matrices(0)  # (S, source words), (target words, T)
    hidden = torch.cat([torch.zeros(1, len(holds)), holds.T]).bool()  # nothing in the first row, one word in each other
    found = []
    for rows in hidden.to(model.device).split(16):
        batch = pair.batch([0] * len(rows))
        batch["input_ids"] = batch["input_ids"].masked_fill(rows, tokenizer.pad_token_id or 0)  # which says nothing
        found.append(pair.log_probabilities(batch).cpu())
    scores = torch.cat(found)  # (source words + 1, T)
    return ((scores[0] - scores[1:]) @ spelled.T).argmax(0)


def word_attention(
    model: PreTrainedModel, tokenizer: Any, sources: Sequence[str], targets: Sequence[str], batch_size: int
) -> Iterator[tuple[int, list[Span], list[Span], torch.Tensor]]:
    """For each pair that has words on both sides: its place, their spans, and every head's attention.

    A word of several tokens looks as they do on average, and is looked at as they are in sum: weights (L, H, target
    words, source words).
    """
    model = eager_copy(model)
    pairs = Pairs(model, tokenizer, sources, targets)
    for indices in pairs.batches(batch_size):
        with torch.no_grad():
            attentions = model(**pairs.batch(indices), output_attentions=True, use_cache=False).cross_attentions
        weights = torch.stack(attentions, 1).float().cpu()  # (B, L, H, T, S)
        for row, i in enumerate(indices):
            words, others = word_spans(sources[i]), word_spans(targets[i])
            if words and others:
                holds, spelled = pairs.token_word_matrices(i)
                own = weights[row, :, :, : spelled.shape[1], : len(holds)]
                spelled = spelled / spelled.sum(-1, keepdim=True).clamp(min=1)
                yield i, words, others, spelled @ own @ holds


class Pairs:
    """Pairs of texts as token ids, with the places of the tokens in the text."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, sources: Sequence[str], targets: Sequence[str]):
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"a {type(tokenizer).__name__} does not tell where its tokens stand in a text: alignments need a fast "
                f"tokenizer."
            )
        self.model, self.tokenizer = model, tokenizer
        self.sources, self.targets = list(sources), list(targets)
        options = {"return_offsets_mapping": True, "return_attention_mask": False}
        self.encoded = tokenizer(self.sources, **options) if self.sources else {"input_ids": []}
        self.labels = tokenizer(text_target=self.targets, **options) if self.targets else {"input_ids": []}

    def batches(self, batch_size: int) -> Iterator[list[int]]:
        """The pairs that have tokens, longest first, in batches of bounded size."""
        lengths = [(len(t), len(s)) for s, t in zip(self.encoded["input_ids"], self.labels["input_ids"], strict=True)]
        order = sorted((i for i, each in enumerate(lengths) if min(each) > 0), key=lambda i: lengths[i], reverse=True)
        batch: list[int] = []
        for i in order:
            cells = (len(batch) + 1) * lengths[batch[0] if batch else i][0] * max(lengths[j][1] for j in [*batch, i])
            if batch and (len(batch) == batch_size or cells > MAX_ATTENTION_WEIGHTS_PER_BATCH):
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def batch(self, indices: list[int]) -> dict[str, torch.Tensor]:
        """What `forward` takes of these pairs: each target with the start token in front and without its last one."""
        start = self.model.config.decoder_start_token_id
        sides = {
            "": [self.encoded["input_ids"][i] for i in indices],
            "decoder_": [[start, *self.labels["input_ids"][i][:-1]] for i in indices],
        }
        inputs = {}
        for side, rows in sides.items():
            width = max(map(len, rows))
            pad_id = self.tokenizer.pad_token_id or 0
            inputs[f"{side}input_ids"] = torch.tensor([row + [pad_id] * (width - len(row)) for row in rows])
            inputs[f"{side}attention_mask"] = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        return {name: values.to(self.model.device) for name, values in inputs.items()}

    def log_probabilities(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Of the first pair's target tokens, in each row of a batch of it alone: (rows, T)."""
        labels = torch.tensor(self.labels["input_ids"][0], device=self.model.device)
        return log_probabilities(self.model, batch, labels.expand(len(batch["input_ids"]), -1))

    def token_word_matrices(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Which tokens belong to which words: (S, source words) and (target words, T), of zeros and ones."""
        source = overlaps(self.encoded["offset_mapping"][i], word_spans(self.sources[i]))
        return source, overlaps(self.labels["offset_mapping"][i], word_spans(self.targets[i])).T


@torch.no_grad()
def log_probabilities(model: PreTrainedModel, batch: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    """log p of each token (B, T) behind those before it, in nats. `batch` is what `forward` takes, without labels."""
    logits = model(**batch, use_cache=False).logits.float()  # (B, T, V)
    return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def token_scores(
    model: PreTrainedModel, batch: dict[str, torch.Tensor], sequences: torch.Tensor, is_token: torch.Tensor
) -> torch.Tensor:
    """log p of each token of generated sequences, by the model alone: without what processors made of it.

    Args:
        batch: a padded batch of sources, (B, S) each.
        sequences: (B, n, 1 + T), the start token first, as `generate()` returns them.
        is_token: (B, n, T), which of them belong to the translation.

    Returns:
        (B, n, T) in nats; nan where `is_token` is False.
    """
    (size, n, _), device = sequences.shape, model.device
    given, labels = sequences.to(device)[..., :-1], sequences.to(device)[..., 1:]
    rows = max(1, MAX_LOGITS_PER_BATCH // (labels.shape[-1] * model.get_output_embeddings().weight.shape[0]))
    found = []
    for indices in torch.arange(size * n, device=device).split(rows):
        inputs = {name: values.to(device)[indices // n] for name, values in batch.items()}
        inputs["decoder_input_ids"] = given.flatten(0, 1)[indices]
        found.append(log_probabilities(model, inputs, labels.flatten(0, 1)[indices]))
    return torch.cat(found).view_as(labels).masked_fill(~is_token.to(device), torch.nan)


def overlaps(tokens: Sequence[Span], words: Sequence[Span]) -> torch.Tensor:
    """Which spans share a character: (tokens, words), of zeros and ones."""
    first, second = (torch.tensor(spans, dtype=torch.long).view(-1, 2) for spans in (tokens, words))
    shared = torch.minimum(first[:, None, 1], second[:, 1]) > torch.maximum(first[:, None, 0], second[:, 0])
    return shared.float()


def eager_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy in evaluation mode that returns attention weights. It shares all parameters and buffers.

    Other threads may use the model at the same time, so that its own settings stay as they are.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(model, shared)
    copied.set_attn_implementation("eager")
    return copied.eval()


def word_spans(text: str) -> list[Span]:
    """The words of a text and every other sign, as spans of characters; white space belongs to none.

    A word is a run of letters, digits and the marks on them; in scripts that write without spaces it is one character.
    """
    spans: list[Span] = []
    in_word = False
    for place, character in enumerate(text):
        kind = character_class(character)
        touches = bool(spans) and spans[-1][1] == place
        if touches and (kind == "mark" or (kind == "word" and in_word)):
            spans[-1] = (spans[-1][0], place + 1)
        elif kind != "space":
            spans.append((place, place + 1))
            in_word = kind == "word"
    return spans


@lru_cache(maxsize=4096)
def character_class(character: str) -> str:
    """What a character is to `word_spans`: "word", "mark" (it joins what it follows), "sign" or "space"."""
    category = unicodedata.category(character)
    if category[0] in "LN" or character == "_":
        return "sign" if unicodedata.name(character, "").startswith(UNSEGMENTED_SCRIPTS) else "word"
    if category[0] == "M" or category == "Cf":
        return "mark"
    return "space" if category[0] in "ZC" else "sign"


__all__ = ["align", "choose_alignment_heads", "token_scores", "word_spans"]
