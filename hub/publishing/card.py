"""Model card of a checkpoint: Hub metadata and a description, with figures from its saved results."""

import json
import re
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..run_files import (
    CheckedMapping,
    count_parameters,
    is_repository,
    local_paths,
    read_mapping,
    read_samples,
    sanitize_recipe,
)

TEMPLATE = Path(__file__).with_name("model_card.md")
METRICS = {  # key of all_results.json -> (name on the Hub, label)
    "test_bleu": ("bleu", "BLEU"),
    "test_chrf": ("chrf", "chrF"),
    "test_ter": ("ter", "TER (lower is better)"),
    "test_exact_match": ("exact_match", "exact match, %"),
    "test_wer": ("wer", "WER, % (lower is better)"),
    "test_per": ("per", "PER, % (lower is better)"),
}
SYNTHETIC = {"demo": "the built-in English-German corpus", "random": "random pairs of numbers"}
NON_LANGUAGE_NAMES = ("cmd", "act", "src", "tgt", "trg", "in", "out")  # column names that resemble language codes
UNKNOWN = "unknown (not stored in the checkpoint)"


def make_card(
    checkpoint: str | Path, repo_id: str, *, license: str | None = None, datasets: list[str] | None = None,
    base_model: str | None = None,
) -> ModelCard:  # fmt: skip
    """Generate the model card of a checkpoint.

    Args:
        checkpoint: Checkpoint directory.
        repo_id: Name of the repository, user/name.
        license: License identifier of the Hub.
        datasets: Hub ids of the training data, used if the run did not log them.
        base_model: Hub id of the model that was fine-tuned.

    Raises:
        ValueError: The directory is not a checkpoint, one of its files cannot be read, or an argument contradicts the
            run's files.
    """
    checkpoint = Path(checkpoint)
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
        pair=languages(recipe, data),
        link=f"[{base}](https://huggingface.co/{base})" if base and is_repository(base) else None,
        example=json.dumps(samples[0][0] if samples else "A sentence.", ensure_ascii=False),
        unknown=UNKNOWN,
        metrics=METRICS,
        known_sources=("hub", *SYNTHETIC),
        describe_split=describe_split,
        escape_markdown=escape_markdown,
        config=config,
        results=results,
        report=report,
        recipe=recipe,
        data=data,
        base=base,
        parameters=count_parameters(checkpoint),
        owner_datasets=datasets,
        samples=samples,
        recipe_text=sanitize_recipe(recipe, results, local_paths(checkpoint))[0].rstrip(),
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
    """Return the Hub datasets that the run has read. If it did not log them, return those of the owner.

    Raises:
        ValueError: The owner's datasets contradict the log.
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
        raise ValueError(f"--base-model {owner_base} contradicts recipe.yaml: the run {start}. Remove the option.")
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


def escape_markdown(text: str) -> str:
    """Return the text on one line, with escaped Markdown characters."""
    return re.sub(r"([\\`*_\[\]<>|#~&$])", r"\\\1", " ".join(text.split()))
