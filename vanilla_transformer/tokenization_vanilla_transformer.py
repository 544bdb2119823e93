# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""The tokenizer for models with two vocabularies. A shared vocabulary (section 5.1) needs no separate class."""

import os
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from weakref import ref

from tokenizers import Tokenizer, processors
from transformers import TokenizersBackend

# tokenizers that are in target mode, per thread and asyncio task
_TARGET_MODE_TOKENIZERS: ContextVar[frozenset[ref]] = ContextVar("target_mode_tokenizers", default=frozenset())


class VanillaTransformerTokenizer(TokenizersBackend):
    """Pair of tokenizers: `tokenizer(text)` encodes sources, and `tokenizer(text_target=text)` encodes targets.

    `decode` and `batch_decode` decode targets, because models generate them. With `use_source_tokenizer=True`, they
    decode sources. Special tokens have the same ids on both sides. All other methods (`len`, `get_vocab`,
    `convert_tokens_to_ids`, ...) use the source vocabulary. `stock("target")` returns the target tokenizer.

    The files are `source_tokenizer.json` and `target_tokenizer.json`. A loader that does not know this class finds no
    `tokenizer.json` and fails. Otherwise, it would encode targets with the source vocabulary.

    Args:
        source_tokenizer_file, target_tokenizer_file: Paths of `tokenizers` JSON files.
        source_tokenizer_object, target_tokenizer_object: `tokenizers.Tokenizer` objects, instead of files.
        **kwargs: Arguments of `TokenizersBackend`, such as `pad_token`. Some imported checkpoints also set
            `known`: the number of source ids and of target ids for which the model has an embedding. Ids without an
            embedding become `unk_token_id`.

    Raises:
        ValueError: If one of the two tokenizers is missing, or if a special token has different ids in them.
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
        kwargs.pop("tokenizer_file", None)  # transformers searches for a tokenizer.json itself
        self.known: list[int] | None = kwargs.get("known")
        super().__init__(tokenizer_object=source, **kwargs)
        self._add_tokens(self.all_special_tokens, special_tokens=True)

    @classmethod
    def convert_to_native_format(cls, **kwargs: Any) -> dict[str, Any]:
        """Return `kwargs`, so that transformers does not rebuild the source tokenizer from its vocabulary."""
        kwargs.pop("trust_remote_code", None)
        return kwargs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encode sources, or targets given as `text_target`."""
        try:
            return super().__call__(*args, **kwargs)
        finally:  # after an error, transformers does not switch back
            self._switch_to_input_mode()

    @property
    def _tokenizer(self) -> Tokenizer:
        """The tokenizer of the current mode, under the name that transformers uses."""
        return self.target_tokenizer if ref(self) in _TARGET_MODE_TOKENIZERS.get() else self.source_tokenizer

    @_tokenizer.setter
    def _tokenizer(self, value: Tokenizer) -> None:
        self.source_tokenizer = value

    def _switch_to_input_mode(self) -> None:
        _TARGET_MODE_TOKENIZERS.set(_TARGET_MODE_TOKENIZERS.get() - {ref(self)})

    def _switch_to_target_mode(self) -> None:
        _TARGET_MODE_TOKENIZERS.set(_TARGET_MODE_TOKENIZERS.get() | {ref(self)})

    def stock(self, side: str) -> TokenizersBackend:
        """Return the "source" or "target" tokenizer as a native `TokenizersBackend`, with all special tokens."""
        special = {name: token for name, token in self.special_tokens_map.items() if isinstance(token, str)}
        return TokenizersBackend(tokenizer_object=getattr(self, f"{side}_tokenizer"), **special)

    def ids_without_embedding(self, side: str) -> set[int]:
        """Return the ids of one side, "source" or "target", that have no embedding (see `known`)."""
        if self.known is None:
            return set()
        tokenizer = getattr(self, f"{side}_tokenizer")
        extra_ids = range(self.known[side == "target"], tokenizer.get_vocab_size(with_added_tokens=False))
        return set(extra_ids) - tokenizer.get_added_tokens_decoder().keys()

    def __len__(self) -> int:
        """Return the number of embedding rows that the source vocabulary needs."""
        return max(set(range(super().__len__())) - self.ids_without_embedding("source")) + 1

    def _convert_encoding(self, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], list]:
        encoding, encodings = super()._convert_encoding(*args, **kwargs)
        if missing := self.ids_without_embedding("target" if self._tokenizer is self.target_tokenizer else "source"):
            unk = self.unk_token_id
            rows = encoding["input_ids"]
            encoding["input_ids"] = [[unk if each in missing else each for each in row] for row in rows]
        return encoding, encodings

    def _decode(self, token_ids, skip_special_tokens=False, use_source_tokenizer=False, **kwargs) -> str:
        if use_source_tokenizer:
            return super()._decode(token_ids, skip_special_tokens, **kwargs)
        self._switch_to_target_mode()
        try:
            return super()._decode(token_ids, skip_special_tokens, **kwargs)
        finally:
            self._switch_to_input_mode()

    def add_special_tokens(self, special_tokens_dict, *args: Any, **kwargs: Any) -> int:
        """Add special tokens, with equal ids in both vocabularies. Raise ValueError if the ids would differ."""
        values = [each if isinstance(each, list | tuple) else [each] for each in special_tokens_dict.values()]
        special = [str(token) for tokens in values for token in tokens]
        validate_special_token_ids(self.source_tokenizer, self.target_tokenizer, special)
        return super().add_special_tokens(special_tokens_dict, *args, **kwargs)

    def _add_tokens(self, new_tokens, special_tokens: bool = False) -> int:
        """Add tokens to the source vocabulary, and special tokens to both, with equal ids."""
        special = [token for token in new_tokens if special_tokens or getattr(token, "special", False)]
        validate_special_token_ids(self.source_tokenizer, self.target_tokenizer, list(map(str, special)))
        added = super()._add_tokens(new_tokens, special_tokens)
        self.target_tokenizer.add_special_tokens(special)
        return added

    def update_post_processor(self) -> None:
        """Update the post-processor of both tokenizers."""
        super().update_post_processor()
        self.target_tokenizer.post_processor = self._tokenizer.post_processor

    def _save_pretrained(self, save_directory, file_names, legacy_format=None, filename_prefix=None) -> tuple[str, ...]:
        prefix = f"{filename_prefix}-" if filename_prefix else ""
        tokenizers = self.source_tokenizer, self.target_tokenizer
        for tokenizer, name in zip(tokenizers, self.vocab_files_names.values(), strict=True):
            path = str(Path(save_directory, prefix + name))
            tokenizer.save(path)
            file_names = (*file_names, path)
        return file_names


