"""Score a checkpoint on a test set: metrics with confidence intervals, or the likelihood of the references.

    vanilla-transformer score runs/demo --source test.en --reference test.de
    vanilla-transformer score runs/demo --source test.refs.tsv                  # source, references ... in columns
    vanilla-transformer score runs/demo --source test.en --reference test.de --compare runs/other
    vanilla-transformer score runs/one runs/two --source test.en --reference test.de --compare runs/one    # an ensemble
    vanilla-transformer score runs/demo --source test.en --reference test.de --likelihood --per-pair-output scores.tsv

The functions with the same options are `score` and `compute_likelihood` of `training.inference.scoring`.
"""

import json
from dataclasses import fields
from typing import Any

from vanilla_transformer.shared.command_line import CommandLineParser, existing_path, new_path, option_name

from .inference.settings import CHECKPOINTS, LikelihoodSettings, ScoreSettings

TITLES = {"bleu": "BLEU", "chrf": "chrF", "ter": "TER", "bleu_tokenized_lc": "BLEU, Moses tokens, lowercase"}
TITLES |= {key: key.replace("_", " ") for key in ("exact_match", "token_error_rate", "character_error_rate")}
TITLES |= {"nll_per_token": "nats per token", "perplexity": "perplexity", "target_tokens": "tokens", "pairs": "pairs"}


def main() -> None:
    parser = CommandLineParser("training.score", __doc__)
    add = parser.add_argument
    add("checkpoints", **CHECKPOINTS)
    source_help = "Text file with one sentence per line, or table (.tsv, .csv, .jsonl, ...) with references."
    add("--source", type=existing_path, required=True, help=source_help)
    reference_help = "One or more text files."
    add(
        "--reference",
        dest="references",
        metavar="REFERENCE",
        type=existing_path,
        nargs="+",
        default=[],
        help=reference_help,
    )
    likelihood_help = "Compute the likelihood of the references instead of translating."
    add("--likelihood", "--nll", action="store_true", help=likelihood_help)
    parser.add_settings(ScoreSettings)
    parser.add_settings(LikelihoodSettings, "per_pair_output")
    add("--output", type=new_path, help="JSON file to write the scores to.")
    options = parser.parse_options()
    is_likelihood, output = options.pop("likelihood"), options.pop("output")
    used, others = (LikelihoodSettings, ScoreSettings) if is_likelihood else (ScoreSettings, LikelihoodSettings)
    for name in [each.name for each in fields(others) if each.name not in {each.name for each in fields(used)}]:
        if options.pop(name) != parser.get_default(name):
            if is_likelihood:
                parser.error(f"--likelihood does not translate. Remove {option_name(name)} or --likelihood.")
            parser.error(f"{option_name(name)} requires --likelihood.")

    from vanilla_transformer.shared.atomic_io import atomic_write

    from .inference.scoring import compute_likelihood, score  # slow imports
    from .run.hardware import configure_malloc

    configure_malloc()
    with parser.exit_on_user_error():
        results = (compute_likelihood if is_likelihood else score)(**options)
        parser.print_result(results, format_scores(results))
        if output:
            with atomic_write(output) as path:
                path.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def format_scores(results: dict[str, Any]) -> str:
    """Return a table with a row per metric and system: rounded scores and intervals, then the signatures."""
    lines, signatures = [], []
    for name, value in results.items():
        if name.endswith("_signature"):
            signatures.append(f"{TITLES[name.removesuffix('_signature')]}: {value}")
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
