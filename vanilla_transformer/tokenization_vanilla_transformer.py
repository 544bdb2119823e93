# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""The tokenizer for models with two vocabularies. A shared one (section 5.1) needs no class of ours."""

import os
from contextvars import ContextVar
from typing import Any
from weakref import ref

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

_TARGET_MODE_TOKENIZERS: ContextVar[frozenset[ref]] = ContextVar("reads_targets", default=frozenset())
# the tokenizers that read targets at the moment; each thread and each asyncio task has its own


class VanillaTransformerTokenizer(PreTrainedTokenizerFast):
    """Two `tokenizers` side by side: `tokenizer(text)` is the source's, `tokenizer(text_target=text)` the target's.

    `decode` and `batch_decode` read targets, which is what a model generates; `use_source_tokenizer=True` reads
    sources. Special tokens have the same ids on both sides. Everything else (`len`, `get_vocab`,
    `convert_tokens_to_ids`, ...) speaks of the source; `stock("target")` is the target's own.

    The files are `source_tokenizer.json` and `target_tokenizer.json`: a loader that does not know this class finds no
    `tokenizer.json`, and fails, instead of encoding targets with the source's vocabulary.

    Args:
        source_tokenizer_file, target_tokenizer_file: paths of `tokenizers` JSON files; or
        source_tokenizer_object, target_tokenizer_object: `tokenizers.Tokenizer`s.
        **kwargs: as for `PreTrainedTokenizerFast`: `pad_token`, `bos_token`, `eos_token`, `unk_token`, ...; and
            `known`, only in checkpoints that earlier versions imported: the number of rows that the model has for
            sources and for targets. Tokens of the vocabularies without a row are read as unknown.

    Raises:
        ValueError: one of the two tokenizers is missing, or a special token has different ids in them.
    """

    vocab_files_names = {
        "source_tokenizer_file": "source_tokenizer.json",
        "target_tokenizer_file": "target_tokenizer.json",
    }
    model_input_names = ["input_ids", "attention_mask"]
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer

    def __init__(
        self,
        source_tokenizer_file: str | os.PathLike | None = None,
        target_tokenizer_file: str | os.PathLike | None = None,
        source_tokenizer_object: Tokenizer | None = None,
        target_tokenizer_object: Tokenizer | None = None,
        **kwargs: Any,
    ):
        source = _load(source_tokenizer_file, source_tokenizer_object, "source")
        self.target_tokenizer = _load(target_tokenizer_file, target_tokenizer_object, "target")
        kwargs.pop("tokenizer_file", None)  # transformers looks for a tokenizer.json of its own accord
        self.known: list[int] | None = kwargs.get("known")
        super().__init__(tokenizer_object=source, **kwargs)
        self._add_tokens(self.all_special_tokens, special_tokens=True)

    @classmethod
    def convert_to_native_format(cls, **kwargs: Any) -> dict[str, Any]:
        """Keeps transformers from rebuilding the source's tokenizer from its vocabulary; `__init__` reads both."""
        kwargs.pop("trust_remote_code", None)
        return kwargs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        finally:  # transformers leaves the mode for targets after an error
            self._switch_to_input_mode()

    @property
    def _tokenizer(self) -> Tokenizer:
        """The one in use, as transformers calls it."""
        return self.target_tokenizer if ref(self) in _TARGET_MODE_TOKENIZERS.get() else self.source_tokenizer

    @_tokenizer.setter
    def _tokenizer(self, value: Tokenizer) -> None:
        self.source_tokenizer = value

    def _switch_to_input_mode(self) -> None:
        _TARGET_MODE_TOKENIZERS.set(_TARGET_MODE_TOKENIZERS.get() - {ref(self)})

    def _switch_to_target_mode(self) -> None:
        _TARGET_MODE_TOKENIZERS.set(_TARGET_MODE_TOKENIZERS.get() | {ref(self)})

    def stock(self, side: str) -> PreTrainedTokenizerFast:
        """One side, "source" or "target", as transformers' own class, with the same special tokens."""
        special = {name: token for name, token in self.special_tokens_map.items() if isinstance(token, str)}
        return PreTrainedTokenizerFast(tokenizer_object=getattr(self, f"{side}_tokenizer"), **special)

    def ids_without_rows(self, side: str) -> set[int]:
        """Return the ids of one side, "source" or "target", for which the model has no rows: see `known`."""
        if self.known is None:
            return set()
        tokenizer = getattr(self, f"{side}_tokenizer")
        beyond = range(self.known[side == "target"], tokenizer.get_vocab_size(with_added_tokens=False))
        return set(beyond) - tokenizer.get_added_tokens_decoder().keys()

    def __len__(self) -> int:
        """Return the number of rows that a model needs for sources."""
        return max(set(range(super().__len__())) - self.ids_without_rows("source")) + 1

    def _convert_encoding(self, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], list]:
        found, encodings = super()._convert_encoding(*args, **kwargs)
        if missing := self.ids_without_rows("target" if self._tokenizer is self.target_tokenizer else "source"):
            unk = self.unk_token_id
            found["input_ids"] = [[unk if each in missing else each for each in ids] for ids in found["input_ids"]]
        return found, encodings

    def _decode(
        self, token_ids, skip_special_tokens: bool = False, use_source_tokenizer: bool = False, **kwargs
    ) -> str:
        if use_source_tokenizer:
            return super()._decode(token_ids, skip_special_tokens, **kwargs)
        self._switch_to_target_mode()
        try:
            return super()._decode(token_ids, skip_special_tokens, **kwargs)
        finally:
            self._switch_to_input_mode()

    def _add_tokens(self, new_tokens, special_tokens: bool = False) -> int:
        """Adds to the source's vocabulary; special tokens to both, where their ids must come out equal."""
        special = [token for token in new_tokens if special_tokens or getattr(token, "special", False)]
        validate_special_token_ids(self.source_tokenizer, self.target_tokenizer, list(map(str, special)))
        added = super()._add_tokens(new_tokens, special_tokens)
        self.target_tokenizer.add_special_tokens(special)
        return added

    def update_post_processor(self) -> None:
        super().update_post_processor()
        self.target_tokenizer.post_processor = self._tokenizer.post_processor

    def _save_pretrained(self, save_directory, file_names, legacy_format=None, filename_prefix=None) -> tuple[str, ...]:
        prefix = f"{filename_prefix}-" if filename_prefix else ""
        for tokenizer, name in zip(
            (self.source_tokenizer, self.target_tokenizer), self.vocab_files_names.values(), strict=True
        ):
            path = os.path.join(save_directory, prefix + name)
            tokenizer.save(path)
            file_names = (*file_names, path)
        return file_names


