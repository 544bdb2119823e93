"""Translation of sentences with a checkpoint or an ensemble."""

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from vanilla_transformer import TranslationPipeline
from vanilla_transformer.pipeline_vanilla_transformer import DEFAULT_BATCH_SIZE
from vanilla_transformer.shared.command_line import accept_settings, logger, shows_progress
from vanilla_transformer.shared.text_lines import read_lines

from ..data.parallel_text import ParallelText
from .settings import TranslationSettings
from .translators import MIN_CTRANSLATE2_SENTENCES, Paths, get_decoding_options, load_translator, select_engine

BATCHES_PER_RERANK_WINDOW = 64
Candidates = list[dict[str, Any]]  # translations of a sentence, best first


@accept_settings(TranslationSettings)
def translate(checkpoints: Paths, sentences: Iterable[str], **options: Any) -> list[str] | list[Candidates]:
    """Translate sentences.

    Example: `translate("runs/demo", ["A dog runs."], num_beams=5)` returns `["Ein Hund rennt."]`.

    Args:
        checkpoints: Directory, or repository on the Hub. Several form an ensemble with averaged probabilities.
        sentences: Source sentences. The translation of an empty string is empty.
        options: Fields of `TranslationSettings`. `glossary` can also be a dictionary of terms with their translations.

    Returns:
        One text per sentence. With `nbest`, `scores` or `details`: one list per sentence with the dictionaries of
        `TranslationPipeline`, best first.

    Raises:
        ValueError: If a checkpoint cannot be loaded, an option has an invalid value, or `sentences` is a string.
    """
    if isinstance(sentences, str):
        raise ValueError(f"sentences={sentences[:80]!r} is a string: pass a list of sentences.")
    settings = TranslationSettings(**options)
    results = translate_lines(load_translator(checkpoints, settings.device), sentences, settings)
    if settings.nbest > 1 or settings.scores or settings.details:
        return list(results)
    return [candidates[0]["translation_text"] for candidates in results]


def pipeline_options(settings: TranslationSettings, translator: TranslationPipeline) -> dict[str, Any]:
    options = get_decoding_options(settings)
    if settings.nbest > 1 or settings.rerank:
        beams = settings.num_beams or max(settings.nbest, translator.model.generation_config.num_beams or 1, 2)
        options |= {"num_beams": beams, "num_return_sequences": beams}  # several can have the same text
    if settings.glossary:
        terms = settings.glossary
        options["glossary"] = read_glossary(Path(terms)) if isinstance(terms, str | Path) else terms
    if settings.details:  # alignments require a fast tokenizer
        options |= {"return_token_scores": True, "return_alignments": bool(translator.tokenizer.is_fast)}
    needs_scores = settings.scores or settings.details or settings.nbest > 1 or settings.rerank
    return options | {"return_scores": bool(needs_scores)}


def translate_lines(
    translator: TranslationPipeline, lines: Iterable[str], settings: TranslationSettings, one_by_one: bool = False
) -> Iterator[Candidates]:
    """Return a lazy iterator of the translations of each line. `one_by_one` translates each line before the next."""
    options, lines = pipeline_options(settings, translator), report_unknown_text(translator.tokenizer, lines)
    first = [] if one_by_one else list(islice(lines, MIN_CTRANSLATE2_SENTENCES))
    lines = chain(first, lines)
    backward = load_translator(settings.rerank, settings.device) if settings.rerank else None
    translator = select_engine(translator, settings.engine, len(first), options, settings.quantization)
    options |= {"batch_size": settings.batch_size, "progress": shows_progress() and not one_by_one}
    if backward is not None:
        return rerank_translations(translator, backward, lines, options, settings, one_by_one)
    batches = ([line] for line in lines) if one_by_one else [lines]
    results = chain.from_iterable(translator(batch, **options) for batch in batches)
    return (select_distinct(result if isinstance(result, list) else [result], settings.nbest) for result in results)


