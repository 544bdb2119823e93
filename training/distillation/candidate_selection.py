"""Translations of a block of lines, and which of them become pairs of a table."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sacrebleu.metrics import BLEU

from training.data.parallel_text import invalid_pair_reason
from vanilla_transformer import TranslationPipeline

MAX_COPY_OVERLAP = (
    0.2  # of `likeness`: English and German or French captions have 0.07, other English texts from 0.25 on
)
MIN_WORDS_FOR_CHECK = 500  # words of a block, below which that says little


@dataclass(frozen=True)
class TableSection:
    """A part of a table: a text, who translates it, and what is taken of the translations.

    `source` is what the teachers read, `target` its translations by people or None, and `backward` says that the
    teachers read the table's target side. The `nbest` translations of each line are taken (0: one per beam).
    With `closest_to_reference`, only the one that is nearest to the target by sentence BLEU is taken: sequence-level
    interpolation (Kim and Rush 2016, section 3.3).
    Translations with a score below `min_score`, length ratios above `max_length_ratio`, and (unless `keep_copies`)
    copies of their source are dropped. `num_beams`, `length_penalty` and `max_new_tokens` default to the first
    teacher's.
    """

    teachers: tuple[str, ...]
    source: Path
    target: Path | None = None
    backward: bool = False
    nbest: int = 1
    closest_to_reference: bool = False
    num_beams: int | None = None
    length_penalty: float | None = None
    max_new_tokens: int | None = None
    batch_size: int = 64
    min_score: float | None = None
    max_length_ratio: float | None = None
    keep_copies: bool = False

    @property
    def named(self) -> str:
        return " + ".join(self.teachers)


def make_pairs(
    piece: TableSection, translator: TranslationPipeline, rows: Iterable[tuple]
) -> tuple[list[tuple[str, str]], Counter]:
    """Pairs (source, target) of rows (line, its translation by people or none), in their order, n-best within a row.

    Returns:
        The pairs, and how many lines or translations were left out, by reason.

    Raises:
        ValueError: the translations look like their sources.
    """
    left_out: Counter = Counter()
    good = []
    for row in rows:
        if reason := invalid_pair_reason(row):
            left_out[f"lines {reason}"] += 1
        else:
            good.append(row)
    lines = [row[0] for row in good]
    found = [[each for each in candidates if each[0]] for candidates in translate(piece, translator, lines)]
    if not piece.keep_copies:
        validate_not_copied(piece, good, [candidates[0][0] for candidates in found if candidates])
    pairs = []
    for row, candidates in zip(good, found, strict=True):
        left_out["without a translation"] += not candidates
        if piece.closest_to_reference:
            candidates = closest_to_reference(candidates, row[1])
        for text, score in candidates:
            if reason := rejection_reason(piece, translator.tokenizer, row[0], text, score):
                left_out[reason] += 1
            else:
                pairs.append((text, row[0]) if piece.backward else (row[0], text))
    return pairs, +left_out


def translate(piece: TableSection, translator: TranslationPipeline, lines: list[str]) -> list[list[tuple[str, float]]]:
    """The n best translations of each line with their scores, best first; 0 where no score is asked for."""
    config = translator.model.generation_config
    num_beams = piece.num_beams or max(piece.nbest, config.num_beams or 1)
    options: dict[str, Any] = {"num_beams": num_beams, "num_return_sequences": piece.nbest or num_beams}
    given = {"length_penalty": piece.length_penalty, "max_new_tokens": piece.max_new_tokens}
    options |= {name: value for name, value in given.items() if value is not None}
    if num_beams == 1 and piece.length_penalty is None:
        options["length_penalty"] = None  # the checkpoint's is for its beams
    with_scores = piece.min_score is not None
    results = translator(lines, batch_size=piece.batch_size, return_scores=with_scores, **options)
    rows = [result if isinstance(result, list) else [result] for result in results]
    return [[(each["translation_text"].strip(), each.get("score", 0.0)) for each in row] for row in rows]


def closest_to_reference(candidates: list[tuple[str, float]], reference: str) -> list[tuple[str, float]]:
    """The one with the highest smoothed sentence BLEU (of equals the first), alone; or none of none."""
    bleu = BLEU(effective_order=True)
    return sorted(candidates, key=lambda each: -bleu.sentence_score(each[0], [reference]).score)[:1]


def rejection_reason(piece: TableSection, tokenizer: Any, line: str, text: str, score: float) -> str | None:
    """Why a translation is left out; None: it is taken."""
    if text == line and not piece.keep_copies:
        return "that are their source"
    if piece.min_score is not None and score < piece.min_score:
        return f"of a score below {piece.min_score:g}"
    if piece.max_length_ratio is not None:
        lengths = len(tokenizer(line)["input_ids"]), len(tokenizer(text_target=text)["input_ids"])
        if max(lengths) > piece.max_length_ratio * min(lengths):
            return f"with more than {piece.max_length_ratio:g} times the tokens on one side"
    return None


def validate_not_copied(piece: TableSection, rows: list[tuple], texts: list[str]) -> None:
    """Raises ValueError where translations are in the language of their sources, as those of a teacher that translates
    into it mostly are.

    Args:
        rows: of one block; where they have translations by people, those tell how alike the languages are.
        texts: the best translations.
    """
    lines = Counter(word for row in rows for word in words(row[0]))
    said = Counter(word for text in texts for word in words(text))
    if said.total() < MIN_WORDS_FOR_CHECK:
        return
    usual = likeness(lines, Counter(word for row in rows for cell in row[1:2] for word in words(cell)))
    if (found := likeness(lines, said)) > max(MAX_COPY_OVERLAP, 2 * usual):
        raise ValueError(
            f"{piece.named}: its translations look like their sources ({100 * found:.0f} % the same words), as "
            f"{texts[0][:80]!r}: give teachers that translate from the language of {piece.source}, or --keep_copies "
            f"where outputs are to look like that."
        )


def likeness(one: Counter, other: Counter) -> float:
    """How much two texts have of their words in common: the sum of the smaller of each word's two frequencies."""
    first, second = max(1, one.total()), max(1, other.total())
    return sum(min(one[word] / first, count / second) for word, count in other.items())


def words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", text.lower())
