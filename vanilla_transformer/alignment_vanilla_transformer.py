# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""Analysis of given translations: word alignments and the log-probability of each token.

    align(model, tokenizer, ["The dog sleeps."], ["Der Hund schläft."])[0]
    # [((0, 3), (0, 3)), ((4, 7), (4, 8)), ((8, 14), (9, 16)), ((14, 15), (16, 17))]: character spans

Both need one forward pass with teacher forcing. They do not depend on the decoding method. Checkpoints do not contain
this module.

Shapes: B batch, S source length, T target length, L layers, H heads, V target vocabulary.
"""

import copy
import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Span = tuple[int, int]  # character offsets: start (included), end (excluded)
Link = tuple[Span, Span]  # source word, target word
Heads = list[list[int]]  # [layer, head], 0-based, as in Whisper's `alignment_heads`

MAX_LOGITS_PER_BATCH = 2**24  # 64 MiB of float32
MAX_ATTENTION_WEIGHTS_PER_BATCH = 2**20  # per layer and head: 4 MiB of float32
UNSEGMENTED_SCRIPTS = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR")  # one word per character


def align(
    model: PreTrainedModel,
    tokenizer: Any,
    sources: Sequence[str],
    targets: Sequence[str],
    heads: Heads | None = None,
    batch_size: int = 64,
) -> list[list[Link]]:
    """Link each target word to the source word with the highest cross-attention weight (section 3.2.3).

    Args:
        model: Any Transformers encoder-decoder model. An attention function that you have registered must return
            weights. Any other attention is replaced by the eager one.
        tokenizer: Fast tokenizer, which provides the character offsets of tokens.
        sources: Source texts.
        targets: Translations of `sources`, from this model or any other source.
        heads: Heads [layer, head] whose attention is averaged. Defaults to `generation_config.alignment_heads`, which
            training sets (see `choose_alignment_heads`), or to all heads.
        batch_size: Maximum number of pairs per batch.

    Returns:
        The links of each pair, in the order of the target words (see `word_spans`).

    Raises:
        ValueError: If the tokenizer is not fast, if the attention function returns no weights, or if a sentence has
            more tokens than learned positions.
    """
    if heads is None:
        heads = getattr(model.generation_config, "alignment_heads", None)
    is_vanilla = model.config.model_type == "vanilla_transformer"
    layers = None
    if heads is not None and is_vanilla:
        heads = [[range(model.config.decoder_layers)[layer], head] for layer, head in heads]  # -1: the last layer
        layers = sorted({layer for layer, _ in heads})
    links: list[list[Link]] = [[] for _ in sources]
    for i, source_words, target_words, weights in iter_word_attention(
        model, tokenizer, sources, targets, batch_size, layers
    ):
        selected = weights.flatten(0, 1)
        if heads is not None:
            selected = torch.stack([weights[layers.index(layer) if layers else layer, head] for layer, head in heads])
        best = selected.mean(0).argmax(-1).tolist()
        links[i] = [(source_words[word], target_word) for word, target_word in zip(best, target_words, strict=True)]
    return links


def choose_alignment_heads(
    model: PreTrainedModel, tokenizer: Any, sources: Sequence[str], targets: Sequence[str]
) -> Heads | None:
    """Choose the heads whose attention agrees best with `prediction_difference_alignment` on held-out pairs.

    Heads are sorted by the number of target words whose largest attention weight is on the source word of that
    alignment. The first n heads are chosen, where n maximizes this number for their averaged attention. About twenty
    pairs are enough.

    Returns:
        [layer, head] of each head, for `model.generation_config.alignment_heads`. None if no source has two words.
    """
    examples = []
    model = copy_for_attention_weights(model)
    for i, source_words, _, weights in iter_word_attention(model, tokenizer, sources, targets, batch_size=16):
        if len(source_words) > 1:  # with one word, every head is right
            examples.append((weights, prediction_difference_alignment(model, tokenizer, sources[i], targets[i])))
    if not examples:
        return None
    hits = sum(((weights.argmax(-1) == expected).sum(-1) for weights, expected in examples), torch.tensor(0))  # (L, H)
    ranking = hits.flatten().argsort(descending=True, stable=True)
    hits_of_top_n = torch.zeros(len(ranking), dtype=torch.long)
    for weights, expected in examples:
        sums = weights.flatten(0, 1)[ranking].cumsum(0)  # sums of the first n heads, for each n
        hits_of_top_n += (sums.argmax(-1) == expected).sum(-1)
    best = ranking[: int(hits_of_top_n.argmax()) + 1]
    return [[index // hits.shape[1], index % hits.shape[1]] for index in sorted(best.tolist())]


def prediction_difference_alignment(model: PreTrainedModel, tokenizer: Any, source: str, target: str) -> torch.Tensor:
    """Return, for each target word, the index of the source word whose masking lowers its probability most.

    This needs one forward pass per source word ("prediction difference" in Li et al. 2019, "On the Word Alignment from
    Neural Machine Translation").
    """
    pair = Pairs(model, tokenizer, [source], [target])
    labels = torch.tensor(pair.labels["input_ids"][0], device=model.device)
    source_matrix, target_matrix = pair.token_word_matrices(0)  # (S, source words), (target words, T)
    masks = torch.cat([torch.zeros(1, len(source_matrix)), source_matrix.T]).bool()  # row 0 masks nothing
    log_probs = []
    for rows in masks.to(model.device).split(16):
        batch = pair.collate([0] * len(rows))
        batch["input_ids"] = batch["input_ids"].masked_fill(rows, tokenizer.pad_token_id or 0)
        log_probs.append(compute_log_probs(model, batch, labels.expand(len(rows), -1)).cpu())
    scores = torch.cat(log_probs)  # (source words + 1, T)
    return ((scores[0] - scores[1:]) @ target_matrix.T).argmax(0)


def iter_word_attention(
    model: PreTrainedModel,
    tokenizer: Any,
    sources: Sequence[str],
    targets: Sequence[str],
    batch_size: int,
    layers: Sequence[int] | None = None,
) -> Iterator[tuple[int, list[Span], list[Span], torch.Tensor]]:
    """Yield index, source word spans, target word spans and attention of each pair that has words on both sides.

    The attention has the shape (L, H, target words, source words). It is averaged over the tokens of each target word
    and summed over the tokens of each source word. `layers` (models of this package only) selects L of the layers. The
    others then compute no weights, which need much memory for long sentences.
    """
    model = copy_for_attention_weights(model, layers)
    captured: list[Any] = []  # attention weights of `layers`
    for layer in layers or ():
        attention = model.get_decoder().layers[layer].cross_attn
        attention.register_forward_hook(lambda module, inputs, output: captured.append(output[1]))
    pairs = Pairs(model, tokenizer, sources, targets)
    for indices in pairs.iter_batch_indices(batch_size):
        captured.clear()
        with torch.no_grad():
            outputs = model(**pairs.collate(indices), output_attentions=layers is None, use_cache=False)
        attentions = captured if layers is not None else outputs.cross_attentions
        if not attentions or attentions[0] is None:
            name = model.config._attn_implementation
            raise ValueError(f"The attention function {name!r} returns no weights. Return them, or use 'eager'.")
        weights = torch.stack(attentions, 1).float().cpu()  # (B, L, H, T, S)
        for row, i in enumerate(indices):
            source_words, target_words = word_spans(sources[i]), word_spans(targets[i])
            if source_words and target_words:
                source_matrix, target_matrix = pairs.token_word_matrices(i)
                token_weights = weights[row, :, :, : target_matrix.shape[1], : len(source_matrix)]
                target_matrix = target_matrix / target_matrix.sum(-1, keepdim=True).clamp(min=1)
                yield i, source_words, target_words, target_matrix @ token_weights @ source_matrix


class Pairs:
    """Tokenized sentence pairs, with the character offsets of the tokens."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, sources: Sequence[str], targets: Sequence[str]):
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"{type(tokenizer).__name__} does not provide the character offsets of tokens: alignments need a fast "
                f"tokenizer."
            )
        self.model, self.tokenizer = model, tokenizer
        self.sources, self.targets = list(sources), list(targets)
        options = {"return_offsets_mapping": True, "return_attention_mask": False}
        self.encoded = tokenizer(self.sources, **options) if self.sources else {"input_ids": []}
        self.labels = tokenizer(text_target=self.targets, **options) if self.targets else {"input_ids": []}

    def iter_batch_indices(self, batch_size: int) -> Iterator[list[int]]:
        """Yield the indices of the pairs that have tokens, longest first, in batches of bounded size."""
        lengths = [(len(t), len(s)) for s, t in zip(self.encoded["input_ids"], self.labels["input_ids"], strict=True)]
        order = sorted((i for i, each in enumerate(lengths) if min(each) > 0), key=lambda i: lengths[i], reverse=True)
        batch: list[int] = []
        for i in order:
            size = (len(batch) + 1) * lengths[batch[0] if batch else i][0] * max(lengths[j][1] for j in [*batch, i])
            if batch and (len(batch) == batch_size or size > MAX_ATTENTION_WEIGHTS_PER_BATCH):
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def collate(self, indices: list[int]) -> dict[str, torch.Tensor]:
        """Return the padded model inputs of some pairs. The decoder input is the target, shifted right."""
        start = resolve_start_token_id(self.model)
        encoder_rows = [torch.tensor(self.encoded["input_ids"][i]) for i in indices]
        decoder_rows = [torch.tensor([start, *self.labels["input_ids"][i][:-1]]) for i in indices]
        inputs = {}
        for side, rows in (("", encoder_rows), ("decoder_", decoder_rows)):
            inputs[f"{side}input_ids"] = pad_sequence(rows, True, padding_value=self.tokenizer.pad_token_id or 0)
            inputs[f"{side}attention_mask"] = pad_sequence([torch.ones_like(row) for row in rows], True)
        return {name: values.to(self.model.device) for name, values in inputs.items()}

    def token_word_matrices(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return 0/1 matrices that assign tokens to words: (S, source words) and (target words, T)."""
        source_matrix = compute_overlaps(self.encoded["offset_mapping"][i], word_spans(self.sources[i]))
        return source_matrix, compute_overlaps(self.labels["offset_mapping"][i], word_spans(self.targets[i])).T


def resolve_start_token_id(model: PreTrainedModel) -> int:
    """Return the first decoder token of `generate()`: the start token, or if it is not set, the BOS token."""
    for name in ("decoder_start_token_id", "bos_token_id"):
        for config in (model.generation_config, model.config):
            if isinstance(value := getattr(config, name, None), int):
                return value
    raise ValueError("Alignments need a start token. Set generation_config.decoder_start_token_id.")


@torch.no_grad()
def compute_log_probs(model: PreTrainedModel, batch: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    """Return the log-probability (B, T) of each label (B, T), in nats, for the model inputs `batch`."""
    logits = model(**batch, use_cache=False).logits.float()  # (B, T, V)
    return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def compute_token_log_probs(
    model: PreTrainedModel, batch: dict[str, torch.Tensor], sequences: torch.Tensor, is_token: torch.Tensor
) -> torch.Tensor:
    """Return the log-probability (B, n, T) of each generated token, in nats and without logits processors.

    `batch` has padded sources (B, S). `sequences` (B, n, 1 + T) are outputs of `generate()` with the start token.
    The result is nan where `is_token` (B, n, T) is False.
    """
    (size, n, _), device = sequences.shape, model.device
    decoder_input_ids, labels = sequences.to(device)[..., :-1], sequences.to(device)[..., 1:]
    head = model.get_output_embeddings()
    vocab_size = head.out_features if hasattr(head, "out_features") else len(head.weight)  # FSMT: an embedding
    rows = max(1, MAX_LOGITS_PER_BATCH // (labels.shape[-1] * vocab_size))
    log_probs = []
    for indices in torch.arange(size * n, device=device).split(rows):
        inputs = {name: values.to(device)[indices // n] for name, values in batch.items()}
        inputs["decoder_input_ids"] = decoder_input_ids.flatten(0, 1)[indices]
        log_probs.append(compute_log_probs(model, inputs, labels.flatten(0, 1)[indices]))
    return torch.cat(log_probs).view_as(labels).masked_fill(~is_token.to(device), torch.nan)


def compute_overlaps(tokens: Sequence[Span], words: Sequence[Span]) -> torch.Tensor:
    """Return a 0/1 matrix (tokens, words): 1 if the spans have a character in common."""
    first, second = (torch.tensor(spans, dtype=torch.long).view(-1, 2) for spans in (tokens, words))
    overlaps = torch.minimum(first[:, None, 1], second[:, 1]) > torch.maximum(first[:, None, 0], second[:, 0])
    return overlaps.float()


def copy_for_attention_weights(model: PreTrainedModel, layers: Sequence[int] | None = None) -> PreTrainedModel:
    """Return a copy in evaluation mode with eager attention, which shares all parameters and buffers.

    With `layers`, only their cross-attention is eager. An attention function of the user is kept, because the outputs
    of the model depend on it. The model itself is not modified, because other threads may use it at the same time.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(model, shared)
    name = str(model.config._attn_implementation)
    function = ALL_ATTENTION_FUNCTIONS.get(name)
    if function is None or "/" in name or function.__module__.startswith("transformers."):  # "/": kernel from the Hub
        if layers is None:
            copied.set_attn_implementation("eager")
            return copied.eval()
        copied.set_attn_implementation("sdpa")
        for layer in layers:
            attention = copied.get_decoder().layers[layer].cross_attn
            attention.config = copy.copy(attention.config)
            attention.config._attn_implementation = "eager"
    return copied.eval()


def word_spans(text: str) -> list[Span]:
    """Return the character spans of words and of all other characters except for white space.

    A word is a sequence of letters, digits and their combining marks. In unsegmented scripts, it is one character.
    """
    spans: list[Span] = []
    in_word = False
    for i, character in enumerate(text):
        kind = character_class(character)
        is_adjacent = bool(spans) and spans[-1][1] == i
        if is_adjacent and (kind == "mark" or (kind == "word" and in_word)):
            spans[-1] = (spans[-1][0], i + 1)
        elif kind != "space":
            spans.append((i, i + 1))
            in_word = kind == "word"
    return spans


@lru_cache(maxsize=4096)
def character_class(character: str) -> str:
    """Return the class of a character: "word", "mark" (joins the previous character), "symbol" or "space"."""
    category = unicodedata.category(character)
    if category[0] in "LN" or character == "_":
        return "symbol" if unicodedata.name(character, "").startswith(UNSEGMENTED_SCRIPTS) else "word"
    if category[0] == "M" or category == "Cf":
        return "mark"
    return "space" if category[0] in "ZC" else "symbol"


__all__ = ["align", "choose_alignment_heads", "compute_token_log_probs", "word_spans"]
