"""Tokenizers of fairseq and OpenNMT-py models, from a vocabulary and BPE codes or a SentencePiece model.

If the training used a word tokenizer such as Moses, the input must be tokenized with it first, as in these programs.
"""

import sys
import unicodedata
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import import_protobuf
from transformers.tokenization_utils_base import generate_merges

from ..tokenizer import SideTokenizer, TokenizerPair, build_word_tokenizer, combine_tokenizers, find_special_tokens

CONTINUATION, WORD_END = "@@", "</w>"  # subword-nmt marks unfinished words in text, and word ends in codes
SPACE = "\xa0"
FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>")  # ids 0 to 3 of each fairseq dictionary
CODE_FILES = ("code", "bpecodes", "sentencepiece.bpe.model")  # file names that fairseq uses
MARKERS = ("\ue000", "\ue001")  # private characters around text that no SentencePiece piece covers
UNIGRAM, BPE = 1, 2  # model types of SentencePiece
START, END = r"(?<![\s\S])", r"(?![\s\S])"  # of a text; transformers.js lacks \A and \z


def read_toolkit_tokenizers(
    layout: str, file: Path, metadata: dict[str, Any], data: Path | None, codes: list[Path]
) -> TokenizerPair | None:
    """Build the tokenizers of a toolkit checkpoint. Return None if no vocabulary is available.

    Vocabularies of OpenNMT-py are in the checkpoint. Dictionaries of fairseq are in `data`, which defaults to the
    directory of the checkpoint. `codes` are BPE codes or SentencePiece models, one for both sides or one per side. With
    fairseq, they default to the files next to the dictionaries, if any.
    """
    if layout == "opennmt":
        vocabularies = metadata.get("vocabularies")
    else:
        folder = data or file.parent
        vocabularies = read_dictionaries(folder, metadata, is_required=data is not None)
        codes = codes or [folder / name for name in CODE_FILES if (folder / name).is_file()][:1]
    if not vocabularies:
        if codes:
            raise ValueError(f"--bpe-codes {codes[0]} requires the fairseq dictionaries. Set --fairseq-data.")
        return None
    tokens = [vocabularies["source"], vocabularies["target"]]
    files = (codes * 2)[:2] if codes else [None, None]
    # OpenNMT-py needs two tokenizers, because only targets have an EOS token
    is_shared = tokens[0] == tokens[1] and files[0] == files[1] and layout != "opennmt"
    sides = [build_side_tokenizer(*each) for each in zip(tokens[: 1 if is_shared else 2], files, strict=False)]
    return combine_tokenizers(sides, source_ends=layout != "opennmt", covers_all_rows=True)


def read_dictionaries(folder: Path, metadata: dict[str, Any], is_required: bool) -> dict[str, list[str]]:
    """Read `dict.LANGUAGE.txt` or `dict.txt` of both sides. Return {} without dictionaries, unless `is_required`."""
    dictionaries = {}
    for side in ("source", "target"):
        language = metadata.get(f"{side}_lang")
        names = [f"dict.{language}.txt"] if language else []
        path = next((folder / name for name in [*names, "dict.txt"] if (folder / name).is_file()), None)
        if path is None:
            available = sorted(each.name for each in folder.glob("dict.*.txt")) if folder.is_dir() else []
            if not is_required and not available:
                return {}
            listed = f"Found {', '.join(available)}: set {side}_lang with --set."
            expected = names[0] if names else f"dictionary for an unknown {side}_lang"
            raise ValueError(f"{folder} has no {expected}. {listed if available else 'Check --fairseq-data.'}")
        dictionaries[side] = read_dictionary(path)
    return dictionaries


