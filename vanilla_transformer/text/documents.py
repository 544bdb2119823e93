r"""Translation of documents: sentences are translated in batches, and white space is preserved.

document = translate_document(translator, "The dog sleeps. The cat waits.\n\nWhere is the child?")
document.translation          # "Der Hund schläft. Die Katze wartet.\n\nWo ist das Kind?"
"""

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vanilla_transformer.alignment_vanilla_transformer import Link, Span, word_spans
from vanilla_transformer.pipeline_vanilla_transformer import TranslationPipeline

SentencePart = tuple[int, int, int]  # start, end, and the number of parts of its sentence; 1 after the first part

LINE = re.compile("[^\\n\\r\\v\\f\\x1c-\\x1e\\x85\\u2028\\u2029]+")  # text between two Unicode line separators
MARK = re.compile("[,;:،؛、，；：–—](?!//)\\s*")
URL = "(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]{0,15}://[!-~]*"
NUMBER = "(?<!\\d)\\d+(?:[,;:،؛、，；：–—]\\d+)+"  # such as "1,234" or "10:45"
CLAUSE = re.compile(f"{URL}|{NUMBER}|({MARK.pattern})")  # group 1 is a mark between two clauses
UNBROKEN = re.compile(f"(?:{NUMBER}|\\d+|[!-/:-~]+)+")  # a number, or a word, address or URL of ASCII characters
SPACE = re.compile("\\s+")
NON_ASCII_SPACE = re.compile("[^\\S\\x00-\\x7f]")  # several bytes in UTF-8
SURROGATE = re.compile("[\\ud800-\\udfff]")
MAX_CHARS_PER_TOKEN = 32  # a text of more than limit * 32 characters is split before it is tokenized


@dataclass
class Sentence:
    """A sentence, or a part of an overlong sentence, with its spans in the document and in the translation."""

    source: Span
    target: Span
    result: dict[str, Any]  # output of the pipeline; if it contains "error", the source is copied


@dataclass
class Document:
    """The translation of a text."""

    translation: str
    sentences: list[Sentence] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # one per sentence that was split or not translated

    @property
    def alignments(self) -> list[Link]:
        """Links of all sentences, if requested, as spans in both texts, in the order of the translation."""
        return [
            ((sentence.source[0] + a, sentence.source[0] + b), (sentence.target[0] + c, sentence.target[0] + d))
            for sentence in self.sentences
            for (a, b), (c, d) in sentence.result.get("alignments", [])
        ]


def translate_document(translator: TranslationPipeline, text: str, **options: Any) -> Document:
    """Translate one text. See `translate_documents`."""
    return translate_documents(translator, [text], **options)[0]


def translate_documents(
    translator: TranslationPipeline,
    texts: Sequence[str],
    language: str = "en",
    max_sentence_tokens: int | None = None,
    **options: Any,
) -> list[Document]:
    """Translate texts of any length and preserve their paragraphs.

    A line break also ends a sentence. An overlong sentence is split, preferably at punctuation, otherwise at white
    space or anywhere, and its parts are translated. A sentence that cannot be translated is copied.

    Args:
        translator: Translation pipeline.
        texts: Source texts.
        language: ISO code of their language, for the rules of sentence splitting.
        max_sentence_tokens: Longer sentences are split. Defaults to the number of positions of the model config,
            the smallest one of an ensemble.
        **options: Options of the pipeline.

    Raises:
        ValueError: If several translations per sentence are requested.
        ImportError: If the library `sentencex` is not installed.
    """
    models = [translator.model, *(options.get("ensemble", translator.ensemble) or ())]
    limits = [max_sentence_tokens, *(getattr(model.config, "max_position_embeddings", None) for model in models)]
    max_sentence_tokens = min((each for each in limits if each is not None), default=sys.maxsize)  # None: T5
    config = options.get("generation_config")
    if (options.get("num_return_sequences", getattr(config, "num_return_sequences", None)) or 1) > 1:
        raise ValueError("num_return_sequences must be 1 for documents. Omit it.")
    options["num_return_sequences"] = 1  # the default of the model may be greater
    if hasattr(translator.tokenizer, "deprecation_warnings"):  # overlong sentences are tokenized before they are split
        translator.tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    parts = [list(split_document(translator, text, language, max_sentence_tokens)) for text in texts]
    sentences = [text[a:b] for text, spans in zip(texts, parts, strict=True) for a, b, _ in spans]
    results = iter(translator(sentences, **options))
    return [assemble_document(text, spans, results) for text, spans in zip(texts, parts, strict=True)]


