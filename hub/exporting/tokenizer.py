"""The tokenizer of an exported model, of stock classes alone, for transformers 5 and for 4.40 to 4.57 before it."""

import json
from pathlib import Path

from transformers import PreTrainedTokenizerBase


def has_two_sides(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether source and target have vocabularies of their own."""
    return hasattr(tokenizer, "target_tokenizer")


def tokenizer_folders(tokenizer: PreTrainedTokenizerBase, folder: Path) -> tuple[Path, Path]:
    """Where `save_tokenizer` puts those of source and target: both in `folder`, or each in one below it."""
    if has_two_sides(tokenizer):
        return folder / "source_tokenizer", folder / "target_tokenizer"
    return folder, folder


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """As stock tokenizers, into `tokenizer_folders`."""
    sides = [tokenizer]
    if has_two_sides(tokenizer):
        sides = [tokenizer.stock(side) for side in ("source", "target")]
    for side, place in zip(sides, tokenizer_folders(tokenizer, folder), strict=False):
        side.save_pretrained(place)
        tell_older_readers(place / "tokenizer_config.json")
        if (place / "tokenizer.json").exists():
            write_merges_as_before(place / "tokenizer.json")


def tell_older_readers(path: Path) -> None:
    """The class by the name that transformers 4 and 5 both know, no token_type_ids, which a Marian refuses, and that
    no space before a mark is dropped (" ?" in French), as transformers.js and older versions would by default."""
    config = json.loads(path.read_text(encoding="utf-8"))
    if config["tokenizer_class"] == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["model_input_names"] = ["input_ids", "attention_mask"]
    config.setdefault("clean_up_tokenization_spaces", False)
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_merges_as_before(path: Path) -> None:
    """Each merge as one string, "t h" for ["t", "h"]: tokenizers 0.19 of transformers 4.40 reads no other, and the
    later ones read both. Where a token has a space in it, merges stay as they are."""
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    merges = tokenizer["model"].get("merges", [])
    if merges and not any(isinstance(merge, str) or " " in "".join(merge) for merge in merges):
        tokenizer["model"]["merges"] = [" ".join(merge) for merge in merges]
        path.write_text(json.dumps(tokenizer, indent=2, ensure_ascii=False), encoding="utf-8")
