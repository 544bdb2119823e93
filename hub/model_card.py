"""The card of a checkpoint: metadata for the Hub, text for people, every figure read from the checkpoint's own results.

    python -m hub.model_card runs/mine user/name --license cc-by-4.0

What no file tells is said to be unknown.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

TEMPLATE = Path(__file__).with_name("model_card.md")
METRICS = {  # in all_results.json -> (the Hub's name, for people)
    "test_bleu": ("bleu", "BLEU"),
    "test_chrf": ("chrf", "chrF"),
    "test_ter": ("ter", "TER (lower is better)"),
    "test_exact_match": ("exact_match", "exact match, %"),
    "test_wer": ("wer", "WER, % (lower is better)"),
    "test_per": ("per", "PER, % (lower is better)"),
}
PAPERS = "BLEU-4 on normalised, lower-cased, Moses-tokenized text, as papers on Multi30k report it"
PLACES = ("output_dir", "data_dir", "logging_dir", "tokenizer_path")  # keys of a recipe that name folders
SHOWN = 10  # sample translations, the first ones
UNKNOWN = "not known: no file of the checkpoint tells"


def main() -> None:
    parser = argparse.ArgumentParser(prog="hub.model_card", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="folder")
    parser.add_argument("repo_id", help="user/name, as it will be on the Hub")
    add_statements(parser)
    arguments = parser.parse_args()
    try:
        print(make_card(arguments.checkpoint, arguments.repo_id, **statements(arguments)))
    except (ValueError, OSError) as error:
        print(f"hub.model_card: {error}", file=sys.stderr)
        sys.exit(2)


def add_statements(parser: argparse.ArgumentParser) -> None:
    """What only the owner can say."""
    parser.add_argument("--license", help="of the weights, as the Hub writes it, such as cc-by-4.0; default: unknown")
    parser.add_argument("--dataset", action="append", default=[], help="its name on the Hub; may be given again")
    parser.add_argument("--base-model", help="on the Hub, that it was fine-tuned from")


def statements(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"license": arguments.license, "datasets": arguments.dataset, "base_model": arguments.base_model}


def make_card(
    folder: Path, repo_id: str, license: str | None = None, datasets: list[str] | None = None,
    base_model: str | None = None,
) -> ModelCard:  # fmt: skip
    """The card of the checkpoint in `folder`.

    Raises:
        ValueError: the folder is no checkpoint, or one of its files cannot be read.
    """
    config = read_json(folder / "config.json")
    if config is None:
        raise ValueError(f"{folder} is no checkpoint: it has no config.json.")
    results = read_json(folder / "all_results.json") or {}
    report = read_json(folder / "import_report.json") or {}
    recipe_text = (folder / "recipe.yaml").read_text(encoding="utf-8") if (folder / "recipe.yaml").exists() else ""
    recipe: dict[str, Any] = yaml.safe_load(recipe_text) or {}
    languages = [recipe[name] for name in ("source_lang", "target_lang") if is_language(recipe.get(name))]
    named = datasets or ([recipe["dataset_name"]] if recipe.get("dataset_name") else [])
    base = base_model or recipe.get("base_model")
    is_public = base is not None and is_repository(base)
    name = repo_id.rpartition("/")[2]
    data = ModelCardData(
        language=languages or None,
        license=license,
        library_name="transformers",
        pipeline_tag="translation",
        tags=["vanilla_transformer", "encoder-decoder", "attention-is-all-you-need"],
        datasets=named or None,
        base_model=base if is_public else None,
        model_name=name,
        eval_results=evaluations(results, recipe, named) or None,
    )
    samples = read_samples(folder / "samples.tsv")
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        title=name,
        repo_id=repo_id,
        summary=summary(recipe, report, base, is_public),
        example=json.dumps(samples[0][0] if samples else "A sentence.", ensure_ascii=False),
        tokenizer_trust=", trust_remote_code=True" if (folder / "source_tokenizer.json").exists() else "",
        architecture=architecture(config, results),
        data=about_data(recipe, results, report),
        training=about_training(results, report),
        scores=table_of_scores(results, recipe),
        samples=table_of_samples(samples),
        limits=limits(recipe, results),
        recipe=without_places(recipe_text).rstrip(),
    )


def read_json(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def is_language(name: Any) -> bool:
    """Whether a recipe's language is one for the Hub: two or three letters, "en", not "phon" or "cmd.act"."""
    return isinstance(name, str) and name.isalpha() and len(name) in (2, 3) and name not in ("cmd", "act")


def evaluations(results: dict[str, Any], recipe: dict[str, Any], datasets: list[str]) -> list[EvalResult]:
    """One entry of the model index for each score."""
    test = str(recipe.get("test_file") or "test")
    found = []
    for key, (metric, label) in METRICS.items():
        if key in results:
            signature = results.get(f"{key}_signature")
            found.append(
                EvalResult(
                    task_type="translation",
                    dataset_type=datasets[0] if datasets else "unknown",
                    dataset_name=datasets[0] if datasets else str(recipe.get("corpus", "unknown")),
                    dataset_split=test,
                    metric_type=metric,
                    metric_name=f"{label} ({signature})" if signature else label,
                    metric_value=round(results[key], 2),
                )
            )
    return found


def is_repository(name: str) -> bool:
    """Whether a base model's name is one of the Hub, and not a folder's, which a recipe writes from the root."""
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is not None