def read_dictionary(path: Path) -> list[str]:
    """Read the tokens of a fairseq dictionary, which has one `token count` per line after the special tokens."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a fairseq dictionary: it is not valid UTF-8.") from error
    ids = {token: i for i, token in enumerate(FAIRSEQ)}
    tokens = list(FAIRSEQ)
    for number, line in enumerate(lines[:-1] if lines[-1] == "" else lines, 1):
        is_overwrite = line.endswith(" #fairseq:overwrite")
        token, _, count = line.removesuffix(" #fairseq:overwrite").rstrip().rpartition(" ")
        if not token or not count.isdigit():
            raise ValueError(f"{path}, line {number}: expected `token count`, got {line[:80]!r}.")
        if token in ids and not is_overwrite:
            raise ValueError(f"{path}, line {number}: the token {token!r} is repeated.")
        if token in ids:  # keeps the earlier row, which is no longer used
            tokens[ids[token]] = f"<overwritten_{ids[token]}>"
        ids[token] = len(tokens)
        tokens.append(token)
    return tokens


def build_side_tokenizer(tokens: list[str], codes: Path | None) -> SideTokenizer:
    """Build the tokenizer of one side from its tokens, ordered by id. Without `codes`, words are split at spaces.

    Intermediate results of merges get ids after those of the vocabulary, and the row of the unknown token.
    """
    special = find_special_tokens(tokens, "the vocabulary")
    unk = special["unk_token"]
    if codes is None:
        tokenizer = build_word_tokenizer(tokens, unk)
    else:
        try:
            content = codes.read_bytes()
        except OSError as error:
            raise ValueError(f"--bpe-codes {codes} cannot be read: {error.strerror}.") from error
        try:  # a SentencePiece model (protobuf) is not text
            text = None if b"\0" in content or content.startswith(b"\n") else content.decode("utf-8")
        except UnicodeDecodeError:
            text = None
        tokenizer = (
            build_sentencepiece_tokenizer(tokens, codes, content, special)
            if text is None
            else build_bpe_tokenizer(tokens, parse_merges(codes, text), unk, set(special.values()))
        )
    surplus = max(tokenizer.get_vocab().values()) + 1 - len(tokens)
    return SideTokenizer(tokenizer, special, [*range(len(tokens)), *[tokens.index(unk)] * surplus])


def parse_merges(path: Path, text: str) -> list[tuple[str, str]]:
    """Parse the merges of subword-nmt (version 0.2) or fastBPE (with counts at the end of each line)."""
    lines = text.rstrip("\n").split("\n")
    has_version = lines[0].startswith("#version:")
    if has_version and lines[0].split()[-1] != "0.2":
        raise ValueError(f"{path} has subword-nmt codes of {lines[0][1:]}. Only version 0.2 is supported.")
    merges = []
    for number, line in enumerate(lines[has_version:], 1 + has_version):
        parts = line.strip("\r\n ").split(" ")
        if len(parts) != 2 and not (len(parts) == 3 and parts[2].isdigit()):
            raise ValueError(f"{path}, line {number}: {line[:80]!r} is not a pair of BPE codes.")
        merges.append((parts[0], parts[1]))
    if not has_version and any(right == WORD_END for _, right in merges):
        raise ValueError(f"{path} has codes of subword-nmt 0.1, which are not supported.")
    return list(dict.fromkeys(merges))  # drops repeated pairs


def build_bpe_tokenizer(tokens: list[str], merges: list[tuple[str, str]], unk: str, special: set[str]) -> Tokenizer:
    """Build a BPE tokenizer for subword-nmt or fastBPE codes. Tokens that end a word get the suffix </w>."""

    def to_vocabulary(token: str) -> str:
        if token in special:
            return token
        if token == CONTINUATION:  # represents white space other than U+0020 inside a word
            return SPACE
        return token.removesuffix(CONTINUATION) if token.endswith(CONTINUATION) else token + WORD_END

    vocabulary: dict[str, int] = {}
    for i, token in enumerate(tokens):
        vocabulary.setdefault(to_vocabulary(token), i)
    next_id = len(tokens)
    for pair in merges:
        for part in (*pair, "".join(pair)):
            if part not in vocabulary:
                vocabulary[part], next_id = next_id, next_id + 1
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unk, end_of_word_suffix=WORD_END))
    # At the end of a word, the programs write white space that is no token: "der\xa0" becomes "de@@ r@@ ". Here, the
    # word becomes "der"
    white_space = (r"[^\S ]|[\x1c-\x1f]", SPACE), (f"{SPACE}+(?= |$)", "")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(Regex(old), new) for old, new in white_space])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    replacements = [(WORD_END, " "), (unk, f"{unk} "), (SPACE, "")]
    steps: list[Any] = [decoders.Replace(old, new) for old, new in replacements]
    # decoders.Strip panics on empty text
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Fuse(), decoders.Replace(Regex(" +$"), "")])
    return tokenizer


def build_sentencepiece_tokenizer(tokens: list[str], path: Path, content: bytes, special: dict[str, str]) -> Tokenizer:
    """Build a tokenizer from a SentencePiece model (unigram or BPE) with the ids of the vocabulary."""
    proto = import_protobuf().ModelProto()
    try:
        proto.ParseFromString(content)
    except DecodeError as error:
        raise ValueError(f"{path} is neither a file of BPE codes nor a SentencePiece model.") from error
    unk = special["unk_token"]
    trainer, normal = proto.trainer_spec, proto.normalizer_spec
    if trainer.model_type not in (UNIGRAM, BPE) or not proto.pieces:
        raise ValueError(f"{path} is not a SentencePiece model of the type unigram or bpe.")
    has_symbols = trainer.model_type == BPE and any(piece.type == 4 for piece in proto.pieces)
    if has_symbols or trainer.treat_whitespace_as_suffix:
        setting = "user_defined_symbols in BPE" if has_symbols else "treat_whitespace_as_suffix=true"
        raise ValueError(f"{path} is a SentencePiece model with {setting}, which is not supported.")
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type in (1, 4, 6)}  # without control symbols
    letters = set("".join(scores)) | {" "}
    known = set(tokens)
    uncovered = known - scores.keys() - set(special.values())  # must not be used by the segmentation
    foreign = {token for token in uncovered if not letters & set(token) and not trainer.byte_fallback}
    starts = {token: MARKERS[0] if token in foreign else MARKERS[1] for token in uncovered}
    names = [starts.get(token, "") + token + MARKERS[1] * (token in foreign) for token in tokens]
    vocabulary = [*names, *(piece for piece in scores if piece not in known)]
    if trainer.model_type == UNIGRAM:
        lowest = min(scores.values(), default=0.0)
        scored = [(piece, scores.get(piece, lowest)) for piece in vocabulary]
        model: Any = models.Unigram(scored, tokens.index(unk), trainer.byte_fallback)
    else:
        merges = generate_merges({piece: i for i, piece in enumerate(scores)}, scores)
        ids = {piece: i for i, piece in enumerate(vocabulary)}
        options = {"ignore_merges": bool(foreign), "byte_fallback": trainer.byte_fallback}
        model = models.BPE(ids, merges, unk_token=unk, fuse_unk=True, **options)
    tokenizer = Tokenizer(model)
    steps = sentencepiece_normalizers(normal)
    scheme = "always" if normal.add_dummy_prefix else "never"
    split: list[Any] = [pre_tokenizers.Metaspace(prepend_scheme=scheme, split=trainer.split_by_whitespace)]
    if foreign:
        steps += run_marker_normalizers(letters)
        split.append(pre_tokenizers.Split(Regex(f"{MARKERS[0]}[^{MARKERS[1]}]*{MARKERS[1]}"), "isolated"))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = sentencepiece_decoder(normal)
    return tokenizer


def sentencepiece_normalizers(normal: Any) -> list[Any]:
    """Return the normalizers for a `NormalizerSpec`.

    Precompiled drops what continues a grapheme after a character that it replaces, such as a mark, a joiner or the line
    feed of a Windows line break. It also separates the marks of half-width katakana.
    """
    compose: list[Any] = [normalizers.NFC()] if "nfkc" in normal.name else []
    charsmap = [normalizers.Precompiled(normal.precompiled_charsmap)] if normal.precompiled_charsmap else []
    continued = Regex("(?<=.)(?=[\\p{M}\u200c\u200d\u0e33\u0eb3\\n])")
    isolate = [normalizers.Replace(continued, MARKERS[0])] if compose and charsmap else []
    join = [normalizers.Replace(MARKERS[0], "")] if isolate else []
    steps = [*compose, *isolate, *charsmap, *join, *compose]
    if compose:
        keep_apart = Regex("(?<=[{}])(?=[{}])".format(*find_composed_letters()))
        steps = [normalizers.Replace(keep_apart, MARKERS[1]), *steps, normalizers.Replace(MARKERS[1], "")]
    if normal.remove_extra_whitespaces:
        steps += [
            normalizers.Replace(Regex(pattern), left) for pattern, left in ((f"{START} +| +{END}", ""), (" {2,}", " "))
        ]
    elif normal.add_dummy_prefix:  # Metaspace adds no prefix before a space
        steps.append(normalizers.Prepend(" "))
    return steps


def find_composed_letters() -> tuple[str, str]:
    """Return letters such as "ê", and the marks that NFC adds to them, but not SentencePiece."""
    letters, marks = set(), set()
    for code in range(sys.maxunicode + 1):
        parts = unicodedata.normalize("NFD", chr(code))
        for i in range(1, len(parts)) if len(parts) > 2 else ():
            letter = unicodedata.normalize("NFC", parts[:i] + parts[i + 1 :])
            if len(letter) == 1:
                letters.add(letter)
                marks.add(parts[i])
    return "".join(sorted(letters)), "".join(sorted(marks))


def sentencepiece_decoder(normal: Any) -> Any:
    """Return a decoder for a `NormalizerSpec`. decoders.Metaspace would join the words of a phrase at the start."""
    steps: list[Any] = [decoders.Replace(mark, "") for mark in MARKERS]
    steps += [decoders.ByteFallback(), decoders.Replace("▁", " "), decoders.Fuse()]
    if normal.remove_extra_whitespaces or normal.add_dummy_prefix:
        steps.append(decoders.Replace(Regex(f"{START} +" if normal.remove_extra_whitespaces else f"{START} "), ""))
    return decoders.Sequence(steps)


def run_marker_normalizers(letters: set[str]) -> list[Any]:
    """Return normalizers that mark runs of characters without a piece. SentencePiece treats a run as one piece."""
    known = "".join(f"\\{letter}" if letter in "\\[]^-&~" else letter for letter in sorted(letters))
    return [
        normalizers.Replace(Regex(f"(?<![^{known}])(?=[^{known}])"), MARKERS[0]),
        normalizers.Replace(Regex(f"(?<=[^{known}{MARKERS[0]}])(?![^{known}])"), MARKERS[1]),
    ]
