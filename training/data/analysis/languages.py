"""Names and codes of languages, and the columns of a table that have such names."""

import re
from collections.abc import Sequence
from functools import lru_cache

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
    **dict.fromkeys(("target", "tgt", "trg", "reference", "ref"), SIDES[1]),
}
METADATA = "id ids lang language code url link file len length score date index"  # "source_id" is no text
NUMBER = re.compile(r"[-_]?\d+$")  # "ref2" and "reference_2" are references
LANGUAGE_TAG = re.compile(r"[A-Za-z]{2,3}[-_]([A-Za-z]{2}|[A-Z][a-z]{3})")  # with a region or a script


def language_code(name: str) -> str | None:
    """Return the code of a language name such as "English", "eng" or "en-US". Returns None for other texts.

    The names of sides, such as "source" and "target", have the codes src and tgt. So have names such as "source_text",
    but not those of metadata, such as "source_id".
    """
    first, *rest = _split(name)
    return _complete_code(name) or (None if rest and rest[-1] in METADATA.split() else CODES.get(first))


def _complete_code(name: str) -> str | None:
    return CODES.get(NUMBER.sub("", name.strip().lower()))


def _split(name: str) -> list[str]:
    return re.split("[-_]", name.strip().lower())  # not at spaces: sentences have no code


def find_columns(names: Sequence[str], languages: tuple[str, str]) -> tuple[int, list[int]] | None:
    """Return the index of the source column and the indices of the target columns, or None if a side is missing.

    Columns have the names of `languages`, other names of these languages, or names such as source and target. Complete
    names, such as "de" and "de_2", precede names that only begin like them, such as "de_text". Raises ValueError if
    several columns can be the source, or if several that only begin like the target can be it.
    """
    return _find_columns(tuple(names), tuple(languages))


@lru_cache  # many rows have the same names
def _find_columns(names: tuple[str, ...], languages: tuple[str, str]) -> tuple[int, list[int]] | None:
    known = tuple(language_code(language) for language in languages)
    for codes in (known, SIDES):
        columns = [_find_side(names, *side) for side in zip(languages, codes, known, strict=True)]
        if all(columns) and not {*columns[0]} & {*columns[1]}:
            for side, found in zip(("source", "target"), columns, strict=True):
                is_complete = side == "target" and all(_complete_code(names[i]) for i in found)
                if len(found) > 1 and not is_complete and not all(LANGUAGE_TAG.fullmatch(names[i]) for i in found):
                    listed = ", ".join(names[i] for i in found)
                    raise ValueError(f"the columns {listed} can all be the {side}. Set --{side}-lang to one of them.")
            return columns[0][0], columns[1]
    return None


def _find_side(names: Sequence[str], language: str, code: str | None, known: str | None) -> list[int]:
    """Return the columns of a side. `code` is that of its language, `known`, or that of the side itself."""
    exact = [i for i, name in enumerate(names) if language and name == language]
    complete = [i for i, name in enumerate(names) if code and _complete_code(name) == code]
    if code != known or {*exact} <= {*complete}:  # the language Indonesian is not the column "id" next to "target"
        exact, complete = complete, exact
    return exact or complete or [i for i, name in enumerate(names) if code and _begins_with(name, code, known)]


def _begins_with(name: str, code: str, known: str | None) -> bool:
    """Return whether a name such as "de_text" begins with a code. "target_fr" is no target of another language."""
    _, *rest = _split(name)
    other = CODES.get(rest[-1]) if rest and code in SIDES and known not in SIDES else None
    return language_code(name) == code and other in (None, known)
