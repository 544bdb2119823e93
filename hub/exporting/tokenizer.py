"""Export of tokenizers to native Transformers classes, for transformers 5 and 4.40 to 4.57."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, processors
from transformers import PreTrainedTokenizerBase

from vanilla_transformer import VanillaTransformerForConditionalGeneration, VanillaTransformerTokenizer
from vanilla_transformer.shared.vocabularies import SIDES, tokens_by_id, vocabularies

from ..importing.tokenizer import select_rows
from ..importing.toolkits.subwords import build_sentencepiece_tokenizer

SPACE = "\u2581"  # replaces spaces in SentencePiece
MAX_DIFFERING = 0.01  # fraction of lines; segmentations of equal score are chosen by float32 rounding


def prepare_for_export(
    model: VanillaTransformerForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, to: str
) -> tuple[VanillaTransformerForConditionalGeneration, PreTrainedTokenizerBase]:
    """Return an equivalent model and tokenizer that the target `to` supports, with an embedding row for every id.

    Raises ValueError if the tokenizer has ids without rows in the model, or if it cannot be converted.
    """
    is_marian_pair = hasattr(tokenizer, "target_encoder")
    if not tokenizer.is_fast and (to == "onnx" or (to == "ctranslate2" and is_marian_pair)):
        tokenizer = convert_to_fast(tokenizer)  # clients of ONNX models require tokenizer.json
    sizes, rows = (model.config.vocab_size, model.lm_head.out_features), {}
    for side, size, vocabulary in zip(SIDES, sizes, vocabularies(tokenizer), strict=True):
        missing = tokenizer.ids_without_embedding(side) if has_separate_vocabularies(tokenizer) else set()
        ids = {*range(size), *vocabulary.values()}
        if (largest := max(ids - missing)) >= size:
            message = f"The {side} tokenizer has the id {largest}, but the model has only {size} embedding rows."
            raise ValueError(f"{message} Use the tokenizer of the model, or call resize_token_embeddings.")
        rows[side] = [tokenizer.unk_token_id if i in missing else i for i in range(max(ids) + 1)]
    return select_rows(model, rows)[0], tokenizer


def convert_to_fast(tokenizer: Any) -> VanillaTransformerTokenizer:
    """Convert a `MarianTokenizer`, which is written in Python, to an equivalent one with `tokenizer.json` files.

    Raises ValueError if it is of another class, or if the ids of too many lines differ after the conversion.
    """
    name, hint = type(tokenizer).__name__, "Use --to transformers or --to ctranslate2, which do not convert it."
    if not hasattr(tokenizer, "spm_source"):
        raise ValueError(f"{name} cannot be converted to tokenizer.json, which this target requires. {hint}")
    special_tokens_map = tokenizer.special_tokens_map
    special: dict[str, Any] = {key: token for key, token in special_tokens_map.items() if isinstance(token, str)}
    codes, eos, sides = tokenizer.supported_language_codes, tokenizer.eos_token, []
    present = {*special.values(), *codes}
    extra = [token for token in tokenizer.added_tokens_decoder.values() if token.content not in present]
    names = {token.content: token.content for token in extra} | {code: code for code in codes}
    if extra and hasattr(tokenizer, "target_encoder"):
        tokens = ", ".join(token.content for token in extra)
        raise ValueError(f"{name} with two vocabularies and added tokens ({tokens}): use --to transformers.")
    for side, vocabulary in zip(SIDES, vocabularies(tokenizer), strict=True):
        content = getattr(tokenizer, f"spm_{side}").serialized_model_proto()
        fast_side = build_sentencepiece_tokenizer(tokens_by_id(vocabulary), Path(name), content, special | names)
        fast_side.add_tokens([AddedToken(code, normalized=False) for code in codes])
        for token in extra:
            flags = {flag: getattr(token, flag) for flag in ("single_word", "lstrip", "rstrip", "special")}
            add = fast_side.add_special_tokens if token.special else fast_side.add_tokens
            add([AddedToken(token.content, normalized=False, **flags)])
        eos_ids = [(eos, vocabulary[eos])]
        fast_side.post_processor = processors.TemplateProcessing(single=["$A", eos], special_tokens=eos_ids)
        sides.append(fast_side)
    known = [len(tokens_by_id(vocabulary)) for vocabulary in vocabularies(tokenizer)]
    fast = VanillaTransformerTokenizer(
        source_tokenizer_object=sides[0], target_tokenizer_object=sides[1], known=known, **special
    )
    for argument, vocabulary in zip(("text", "text_target"), vocabularies(tokenizer), strict=True):
        text = "".join(token for token in vocabulary if token not in {*names, *special.values()}).replace(SPACE, " ")
        lines = [text[start : start + 50] for start in range(0, len(text), 50)]
        lines += [f"a {token.content} a{token.content}a" for token in extra]
        pairs = zip(*(each(**{argument: lines})["input_ids"] for each in (tokenizer, fast)), strict=True)
        differing = [i for i, (one, other) in enumerate(pairs) if one != other]
        if len(differing) > MAX_DIFFERING * len(lines) or any(i >= len(lines) - len(extra) for i in differing):
            raise ValueError(f"{name} with this vocabulary cannot be converted: too many ids differ. {hint}")
    return fast


def has_separate_vocabularies(tokenizer: PreTrainedTokenizerBase) -> bool:
    return hasattr(tokenizer, "target_tokenizer")


def tokenizer_dirs(tokenizer: PreTrainedTokenizerBase, folder: Path) -> tuple[Path, Path]:
    """Return the directories of the source and target tokenizers: the same one, or two subdirectories."""
    if has_separate_vocabularies(tokenizer):
        return folder / "source_tokenizer", folder / "target_tokenizer"
    return folder, folder


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save native Transformers tokenizers to `tokenizer_dirs`."""
    sides = [tokenizer.stock(side) for side in SIDES] if has_separate_vocabularies(tokenizer) else [tokenizer]
    for side, side_dir in zip(sides, tokenizer_dirs(tokenizer, folder), strict=False):
        if side is not tokenizer:  # without the settings of an earlier call
            side.backend_tokenizer.no_truncation()
            side.backend_tokenizer.no_padding()
        side.save_pretrained(side_dir)
        patch_tokenizer_config(side_dir / "tokenizer_config.json")
        if (side_dir / "tokenizer.json").exists():
            write_legacy_merges(side_dir / "tokenizer.json")


def patch_tokenizer_config(path: Path) -> None:
    """Patch `tokenizer_config.json` for older versions and other libraries.

    The class name is known to transformers 4 and 5. `token_type_ids`, which Marian rejects, are omitted. Spaces before
    punctuation (" ?" in French) are kept; older versions and transformers.js remove them by default.
    """
    config = json.loads(path.read_text(encoding="utf-8"))
    if config["tokenizer_class"] == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["model_input_names"] = ["input_ids", "attention_mask"]
    config.setdefault("clean_up_tokenization_spaces", False)
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_legacy_merges(path: Path) -> None:
    """Write each merge as a string, "t h" for ["t", "h"], if no token contains a space.

    tokenizers 0.19 (transformers 4.40) reads only this format; later versions read both.
    """
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    merges = tokenizer["model"].get("merges", [])
    if merges and not any(isinstance(merge, str) or " " in "".join(merge) for merge in merges):
        tokenizer["model"]["merges"] = [" ".join(merge) for merge in merges]
        path.write_text(json.dumps(tokenizer, indent=2, ensure_ascii=False), encoding="utf-8")
