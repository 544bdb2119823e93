"""Translate lines of text or a document, from stdin to stdout or between files.

    echo "A dog runs." | python -m training.translate runs/demo
    python -m training.translate runs/demo --input source.en --output target.de --num-beams 5
    python -m training.translate runs/demo --input source.en --nbest 3      # columns: line, score, translation
    python -m training.translate runs/demo --input source.en --glossary terms.tsv
    python -m training.translate runs/demo --input source.en --engine ctranslate2 --quantization int8   # on a CPU
    python -m training.translate runs/demo --input source.en --json         # one object per line, with all details
    python -m training.translate runs/demo --input letter.en --document     # paragraphs of several sentences
    python -m training.translate runs/forward --input source.en --rerank runs/backward
    python -m training.translate runs/one runs/two --input source.en        # ensemble: averaged probabilities

The output has one line per input line, in the same order. If a line cannot be translated, its output line is empty and
stderr gets the reason with the line number. With `--document`, such text is kept unchanged.
"""

import argparse
import json
import math
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from vanilla_transformer import TranslationPipeline
from vanilla_transformer.pipeline_vanilla_transformer import DEFAULT_BATCH_SIZE
from vanilla_transformer.shared.atomic_io import atomic_write
from vanilla_transformer.shared.command_line import (
    CommandLineParser,
    add_options,
    exit_on_user_error,
    exponent_type,
    option_name,
)
from vanilla_transformer.shared.text_lines import read_lines, sanitize_tsv_cell
from vanilla_transformer.text.documents import translate_document

from .data.parallel_text import ParallelText
from .inference.translators import (
    CHECKPOINTS,
    MIN_CTRANSLATE2_SENTENCES,
    get_decoding_options,
    load_translator,
    read_run_recipe,
    select_engine,
)
from .run.hardware import configure_malloc, device_type

RERANK_WEIGHT = 0.5  # of the target-to-source model
BATCHES_PER_RERANK_WINDOW = 64
MAX_SENTENCE_CHARS = 200  # estimate for documents


