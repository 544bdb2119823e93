"""Text as papers prepare it, by parts of `tokenizers` alone, so that a checkpoint takes raw text and gives raw text.

Quotes, dashes and dots are normalised as Moses' normalize-punctuation.perl does, and words are split where its
tokenizer.perl does; both as sacremoses has them, without escapes (`&apos;`). A shared vocabulary knows no language, so
that one rule serves all. Where those of Moses differ by language:

    apostrophes     English `don 't`, `dog 's`; French `l' homme`, told by the word before; German as English
    abbreviations   those of English, German and French all keep their period
    `",` and `,"`   stay as they are; Moses puts the one for the other, in English one way and in the others the other

Nothing is put into the text: a split is a bound between tokens, and a space is part of the token behind it. So the way
back is exact but for what was normalised.
"""

from sacremoses.corpus import NonbreakingPrefixes
from tokenizers import Regex, normalizers, pre_tokenizers

LANGUAGES = ("en", "de", "fr")  # whose abbreviations are known
NUMERIC = " #NUMERIC_ONLY#"  # behind those that keep their period before a number alone
ELISIONS = "c d j l m n s t qu jusqu lorsqu puisqu quoiqu quelqu aujourd presqu"  # of French, before an apostrophe
SUBSTITUTIONS = {
    r"\s+": " ",
    r"[\x00-\x1f]": "",
    "[`´‘’‚]": "'",
    "[„“”«»]|''": '"',
    "–": "-",
    "—": " - ",
    "…": "...",
}


def moses_normalizer() -> normalizers.Normalizer:
    """Straight quotes, plain dashes, three dots for an ellipsis, single spaces."""
    return normalizers.Sequence([normalizers.Replace(Regex(old), new) for old, new in SUBSTITUTIONS.items()])


def moses_splits() -> pre_tokenizers.PreTokenizer:
    """Bounds between Moses' tokens, in a text whose spaces are the mark "▁" (`Metaspace(split=False)`).

    The expression has nothing that a browser's cannot have (no property `Alnum`, no `(?i:`, no escaped hyphen outside
    of brackets), so that transformers.js reads it, too.
    """
    listed = {each.strip() for language in LANGUAGES for each in NonbreakingPrefixes().words(language)}
    numeric = {each.removesuffix(NUMERIC) for each in listed if each.endswith(NUMERIC)}
    listed = {each for each in listed if "#" not in each} - numeric
    always, before_number = (
        "|".join(each.replace(".", r"\.") for each in sorted(words, key=len, reverse=True))
        for words in (listed, numeric)
    )
    elisions = "|".join("".join(f"[{letter}{letter.upper()}]" for letter in each) for each in ELISIONS.split())
    core = r"[\p{Alpha}\p{Nd}\-]"
    word = rf"(?:{core}|(?<!\.)\.(?={core})|(?<=\p{{N}}),(?=\p{{N}}))+"
    ends = rf"(?!{core}|\.)"
    tokens = [
        r"\.{2,}",
        rf"(?:{always})\.{ends}",
        rf"(?:{before_number})\.(?=▁[0-9])",
        rf"(?=[\p{{N}}\-.]*\p{{Alpha}})(?:{core}+\.)+{core}+\.{ends}",  # u.s.a.
        rf"(?:{elisions})'(?=\p{{Alpha}})",
        rf"(?<=\p{{Alpha}})'(?=\p{{Alpha}}){word}",
        r"(?<=\p{N})'s",
        rf"{word}\.(?=▁\p{{Lower}})",  # no end of a sentence
        word,
        ".",
    ]
    return pre_tokenizers.Split(Regex(f"▁?(?:{'|'.join(tokens)})"), "isolated")
