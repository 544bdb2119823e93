"""Vocabularies of the source and the target, for tokenizers of all classes."""

from collections.abc import Iterable
from functools import partial
from typing import Any

SIDES = ("source", "target")


def vocabularies(tokenizer: Any) -> list[dict[str, int]]:
    """Return the source and target vocabularies: token to id."""
    if hasattr(tokenizer, "target_tokenizer"):
        return [getattr(tokenizer, f"{side}_tokenizer").get_vocab() for side in SIDES]
    vocabulary = tokenizer.get_vocab() | getattr(tokenizer, "lang_token_to_id", {})  # M2M100 may omit its languages
    return [vocabulary, getattr(tokenizer, "target_encoder", vocabulary)]  # Marian: 1 or 2


def add_target_mode(tokenizer: Any) -> None:
    """Let an FSMT tokenizer use its target vocabulary for `text_target`. The class tokenizes all texts as sources."""
    if type(tokenizer).__name__ == "FSMTTokenizer":
        tokenizer.target_encoder = {token: i for i, token in tokenizer.decoder.items()}
        for mode, *side in (
            ("input", tokenizer.encoder, tokenizer.src_lang),
            ("target", tokenizer.target_encoder, tokenizer.tgt_lang),
        ):
            setattr(tokenizer, f"_switch_to_{mode}_mode", partial(_set_side, tokenizer, *side))


def _set_side(tokenizer: Any, encoder: dict[str, int], language: str) -> None:
    tokenizer.encoder, tokenizer.src_lang = encoder, language


def backend_tokenizers(tokenizer: Any) -> list[Any]:
    """Return the Rust tokenizers of both sides, one if they share it, or an empty list for a slow tokenizer."""
    sides = [getattr(tokenizer, name, None) for name in ("backend_tokenizer", "target_tokenizer")]
    return [side for side in sides if side is not None]


def disable_bpe_dropout(backends: Iterable[Any]) -> None:
    """Disable the BPE-dropout of Rust tokenizers. With it, they split the same text at random."""
    for model in (each.model for each in backends):
        if getattr(model, "dropout", None) is not None:
            model.dropout = None


def tokens_by_id(vocabulary: dict[str, int], size: int = 0) -> list[str]:
    """Return at least `size` tokens in the order of their ids, with `<unused_N>` for ids without a token."""
    names = {i: token for token, i in vocabulary.items()}
    return [names.get(i, f"<unused_{i}>") for i in range(max(size, max(names) + 1))]
