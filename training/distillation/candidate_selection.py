"""Translation of a block of lines, and selection of the translations that become pairs of a table."""

import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sacrebleu.metrics import BLEU

from vanilla_transformer import TranslationPipeline

from ..data.parallel_text import invalid_pair_reason
from ..inference.translation import select_distinct
from ..inference.translators import get_decoding_options
from .settings import DistillationSettings

MAX_COPY_OVERLAP = 0.2  # `word_overlap` is 0.07 for English and German or French, from 0.25 within English
MIN_WORDS_FOR_CHECK = 500  # per block
Candidate = tuple[str, float]  # a translation and its score


@dataclass(frozen=True)
class TableSection(DistillationSettings):
    """A text, its teachers, and the settings that select the translations.

    `closest_to_reference` takes only the translation that is closest to the target by sentence BLEU: sequence-level
    interpolation (Kim and Rush 2016, section 3.3). `nbest=None` means one candidate per beam.
    """

    teachers: tuple[str, ...]
    source: Path  # the text that the teachers translate; `target` contains reference translations of it, if any
    backward: bool = False  # whether the teachers translate the target side of the table
    closest_to_reference: bool = False


def make_pairs(
    section: TableSection, translator: TranslationPipeline, rows: Iterable[tuple]
) -> tuple[list[tuple[str, str]], Counter]:
    """Translate the rows of a block, (line,) or (line, reference), and select pairs (source, target) in their order.

    Also return the number of dropped lines and translations per reason.
    """
    dropped: Counter = Counter()
    valid_rows = []
    for row in rows:
        if reason := invalid_pair_reason(row):
            dropped[f"lines {reason}"] += 1
        else:
            valid_rows.append(row)
    lines = [row[0] for row in valid_rows]
    translations = [[each for each in nbest if each[0]] for nbest in translate(section, translator, lines)]
    if not section.keep_copies:
        validate_not_copied(section, valid_rows, [candidates[0][0] for candidates in translations if candidates])
    pairs = []
    for row, candidates in zip(valid_rows, translations, strict=True):
        dropped["without a translation"] += not candidates
        if section.closest_to_reference:
            candidates = closest_to_reference(candidates, row[1])
        for text, score in candidates:
            if reason := rejection_reason(section, translator.tokenizer, row[0], text, score):
                dropped[reason] += 1
            else:
                pairs.append((text, row[0]) if section.backward else (row[0], text))
    return pairs, +dropped


def decoding_options(section: TableSection, translator: TranslationPipeline) -> dict[str, Any]:
    """Return the options that `translate` passes to the pipeline."""
    num_beams = section.num_beams or max(section.nbest or 0, translator.model.generation_config.num_beams or 1)
    options = get_decoding_options(replace(section, num_beams=num_beams))
    options |= {"num_return_sequences": section.nbest or num_beams, "batch_size": section.batch_size}
    return options | {"return_scores": section.min_score is not None}


def translate(section: TableSection, translator: TranslationPipeline, lines: list[str]) -> list[list[Candidate]]:
    """Return different translations of each line with their scores, best first. Scores are 0 without `min_score`."""
    results = translator(lines, **decoding_options(section, translator))
    rows = [select_distinct(each if isinstance(each, list) else [each], sys.maxsize) for each in results]
    return [[(each["translation_text"].strip(), each.get("score", 0.0)) for each in row] for row in rows]


def closest_to_reference(candidates: list[Candidate], reference: str) -> list[Candidate]:
    """Return a list with the candidate of the highest smoothed sentence BLEU, or an empty list."""
    bleu = BLEU(effective_order=True)
    return sorted(candidates, key=lambda each: -bleu.sentence_score(each[0], [reference]).score)[:1]


def rejection_reason(section: TableSection, tokenizer: Any, line: str, text: str, score: float) -> str | None:
    if text == line and not section.keep_copies:
        return "equal to their source"
    if section.min_score is not None and score < section.min_score:
        return f"with a score below {section.min_score:g}"
    if section.max_length_ratio is not None:
        lengths = len(tokenizer(line)["input_ids"]), len(tokenizer(text_target=text)["input_ids"])
        if max(lengths) > section.max_length_ratio * min(lengths):
            return f"with more than {section.max_length_ratio:g} times the tokens on one side"
    return None


def validate_not_copied(section: TableSection, rows: list[tuple], texts: list[str]) -> None:
    """Raise ValueError if the translations are in the language of their sources.

    A teacher of the reverse direction mostly copies its inputs. `texts` are the best translations of the rows of a
    block. References in the rows, if any, show how many words the two languages share.
    """
    sources, translations = count_words(row[0] for row in rows), count_words(texts)
    if translations.total() < MIN_WORDS_FOR_CHECK:
        return
    expected = word_overlap(sources, count_words(cell for row in rows for cell in row[1:2]))
    if (overlap := word_overlap(sources, translations)) > max(MAX_COPY_OVERLAP, 2 * expected):
        raise ValueError(
            f"{' + '.join(section.teachers)}: the translations and their sources have {100 * overlap:.0f} % of their "
            f"words in common, for example {texts[0][:80]!r}. Use teachers that translate from the language of "
            f"{section.source}, or --keep-copies if copies are expected."
        )


def word_overlap(first: Counter, second: Counter) -> float:
    """Return the sum over words of the minimum of their relative frequencies in two texts."""
    first_total, second_total = max(1, first.total()), max(1, second.total())
    return sum(min(first[word] / first_total, count / second_total) for word, count in second.items())


def count_words(texts: Iterable[str]) -> Counter:
    return Counter(word for text in texts for word in re.findall(r"[^\W\d_]+", text.lower()))
