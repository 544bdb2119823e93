"""Scores a checkpoint on a test set: translations with confidence intervals, and the model's own score of given pairs.

python -m training.score runs/demo --source test.en --reference test.de
python -m training.score runs/demo --source test.refs.tsv                  # source, references ... in columns
python -m training.score runs/demo --source test.en --reference test.de --compare runs/other
python -m training.score runs/one runs/two --source test.en --reference test.de --compare runs/one    # an ensemble
python -m training.score runs/demo --source test.en --reference test.de --likelihood --per_pair_output scores.tsv
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.significance import PairedTest

from training.data.files import iter_stripped_lines, read_table, validate_line_counts
from training.data.parallel_text import ParallelText, collect_valid_pairs
from training.metrics import SequenceMetric, TranslationMetric, compute_pair_nll, transpose_references
from training.run.hardware import configure_malloc, device_type
from training.translators import CHECKPOINTS, get_decoding_options, load_translator, read_run_recipe
from vanilla_transformer import TranslationPipeline
from vanilla_transformer.pipeline_vanilla_transformer import DEFAULT_BATCH_SIZE
from vanilla_transformer.shared.atomic_io import atomic_write
from vanilla_transformer.shared.command_line import CommandLineParser, exit_on_user_error, exponent_type


def main() -> None:
    parser = CommandLineParser("training.score", __doc__)
    parser.add_argument("checkpoint", nargs="+", help=CHECKPOINTS)
    parser.add_argument("--source", type=Path, required=True, help="text file, or .tsv with references beside it")
    parser.add_argument("--reference", type=Path, nargs="+", default=[], help="one text file or several")
    parser.add_argument(
        "--compare", nargs="+", help="another checkpoint or ensemble: paired bootstrap resampling (Koehn 2004) of both"
    )
    parser.add_argument(
        "--metric", choices=("translation", "sequence"), help="default: as the checkpoint's recipe says"
    )
    parser.add_argument("--target_lang", help="for Moses tokens; default: as the recipe says, or de")
    parser.add_argument(
        "--num_bootstrap_samples", type=int, default=1000, help="bootstrap resamples (default: %(default)s)"
    )
    parser.add_argument(
        "--likelihood", "--nll", action="store_true", help="score the given pairs by the model; no translation"
    )
    parser.add_argument(
        "--per_pair_output", type=Path, help="with --likelihood: file to be made, each line's nats and tokens"
    )
    parser.add_argument("--num_beams", type=int, help="beam size; default: the checkpoint's")
    parser.add_argument("--length_penalty", type=exponent_type, help="default: the checkpoint's")
    parser.add_argument(
        "--batch_size", type=int, help="sentences a batch; default: 64, on a GPU as many as its memory holds"
    )
    parser.add_argument("--output", type=Path, help="JSON file to be made, with everything that is printed")
    parser.add_argument("--device", type=device_type, help="cpu, cuda, ...; default: a GPU where there is one")
    arguments = parser.parse_args()
    configure_malloc()
    with exit_on_user_error(parser.prog):
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    for path in (arguments.output, arguments.per_pair_output):
        if path is not None and path.exists():
            raise ValueError(f"{path} exists already: give a file that does not.")
    if arguments.num_bootstrap_samples < 2 or (arguments.batch_size is not None and arguments.batch_size < 1):
        raise ValueError("--num_bootstrap_samples and --batch_size: give at least 2 and 1.")
    if arguments.compare == arguments.checkpoint:
        raise ValueError("--compare names the same checkpoint: give another one.")
    for name in ("compare", "metric", "num_beams", "length_penalty") if arguments.likelihood else ():
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name} is for translations, and --likelihood makes none: leave one of them out.")
    if arguments.per_pair_output and not arguments.likelihood:
        raise ValueError("--per_pair_output is for --likelihood: give that, too.")
    text = read_test_set(arguments.source, arguments.reference)
    if not len(text):
        raise ValueError(f"{arguments.source} holds no sentences: give a test set with at least one.")
    results = compute_nll(text, arguments) if arguments.likelihood else scores(arguments, text)
    print(f"{len(text)} sentences", file=sys.stderr)
    print(json.dumps(results, indent=2, ensure_ascii=False))
    if arguments.output:
        with atomic_write(arguments.output) as path:
            path.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_test_set(source: Path, references: list[Path]) -> ParallelText:
    """Sources and every reference of each. Raises ValueError for files of different length."""
    if not references:
        if source.suffix != ".tsv":
            raise ValueError("give --reference, or a --source that is a .tsv with references in its further columns.")
        return collect_valid_pairs(read_table(source, ("", "")), str(source), None)
    for path in references:
        validate_line_counts(source, path)
    columns = map(iter_stripped_lines, (source, *references))
    return collect_valid_pairs(zip(*columns, strict=True), ", ".join(map(str, (source, *references))), None)


def scores(arguments: argparse.Namespace, text: ParallelText) -> dict[str, Any]:
    """Scores of one checkpoint's translations, or of two with the probability that the difference is chance."""
    recipe = read_run_recipe(Path(arguments.checkpoint[0]))
    systems: list[tuple[str, list[str]]] = []
    for names in filter(None, (arguments.checkpoint, arguments.compare)):
        translator = load_translator(names, arguments.device)
        systems.append((" + ".join(names), translate(translator, text.sources, arguments)))
    metric = arguments.metric or recipe.get("metric", "translation")
    references: list = text.references or text.targets
    if metric == "sequence":
        found = {
            name: SequenceMetric().compute(predictions=outputs, references=references) for name, outputs in systems
        }
        return found if arguments.compare else found[systems[0][0]]
    language = arguments.target_lang or recipe.get("target_lang", "de")
    moses = TranslationMetric(language).moses
    columns = transpose_references(references)
    results = bootstrap_scores(
        systems, {"bleu": BLEU(), "chrf": CHRF(), "ter": TER()}, columns, arguments.num_bootstrap_samples
    )
    tokenized = [(name, moses(outputs)) for name, outputs in systems]
    papers = {"bleu_tokenized_lc": BLEU(tokenize="none", force=True)}
    return results | bootstrap_scores(
        tokenized, papers, [moses(column) for column in columns], arguments.num_bootstrap_samples
    )