def select_distinct(candidates: Candidates, count: int) -> Candidates:
    """Return at most `count` candidates with different texts, in their order."""
    selected: dict[str, Any] = {}
    for each in candidates:
        selected.setdefault(each["translation_text"], each)
    return list(selected.values())[:count]


def report_unknown_text(tokenizer: Any, lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines. Then warn if the tokenizer does not know characters or words of some lines."""
    count, example = 0, ""
    for line in lines:
        text = line.encode(errors="replace").decode() if isinstance(line, str) else ""  # the pipeline rejects others
        if tokenizer.unk_token_id in tokenizer(text)["input_ids"]:
            count += 1
            example = example or next(
                (w for w in text.split() if tokenizer.unk_token_id in tokenizer(w).input_ids), text
            )
        yield line
    if count:
        found = f"{count:,} lines contain characters or words that the tokenizer does not know"
        logger.warning(f"{found}, such as {example[:80]!r}. The model cannot translate them.")


def rerank_translations(
    translator: TranslationPipeline,
    backward: TranslationPipeline,
    lines: Iterable[str],
    options: dict[str, Any],
    settings: TranslationSettings,
    one_by_one: bool = False,
) -> Iterator[Candidates]:
    """Rerank the `num_beams` best translations with a noisy channel (Yee et al. 2019, without their language model).

    The score is log p(target | source) / length^penalty + weight * log p(source | target) / length.
    """
    from .metrics import compute_pair_nll  # slow import

    numbered, size = enumerate(lines, start=1), settings.batch_size or DEFAULT_BATCH_SIZE
    window_size = 1 if one_by_one else size * BATCHES_PER_RERANK_WINDOW
    while window := list(islice(numbered, window_size)):
        outputs = translator([line for _, line in window], **options)
        scored_candidates, pairs = Candidates(), ParallelText([], [])
        for (number, line), candidates in zip(window, outputs, strict=True):
            if not line.strip() or "error" in candidates[0]:
                continue
            sources, targets = [each["translation_text"] for each in candidates], [line.rstrip()] * len(candidates)
            if reason := scoring_error(backward, sources, targets):
                logger.warning(f"line {number} is not reranked: {reason}")
                continue
            scored_candidates += candidates
            pairs.sources += sources
            pairs.targets += targets
        backward_nll = compute_pair_nll(backward.model, backward.tokenizer, pairs, size, show=False)
        for each, (nats, tokens) in zip(scored_candidates, backward_nll, strict=True):
            each["score"] -= settings.rerank_weight * nats / tokens
        for candidates in outputs:
            yield select_distinct(sorted(candidates, key=lambda each: -each.get("score", 0.0)), settings.nbest)


def scoring_error(backward: TranslationPipeline, sources: list[str], targets: list[str]) -> str | None:
    """Return why a model cannot score all of the pairs, or None if it can."""
    encoded = backward.tokenizer(sources, text_target=targets)
    lengths = [len(ids) for name in ("input_ids", "labels") for ids in encoded[name]]
    max_length = backward._max_sequence_length()
    if not all(lengths):
        return "the sentence has no tokens."
    if max_length is not None and max(lengths, default=0) > max_length:
        return f"the sentence has {max(lengths)} tokens, and the model accepts at most {max_length}."
    return None


def read_glossary(path: Path) -> dict[str, list[str]]:
    """Read a table with one term per line: source, a tab, and one or more tab-separated translations."""
    glossary: dict[str, list[str]] = {}
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        source, *targets = (each.strip() for each in line.split("\t"))
        if not source or not targets or not all(targets):
            raise ValueError(f"{path}, line {number}: {line[:80]!r}: expected a term, a tab, and its translation.")
        if source in glossary:
            raise ValueError(f"{path}, line {number}: {source!r} is a duplicate. Put its translations into one line.")
        glossary[source] = targets
    return glossary
