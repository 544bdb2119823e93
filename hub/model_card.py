"""Generate the model card of a checkpoint: Hub metadata and a description, with figures from its saved results.

    python -m hub.model_card runs/mine user/name --license cc-by-4.0

The data sets are those that the run logged when it read the data, not those in its recipe. The card states which values
are unknown.
"""

import argparse
import json
import re
from argparse import ArgumentTypeError
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hub.hub_errors import hub_error_message
from hub.run_files import (
    CheckedMapping,
    count_parameters,
    is_repository,
    local_paths,
    read_mapping,
    read_samples,
    sanitize_recipe,
)
from vanilla_transformer.shared.command_line import CommandLineParser, exit_on_user_error

TEMPLATE = Path(__file__).with_name("model_card.md")
METRICS = {  # key of all_results.json -> (name on the Hub, label)
    "test_bleu": ("bleu", "BLEU"),
    "test_chrf": ("chrf", "chrF"),
    "test_ter": ("ter", "TER (lower is better)"),
    "test_exact_match": ("exact_match", "exact match, %"),
    "test_wer": ("wer", "WER, % (lower is better)"),
    "test_per": ("per", "PER, % (lower is better)"),
}
MULTI30K_PROTOCOL = "BLEU-4 on normalized, lower-cased, Moses-tokenized text, as papers on Multi30k report it"
SYNTHETIC = {"demo": "the built-in English-German corpus", "random": "random pairs of numbers"}
NON_LANGUAGE_NAMES = ("cmd", "act", "src", "tgt", "trg", "in", "out")  # column names that resemble language codes
NUM_SAMPLES_SHOWN = 10
UNKNOWN = "unknown (not stored in the checkpoint)"


def main() -> None:
    parser = CommandLineParser("hub.model_card", __doc__)
    parser.add_argument("checkpoint", type=Path, help="Path to the checkpoint directory.")
    parser.add_argument("repo_id", help="Name of the repository on the Hub, user/name.")
    add_metadata_options(parser)
    arguments = parser.parse_args()
    with exit_on_user_error(parser.prog, formatter=partial(hub_error_message, repo_id=arguments.repo_id)):
        print(make_card(arguments.checkpoint, arguments.repo_id, **card_metadata(arguments)))


def add_metadata_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for metadata that only the owner knows."""
    parser.add_argument("--license", type=license_id, help="License identifier of the Hub, such as cc-by-4.0.")
    parser.add_argument("--dataset", action="append", default=[], type=hub_id, help="Hub id of the training data.")
    parser.add_argument("--base_model", type=hub_id, help="Hub id of the model that was fine-tuned.")


def license_id(text: str) -> str:
    """Return the value of `--license`. Raise ArgumentTypeError if it is not a license identifier."""
    if not re.fullmatch(r"[a-z][a-z0-9]*([.+-]+[a-z0-9]+)*\+{0,2}", text):
        raise ArgumentTypeError(f"{text!r} is not a license of https://huggingface.co/docs/hub/repositories-licenses")
    return text


def hub_id(text: str) -> str:
    """Return the value of an option. Raise ArgumentTypeError if it is not a Hub id."""
    if not is_repository(text):
        raise ArgumentTypeError(f"{text!r} is not a Hub id. Use the form user/name.")
    return text


def card_metadata(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"license": arguments.license, "datasets": arguments.dataset, "base_model": arguments.base_model}


def make_card(
    checkpoint: Path, repo_id: str, license: str | None = None, datasets: list[str] | None = None,
    base_model: str | None = None,
) -> ModelCard:  # fmt: skip
    """Generate the model card of a checkpoint.

    Args:
        checkpoint: Checkpoint directory.
        repo_id: Name of the repository, user/name.
        license: License identifier of the Hub.
        datasets: Training data according to the owner, used if the run did not log them.
        base_model: Fine-tuned model according to the owner.

    Raises:
        ValueError: The directory is not a checkpoint, one of its files cannot be read, or an argument contradicts the
            run's files.
    """
    if not (checkpoint / "config.json").is_file():
        raise ValueError(f"{checkpoint} is not a checkpoint: it has no config.json.")
    names = ("config.json", "all_results.json", "import_report.json", "recipe.yaml")
    config, results, report, recipe = (read_mapping(checkpoint / name) for name in names)
    if report:  # other files in the directory belong to a different model
        results, recipe = CheckedMapping({}, results.name), CheckedMapping({}, recipe.name)
    data = results.mapping("data")
    known_datasets = resolve_datasets(data, datasets or [])
    base = resolve_base_model(recipe, base_model)
    name = repo_id.rpartition("/")[2]
    metadata = ModelCardData(
        language=[each.lower() for each in languages(recipe, data) if is_language(each)] or None,
        license=license,
        library_name="transformers",
        pipeline_tag="translation",
        tags=["vanilla_transformer", "encoder-decoder", "attention-is-all-you-need"],
        datasets=known_datasets or None,
        base_model=base if base and is_repository(base) else None,
        model_name=name,
        eval_results=eval_results(results, data) or None,
    )
    samples = read_samples(checkpoint / "samples.tsv") if results else []
    return ModelCard.from_template(
        metadata,
        template_path=str(TEMPLATE),
        title=name,
        repo_id=repo_id,
        summary=summary(recipe, report, data, base),
        example=json.dumps(samples[0][0] if samples else "A sentence.", ensure_ascii=False),
        architecture=architecture_lines(config, count_parameters(checkpoint)),
        data=data_lines(results, data, datasets or []),
        training=training_lines(results, report),
        scores=score_table(results, recipe, data),
        samples=sample_table(samples),
        limits=limitations(recipe, results, data, base),
        recipe=sanitize_recipe(recipe, results, local_paths(checkpoint))[0].rstrip(),
    )


def is_language(name: str) -> bool:
    """Return whether a recipe's language is a language code of 2 or 3 letters: "en", but not "phon" or "cmd.act"."""
    return name.isascii() and name.isalpha() and len(name) in (2, 3) and name.lower() not in NON_LANGUAGE_NAMES