def validate_special_token_ids(source: Tokenizer, target: Tokenizer, special: list[str]) -> None:
    """Raise ValueError if special tokens have, or would get, different ids in the two vocabularies."""
    ids = {token: [side.token_to_id(token) for side in (source, target)] for token in special}
    if any(None in pair for pair in ids.values()):  # add them to copies, so that an error changes nothing
        copies = [Tokenizer.from_str(side.to_str()) for side in (source, target)]
        for copy in copies:
            copy.add_special_tokens(special)
        ids = {token: [copy.token_to_id(token) for copy in copies] for token in special}
    for token, (source_id, target_id) in ids.items():
        if source_id != target_id:
            raise ValueError(
                f"The special token {token!r} has the id {source_id} in the source vocabulary and {target_id} in the "
                f"target vocabulary, but they must be equal. Train both tokenizers with the same special tokens."
            )


def _load(file: str | os.PathLike | None, tokenizer: Tokenizer | None, side: str) -> Tokenizer:
    if file is None and tokenizer is None:
        raise ValueError(
            f"The {side} tokenizer is missing: specify {side}_tokenizer_file or {side}_tokenizer_object. For a shared "
            f"vocabulary, use TokenizersBackend instead."
        )
    # a copy, because special tokens are added
    result = Tokenizer.from_file(str(file)) if tokenizer is None else Tokenizer.from_str(tokenizer.to_str())
    if result.post_processor is None:  # otherwise, transformers would set one for both sides
        result.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    return result


__all__ = ["VanillaTransformerTokenizer"]
