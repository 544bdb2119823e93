"""Translation of sentences with a checkpoint or an ensemble."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from vanilla_transformer import TranslationPipeline
from vanilla_transformer.pipeline_vanilla_transformer import DEFAULT_BATCH_SIZE
from vanilla_transformer.shared.command_line import logger, shows_progress
from vanilla_transformer.shared.text_lines import read_lines

from ..data.parallel_text import ParallelText
from .translators import (
    MIN_CTRANSLATE2_SENTENCES,
    get_decoding_options,
    load_translator,
    select_engine,
    validate_numbers,
)

RERANK_WEIGHT = 0.5  # of the target-to-source model
BATCHES_PER_RERANK_WINDOW = 64
Candidates = list[dict[str, Any]]  # translations of a sentence, best first


def translate(
    checkpoints: str | Path | Sequence[str | Path],
    sentences: Iterable[str],
    *,
    nbest: int = 1,
    num_beams: int | None = None,
    length_penalty: float | None = None,
    max_new_tokens: int | None = None,
    glossary: str | Path | Mapping[str, Any] | None = None,
    scores: bool = False,
    details: bool = False,
    rerank: str | Path | None = None,
    rerank_weight: float = RERANK_WEIGHT,
    batch_size: int | None = None,
    engine: str = "auto",
    quantization: str | None = None,
    device: str | None = None,
) -> list[Any]:
    """Translate sentences.

    Example: `translate("runs/demo", ["A dog runs."], num_beams=5)` returns `["Ein Hund rennt."]`.

    Args:
        checkpoints: Directory, or repository on the Hub. Several form an ensemble with averaged probabilities.
        sentences: Source sentences. The translation of an empty string is empty.
        nbest: Translations per sentence.
        num_beams: Beam size. Default of this and the next two: the generation config of the first checkpoint.
        length_penalty: Exponent p of the score: log-probability / length ** p.
        max_new_tokens: Maximum length of a translation.
        glossary: Path of a table (see `read_glossary`), or dictionary of terms with their translations.
        scores: Whether to return scores: log-probability in nats / length ** length_penalty.
        details: Whether to return scores, tokens with their log-probabilities, and word alignments.
        rerank: Target-to-source checkpoint that reranks the `num_beams` best translations.
        rerank_weight: Weight of the score of the target-to-source checkpoint.
        batch_size: Sentences per batch. Defaults to 64; on a GPU, to as many as fit into memory.
        engine: "auto", "transformers" or "ctranslate2". See `select_engine`.
        quantization: Type of the weights with CTranslate2, such as "int8".
        device: For example "cpu" or "cuda:1". Defaults to a GPU, if available.

    Returns:
        One text per sentence. With `nbest`, `scores` or `details`: one list per sentence with the dictionaries of
        `TranslationPipeline`, best first.

    Raises:
        ValueError: If a checkpoint cannot be loaded, an option has an invalid value, or `sentences` is a string.
    """
    if isinstance(sentences, str):
        raise ValueError(f"sentences={sentences[:80]!r} is a string: pass a list of sentences.")
    settings = TranslationSettings(
        nbest=nbest, num_beams=num_beams, length_penalty=length_penalty, max_new_tokens=max_new_tokens,
        glossary=glossary, scores=scores, details=details, rerank=rerank, rerank_weight=rerank_weight,
        batch_size=batch_size, engine=engine, quantization=quantization, device=device,
    )  # fmt: skip
    results = translate_lines(load_translator(checkpoints, device), sentences, settings)
    if nbest > 1 or scores or details:
        return list(results)
    return [candidates[0]["translation_text"] for candidates in results]


@dataclass(frozen=True, kw_only=True)
class TranslationSettings:
    """The keyword arguments of `translate`."""

    nbest: int = 1
    num_beams: int | None = None
    length_penalty: float | None = None
    max_new_tokens: int | None = None
    glossary: str | Path | Mapping[str, Any] | None = None
    scores: bool = False
    details: bool = False
    rerank: str | Path | None = None
    rerank_weight: float = RERANK_WEIGHT
    batch_size: int | None = None
    engine: str = "auto"
    quantization: str | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for invalid values and combinations."""
        validate_numbers(self, ("batch_size", "nbest", "num_beams", "max_new_tokens"))
        if (self.num_beams or self.nbest) < self.nbest:
            raise ValueError(f"nbest={self.nbest} must be at most num_beams={self.num_beams}.")
        if self.rerank and self.num_beams == 1:
            raise ValueError("rerank requires num_beams of at least 2.")

    def decoding_options(self, translator: TranslationPipeline) -> dict[str, Any]:
        """Return the options of the pipeline."""
        options = get_decoding_options(self)
        if self.nbest > 1 or self.rerank:
            beams = self.num_beams or max(self.nbest, translator.model.generation_config.num_beams or 1)
            beams = max(beams, 2)
            options |= {"num_beams": beams, "num_return_sequences": beams if self.rerank else self.nbest}
        if self.glossary:
            terms = self.glossary
            options["glossary"] = read_glossary(Path(terms)) if isinstance(terms, str | Path) else terms
        if self.details:  # alignments require a fast tokenizer
            options |= {"return_token_scores": True, "return_alignments": bool(translator.tokenizer.is_fast)}
        needs_scores = self.scores or self.details or self.nbest > 1 or self.rerank
        return options | {"return_scores": bool(needs_scores)}