def languages(recipe: CheckedMapping, data: CheckedMapping) -> list[str]:
    """Return the source and target language, or [] if they are unknown."""
    source = data.mapping("train").text("source")
    if source in SYNTHETIC:
        return ["en", "de"] if source == "demo" else []
    pair = [recipe.text("source_lang"), recipe.text("target_lang")]
    return [each for each in pair if each] if all(pair) else []


def resolve_datasets(data: CheckedMapping, owner_datasets: list[str]) -> list[str]:
    """Return the Hub data sets that the run has read. If it did not log them, return those of the owner.

    Raises:
        ValueError: The owner's data sets contradict the log.
    """
    parts = [data.mapping(split) for split in ("train", "validation")]
    read = list(dict.fromkeys(part.text("dataset") or "unknown" for part in parts if part.text("source") == "hub"))
    source = parts[0].text("source")
    wrong = [name for name in owner_datasets if name not in read] if source in ("hub", *SYNTHETIC) else []
    if wrong:
        used = ", ".join(read) or SYNTHETIC[str(source)]
        raise ValueError(f"--dataset {wrong[0]} contradicts all_results.json: the run used {used}. Remove the option.")
    return read or owner_datasets


def resolve_base_model(recipe: CheckedMapping, owner_base: str | None) -> str | None:
    """Return the Hub id or path of the model that was fine-tuned, or None.

    Raises:
        ValueError: The owner's model contradicts the recipe.
    """
    base = recipe.text("base_model")
    if owner_base and recipe and owner_base != base and (base is None or is_repository(base)):
        start = f"fine-tuned {base}" if base else "started from random weights"
        raise ValueError(f"--base_model {owner_base} contradicts recipe.yaml: the run {start}. Remove the option.")
    return owner_base or base


def describe_split(part: CheckedMapping) -> str:
    """Return a description of the origin of a split."""
    source = part.text("source")
    if source in SYNTHETIC:
        return SYNTHETIC[source]
    if source == "hub":
        config = part.text("config")
        return f"{part.text('dataset')}{f' ({config})' if config else ''}, {part.text('split')}"
    if source == "local_dataset":
        return f"a local data set of the owner, {part.text('split')}"
    if source == "files":
        return f"text files of the owner ({', '.join(part.texts('files'))})"
    return "unknown"