def summary(recipe: dict[str, Any], report: dict[str, Any], base: str | None, is_public: bool) -> str:
    what = "The encoder-decoder of [Attention Is All You Need](https://arxiv.org/abs/1706.03762)"
    if report:
        return f"{what}, imported from a checkpoint of the layout `{report['layout']}`."
    languages = [recipe.get("source_lang"), recipe.get("target_lang")]
    if not all(languages):
        return f"{what}. What it was trained for is {UNKNOWN}."
    start = f"fine-tuned from [{base}](https://huggingface.co/{base})" if is_public else "trained from scratch"
    if base and not is_public:
        start = "fine-tuned from a checkpoint that is not on the Hub"
    return f"{what}, {start}: from {languages[0]} to {languages[1]}."


def architecture(config: dict[str, Any], results: dict[str, Any]) -> list[str]:
    keys = config.get
    shared = keys("share_encoder_decoder_embeddings", True)
    return [
        f"{keys('encoder_layers')} encoder and {keys('decoder_layers')} decoder layers, width {keys('d_model')}, "
        f"{keys('encoder_attention_heads')} heads, feed-forward width {keys('encoder_ffn_dim')}",
        f"{keys('norm_position')}-norm, {keys('position_embedding_type')} positions",
        f"vocabulary: {keys('vocab_size'):,} tokens, shared by both sides"
        if shared
        else f"vocabularies: {keys('vocab_size'):,} source and {keys('decoder_vocab_size'):,} target tokens",
        f"parameters: {results['parameters']:,}" if "parameters" in results else f"parameters: {UNKNOWN}",
    ]


def about_data(recipe: dict[str, Any], results: dict[str, Any], report: dict[str, Any]) -> list[str]:
    if report or not results:
        return [f"Training data: {UNKNOWN}."]
    corpus = {"demo": "the embedded English-German corpus", "random": "random pairs"}.get(recipe.get("corpus", ""), "")
    name = corpus or recipe.get("dataset_name") or "text files of the owner"
    lines = [f"{name}; {results['train_pairs']:,} training pairs" if "train_pairs" in results else name]
    if results.get("train_pairs_dropped"):
        told = ", ".join(f"{reason}: {number}" for reason, number in dict(results["train_pairs_dropped"]).items())
        lines.append(f"left out: {told}")
    if "train_sha256" in results:
        lines.append(f"SHA-256 of the training text: `{results['train_sha256']}`")
    return lines


def about_training(results: dict[str, Any], report: dict[str, Any]) -> list[str]:
    if report:
        difference = (report.get("parity") or {}).get("largest_difference_of_log_probabilities")
        lines = [f"Trained elsewhere; cost: {UNKNOWN}."]
        if difference is not None:
            lines.append(
                f"Compared with the original code on random batches: log-probabilities within {difference:.1g}."
            )
        return lines
    if not results:
        return [f"Cost: {UNKNOWN}."]
    known = (
        "updates",
        "train_target_tokens",
        "train_runtime",
        "device",
        "processes",
        "threads",
        "cpu_cores",
        "precision",
    )
    if missing := [name for name in known if name not in results]:
        return [f"Cost: {UNKNOWN} ({missing[0]} is missing in its results)."]
    versions = ", ".join(f"{name} {version}" for name, version in results.get("versions", {}).items())
    return [
        f"{results['updates']:,} updates, {results['train_target_tokens']:,} target tokens",
        f"{results['train_runtime'] / 60:.1f} minutes on {results['device']}, {results['processes']} processes with "
        f"{results['threads']} threads each ({results['cpu_cores']} CPU cores), {results['precision']}",
        f"energy: {UNKNOWN}",
        f"versions: {versions}",
    ]


def table_of_scores(results: dict[str, Any], recipe: dict[str, Any]) -> str:
    rows = []
    for key, (_, label) in METRICS.items():
        if key in results:
            signature = results.get(f"{key}_signature")
            rows.append(f"| {label} | {results[key]:.2f} | {f'`{signature}`' if signature else ''} |")
    if "test_bleu_tokenized_lc" in results:
        rows.append(f"| BLEU, papers' protocol | {results['test_bleu_tokenized_lc']:.2f} | {PAPERS} |")
    if not rows:
        return f"Scores: {UNKNOWN}."
    beams = recipe.get("num_beams")
    head = f"On `{recipe.get('test_file') or 'the test set'}`, beam size {beams}, one run.\n\n"
    return head + "\n".join(["| score | value | protocol |", "|---|---|---|", *rows])


def read_samples(path: Path) -> list[list[str]]:
    if not path.exists():
        return []
    return [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:]]


def table_of_samples(samples: list[list[str]]) -> str:
    if not samples:
        return "None were kept."
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in samples[:SHOWN]]
    head = f"The first {min(SHOWN, len(samples))} of the test set, not picked:\n\n"
    return head + "\n".join(["| source | reference | output |", "|---|---|---|", *rows])


def limits(recipe: dict[str, Any], results: dict[str, Any]) -> list[str]:
    lines = [
        "It knows what its training data show: other domains, other kinds of text and other scripts come out wrong."
    ]
    if recipe.get("corpus") == "demo":
        lines.append("Its corpus comes out of a small grammar: it translates sentences of that grammar and no others.")
    if recipe.get("max_length"):
        lines.append(f"Trained on sentences of at most {recipe['max_length']} tokens.")
    if "test_bleu" in results or "test_exact_match" in results:
        lines.append("Scores are of one run on one test set; another seed gives somewhat different ones.")
    lines.append("It has not been examined for biases of its training data.")
    return lines


def without_places(recipe_text: str) -> str:
    """The recipe without paths of the owner's machine."""
    lines = []
    for line in recipe_text.splitlines(keepends=True):
        key, _, value = line.partition(":")
        if key not in PLACES and not (key == "base_model" and not is_repository(value.strip())):
            lines.append(line)
    return "".join(lines)


if __name__ == "__main__":
    main()
