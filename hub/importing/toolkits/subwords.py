"""Tokenizers of fairseq's and OpenNMT-py's models: a vocabulary, and codes of BPE or a model of SentencePiece's.

Text is read as their own programs read it, which is behind a word tokenizer such as Moses' where one was used.
"""

from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import import_protobuf
from transformers.tokenization_utils_base import generate_merges

from hub.importing.tokenizer import KNOWN, SideTokenizer, TokenizerPair, combine_tokenizers

CONTINUED, END = "@@", "</w>"  # how subword-nmt marks what a word goes on behind, and, in codes, where it ends
SPACE = "\xa0"
FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>")  # ids 0 to 3 of each of its dictionaries
CODES = ("code", "bpecodes", "sentencepiece.bpe.model")  # as fairseq itself looks for them beside a model
RUN = ("\ue000", "\ue001")  # private characters, around text of which SentencePiece knows nothing
UNIGRAM, BPE = 1, 2  # SentencePiece's model types


def read_toolkit(
    layout: str, file: Path, metadata: dict[str, Any], data: Path | None, codes: list[Path]
) -> TokenizerPair | None:
    """The tokenizers of a toolkit's checkpoint; None where nothing tells a vocabulary.

    Args:
        layout: "fairseq", whose dictionaries are files, or "opennmt", whose vocabularies are in the checkpoint.
        file: the checkpoint.
        metadata: what it tells.
        data: fairseq's folder of dictionaries; None: that of the checkpoint.
        codes: of both sides, or of source and target; none: those that lie beside the dictionaries, if any.

    Raises:
        ValueError: a file that is missing, or is no such file.
    """
    if layout == "opennmt":
        vocabularies = metadata.get("vocabularies")
    else:
        folder = data or file.parent
        vocabularies = dictionaries(folder, metadata, asked=data is not None)
        codes = codes or [folder / name for name in CODES if (folder / name).is_file()][:1]
    if not vocabularies:
        if codes:
            raise ValueError(
                f"--bpe_codes {codes[0]} needs the vocabulary: give fairseq's folder of dictionaries with --data."
            )
        return None
    tokens = [vocabularies["source"], vocabularies["target"]]
    files = (codes * 2)[:2] if codes else [None, None]
    # of OpenNMT-py always two: only the class for two sides can end targets and not sources
    one = tokens[0] == tokens[1] and files[0] == files[1] and layout != "opennmt"
    sides = [build_side_tokenizer(*each) for each in zip(tokens[: 1 if one else 2], files, strict=False)]
    tokenizers = combine_tokenizers(sides, source_ends=layout != "opennmt")
    tokenizers.covers_all_rows = True
    return tokenizers


def dictionaries(folder: Path, metadata: dict[str, Any], asked: bool) -> dict[str, list[str]]:
    """Source and target tokens by id, of `dict.LANGUAGE.txt` or `dict.txt`; {} where there are none, unless `asked`."""
    found = {}
    for side in ("source", "target"):
        language = metadata.get(f"{side}_lang")
        names = [f"dict.{language}.txt"] if language else []
        path = next((folder / name for name in [*names, "dict.txt"] if (folder / name).is_file()), None)
        if path is None:
            there = sorted(each.name for each in folder.glob("dict.*.txt")) if folder.is_dir() else []
            if not asked and not there:
                return {}
            cure = f"It has {', '.join(there)}: say which with --set {side}_lang=..." if there else "Is it the folder?"
            raise ValueError(f"{folder} has no {names[0] if names else f'dictionary of a known {side}_lang'}. {cure}")
        found[side] = read_dictionary(path)
    return found


