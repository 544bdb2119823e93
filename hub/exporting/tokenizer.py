"""The tokenizer of an exported model, of stock classes alone, for transformers 5 and for 4.40 to 4.57 before it."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, processors
from transformers import PreTrainedTokenizerBase

from hub.importing.tokenizer import with_rows
from hub.importing.toolkits.subwords import build_sentencepiece_tokenizer
from vanilla_transformer import VanillaTransformerForConditionalGeneration, VanillaTransformerTokenizer

ONLY_JSON = ("onnx",)  # targets whose readers need tokenizer.json
SIDES = ("source", "target")
SPACE = "\u2581"  # of SentencePiece
MAX_DIFFERING = 0.01  # of lines: scores in float32, as of SentencePiece, decide between segmentations of equal score


def prepare(
    model: VanillaTransformerForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, to: str
) -> tuple[VanillaTransformerForConditionalGeneration, PreTrainedTokenizerBase]:
    """Return an equal model and tokenizer that the target `to` can take, with a row for every id.

    Raises:
        ValueError: the tokenizer has ids that the model has no rows for, or it cannot be converted.
    """
    two_python_sides = to == "ctranslate2" and hasattr(tokenizer, "target_encoder")
    if not tokenizer.is_fast and (to in ONLY_JSON or two_python_sides):
        tokenizer = as_fast(tokenizer)
    sizes, rows = (model.config.vocab_size, model.lm_head.out_features), {}
    for side, size, vocabulary in zip(SIDES, sizes, vocabularies(tokenizer), strict=True):
        missing = tokenizer.ids_without_rows(side) if has_separate_vocabularies(tokenizer) else set()
        ids = {*range(size), *vocabulary.values()}
        if (largest := max(ids - missing)) >= size:
            raise ValueError(
                f"the {side}'s tokenizer has the id {largest}, but the model has {size} rows, which are for ids below "
                f"{size}: give the model its own tokenizer, or more rows (resize_token_embeddings)."
            )
        rows[side] = [tokenizer.unk_token_id if i in missing else i for i in range(max(ids) + 1)]
    return with_rows(model, rows)[0], tokenizer


def vocabularies(tokenizer: Any) -> list[dict[str, int]]:
    """Return the tokens of source and target with their ids."""
    if has_separate_vocabularies(tokenizer):
        return [getattr(tokenizer, f"{side}_tokenizer").get_vocab() for side in SIDES]
    return [tokenizer.get_vocab(), getattr(tokenizer, "target_encoder", tokenizer.get_vocab())]  # Marian may have two


def tokens_by_id(vocabulary: dict[str, int], size: int = 0) -> list[str]:
    """Return at least `size` tokens in the order of their ids; an id without a token gets `<unused_N>`."""
    names = {i: token for token, i in vocabulary.items()}
    return [names.get(i, f"<unused_{i}>") for i in range(max(size, max(names) + 1))]


def as_fast(tokenizer: Any) -> VanillaTransformerTokenizer:
    """Return a tokenizer with `tokenizer.json` files that is equal to a Marian one, which is written in Python.

    Raises:
        ValueError: it is of another class, or the ids of its vocabulary differ too often.
    """
    name, cure = type(tokenizer).__name__, "Use --to transformers or --to ctranslate2, which keep it."
    if not hasattr(tokenizer, "spm_source"):
        raise ValueError(f"a {name} cannot be written as tokenizer.json, which this target needs. {cure}")
    special: dict[str, Any] = {
        key: token for key, token in tokenizer.special_tokens_map.items() if isinstance(token, str)
    }
    codes, end, sides = tokenizer.supported_language_codes, tokenizer.eos_token, []
    for side, vocabulary in zip(SIDES, vocabularies(tokenizer), strict=True):
        content = getattr(tokenizer, f"spm_{side}").serialized_model_proto()
        made = build_sentencepiece_tokenizer(
            tokens_by_id(vocabulary), Path(name), content, special | {code: code for code in codes}
        )
        made.add_tokens([AddedToken(code, normalized=False) for code in codes])
        ends = [(end, vocabulary[end])]
        made.post_processor = processors.TemplateProcessing(single=["$A", end], special_tokens=ends)
        sides.append(made)
    known = [len(tokens_by_id(vocabulary)) for vocabulary in vocabularies(tokenizer)]
    fast = VanillaTransformerTokenizer(
        source_tokenizer_object=sides[0], target_tokenizer_object=sides[1], known=known, **special
    )
    for argument, vocabulary in zip(("text", "text_target"), vocabularies(tokenizer), strict=True):
        text = "".join(token for token in vocabulary if token not in {*codes, *special.values()}).replace(SPACE, " ")
        lines = [text[start : start + 50] for start in range(0, len(text), 50)]
        pairs = zip(*(each(**{argument: lines})["input_ids"] for each in (tokenizer, fast)), strict=True)
        if sum(one != other for one, other in pairs) > MAX_DIFFERING * len(lines):
            raise ValueError(f"a {name} with this vocabulary cannot be converted: too many ids differ. {cure}")
    return fast


def has_separate_vocabularies(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether source and target have vocabularies of their own."""
    return hasattr(tokenizer, "target_tokenizer")


def tokenizer_folders(tokenizer: PreTrainedTokenizerBase, folder: Path) -> tuple[Path, Path]:
    """Where `save_tokenizer` puts those of source and target: both in `folder`, or each in one below it."""
    if has_separate_vocabularies(tokenizer):
        return folder / "source_tokenizer", folder / "target_tokenizer"
    return folder, folder


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """As stock tokenizers, into `tokenizer_folders`."""
    sides = [tokenizer.stock(side) for side in SIDES] if has_separate_vocabularies(tokenizer) else [tokenizer]
    for side, place in zip(sides, tokenizer_folders(tokenizer, folder), strict=False):
        side.save_pretrained(place)
        patch_tokenizer_config(place / "tokenizer_config.json")
        if (place / "tokenizer.json").exists():
            write_legacy_merges(place / "tokenizer.json")


def patch_tokenizer_config(path: Path) -> None:
    """The class by the name that transformers 4 and 5 both know, no token_type_ids, which a Marian refuses, and that
    no space before a mark is dropped (" ?" in French), as transformers.js and older versions would by default."""
    config = json.loads(path.read_text(encoding="utf-8"))
    if config["tokenizer_class"] == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["model_input_names"] = ["input_ids", "attention_mask"]
    config.setdefault("clean_up_tokenization_spaces", False)
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_legacy_merges(path: Path) -> None:
    """Each merge as one string, "t h" for ["t", "h"]: tokenizers 0.19 of transformers 4.40 reads no other, and the
    later ones read both. Where a token has a space in it, merges stay as they are."""
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    merges = tokenizer["model"].get("merges", [])
    if merges and not any(isinstance(merge, str) or " " in "".join(merge) for merge in merges):
        tokenizer["model"]["merges"] = [" ".join(merge) for merge in merges]
        path.write_text(json.dumps(tokenizer, indent=2, ensure_ascii=False), encoding="utf-8")