def translate_lines(
    translator: TranslationPipeline, lines: Iterable[str], settings: TranslationSettings, one_by_one: bool = False
) -> Iterator[Candidates]:
    """Return a lazy iterator of the translations of each line. `one_by_one` translates each line before the next."""
    options, lines = settings.decoding_options(translator), iter(lines)
    first = [] if one_by_one else list(islice(lines, MIN_CTRANSLATE2_SENTENCES))
    lines = chain(first, lines)
    backward = load_translator(settings.rerank, settings.device) if settings.rerank else None
    translator = select_engine(translator, settings.engine, len(first), options, settings.quantization)
    options |= {"batch_size": settings.batch_size, "progress": shows_progress() and not one_by_one}
    if backward is not None:
        return rerank_translations(translator, backward, lines, options, settings)
    batches = ([line] for line in lines) if one_by_one else [lines]
    results = chain.from_iterable(translator(batch, **options) for batch in batches)
    return (result if isinstance(result, list) else [result] for result in results)


def rerank_translations(
    translator: TranslationPipeline,
    backward: TranslationPipeline,
    lines: Iterable[str],
    options: dict[str, Any],
    settings: TranslationSettings,
) -> Iterator[Candidates]:
    """Rerank the `num_beams` best translations with a noisy channel (Yee et al. 2019, without their language model).

    The score is log p(target | source) / length^penalty + weight * log p(source | target) / length.
    """
    from .metrics import compute_pair_nll  # slow import

    numbered, size = enumerate(lines, start=1), settings.batch_size or DEFAULT_BATCH_SIZE
    while window := list(islice(numbered, size * BATCHES_PER_RERANK_WINDOW)):
        outputs = translator([line for _, line in window], **options)
        scored_candidates, pairs = Candidates(), list[tuple[str, str]]()
        for (number, line), candidates in zip(window, outputs, strict=True):
            if not line.strip() or "error" in candidates[0]:
                continue
            both = [(each["translation_text"], line.rstrip()) for each in candidates]
            if reason := scoring_error(backward, both):
                logger.warning(f"line {number} is not reranked: {reason}")
                continue
            scored_candidates += candidates
            pairs += both
        text = ParallelText([target for target, _ in pairs], [source for _, source in pairs])
        backward_nll = compute_pair_nll(backward.model, backward.tokenizer, text, size, show=False) if pairs else []
        for each, (nats, tokens) in zip(scored_candidates, backward_nll, strict=True):
            each["score"] -= settings.rerank_weight * nats / tokens
        for candidates in outputs:
            yield sorted(candidates, key=lambda each: -each.get("score", 0.0))[: settings.nbest]


def scoring_error(backward: TranslationPipeline, pairs: list[tuple[str, str]]) -> str | None:
    """Return why a model cannot score all of the pairs, or None if it can."""
    encoded = backward.tokenizer([source for source, _ in pairs], text_target=[target for _, target in pairs])
    lengths = [len(ids) for name in ("input_ids", "labels") for ids in encoded[name]]
    max_length = backward._max_sequence_length()
    if not all(lengths):
        return "the sentence has no tokens."
    if max_length is not None and max(lengths, default=0) > max_length:
        return f"the sentence has {max(lengths)} tokens, and the model accepts at most {max_length}."
    return None


def read_glossary(path: Path) -> dict[str, list[str]]:
    """Read a table with one term per line: source, a tab, and one or more tab-separated translations.

    Raises:
        ValueError: If a line has no tab, or a term is a duplicate.
    """
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