def eval_results(results: CheckedMapping, data: CheckedMapping) -> list[EvalResult]:
    """Return one entry of the Hub's model index per score."""
    test = data.mapping("test")
    is_public = test.text("source") == "hub"
    entries = []
    for key, (metric, label) in METRICS.items():
        if key in results:
            signature = results.text(f"{key}_signature")
            entries.append(
                EvalResult(
                    task_type="translation",
                    dataset_type=test.text("dataset") or "unknown" if is_public else "unknown",
                    dataset_name=test.text("dataset") or "unknown" if is_public else describe_split(test),
                    dataset_config=test.text("config") if is_public else None,
                    dataset_split=(test.text("split") if is_public else None) or "test",
                    metric_type=metric,
                    metric_name=f"{label} ({signature})" if signature else label,
                    metric_value=round(results.number(key), 2),
                )
            )
    return entries


def summary(recipe: CheckedMapping, report: CheckedMapping, data: CheckedMapping, base: str | None) -> str:
    model = "The encoder-decoder of [Attention Is All You Need](https://arxiv.org/abs/1706.03762)"
    link = f"[{base}](https://huggingface.co/{base})" if base and is_repository(base) else None
    owner_note = f" According to the owner, it was fine-tuned from {link}." if link and not recipe else ""
    if report:
        layout = report.text("layout")
        origin = f"with the layout `{layout}`" if layout else f"whose layout is {UNKNOWN}"
        return f"{model}, imported from a checkpoint {origin}.{owner_note}"
    if data.mapping("train").text("source") == "random" and not base:
        return f"{model}, trained from scratch on random pairs of numbers, which it can only memorize."
    pair = languages(recipe, data)
    if not pair:
        return f"{model}. Its languages are {UNKNOWN}.{owner_note}"
    rank = recipe.count("lora_rank")
    method = f"fine-tuned with LoRA (rank {rank})" if rank else "fine-tuned"
    start = f"{method} from {link or 'a checkpoint that is not on the Hub'}" if base else "trained from scratch"
    return f"{model}, {start}: from {pair[0]} to {pair[1]}."


def architecture_lines(config: CheckedMapping, parameters: int | None) -> list[str]:
    def both(key: str) -> str:
        encoder, decoder = config.count(f"encoder_{key}"), config.count(f"decoder_{key}")
        return known(encoder) if encoder == decoder else f"{known(encoder)} (encoder) and {known(decoder)} (decoder)"

    def known(value: int | None) -> str:
        return "unknown" if value is None else f"{value:,}"

    shared = config.values.get("share_encoder_decoder_embeddings", True) is True
    source, target = known(config.count("vocab_size")), known(config.count("decoder_vocab_size"))
    return [
        f"{known(config.count('encoder_layers'))} encoder and {known(config.count('decoder_layers'))} decoder layers, "
        f"hidden size {known(config.count('d_model'))}, attention heads: {both('attention_heads')}, feed-forward "
        f"dimension: {both('ffn_dim')}",
        f"{config.text('norm_position') or 'unknown'}-norm, {config.text('position_embedding_type') or 'unknown'} "
        f"positions",
        f"embeddings: {source} tokens, shared by source and target"
        if shared
        else f"embeddings: {source} source and {target} target tokens",
        f"parameters: {UNKNOWN if parameters is None else f'{parameters:,}'}",
    ]


def data_lines(results: CheckedMapping, data: CheckedMapping, owner_datasets: list[str]) -> list[str]:
    owner = [f"training data according to the owner: {', '.join(owner_datasets)}"] if owner_datasets else []
    train = data.mapping("train")
    lines = [] if train else [f"Training data: {UNKNOWN}."]
    for split, label in (("train", "training"), ("validation", "validation"), ("test", "test")):
        if not (part := data.mapping(split)):
            continue
        line = f"{label}: {'held out from the training data' if 'split_off' in part else describe_split(part)}"
        if (pairs := part.count("pairs")) is not None:
            twice = part.values.get("both_directions") is True
            line += f"; {pairs // 2:,} pairs, each in both directions" if twice else f"; {pairs:,} pairs"
        if references := part.text("references"):
            line += f"; additional references in {references}"
        if sha256 := part.text("sha256"):
            line += f"; SHA-256 of the text: `{sha256}`"
        lines.append(line)
    trained, read = results.count("train_pairs"), results.count("train_pairs_read")
    lines += [f"trained on {trained:,} pairs"] if trained is not None else []
    lines += [f"read during training: {read:,} pairs"] if read is not None else []
    if not train and (sha256 := results.text("train_sha256")):
        lines.append(f"SHA-256 of the training text: `{sha256}`")
    dropped = results.values.get("train_pairs_dropped")
    if isinstance(dropped, dict):
        counts = results.mapping("train_pairs_dropped")
        if counts:
            lines.append(f"excluded: {', '.join(f'{reason}: {counts.count(reason) or 0:,}' for reason in dropped)}")
    elif dropped:
        lines.append(f"excluded: {results.count('train_pairs_dropped'):,} pairs")
    return lines if train.text("source") in ("hub", *SYNTHETIC) else lines + owner


