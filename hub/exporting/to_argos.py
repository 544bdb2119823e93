"""A model of ours as a package for Argos Translate and LibreTranslate: CTranslate2's model, and its vocabulary for
SentencePiece, in one file.

Byte-pair tokens become SentencePiece's without training anything. It merges, of all neighbours that together are a
token, those that make the token with the best score. With the number of a token's merge as its score that is the order
of our merges: every token comes of one merge alone, and none crosses a bound that our tokenizer sets beforehand (at
spaces, punctuation and digits), since none did when it was trained.
"""

import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sentencepiece.sentencepiece_model_pb2 import ModelProto
from transformers import PreTrainedTokenizerBase

from hub.exporting.to_ctranslate2 import to_spec
from hub.exporting.tokenizer import has_separate_vocabularies
from vanilla_transformer import VanillaTransformerForConditionalGeneration

USAGE = """{out} holds a package for Argos Translate. To translate, with argostranslate alone:
    argostranslate.package.install_from_path("{out}/NAME.argosmodel")
    print(argostranslate.translate.translate("a sentence", FROM, TO))
For LibreTranslate, copy the file to where its other packages are, or install it in the same way."""
NAMES = {"cs": "Czech", "de": "German", "en": "English", "es": "Spanish", "fr": "French", "it": "Italian"}
NAMES |= {"nl": "Dutch", "pl": "Polish", "pt": "Portuguese", "ru": "Russian", "tr": "Turkish", "uk": "Ukrainian"}
MASKED_SCORE = -1.0e9  # the score of what no merge makes: single characters


def convert(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    quantization: str | None = None,
    languages: tuple[str, str] = ("", ""),
) -> Callable[[Path], None]:
    """What writes the package into a folder, as `translate-<from>_<to>.argosmodel`.

    Args:
        languages: codes of source and target, as in ISO 639.

    Raises:
        ValueError: a language is not given, the tokenizer is none that SentencePiece can be, or the architecture none
            of CTranslate2's.
    """
    if not all(languages):
        raise ValueError(
            "--to argos needs --source_lang and --target_lang, such as en and de: no recipe.yaml has them."
        )
    if wrong := [code for code in languages if not re.fullmatch("[A-Za-z]{2,3}([-_][A-Za-z0-9]+)*", code)]:
        raise ValueError(
            f"{wrong[0][:50]!r} is no code of a language: give --source_lang and --target_lang such as en."
        )
    pieces = to_sentencepiece(tokenizer)
    spec = to_spec(model, tokenizer, quantization)
    spec.config.add_source_eos = True  # which our tokenizer adds itself
    name = "translate-{}_{}".format(*languages)
    metadata = {"package_version": "1.0", "argos_version": "1.9", "type": "translate"}
    for side, code in zip(("from", "to"), languages, strict=True):
        metadata |= {f"{side}_code": code, f"{side}_name": NAMES.get(code, code)}

    def write(folder: Path) -> None:
        with TemporaryDirectory(dir=folder) as place, zipfile.ZipFile(folder / f"{name}.argosmodel", "w") as package:
            spec.save(place)
            for path in sorted(Path(place).iterdir()):
                package.write(path, f"{name}/model/{path.name}", zipfile.ZIP_DEFLATED)
            package.writestr(f"{name}/sentencepiece.model", pieces.SerializeToString())
            package.writestr(f"{name}/metadata.json", json.dumps(metadata, indent=2))

    return write


def to_sentencepiece(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The `ModelProto` of SentencePiece that gives a text the ids of this tokenizer, but for `</s>`.

    Runs of unknown characters are one `<unk>` there, and one each here; a space at the beginning is one more there.
    Text is taken as it is, where ours is first composed (NFC).

    Raises:
        ValueError: it is no tokenizer with one vocabulary of byte-pair tokens as `training.train` makes it.
    """
    if has_separate_vocabularies(tokenizer):
        raise ValueError("Argos Translate has one vocabulary for both languages, and this model two.")
    parts = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {"model": {"type": "none"}}
    validate_sentencepiece_support(parts)
    proto = ModelProto()
    proto.trainer_spec.model_type = proto.trainer_spec.BPE
    proto.trainer_spec.unk_surface = ""
    ids = {"unk": tokenizer.unk_token_id, "bos": tokenizer.bos_token_id}
    ids |= {"eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    for key, value in ids.items():
        setattr(proto.trainer_spec, f"{key}_id", -1 if value is None else value)
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = proto.normalizer_spec.escape_whitespaces = True
    proto.normalizer_spec.remove_extra_whitespaces = False
    merges = (each.split(" ") if isinstance(each, str) else each for each in parts["model"]["merges"])
    rank = {"".join(pair): number for number, pair in reversed(list(enumerate(merges)))}
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        kind = "UNKNOWN" if number == ids["unk"] else "CONTROL" if number in ids.values() else "NORMAL"
        proto.pieces.add(
            piece=token, score=-rank[token] if token in rank else MASKED_SCORE, type=getattr(proto.SentencePiece, kind)
        )
    return proto


def validate_sentencepiece_support(parts: dict[str, Any]) -> None:
    """Raises ValueError that names what of a tokenizer (its file's content) SentencePiece cannot do."""
    before = parts.get("pre_tokenizer") or {}
    first, *others = before.get("pretokenizers") or [before]
    steps = [each["type"] for each in (first, *others) if each]
    normal = (parts.get("normalizer") or {"type": "NFC"})["type"]
    reasons = {
        f"its tokenizer is of the type {parts['model']['type']}, not BPE": parts["model"]["type"] != "BPE",
        f"its tokenizer changes text ({normal}: lowercase or moses)": normal != "NFC",
        f"its tokenizer splits words by {', '.join(steps) or 'nothing'}": bool(
            steps[:1] != ["Metaspace"] or set(steps) - {"Metaspace", "Punctuation", "Digits"}
        ),
        "its tokenizer does not write ▁ before each word": (first.get("replacement"), first.get("prepend_scheme"))
        not in (("▁", "always"), ("▁", "first")),
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise ValueError(f"SentencePiece, which Argos Translate reads, cannot express this model: {found[0]}.")
