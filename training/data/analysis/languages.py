"""Names and codes of languages, and the columns of a table that have such names."""

import re
from collections.abc import Sequence

from transformers.models.whisper.tokenization_whisper import LANGUAGES as NAMES  # code -> English name

SIDES = ("src", "tgt")  # names of the two columns if their languages are unknown
THREE_LETTER_CODES = {  # ISO 639-2 and 639-3
    **{"en": "eng", "de": "deu ger", "fr": "fra fre", "es": "spa", "it": "ita", "pt": "por", "nl": "nld dut"},
    **{"pl": "pol", "cs": "ces cze", "ru": "rus", "uk": "ukr", "el": "ell gre", "tr": "tur", "sv": "swe", "da": "dan"},
    **{"no": "nor", "fi": "fin", "hu": "hun", "ro": "ron rum", "ja": "jpn", "ko": "kor", "zh": "zho chi", "ar": "ara"},
    **{"hi": "hin", "vi": "vie"},
}
CODES = {
    **{code: code for code in NAMES},
    **{name: code for code, name in NAMES.items()},
    **{name: code for code, names in THREE_LETTER_CODES.items() for name in names.split()},
    **dict.fromkeys(("source", "src"), SIDES[0]),
    **dict.fromkeys(("target", "tgt", "trg", "reference"), SIDES[1]),
}
METADATA = "id ids lang language code url link file len length score date index"  # "source_id" is no text


def language_code(name: str) -> str | None:
    """Return the code of a language name such as "English", "eng" or "en-US". Returns None for other texts.

    The names of sides, such as "source" and "target", have the codes src and tgt. So have names such as "source_text",
    but not those of metadata, such as "source_id".
    """
    first, *rest = re.split("[-_]", name.strip().lower())  # not split at spaces: sentences have no code
    return _full_code(name) or (None if rest and rest[-1] in METADATA.split() else CODES.get(first))


def _full_code(name: str) -> str | None:
    return CODES.get(name.strip().lower())


def find_columns(names: Sequence[str], languages: tuple[str, str]) -> tuple[int, list[int]] | None:
    """Return the index of the source column and the indices of the target columns, or None if a side is missing.

    Columns have the names of `languages`, other names of these languages, or names such as source and target. Raises
    ValueError if several columns have names such as source.
    """
    known = tuple(language_code(language) for language in languages)
    for codes in (known, SIDES):
        columns = [_find_side(names, *side) for side in zip(languages, codes, strict=True)]
        if all(columns) and not {*columns[0]} & {*columns[1]}:
            if codes is SIDES and len(columns[0]) > 1:
                found = " and ".join(names[i] for i in columns[0])
                raise ValueError(f"the columns {found} can both be the source. Set --source-lang to one of them.")
            return columns[0][0], columns[1]
    return None


def _find_side(names: Sequence[str], language: str, code: str | None) -> list[int]:
    """Return the columns with this name, or else those whose complete name has this code, or else its beginning."""
    wanted = (names, language), ([*map(_full_code, names)], code), ([*map(language_code, names)], code)
    found = ([i for i, name in enumerate(columns) if value and name == value] for columns, value in wanted)
    return next(filter(None, found), [])