def training_lines(results: CheckedMapping, report: CheckedMapping) -> list[str]:
    if report:
        difference = report.mapping("parity").number("largest_difference_of_log_probabilities")
        lines = [f"Imported; training cost: {UNKNOWN}."]
        if difference is not None:
            lines.append(f"Log-probabilities differ from those of the original code by at most {difference:.1g}.")
        return lines
    if not results:
        return [f"Training cost: {UNKNOWN}."]
    keys = "updates train_target_tokens train_runtime device processes threads cpu_cores precision"
    if missing := [key for key in keys.split() if key not in results]:
        return [f"Training cost: {UNKNOWN} ({missing[0]} is missing in all_results.json)."]
    versions = results.mapping("versions")
    count = results.count
    return [
        f"{count('updates'):,} updates, {count('train_target_tokens'):,} target tokens",
        f"{results.number('train_runtime') / 60:.1f} minutes on {results.text('device')}; processes: "
        f"{count('processes')}, threads per process: {count('threads')} (CPU cores: {count('cpu_cores')}); "
        f"{results.text('precision')}",
        f"energy: {UNKNOWN}",
        "versions: " + (", ".join(f"{name} {versions.text(name)}" for name in versions.values) or UNKNOWN),
    ]


def score_table(results: CheckedMapping, recipe: CheckedMapping, data: CheckedMapping) -> str:
    rows = []
    for key, (_, label) in METRICS.items():
        if key in results:
            signature = results.text(f"{key}_signature")
            protocol = f"`{signature}`".replace("|", r"\|") if signature else ""  # a pipe ends a cell, also in code
            rows.append(f"| {label} | {results.number(key):.2f} | {protocol} |")
    if "test_bleu_tokenized_lc" in results:
        rows.append(f"| Multi30k BLEU | {results.number('test_bleu_tokenized_lc'):.2f} | {MULTI30K_PROTOCOL} |")
    if not rows:
        return f"Scores: {UNKNOWN}."
    test, beams = data.mapping("test"), recipe.count("num_beams")
    test_set = describe_split(test) if test else UNKNOWN
    head = f"Test set: {test_set}; beam size: {UNKNOWN if beams is None else beams}; one run.\n\n"
    return head + "\n".join(["| score | value | protocol |", "|---|---|---|", *rows])


def sample_table(samples: list[list[str]]) -> str:
    if not samples:
        return "No samples were saved."
    rows = ["| " + " | ".join(map(escape_markdown, row)) + " |" for row in samples[:NUM_SAMPLES_SHOWN]]
    head = f"The first {min(NUM_SAMPLES_SHOWN, len(samples))} translations of the test set, not cherry-picked:\n\n"
    return head + "\n".join(["| source | reference | output |", "|---|---|---|", *rows])


def escape_markdown(text: str) -> str:
    """Return the text on one line, with escaped Markdown characters."""
    return re.sub(r"([\\`*_\[\]<>|#~&$])", r"\\\1", " ".join(text.split()))


def limitations(recipe: CheckedMapping, results: CheckedMapping, data: CheckedMapping, base: str | None) -> list[str]:
    lines = ["Expect wrong translations for domains, text types and scripts that the training data do not contain."]
    if data.mapping("train").text("source") == "demo" and not base:
        lines.append("A grammar generated the training data. The model translates only sentences of that grammar.")
    if results and (longest := recipe.count("max_length")):
        lines.append(f"{'Fine-tuned' if base else 'Trained'} on sentences of at most {longest} tokens.")
    if "test_bleu" in results or "test_exact_match" in results:
        lines.append("Scores are from one run on one test set; another seed gives somewhat different scores.")
    lines.append("The model has not been evaluated for biases in its training data.")
    return lines


if __name__ == "__main__":
    main()