def read_dictionary(path: Path) -> list[str]:
    """Tokens by id of fairseq's format: behind its four special ones, `token count` a line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: it is no dictionary of fairseq's.") from error
    ids = {token: i for i, token in enumerate(FAIRSEQ)}
    tokens = list(FAIRSEQ)
    for number, line in enumerate(lines[:-1] if lines[-1] == "" else lines, 1):
        overwrites = line.endswith(" #fairseq:overwrite")
        token, _, count = line.removesuffix(" #fairseq:overwrite").rstrip().rpartition(" ")
        if not token or not count.isdigit():
            raise ValueError(
                f"{path}, line {number}: {line[:80]!r} is not `token count`: it is no dictionary of fairseq's."
            )
        if token in ids and not overwrites:
            raise ValueError(f"{path}, line {number}: the token {token!r} is there twice.")
        if token in ids:  # the earlier row stays, and no text reaches it
            tokens[ids[token]] = f"<overwritten_{ids[token]}>"
        ids[token] = len(tokens)
        tokens.append(token)
    return tokens


def build_side_tokenizer(tokens: list[str], codes: Path | None) -> SideTokenizer:
    """A side whose ids are those of `tokens`. Tokens that only build others have higher ids, and the row of unk.

    Args:
        codes: None: words of the text, which stand between spaces, are the tokens.
    """
    special = {name: next((token for token in known if token in tokens), "") for name, known in KNOWN.items()}
    if lacking := [name for name, token in special.items() if not token]:
        raise ValueError(f"the vocabulary has no {lacking[0]}: none of {', '.join(KNOWN[lacking[0]])} is in it.")
    unk = special["unk_token"]
    if codes is None:
        tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=unk))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    else:
        try:
            content = codes.read_bytes()
        except OSError as error:
            raise ValueError(f"--bpe_codes {codes} cannot be read: {error.strerror}.") from error
        text = as_text(content)
        tokenizer = (
            build_sentencepiece_tokenizer(tokens, codes, content, special)
            if text is None
            else build_bpe_tokenizer(tokens, merges_of(codes, text), unk, set(special.values()))
        )
    surplus = max(tokenizer.get_vocab().values()) + 1 - len(tokens)
    return SideTokenizer(tokenizer, special, [*range(len(tokens)), *[tokens.index(unk)] * surplus])


def as_text(content: bytes) -> str | None:
    """Codes as text; None for a model of SentencePiece's, which is a protobuf."""
    if b"\0" in content or content.startswith(b"\n"):
        return None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return None


def merges_of(path: Path, text: str) -> list[tuple[str, str]]:
    """Pairs in the order of their merging, of subword-nmt (from version 0.2 on) or fastBPE (with counts behind)."""
    lines = text.rstrip("\n").split("\n")
    versioned = lines[0].startswith("#version:")
    if versioned and lines[0].split()[-1] != "0.2":
        raise ValueError(f"{path} has codes of {lines[0][1:]}: of subword-nmt's, version 0.2 alone is read.")
    merges = []
    for number, line in enumerate(lines[versioned:], 1 + versioned):
        parts = line.strip("\r\n ").split(" ")
        if len(parts) != 2 and not (len(parts) == 3 and parts[2].isdigit()):
            raise ValueError(f"{path}, line {number}: {line[:80]!r} is no pair of a BPE's codes.")
        merges.append((parts[0], parts[1], len(parts)))
    if not versioned and any(right == END for _, right, _ in merges):
        raise ValueError(f"{path} has codes of subword-nmt 0.1, where {END} is a part of its own: they are not read.")
    return list(dict.fromkeys((left, right) for left, right, _ in merges))  # of those given twice, the first


def build_bpe_tokenizer(tokens: list[str], merges: list[tuple[str, str]], unk: str, special: set[str]) -> Tokenizer:
    """BPE as subword-nmt and fastBPE do it: tokens that end a word are called so, instead of marking the others."""

    def name(token: str) -> str:
        if token in special:
            return token
        if token == CONTINUED:  # what is left where a space other than the common one stands within a word
            return SPACE
        return token.removesuffix(CONTINUED) if token.endswith(CONTINUED) else token + END

    vocabulary: dict[str, int] = {}
    for i, token in enumerate(tokens):
        vocabulary.setdefault(name(token), i)
    following = len(tokens)
    for pair in merges:
        for part in (*pair, "".join(pair)):
            if part not in vocabulary:
                vocabulary[part], following = following, following + 1
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unk, end_of_word_suffix=END))
    tokenizer.normalizer = normalizers.Replace(Regex(r"[^\S ]"), SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    # its Strip panics at an empty text
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(END, " "),
            decoders.Replace(unk, f"{unk} "),
            decoders.Replace(SPACE, ""),
            decoders.Fuse(),
            decoders.Replace(Regex(" +$"), ""),
        ]
    )
    return tokenizer


