"""Translation from file to file: line by line with constant memory, or as a document."""

import json
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import tee
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from vanilla_transformer import TranslationPipeline
from vanilla_transformer.shared.atomic_io import atomic_write
from vanilla_transformer.shared.command_line import logger, shows_progress
from vanilla_transformer.shared.text_lines import sanitize_tsv_cell, validate_not_utf_16
from vanilla_transformer.text.documents import translate_document

from .settings import TranslationSettings
from .translation import Candidates, pipeline_options, report_unknown_text, translate_lines
from .translators import load_translator, read_run_recipe, select_engine

MAX_SENTENCE_CHARS = 200  # estimate for documents


def translate_file(
    checkpoints: list[str],
    source: Path | None,
    output: Path | None,
    is_document: bool,
    source_lang: str | None,
    **options: Any,
) -> None:
    """Translate a file, and write one translation per line, columns, or JSON.

    With `details`, each line or sentence becomes a JSON object, and with `nbest` or `scores` it becomes rows with the
    columns line number, score and translation. A line that cannot be translated is logged and left empty.

    Args:
        source: UTF-8 text. None reads stdin. If stdin is a terminal, each line is translated immediately.
        output: File to write atomically. None writes to stdout.
        is_document: Whether to split paragraphs into sentences and to keep white space.
        source_lang: Language of a document. Defaults to that of the recipe, or "en".
        options: Fields of `TranslationSettings`.
    """
    settings = TranslationSettings(**options)
    if is_document and (settings.rerank or settings.nbest > 1 or settings.scores):
        raise ValueError("--document does not support --nbest, --scores and --rerank. Remove them.")
    translator = load_translator(checkpoints, settings.device)
    with ExitStack() as files:
        stream = files.enter_context(source.open("rb")) if source else sys.stdin.buffer
        sink: TextIO = sys.stdout
        if output:
            path = files.enter_context(atomic_write(output))
            sink = files.enter_context(path.open("w", encoding="utf-8", newline=""))
        if is_document:
            recipe = read_run_recipe(Path(checkpoints[0]))
            language = source_lang or str(recipe.get("source_lang") or "en")
            write_document(translator, stream.read(), sink, settings, language, recipe.get("max_length"))
        else:
            write_lines(translator, stream, sink, settings)


def write_lines(translator: TranslationPipeline, stream: BinaryIO, sink: TextIO, settings: TranslationSettings) -> None:
    lines, sources = tee(decode_lines(stream))
    with_scores = settings.scores or settings.nbest > 1
    terms: list[bool] = []  # whether each term is in the translation
    results = translate_lines(translator, lines, settings, one_by_one=stream.isatty())
    for number, (candidates, line) in enumerate(zip(results, sources, strict=True), start=1):
        for candidate in candidates:
            if "error" in candidate:
                logger.error(f"line {number} is not translated: {candidate['error']}")
        if settings.details:
            sink.write(format_json(line, candidates))
        else:
            for candidate in candidates:
                text = sanitize_tsv_cell(candidate["translation_text"])
                sink.write(f"{number}\t{candidate.get('score', 0.0):.4f}\t{text}\n" if with_scores else f"{text}\n")
        terms += find_term_matches(candidates)
        if sink is sys.stdout:
            sink.flush()
    report_terms(terms, settings)


def write_document(
    translator: TranslationPipeline,
    source: bytes,
    sink: TextIO,
    settings: TranslationSettings,
    language: str,
    max_length: Any,
) -> None:
    validate_not_utf_16(source, "the document")
    try:
        text = source.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8 text: convert the document to UTF-8.") from error
    options = pipeline_options(settings, translator) | {"batch_size": settings.batch_size, "progress": shows_progress()}
    num_sentences = len(text) // MAX_SENTENCE_CHARS
    translator = select_engine(translator, settings.engine, num_sentences, options, settings.quantization)
    limit = max_length if isinstance(max_length, int) else None
    list(report_unknown_text(translator.tokenizer, text.splitlines()))
    document = translate_document(translator, text, language=language, max_sentence_tokens=limit, **options)
    for warning in document.warnings:
        logger.warning(warning)
    report_terms(find_term_matches([each.result for each in document.sentences]), settings)
    if settings.details:
        for sentence in document.sentences:
            start, end = sentence.source
            sink.write(format_json(text[start:end], [sentence.result], span=sentence.source))
    else:
        sink.write(document.translation)


def decode_lines(stream: BinaryIO) -> Iterator[str]:
    """Yield decoded lines. A line that is not UTF-8 is logged and left empty. Raises ValueError for UTF-16."""
    for number, line in enumerate(stream, start=1):
        if number == 1:
            validate_not_utf_16(line, "the input")
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8").strip()  # as in training
        except UnicodeDecodeError as error:
            logger.error(f"line {number} is not translated: not UTF-8 (byte {line[error.start]:#04x})")
            yield ""


def find_term_matches(candidates: Candidates) -> list[bool]:
    """Return for each glossary term and translation whether the term is in the translation."""
    return [term["target"] is not None for each in candidates for term in each.get("terms", ())]


def report_terms(terms: list[bool], settings: TranslationSettings) -> None:
    if settings.glossary:
        logger.info(f"glossary: {sum(terms)} of {len(terms)} terms are used")


def format_json(source: str, candidates: Candidates, **more: Any) -> str:
    """Format the candidates, best first, as a JSON object with one list per detail."""
    row: dict[str, Any] = {"source": source, **more}
    names = {"translations": "translation_text", "scores": "score", "log_probabilities": "log_probability"}
    names |= {name: name for name in ("tokens", "token_scores", "alignments", "terms")}
    for name, key in names.items():
        values = [candidate[key] for candidate in candidates if key in candidate]
        row[name] = [None if value == -math.inf else value for value in values]  # JSON has no infinity
    if "error" in candidates[0]:
        row["error"] = candidates[0]["error"]
    return json.dumps(row, ensure_ascii=False) + "\n"