def main() -> None:
    parser = CommandLineParser("training.translate", __doc__)
    parser.add_argument("checkpoint", nargs="+", help=CHECKPOINTS)
    parser.add_argument("--input", type=Path, help="Text file to translate. Default: stdin.")
    parser.add_argument("--output", type=Path, help="File to write. Default: stdout.")
    batch_help = "Sentences per batch. Default: 64; on a GPU, as many as fit into memory."
    parser.add_argument("--batch-size", type=int, help=batch_help)
    parser.add_argument("--num-beams", type=int, help="Beam size. Default: the checkpoint's.")
    parser.add_argument("--length-penalty", type=exponent_type, help="Length penalty. Default: the checkpoint's.")
    parser.add_argument("--max-new-tokens", type=int, help="Maximum translation length. Default: the checkpoint's.")
    parser.add_argument("--nbest", type=int, default=1, help="Translations per line, with scores if more than 1.")
    glossary_help = "Table with one term per line: source, a tab, and one or more tab-separated translations."
    parser.add_argument("--glossary", type=Path, help=glossary_help)
    parser.add_argument("--scores", action="store_true", help="Print columns: line, score, translation.")
    json_help = "Print one object per line: source, translations, scores, tokens, token_scores, alignments."
    parser.add_argument("--json", action="store_true", help=json_help)
    document_help = "Split paragraphs into sentences and keep white space."
    parser.add_argument("--document", action="store_true", help=document_help)
    parser.add_argument("--source-lang", help="With --document: source language. Default: the recipe's, or en.")
    parser.add_argument("--rerank", help="Target-to-source checkpoint that reranks the --num-beams best translations.")
    weight_help = "Weight of the --rerank checkpoint (default: %(default)s)."
    parser.add_argument("--rerank-weight", type=float, default=RERANK_WEIGHT, help=weight_help)
    add_options(parser, "engine", "quantization")
    parser.add_argument("--device", type=device_type, help="Device such as cuda:1. Default: a GPU, if available.")
    arguments = parser.parse_args()
    configure_malloc()
    with exit_on_user_error(parser.prog, ImportError):
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    for name in ("batch_size", "nbest", "num_beams", "max_new_tokens"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            raise ValueError(f"{option_name(name)} {getattr(arguments, name)} must be at least 1.")
    if arguments.output is not None and arguments.output.exists():
        raise ValueError(f"{arguments.output} already exists. Choose another path.")
    if arguments.nbest > 1 and (arguments.num_beams or arguments.nbest) < arguments.nbest:
        raise ValueError(f"--nbest {arguments.nbest} must be at most --num-beams {arguments.num_beams}.")
    if arguments.document and (arguments.rerank or arguments.nbest > 1 or arguments.scores):
        raise ValueError("--document does not support --nbest, --scores and --rerank. Remove them.")
    if arguments.rerank and arguments.num_beams == 1:
        raise ValueError("--rerank requires --num-beams of at least 2.")
    translator = load_translator(arguments.checkpoint, arguments.device)
    options = get_decoding_options(arguments)
    if arguments.nbest > 1:
        num_beams = arguments.num_beams or max(arguments.nbest, translator.model.generation_config.num_beams or 1)
        options |= {"num_beams": num_beams, "num_return_sequences": arguments.nbest}
    if arguments.glossary:
        options["glossary"] = read_glossary(arguments.glossary)
    with ExitStack() as files:
        source = files.enter_context(arguments.input.open("rb")) if arguments.input else sys.stdin.buffer
        sink: TextIO = sys.stdout
        if arguments.output:
            path = files.enter_context(atomic_write(arguments.output))
            sink = files.enter_context(path.open("w", encoding="utf-8", newline=""))
        if arguments.document:
            translate_text(translator, source.read(), sink, options, arguments)
        else:
            translate_lines(translator, source, sink, options, arguments)


def translate_lines(
    translator: TranslationPipeline, source: BinaryIO, sink: TextIO, options: dict[str, Any], arguments: Any
) -> None:
    """Translate each line and write it as text, columns or JSON."""
    with_scores = arguments.scores or arguments.nbest > 1
    options |= {"return_scores": with_scores or arguments.json, "progress": sys.stderr.isatty()}
    is_interactive = sys.stdin.isatty() and not arguments.input  # translate each line at once
    decoded = decode_lines(source)
    first = [] if is_interactive else list(islice(decoded, MIN_CTRANSLATE2_SENTENCES))
    lines, pending = tee_lines(chain(first, decoded))
    if arguments.rerank:
        beams = options.get("num_beams") or translator.model.generation_config.num_beams or 1
        num_candidates = max(beams, arguments.nbest, 2)
        options |= {"num_beams": num_candidates, "num_return_sequences": num_candidates, "return_scores": True}
    if arguments.json:
        options |= json_options(translator)
    translator = select_engine(translator, arguments.engine, len(first), options, arguments.quantization)
    if arguments.rerank:
        backward = load_translator(arguments.rerank, arguments.device)
        results: Iterable = rerank(translator, backward, lines, options, arguments)
    elif is_interactive:
        results = (result for line in lines for result in translator([line], **options))
    else:
        results = translator(lines, batch_size=arguments.batch_size, **options)
    terms: list[bool] = []  # whether each term is in the translation
    for number, result in enumerate(results, start=1):
        candidates = result if isinstance(result, list) else [result]
        text = pending.popleft()
        for candidate in candidates:
            if "error" in candidate:
                print(f"line {number} is not translated: {candidate['error']}", file=sys.stderr)
        if arguments.json:
            sink.write(format_json(text.rstrip("\r\n"), candidates))
        else:
            for candidate in candidates:
                text = sanitize_tsv_cell(candidate["translation_text"])
                sink.write(f"{number}\t{candidate.get('score', 0.0):.4f}\t{text}\n" if with_scores else f"{text}\n")
        terms += find_term_matches(candidates)
        if sink is sys.stdout:
            sink.flush()
    if arguments.glossary:
        report_terms(terms)


def find_term_matches(candidates: list[dict[str, Any]]) -> list[bool]:
    """Return for each glossary term and translation whether the term is in the translation."""
    return [term["target"] is not None for each in candidates for term in each.get("terms", ())]


def report_terms(terms: list[bool]) -> None:
    print(f"glossary: {sum(terms)} of {len(terms)} terms are used", file=sys.stderr)


def read_glossary(path: Path) -> dict[str, list[str]]:
    """Read a glossary. Raises ValueError for lines without a tab and for duplicate terms."""
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


def translate_text(
    translator: TranslationPipeline, source: bytes, sink: TextIO, options: dict[str, Any], arguments: Any
) -> None:
    """Translate a document and write it as text, or as JSON with one object per sentence."""
    try:
        text = source.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8 text: convert the document to UTF-8.") from error
    settings = read_run_recipe(Path(arguments.checkpoint[0]))
    language = arguments.source_lang or str(settings.get("source_lang") or "en")
    longest = settings.get("max_length")
    options |= {"batch_size": arguments.batch_size, "progress": sys.stderr.isatty()}
    if arguments.json:
        options |= json_options(translator) | {"return_scores": True}
    num_sentences = len(text) // MAX_SENTENCE_CHARS
    translator = select_engine(translator, arguments.engine, num_sentences, options, arguments.quantization)
    document = translate_document(
        translator,
        text,
        language=language,
        max_sentence_tokens=longest if isinstance(longest, int) else None,
        **options,
    )
    for warning in document.warnings:
        print(warning, file=sys.stderr)
    if arguments.glossary:
        report_terms([match for sentence in document.sentences for match in find_term_matches([sentence.result])])
    if arguments.json:
        for sentence in document.sentences:
            start, end = sentence.source
            sink.write(format_json(text[start:end], [sentence.result], span=sentence.source))
    else:
        sink.write(document.translation)


def json_options(translator: TranslationPipeline) -> dict[str, bool]:
    """Return the pipeline options for `--json`. Alignments require a fast tokenizer."""
    return {"return_token_scores": True, "return_alignments": bool(translator.tokenizer.is_fast)}


def format_json(source: str, candidates: list[dict[str, Any]], **more: Any) -> str:
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


def rerank(
    translator: TranslationPipeline,
    backward: TranslationPipeline,
    lines: Iterable[str],
    options: dict[str, Any],
    arguments: Any,
) -> Iterator[list[dict[str, Any]]]:
    """Rerank the `num_beams` best translations with a noisy channel (Yee et al. 2019, without their language model).

    The score is log p(target | source) / length^penalty + weight * log p(source | target) / length.
    """
    from .inference.metrics import compute_pair_nll  # slow import

    numbered, size = enumerate(lines, start=1), arguments.batch_size or DEFAULT_BATCH_SIZE
    while window := list(islice(numbered, size * BATCHES_PER_RERANK_WINDOW)):
        outputs = translator([line for _, line in window], batch_size=arguments.batch_size, **options)
        scored, pairs = list[dict[str, Any]](), list[tuple[str, str]]()
        for (number, line), candidates in zip(window, outputs, strict=True):
            if not line.strip() or "error" in candidates[0]:
                continue
            both = [(each["translation_text"], line.rstrip("\r\n")) for each in candidates]
            if reason := scoring_error(backward, both):
                print(f"line {number} is not reranked: {reason}", file=sys.stderr)
                continue
            scored += candidates
            pairs += both
        text = ParallelText([target for target, _ in pairs], [source for _, source in pairs])
        back = compute_pair_nll(backward.model, backward.tokenizer, text, size, show=False) if pairs else []
        for each, (nats, tokens) in zip(scored, back, strict=True):
            each["score"] -= arguments.rerank_weight * nats / tokens
        for candidates in outputs:
            yield sorted(candidates, key=lambda each: -each.get("score", 0.0))[: arguments.nbest]


def scoring_error(backward: TranslationPipeline, pairs: list[tuple[str, str]]) -> str | None:
    """Return why a model cannot score all of the pairs, or None if it can."""
    encoded = backward.tokenizer([source for source, _ in pairs], text_target=[target for _, target in pairs])
    lengths = [len(ids) for name in ("input_ids", "labels") for ids in encoded[name]]
    last = backward._max_sequence_length()
    if not all(lengths):
        return "the sentence has no tokens."
    if last is not None and max(lengths, default=0) > last:
        return f"the sentence has {max(lengths)} tokens, and the model takes at most {last}."
    return None


def tee_lines(lines: Iterator[str]) -> tuple[Iterator[str], deque[str]]:
    """Return an iterator of the lines and a queue of the lines that were read."""
    pending: deque[str] = deque()

    def iterate() -> Iterator[str]:
        for line in lines:
            pending.append(line)
            yield line

    return iterate(), pending


def decode_lines(lines: BinaryIO) -> Iterator[str]:
    """Decode lines. A line that is not UTF-8 is reported and yielded as blank."""
    for number, line in enumerate(lines, start=1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            print(f"line {number} is not translated: not UTF-8 (byte {line[error.start]:#04x})", file=sys.stderr)
            yield ""


if __name__ == "__main__":
    main()