def assemble_document(text: str, parts: list[SentencePart], results: Iterator[dict[str, Any]]) -> Document:
    """Join the translations of the parts with the original white space."""
    chunks: list[str] = []
    document = Document("")
    end = length = 0
    for (start, part_end, n), result in zip(parts, results, strict=False):
        translation, links = result["translation_text"].strip(), result.get("alignments", [])
        if "error" in result or not translation:
            result.setdefault("error", "the translation is empty.")
            document.warnings.append(f"not translated, at character {start + 1}: {result['error']}")
            translation = text[start:part_end]
            links = [(span, span) for span in word_spans(translation)]
        elif indent := result["translation_text"].find(translation):
            links = [(span, (a - indent, b - indent)) for span, (a, b) in links]
        result |= {"alignments": links} if "alignments" in result else {}
        if n > 1:
            document.warnings.append(f"translated in {n} parts, at character {start + 1}: the sentence is too long.")
        chunks += [text[end:start], translation]
        length += start - end
        document.sentences.append(Sentence((start, part_end), (length, length + len(translation)), result))
        length, end = length + len(translation), part_end
    document.translation = "".join([*chunks, text[end:]])
    return document


def split_document(translator: TranslationPipeline, text: str, language: str, limit: int) -> Iterator[SentencePart]:
    """Yield the parts to translate."""
    for start, end in sentence_spans(text, language):
        first, *others = split_long_sentence(translator, text, start, end, limit)
        yield (*first, 1 + len(others))
        yield from ((*part, 1) for part in others)


def sentence_spans(text: str, language: str = "en") -> Iterator[Span]:
    """Yield the span of each sentence of a text without surrounding white space. A line break ends a sentence."""
    try:
        from sentencex import segment
    except ImportError as error:
        raise ImportError("Document translation requires sentencex. Run `pip install sentencex`.") from error
    for line in LINE.finditer(text):
        offset = line.start()
        plain = NON_ASCII_SPACE.sub(" ", line[0])  # sentencex 1.0 panics at such a space between letter and full stop
        for sentence in [plain] if SURROGATE.search(plain) else segment(language, plain):
            if stripped := sentence.strip():
                start = offset + sentence.index(stripped)
                yield start, start + len(stripped)
            offset += len(sentence)


def find_cut(text: str, start: int, end: int) -> Span:
    """Return the characters between the two parts of a span, which may be none, near its middle."""
    middle, quarter = (start + end) // 2, (end - start) // 4

    def nearest(spans: Iterable[Span], reach: int) -> Span | None:
        near = [(a, b) for a, b in spans if middle - reach <= a and b <= middle + reach]
        return min(near, key=lambda span: abs(span[1] - middle), default=None)

    matches = (match for match in CLAUSE.finditer(text, start, end) if match[1])
    clauses = ((match.start() + len(match[1].rstrip()), match.end()) for match in matches)
    spaces = (match.span() for match in SPACE.finditer(text, start, end))
    if cut := nearest(clauses, quarter) or nearest(spaces, end - start):
        return cut
    spans = (match.span() for match in UNBROKEN.finditer(text, start, end))
    unbroken: tuple[int, ...] = next((span for span in spans if span[0] < middle < span[1]), ())
    marks = ((match.end(), match.end()) for match in MARK.finditer(text, start, end) if unbroken)
    return nearest(((edge, edge) for edge in unbroken), quarter) or nearest(marks, quarter) or (middle, middle)


def split_long_sentence(translator: TranslationPipeline, text: str, start: int, end: int, limit: int) -> Iterator[Span]:
    """Split a span recursively into parts of at most `limit` tokens, near the middle, at punctuation or white space."""
    is_longer = end - start > 1 and not SURROGATE.search(text, start, end)  # tokenizers reject surrogates
    if is_longer and end - start <= MAX_CHARS_PER_TOKEN * limit:
        is_longer = len(translator.preprocess(text[start:end])["input_ids"]) > limit
    if not is_longer:
        yield start, end
        return
    cut = find_cut(text, start, end)
    for part_start, part_end in ((start, cut[0]), (cut[1], end)):
        if stripped := text[part_start:part_end].strip():  # the range may end inside of white space
            part_start = text.index(stripped, part_start)
            yield from split_long_sentence(translator, text, part_start, part_start + len(stripped), limit)


__all__ = ["Document", "Sentence", "sentence_spans", "translate_document", "translate_documents"]