def bootstrap_scores(systems: list, metrics: dict[str, Any], columns: list, samples: int) -> dict[str, Any]:
    """For each metric its score, the half-width of its 95 % interval and its signature; for two systems both, and p."""
    signatures, table = PairedTest(systems, metrics, columns, test_type="bs", n_samples=samples)()
    results: dict[str, Any] = {}
    for name, (key, signature) in zip(metrics, signatures.items(), strict=True):
        rows = [{"score": float(row.score), "interval_95": float(row.ci)} for row in table[key]]
        if len(rows) == 2:
            rows[1]["p_value"] = float(table[key][1].p_value)
            results[name] = {systems[i][0]: row for i, row in enumerate(rows)}
        else:
            results[name] = rows[0]
        results[f"{name}_signature"] = str(signature)
    return results


def translate(translator: TranslationPipeline, sources: list[str], arguments: argparse.Namespace) -> list[str]:
    options = {"batch_size": arguments.batch_size, "progress": sys.stderr.isatty(), **get_decoding_options(arguments)}
    outputs = translator(sources, **options)
    return [output["translation_text"] for output in outputs]


def compute_nll(text: ParallelText, arguments: argparse.Namespace) -> dict[str, Any]:
    """Negative log-likelihood of the first reference of each source, in nats, the end of sentence included."""
    translator = load_translator(arguments.checkpoint, arguments.device)
    scored = compute_pair_nll(
        translator.model, translator.tokenizer, text, arguments.batch_size or DEFAULT_BATCH_SIZE, translator.ensemble
    )
    if arguments.per_pair_output:
        rows = (f"{nats:.4f}\t{tokens}\t{nats / tokens:.4f}\n" for nats, tokens in scored)
        with atomic_write(arguments.per_pair_output) as path:
            path.write_text("nats\ttokens\tnats_per_token\n" + "".join(rows), encoding="utf-8")
    total, tokens = (sum(column) for column in zip(*scored, strict=True))
    mean = total / tokens
    return {"nll_per_token": mean, "perplexity": math.exp(mean), "target_tokens": tokens, "pairs": len(scored)}


if __name__ == "__main__":
    main()
