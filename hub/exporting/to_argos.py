"""Export to a package for Argos Translate and LibreTranslate: a CTranslate2 model with a SentencePiece vocabulary.

The BPE vocabulary is converted to SentencePiece without training. SentencePiece repeatedly merges two neighbors that
form the token with the highest score. The score of a token is the negative rank of its merge, so SentencePiece applies
the merges in our order. This is exact: each token results from exactly one merge, and no merge crosses a
pre-tokenization boundary (spaces, punctuation and digits).
"""

import io
import json
import sys
import unicodedata
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain, groupby, permutations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import regex as re
from sentencepiece import SentencePieceTrainer
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from transformers import PreTrainedTokenizerBase

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.shared.generation_settings import special_token_ids

from ..run_files import language_name
from .to_ctranslate2 import to_spec
from .tokenizer import has_separate_vocabularies

USAGE = """{out} contains a package for Argos Translate. To translate with argostranslate only:
    argostranslate.package.install_from_path("{out}/NAME.argosmodel")
    print(argostranslate.translate.translate("a sentence", FROM, TO))
For LibreTranslate, copy the file to its package directory, or install it in the same way."""
BPE_OPTIONS = ("byte_fallback", "end_of_word_suffix", "continuing_subword_prefix", "ignore_merges")
NFC = {"type": "NFC"}  # the normalizer of our tokenizers until version 0.1, and the present one
SINGLE_SPACES = {
    "type": "Sequence",
    "normalizers": [
        NFC,
        {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
        {"type": "Strip", "strip_left": True, "strip_right": False},
    ],
}
VOWEL_MARK_CLASSES = range(10, 36)  # combining classes of Hebrew and Arabic vowel marks
MASKED_SCORE = -1.0e9  # score of tokens that no merge forms: single characters


def convert(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    quantization: str | None,
    languages: Sequence[str],
) -> Callable[[Path], None]:
    """Return a function that writes the package `translate-<from>_<to>.argosmodel` to a directory.

    Raises ValueError if a language code is missing or not valid, or if SentencePiece does not support the tokenizer or
    CTranslate2 the architecture.
    """
    if not all(languages):
        raise ValueError("--to argos requires language codes. Set --source-lang and --target-lang, such as en and de.")
    for code in languages:
        if not re.fullmatch("[A-Za-z]{2,3}([-_][A-Za-z0-9]+)*", code):
            raise ValueError(f"{code[:50]!r} is not a language code. Use codes such as en and de.")
    if (eos := special_token_ids(model)["eos_token_id"]) != tokenizer.eos_token_id:
        raise ValueError(
            f"Argos Translate requires that sources and targets end with the same token, but eos_token_id is {eos} in "
            f"generation_config.json and {tokenizer.eos_token_id} in the tokenizer. "
            "Use --to ctranslate2 or --to transformers."
        )
    pieces = to_sentencepiece(tokenizer)
    spec = to_spec(model, tokenizer, quantization)
    spec.config.add_source_eos = True  # SentencePiece does not add it
    name = "translate-{}_{}".format(*languages)
    metadata = {"package_version": "1.0", "argos_version": "1.9", "type": "translate"}
    for side, code in zip(("from", "to"), languages, strict=True):
        metadata |= {f"{side}_code": code, f"{side}_name": language_name(code)}

    def write(folder: Path) -> None:
        with TemporaryDirectory(dir=folder) as spec_dir, zipfile.ZipFile(folder / f"{name}.argosmodel", "w") as package:
            spec.save(spec_dir)
            for path in sorted(Path(spec_dir).iterdir()):
                package.write(path, f"{name}/model/{path.name}", zipfile.ZIP_DEFLATED)
            package.writestr(f"{name}/sentencepiece.model", pieces.SerializeToString())
            package.writestr(f"{name}/metadata.json", json.dumps(metadata, indent=2))

    return write


def to_sentencepiece(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return a SentencePiece `ModelProto` with the same ids as the tokenizer, except for `</s>`.

    There are five differences. SentencePiece maps a run of unknown characters to one `<unk>`, our tokenizer maps each
    character to one. SentencePiece adds one more token for a leading space, if the tokenizer is of version 0.1. It
    ignores a space at the end. It encodes the name of a special token in a text as characters. It does not apply NFC to
    rare sequences of combining marks (see `normalization_rules`).
    """
    if has_separate_vocabularies(tokenizer):
        raise ValueError("Argos Translate requires one vocabulary for both languages, but this model has two.")
    parts = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {"model": {"type": "none"}}
    validate_sentencepiece_support(tokenizer, parts)
    proto = ModelProto()
    proto.trainer_spec.model_type = proto.trainer_spec.BPE
    proto.trainer_spec.unk_surface = ""
    ids = {"unk": tokenizer.unk_token_id, "bos": tokenizer.bos_token_id}
    ids |= {"eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    for key, value in ids.items():
        setattr(proto.trainer_spec, f"{key}_id", -1 if value is None else value)
    has_single_spaces = parts.get("normalizer") == SINGLE_SPACES
    proto.normalizer_spec.name = "user_defined"
    proto.normalizer_spec.precompiled_charsmap = compile_normalization(has_single_spaces)
    proto.normalizer_spec.add_dummy_prefix = proto.normalizer_spec.escape_whitespaces = True
    proto.normalizer_spec.remove_extra_whitespaces = has_single_spaces
    merges = (each.split(" ") if isinstance(each, str) else each for each in parts["model"]["merges"])
    ranks = {"".join(pair): rank for rank, pair in reversed(list(enumerate(merges)))}
    for token, i in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        kind = "UNKNOWN" if i == ids["unk"] else "CONTROL" if i in ids.values() else "NORMAL"
        score = -ranks[token] if token in ranks else MASKED_SCORE
        proto.pieces.add(piece=token, score=score, type=getattr(proto.SentencePiece, kind))
    return proto


def iter_splits(marks: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the two parts of each order of combining marks, for each number of marks in the first part."""
    for order in permutations(marks):
        for count in range(len(marks) + 1):
            yield "".join(order[:count]), "".join(order[count:])


def is_reordered(first: str, second: str) -> bool:
    """Return whether NFC exchanges two successive combining marks."""
    return unicodedata.combining(first) > unicodedata.combining(second) > 0


def normalization_rules(has_single_spaces: bool) -> dict[str, str]:
    """Return the texts that NFC changes, and on request white space, with their normalized forms.

    For combining marks, these are all orders and partial compositions of the marks of a letter, without and with one
    more mark, pairs of marks of a script, and three Hebrew or Arabic vowel marks.
    """
    characters = list(map(chr, range(1, sys.maxunicode + 1)))
    decomposed = {each: unicodedata.normalize("NFD", each) for each in characters}
    letters = {text for each, text in decomposed.items() if each != text}
    texts = {each for each in characters if each.isspace() or each != decomposed[each]}
    pairs = [text for text in letters if len(text) == 2]
    letters |= {text + mark for text in pairs for mark in {each[1] for each in pairs} if is_reordered(text[1], mark)}
    for text in letters:
        splits = iter_splits(text[1:])
        texts |= {unicodedata.normalize("NFC", text[0] + first) + rest for first, rest in splits}
    for _, block in groupby(filter(unicodedata.combining, characters), lambda each: ord(each) >> 8):
        marks = list(block)
        vowel_marks = [each for each in marks if unicodedata.combining(each) in VOWEL_MARK_CLASSES]
        texts |= {"".join(each) for each in chain(permutations(marks, 2), permutations(vowel_marks, 3))}
    rules = {each: unicodedata.normalize("NFC", each) for each in texts}
    if has_single_spaces:
        rules |= {each: " " for each in texts if re.fullmatch(r"\p{White_Space}", each)}
    return {text: normalized for text, normalized in rules.items() if text != normalized}


@cache
def compile_normalization(has_single_spaces: bool) -> bytes:
    """Return `normalization_rules` in the format of a SentencePiece model.

    SentencePiece compiles rules only in a training, so this trains a model of one sentence.
    """
    rules = normalization_rules(has_single_spaces)
    lines = ["\t".join(" ".join(f"{ord(each):X}" for each in text) for text in rule) for rule in rules.items()]
    model = io.BytesIO()
    with TemporaryDirectory() as folder:
        path = Path(folder, "rules.tsv")
        path.write_text("\n".join(lines), encoding="utf-8")
        SentencePieceTrainer.train(
            sentence_iterator=iter(["a"]), model_writer=model, model_type="char", vocab_size=8, hard_vocab_limit=False,
            normalization_rule_tsv=str(path), minloglevel=2,
        )  # fmt: skip
    return ModelProto.FromString(model.getvalue()).normalizer_spec.precompiled_charsmap


def validate_sentencepiece_support(tokenizer: PreTrainedTokenizerBase, parts: dict[str, Any]) -> None:
    """Raise ValueError if SentencePiece does not support a tokenizer; `parts` is the content of tokenizer.json."""
    pre_tokenizer = parts.get("pre_tokenizer") or {}
    first, *others = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    steps = [each["type"] for each in (first, *others) if each]
    is_supported = steps[:1] == ["Metaspace"] and set(steps) <= {"Metaspace", "Punctuation", "Digits"}
    behaviors = {each["behavior"] for each in others if each["type"] == "Punctuation"}
    normalizer = parts.get("normalizer") or NFC
    options = [name for name in BPE_OPTIONS if parts["model"].get(name)]
    special = {tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token}
    added = sorted({each["content"] for each in parts.get("added_tokens", [])} - special)
    reasons = {
        f"the tokenizer type is {parts['model']['type']}, expected BPE": parts["model"]["type"] != "BPE",
        f"the tokenizer normalizes text with {normalizer['type']} (lowercase or moses)": normalizer
        not in (NFC, SINGLE_SPACES),
        f"the tokenizer splits words with {', '.join(steps) or 'nothing'}": not is_supported,
        "the tokenizer does not write ▁ before each word": (first.get("replacement"), first.get("prepend_scheme"))
        not in (("▁", "always"), ("▁", "first")),
        f"the behavior of Punctuation is {', '.join(behaviors)}, expected Isolated": not behaviors <= {"Isolated"},
        f"the tokenizer uses {', '.join(options)}": bool(options),
        f"the tokenizer has {len(added)} added tokens, such as {', '.join(added[:3])}": bool(added),
        "the tokenizer does not add exactly one token, EOS, to a sentence": tokenizer("")["input_ids"]
        != [tokenizer.eos_token_id],
    }
    if problems := [reason for reason, holds in reasons.items() if holds]:
        raise ValueError(f"SentencePiece, which Argos Translate uses, does not support this tokenizer: {problems[0]}.")
