"""Score a checkpoint on a test set: metrics with confidence intervals, or the likelihood of the references.

python -m training.score runs/demo --source test.en --reference test.de
python -m training.score runs/demo --source test.refs.tsv                  # source, references ... in columns
python -m training.score runs/demo --source test.en --reference test.de --compare runs/other
python -m training.score runs/one runs/two --source test.en --reference test.de --compare runs/one    # an ensemble
python -m training.score runs/demo --source test.en --reference test.de --likelihood --per-pair-output scores.tsv
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.significance import PairedTest

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

from .data.files import iter_stripped_lines, read_table, validate_line_counts
from .data.parallel_text import ParallelText, collect_valid_pairs
from .inference.metrics import SequenceMetric, TranslationMetric, compute_pair_nll, transpose_references
from .inference.translators import (
    CHECKPOINTS,
    get_decoding_options,
    load_translator,
    read_run_recipe,
    select_engine,
)
from .run.hardware import configure_malloc, device_type


def main() -> None:
    parser = CommandLineParser("training.score", __doc__)
    parser.add_argument("checkpoint", nargs="+", help=CHECKPOINTS)
    source_help = "Text file with one sentence per line, or .tsv file with references in the further columns."
    parser.add_argument("--source", type=Path, required=True, help=source_help)
    parser.add_argument("--reference", type=Path, nargs="+", default=[], help="One or more text files.")
    compare_help = "Checkpoint or ensemble to compare with, by paired bootstrap resampling (Koehn 2004)."
    parser.add_argument("--compare", nargs="+", help=compare_help)
    metric_help = "Metric. Default: the recipe's."
    parser.add_argument("--metric", choices=("translation", "sequence"), help=metric_help)
    parser.add_argument("--target-lang", help="Language of the Moses tokenizer. Default: the recipe's, or de.")
    samples_help = "Number of bootstrap resamples (default: %(default)s)."
    parser.add_argument("--num-bootstrap-samples", type=int, default=1000, help=samples_help)
    likelihood_help = "Compute the likelihood of the references instead of translating."
    parser.add_argument("--likelihood", "--nll", action="store_true", help=likelihood_help)
    output_help = "With --likelihood: file to write the nats and tokens of each pair to."
    parser.add_argument("--per-pair-output", type=Path, help=output_help)
    parser.add_argument("--num-beams", type=int, help="Beam size. Default: the checkpoint's.")
    parser.add_argument("--length-penalty", type=exponent_type, help="Length penalty. Default: the checkpoint's.")
    batch_help = "Sentences per batch. Default: 64; on a GPU, as many as fit into memory."
    parser.add_argument("--batch-size", type=int, help=batch_help)
    parser.add_argument("--output", type=Path, help="JSON file to write the printed scores to.")
    add_options(parser, "engine", "quantization")
    parser.add_argument("--device", type=device_type, help="Device such as cpu or cuda. Default: a GPU, if available.")
    arguments = parser.parse_args()
    configure_malloc()
    with exit_on_user_error(parser.prog):
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    for path in (arguments.output, arguments.per_pair_output):
        if path is not None and path.exists():
            raise ValueError(f"{path} already exists. Choose another path.")
    if arguments.num_bootstrap_samples < 2 or (arguments.batch_size is not None and arguments.batch_size < 1):
        raise ValueError("--num-bootstrap-samples must be at least 2 and --batch-size at least 1.")
    if arguments.compare == arguments.checkpoint:
        raise ValueError("--compare must be another checkpoint.")
    arguments_of_translation = ("compare", "metric", "num_beams", "length_penalty", "engine", "quantization")
    for name in arguments_of_translation if arguments.likelihood else ():
        if getattr(arguments, name) not in (None, "auto"):
            raise ValueError(f"--likelihood does not translate. Remove {option_name(name)} or --likelihood.")
    if arguments.per_pair_output and not arguments.likelihood:
        raise ValueError("--per-pair-output requires --likelihood.")
    text = read_test_set(arguments.source, arguments.reference)
    if not len(text):
        raise ValueError(f"{arguments.source} contains no sentences.")
    results = compute_nll(text, arguments) if arguments.likelihood else compute_scores(arguments, text)
    print(f"{len(text)} sentences", file=sys.stderr)
    print(json.dumps(results, indent=2, ensure_ascii=False))
    if arguments.output:
        with atomic_write(arguments.output) as path:
            path.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_test_set(source: Path, references: list[Path]) -> ParallelText:
    """Read sources and references. Raises ValueError if the files have different numbers of lines."""
    if (source.suffix == ".tsv") == bool(references):
        raise ValueError("Set --reference and a text file as --source, or use a .tsv file with references as --source.")
    if not references:
        return collect_valid_pairs(read_table(source, ("", "")), str(source), None)
    for path in references:
        validate_line_counts(source, path)
    columns = map(iter_stripped_lines, (source, *references))
    return collect_valid_pairs(zip(*columns, strict=True), ", ".join(map(str, (source, *references))), None)


def compute_scores(arguments: argparse.Namespace, text: ParallelText) -> dict[str, Any]:
    """Compute metrics of one system, or of two with the p-value of their difference."""
    recipe = read_run_recipe(Path(arguments.checkpoint[0]))
    systems: list[tuple[str, list[str]]] = []
    for names in filter(None, (arguments.checkpoint, arguments.compare)):
        translator = load_translator(names, arguments.device)
        systems.append((" + ".join(names), translate(translator, text.sources, arguments)))
    metric = arguments.metric or recipe.get("metric", "translation")
    references: list = text.references or text.targets
    if metric == "sequence":
        scores = {name: SequenceMetric().compute(predictions=output, references=references) for name, output in systems}
        return scores if arguments.compare else scores[systems[0][0]]
    language = arguments.target_lang or recipe.get("target_lang", "de")
    tokenize = TranslationMetric(language).tokenize_with_moses
    columns = transpose_references(references)
    samples = arguments.num_bootstrap_samples
    results = bootstrap_scores(systems, {"bleu": BLEU(), "chrf": CHRF(), "ter": TER()}, columns, samples)
    tokenized = [(name, tokenize(outputs)) for name, outputs in systems]
    tokenized_bleu = {"bleu_tokenized_lc": BLEU(tokenize="none", force=True)}
    return results | bootstrap_scores(tokenized, tokenized_bleu, [tokenize(column) for column in columns], samples)


def bootstrap_scores(systems: list, metrics: dict[str, Any], columns: list, samples: int) -> dict[str, Any]:
    """Compute score, half-width of the 95 % interval and signature per metric, and the p-value of a difference."""
    signatures, table = PairedTest(systems, metrics, columns, test_type="bs", n_samples=samples)()
    results: dict[str, Any] = {}
    for name, (key, signature) in zip(metrics, signatures.items(), strict=True):
        rows = [{"score": float(row.score), "interval_95": float(row.ci)} for row in table[key]]
        if len(rows) == 2:
            is_equal = rows[0]["score"] == rows[1]["score"]  # sacreBLEU counts no resample as more different
            rows[1]["p_value"] = 1.0 if is_equal else float(table[key][1].p_value)
            results[name] = {systems[i][0]: row for i, row in enumerate(rows)}
        else:
            results[name] = rows[0]
        results[f"{name}_signature"] = str(signature)
    return results


def translate(translator: TranslationPipeline, sources: list[str], arguments: argparse.Namespace) -> list[str]:
    options = {"batch_size": arguments.batch_size, "progress": sys.stderr.isatty(), **get_decoding_options(arguments)}
    translator = select_engine(translator, arguments.engine, len(sources), options, arguments.quantization)
    outputs = translator(sources, **options)
    return [output["translation_text"] for output in outputs]


def compute_nll(text: ParallelText, arguments: argparse.Namespace) -> dict[str, Any]:
    """Compute the negative log-likelihood of the first reference of each pair in nats, including EOS."""
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
