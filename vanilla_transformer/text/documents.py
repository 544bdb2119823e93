"""Whole texts: their sentences are translated in batches, and put back between the white space that was there.

document = translate_document(translate, "The dog sleeps. The cat waits.\\n\\nWhere is the child?")
document.translation          # "Der Hund schläft. Die Katze wartet.\\n\\nWo ist das Kind?"
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vanilla_transformer.alignment_vanilla_transformer import Link, word_spans
from vanilla_transformer.pipeline_vanilla_transformer import TranslationPipeline

Span = tuple[int, int]  # the first character, and the one behind the last

LINE = re.compile("[^\\n\\r\\v\\f\\x1c-\\x1e\\x85\\u2028\\u2029]+")  # between any two of Unicode's line separators
CLAUSE = re.compile("[,;:،؛、，；：–—]\\s*")
SPACE = re.compile("\\s+")
WIDE_SPACE = re.compile("[^\\S\\x00-\\x7f]")  # of several bytes in UTF-8
SURROGATE = re.compile("[\\ud800-\\udfff]")
MAX_CHARS_PER_TOKEN = 32  # characters: a text of more for each token it may have is too long without counting


@dataclass
class Sentence:
    """A sentence of a document, or a part of one that was too long: where it stands in both texts, and its result."""

    source: Span
    target: Span
    result: dict[str, Any]  # as the pipeline gives it; with "error", the source stands in the translation, too


@dataclass
class Document:
    translation: str
    sentences: list[Sentence] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)  # a line for each sentence that was not translated as a whole

    @property
    def alignments(self) -> list[Link]:
        """The links of all sentences, if asked for, as places in the two texts; in the order of the translation."""
        return [
            ((sentence.source[0] + a, sentence.source[0] + b), (sentence.target[0] + c, sentence.target[0] + d))
            for sentence in self.sentences
            for (a, b), (c, d) in sentence.result.get("alignments", [])
        ]


def translate_document(translator: TranslationPipeline, text: str, **options: Any) -> Document:
    """One text; see `translate_documents`."""
    (document,) = translate_documents(translator, [text], **options)
    return document


def translate_documents(
    translator: TranslationPipeline,
    texts: Sequence[str],
    language: str = "en",
    longest: int | None = None,
    **options: Any,
) -> list[Document]:
    """Translates texts of any length. Every paragraph is there again, in its place; no sentence is cut.

    A line break ends a sentence, too. A sentence that is longer than the model takes is translated in parts, which end
    at a comma or another mark, at white space, or wherever there is none. One that cannot be translated stays as it is.

    Args:
        language: of the texts, an ISO code, for the rules by which sentences end.
        longest: tokens of the longest sentence; default: the positions that the model was made with.
        **options: those of the pipeline.

    Raises:
        ValueError: several translations of a sentence were asked for.
        ImportError: the library `sentencex` is not installed.
    """
    positions = translator.model.config.max_position_embeddings
    longest = positions if longest is None else min(longest, positions)
    config = options.get("generation_config")
    if (options.get("num_return_sequences", getattr(config, "num_return_sequences", None)) or 1) > 1:
        raise ValueError("a document has one translation: leave num_return_sequences out.")
    options["num_return_sequences"] = 1  # the model's own default may be more
    if hasattr(translator.tokenizer, "deprecation_warnings"):  # sentences are measured before they are split
        translator.tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    parts = [list(split_document(translator, text, language, longest)) for text in texts]
    results = iter(
        translator([text[a:b] for text, own in zip(texts, parts, strict=True) for a, b, _ in own], **options)
    )
    return [assemble_document(text, own, results) for text, own in zip(texts, parts, strict=True)]


def assemble_document(text: str, parts: list[tuple[int, int, int]], results: Iterator[dict[str, Any]]) -> Document:
    """A document of its parts (start, end, parts of that sentence); takes their translations from `results`."""
    pieces: list[str] = []
    document = Document("")
    end = length = told = 0
    for number, ((start, behind, n), result) in enumerate(zip(parts, results, strict=False)):
        source = text[start:behind]
        if "error" in result or not result["translation_text"].strip():
            result.setdefault("error", "the model gave an empty translation.")
            document.remarks.append(f"left as it was, at character {start + 1}: {result['error']}")
            result |= {"alignments": [(span, span) for span in word_spans(source)]} if "alignments" in result else {}
        translation = source if "error" in result else result["translation_text"].strip()
        if "error" not in result and (indent := result["translation_text"].find(translation)):
            links = [(here, (a - indent, b - indent)) for here, (a, b) in result.get("alignments", [])]
            result |= {"alignments": links} if links else {}
        if n > 1 and number >= told:
            document.remarks.append(f"translated in {n} parts, at character {start + 1}: the sentence is too long.")
            told = number + n
        pieces += [text[end:start], translation]
        length += start - end
        document.sentences.append(Sentence((start, behind), (length, length + len(translation)), result))
        length, end = length + len(translation), behind
    document.translation = "".join([*pieces, text[end:]])
    return document


def split_document(
    translator: TranslationPipeline, text: str, language: str, longest: int
) -> Iterator[tuple[int, int, int]]:
    """What of a text is translated at once: its first character, the one behind its last, and of how many parts its
    sentence is."""
    for start, end in sentence_spans(text, language):
        parts = list(split_long_sentence(translator, text, start, end, longest))
        yield from ((a, b, len(parts)) for a, b in parts)


def sentence_spans(text: str, language: str = "en") -> Iterator[Span]:
    """The sentences of a text, without the white space around them. A line break ends one."""
    try:
        from sentencex import segment
    except ImportError as error:
        raise ImportError(
            "documents are split into sentences by the library sentencex: pip install sentencex."
        ) from error
    for line in LINE.finditer(text):
        place = line.start()
        plain = WIDE_SPACE.sub(" ", line[0])  # sentencex 1.0 panics at a letter, wide white space and a full stop
        for sentence in [plain] if SURROGATE.search(plain) else segment(language, plain):
            if stripped := sentence.strip():
                start = place + sentence.index(stripped)
                yield start, start + len(stripped)
            place += len(sentence)


def split_long_sentence(
    translator: TranslationPipeline, text: str, start: int, end: int, longest: int
) -> Iterator[Span]:
    """A span in parts of at most `longest` tokens, halved near the middle at a mark, at white space, or anywhere."""
    is_longer = end - start > 1 and not SURROGATE.search(text, start, end)  # which no tokenizer reads
    if is_longer and end - start <= MAX_CHARS_PER_TOKEN * longest:
        is_longer = len(translator.preprocess(text[start:end])["input_ids"]) > longest
    if not is_longer:
        yield start, end
        return
    middle, quarter = (start + end) // 2, (end - start) // 4
    cut = middle, middle
    for pattern, reach in ((CLAUSE, quarter), (SPACE, 2 * quarter)):
        if found := list(pattern.finditer(text, middle - reach, middle + reach)):
            best = min(found, key=lambda match: abs(match.end() - middle))
            cut = (best.start() + len(best[0].rstrip()), best.end())
            break
    for part in ((start, cut[0]), (cut[1], end)):
        if start < part[1] and text[part[0] : part[1]].strip():
            yield from split_long_sentence(translator, text, *part, longest)


__all__ = ["Document", "Sentence", "sentence_spans", "translate_document", "translate_documents"]
