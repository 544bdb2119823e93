"""Score a checkpoint on a test set: metrics with confidence intervals, or the likelihood of the references.

    vanilla-transformer score runs/demo --source test.en --reference test.de
    vanilla-transformer score runs/demo --source test.refs.tsv                  # source, references ... in columns
    vanilla-transformer score runs/demo --source test.en --reference test.de --compare runs/other
    vanilla-transformer score runs/one runs/two --source test.en --reference test.de --compare runs/one    # an ensemble
    vanilla-transformer score runs/demo --source test.en --reference test.de --likelihood --per-pair-output scores.tsv

The functions with the same options are `score` and `compute_likelihood` of `training.inference.scoring`.
"""

import json
from typing import Any

from vanilla_transformer.shared.command_line import (
    CHECKPOINTS,
    CommandLineParser,
    add_options,
    checkpoint_name,
    existing_path,
    exit_on_user_error,
    new_path,
    option_name,
    positive_int,
    print_result,
)

TRANSLATION_OPTIONS = ("num_beams", "length_penalty", "max_new_tokens", "engine", "quantization", "target_lang")
TITLES = {"bleu": "BLEU", "chrf": "chrF", "ter": "TER", "bleu_tokenized_lc": "BLEU, Moses tokens, lowercase"}
TITLES |= {"exact_match": "exact match", "wer": "word error rate", "per": "phoneme error rate"}
TITLES |= {"nll_per_token": "nats per token", "perplexity": "perplexity", "target_tokens": "tokens", "pairs": "pairs"}


def make_parser() -> CommandLineParser:
    parser = CommandLineParser("training.score", __doc__)
    add = parser.add_argument
    add("checkpoint", nargs="+", type=checkpoint_name, help=CHECKPOINTS)
    source_help = "Text file with one sentence per line, or .tsv file with references in the further columns."
    add("--source", type=existing_path, required=True, help=source_help)
    add("--reference", type=existing_path, nargs="+", default=[], help="One or more text files.")
    compare_help = "Checkpoint or ensemble to compare with, by paired bootstrap resampling (Koehn 2004)."
    add("--compare", nargs="+", type=checkpoint_name, help=compare_help)
    add("--metric", choices=("translation", "sequence"), help="Metric. Default: the recipe's.")
    samples_help = "Number of bootstrap resamples. Default: %(default)s."
    add("--num-bootstrap-samples", type=positive_int, default=1000, help=samples_help)
    likelihood_help = "Compute the likelihood of the references instead of translating."
    add("--likelihood", "--nll", action="store_true", help=likelihood_help)
    output_help = "With --likelihood: file to write the nats and tokens of each pair to."
    add("--per-pair-output", type=new_path, help=output_help)
    add("--output", type=new_path, help="JSON file to write the scores to.")
    add_options(parser, *TRANSLATION_OPTIONS, "batch_size", "device", "json", "quiet")
    return parser


def main() -> None:
    parser = make_parser()
    arguments = parser.parse_args()
    for name in ("compare", "metric", *TRANSLATION_OPTIONS) if arguments.likelihood else ():
        if getattr(arguments, name) != parser.get_default(name):
            parser.error(f"--likelihood does not translate. Remove {option_name(name)} or --likelihood.")
    if arguments.per_pair_output and not arguments.likelihood:
        parser.error("--per-pair-output requires --likelihood.")

    from vanilla_transformer.shared.atomic_io import atomic_write

    from .inference.scoring import compute_likelihood, score  # slow imports
    from .run.hardware import configure_malloc

    configure_malloc()
    with exit_on_user_error(parser.prog, quiet=arguments.quiet):
        names: tuple[str, ...] = ("compare", "metric", "num_bootstrap_samples", *TRANSLATION_OPTIONS)
        names = ("per_pair_output",) if arguments.likelihood else names
        options = {name: getattr(arguments, name) for name in (*names, "batch_size", "device")}
        compute = compute_likelihood if arguments.likelihood else score
        results = compute(arguments.checkpoint, arguments.source, arguments.reference, **options)
        print_result(results, arguments.json, format_scores(results))
        if arguments.output:
            with atomic_write(arguments.output) as path:
                path.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def format_scores(results: dict[str, Any]) -> str:
    """Return a table with a row per metric and system: rounded scores and intervals, then the signatures."""
    lines, signatures = [], []
    for name, value in results.items():
        if name.endswith("_signature"):
            signatures.append(f"{TITLES[name.removesuffix('_signature')]}: {value}")
        elif name not in TITLES:  # a system and its scores
            lines += [name, *(f"  {line}" for line in format_scores(value).splitlines())]
        elif isinstance(value, dict):
            for system, row in {"": value}.items() if "score" in value else value.items():
                p_value = f"  p = {row['p_value']:.3f}" if "p_value" in row else ""
                text = f"{TITLES[name]:<30} {row['score']:5.1f} ± {row['interval_95']:.1f}  {system}{p_value}"
                lines.append(text.rstrip())
        else:
            number = f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
            lines.append(f"{TITLES[name]:<30} {number:>7}")
    return "\n".join([*lines, *(["", "±: half of the 95 % confidence interval", *signatures] if signatures else [])])


if __name__ == "__main__":
    main()
