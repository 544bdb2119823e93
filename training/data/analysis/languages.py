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


def language_code(name: str) -> str | None:
    """Return the code of a language name such as "English", "eng" or "en-US". Returns None for other texts.

    The names of sides, such as "source" and "target", have the codes src and tgt.
    """
    name = name.strip().lower()
    return CODES.get(name) or CODES.get(re.split("[-_]", name)[0])  # not split at spaces: sentences have no code


def find_columns(names: Sequence[str], languages: tuple[str, str]) -> tuple[int, list[int]] | None:
    """Return the index of the source column and the indices of the target columns, or None if a side is missing.

    Columns have the names of `languages`, other names of these languages, or names such as source and target.
    """
    codes = [language_code(name) for name in names]
    known = tuple(language_code(language) for language in languages)
    for columns, (source, target) in ((list(names), languages), (codes, known), (codes, SIDES)):
        if source and target and source != target and source in columns and target in columns:
            return columns.index(source), [i for i, name in enumerate(columns) if name == target]
    return None