def validate_special_token_ids(source: Tokenizer, target: Tokenizer, special: list[str]) -> None:
    """Raises ValueError where special tokens have, or would get, other ids in one vocabulary than in the other."""
    ids = {token: [side.token_to_id(token) for side in (source, target)] for token in special}
    if any(None in pair for pair in ids.values()):  # tried on copies: what is refused changes nothing
        copies = [Tokenizer.from_str(side.to_str()) for side in (source, target)]
        for copy in copies:
            copy.add_special_tokens(special)
        ids = {token: [copy.token_to_id(token) for copy in copies] for token in special}
    for token, (source_id, target_id) in ids.items():
        if source_id != target_id:
            raise ValueError(
                f"The special token {token!r} has the id {source_id} in the source's vocabulary and {target_id} in "
                f"the target's: give it the same id in both, as by training both with the same special tokens."
            )


def _load(file: str | os.PathLike | None, tokenizer: Tokenizer | None, side: str) -> Tokenizer:
    if tokenizer is not None:
        return Tokenizer.from_str(tokenizer.to_str())  # a copy: special tokens are added to it
    if file is None:
        raise ValueError(
            f"The {side}'s tokenizer is missing: give {side}_tokenizer_file or {side}_tokenizer_object. A model with "
            f"one shared vocabulary uses PreTrainedTokenizerFast instead."
        )
    return Tokenizer.from_file(str(file))


__all__ = ["VanillaTransformerTokenizer"]
