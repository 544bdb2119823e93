"""Moses-style normalizer and pre-tokenizer, built only from parts of `tokenizers`.

A checkpoint takes and returns raw text. Quotes, dashes and dots are normalized as by Moses' normalize-punctuation.perl,
and words are split as by tokenizer.perl. Both follow sacremoses, without escapes (`&apos;`).
A shared vocabulary has no language, so one rule applies to all languages. Where the rules of Moses differ by language:

- Apostrophes: English `don 't`, `dog 's`; French `l' homme` after a word of `ELISIONS`. German is split like English.
- Abbreviations of English, German and French all keep their period.
- `",` and `,"` are unchanged. Moses swaps the two characters, in a direction that depends on the language.

No characters are inserted: a split is a token boundary, and a space belongs to the following token. Decoding is
therefore exact except for the normalization.
"""

from sacremoses.corpus import NonbreakingPrefixes
from tokenizers import Regex, normalizers, pre_tokenizers

LANGUAGES = ("en", "de", "fr")  # languages of the abbreviations
NUMERIC = " #NUMERIC_ONLY#"  # suffix of abbreviations that keep their period only before a number
ELISIONS = "c d j l m n s t qu jusqu lorsqu puisqu quoiqu quelqu aujourd presqu"  # French, before an apostrophe
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
    """Build a normalizer that inserts straight quotes, ASCII hyphens, three dots for an ellipsis, and single spaces."""
    return normalizers.Sequence([normalizers.Replace(Regex(old), new) for old, new in SUBSTITUTIONS.items()])


def moses_splits() -> pre_tokenizers.PreTokenizer:
    """Build a pre-tokenizer for text whose spaces are replaced by "▁" (`Metaspace(split=False)`).

    The expression uses only syntax of JavaScript (no property `Alnum`, no `(?i:`, no escaped hyphen outside of
    brackets), because transformers.js reads it too.
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
        rf"{word}\.(?=▁\p{{Lower}})",  # not the end of a sentence
        word,
        ".",
    ]
    return pre_tokenizers.Split(Regex(f"▁?(?:{'|'.join(tokens)})"), "isolated")