def build_sentencepiece_tokenizer(tokens: list[str], path: Path, content: bytes, special: dict[str, str]) -> Tokenizer:
    """A SentencePiece model, unigrams or BPE, with the vocabulary's ids instead of its own."""
    proto = import_protobuf().ModelProto()
    try:
        proto.ParseFromString(content)
    except DecodeError as error:
        raise ValueError(f"{path} is neither BPE codes nor a model of SentencePiece's.") from error
    unk = special["unk_token"]
    trainer, normal = proto.trainer_spec, proto.normalizer_spec
    if trainer.model_type not in (UNIGRAM, BPE) or not proto.pieces:
        raise ValueError(f"{path} is no model of SentencePiece's of the type unigram or bpe.")
    has_symbols = trainer.model_type == BPE and any(piece.type == 4 for piece in proto.pieces)
    if has_symbols or trainer.treat_whitespace_as_suffix:
        setting = "user_defined_symbols in BPE" if has_symbols else "treat_whitespace_as_suffix=true"
        raise ValueError(f"{path} is a SentencePiece model with {setting}, which is not supported.")
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type in (1, 4, 6)}  # no control symbols
    letters = set("".join(scores)) | {" "}
    known = set(tokens)
    others = known - scores.keys() - set(special.values())  # its segmentation must not use them
    foreign = {token for token in others if not letters & set(token) and not trainer.byte_fallback}
    starts = {token: RUN[0] if token in foreign else RUN[1] for token in others}
    names = [starts.get(token, "") + token + RUN[1] * (token in foreign) for token in tokens]
    pieces = [*names, *(piece for piece in scores if piece not in known)]
    if trainer.model_type == UNIGRAM:
        lowest = min(scores.values(), default=0.0)
        scored = [(piece, scores.get(piece, lowest)) for piece in pieces]
        model: Any = models.Unigram(scored, tokens.index(unk), trainer.byte_fallback)
    else:
        merges = generate_merges({piece: i for i, piece in enumerate(scores)}, scores)
        ids = {piece: i for i, piece in enumerate(pieces)}
        options = {"ignore_merges": bool(foreign), "byte_fallback": trainer.byte_fallback}
        model = models.BPE(ids, merges, unk_token=unk, fuse_unk=True, **options)
    tokenizer = Tokenizer(model)
    # Precompiled reads a letter and its combining marks as the letter
    steps: list[Any] = [normalizers.NFC()] if "nfkc" in normal.name else []
    steps += [normalizers.Precompiled(normal.precompiled_charsmap)] if normal.precompiled_charsmap else []
    if normal.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(pattern), left) for pattern, left in (("^ +| +$", ""), (" {2,}", " "))]
    elif normal.add_dummy_prefix:  # Metaspace adds none before a space
        steps.append(normalizers.Prepend(" "))
    scheme = "always" if normal.add_dummy_prefix else "never"
    split: list[Any] = [pre_tokenizers.Metaspace(prepend_scheme=scheme, split=trainer.split_by_whitespace)]
    if foreign:
        steps += marks_of_runs(letters)
        split.append(pre_tokenizers.Split(Regex(f"{RUN[0]}[^{RUN[1]}]*{RUN[1]}"), "isolated"))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    marks = [decoders.Replace(mark, "") for mark in RUN]
    tokenizer.decoder = decoders.Sequence([*marks, decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)])
    return tokenizer


def marks_of_runs(letters: set[str]) -> list[Any]:
    """Puts marks around characters that no piece has: SentencePiece takes a run of them as one piece, by its text."""
    known = "".join(f"\\{letter}" if letter in "\\[]^-&~" else letter for letter in sorted(letters))
    return [
        normalizers.Replace(Regex(f"(?<=[{known}]|^)(?=[^{known}])"), RUN[0]),
        normalizers.Replace(Regex(f"(?<=[^{known}{RUN[0]}])(?=[{known}]|$)"), RUN[1]),
    ]
