"""Vocabularies of the source and the target, for tokenizers of all classes."""

from typing import Any

SIDES = ("source", "target")


def vocabularies(tokenizer: Any) -> list[dict[str, int]]:
    """Return the source and target vocabularies: token to id."""
    if hasattr(tokenizer, "target_tokenizer"):
        return [getattr(tokenizer, f"{side}_tokenizer").get_vocab() for side in SIDES]
    return [tokenizer.get_vocab(), getattr(tokenizer, "target_encoder", tokenizer.get_vocab())]  # Marian: 1 or 2


def tokens_by_id(vocabulary: dict[str, int], size: int = 0) -> list[str]:
    """Return at least `size` tokens in the order of their ids, with `<unused_N>` for ids without a token."""
    names = {i: token for token, i in vocabulary.items()}
    return [names.get(i, f"<unused_{i}>") for i in range(max(size, max(names) + 1))]
