"""Model card of a checkpoint: Hub metadata and a description, with figures from its saved results."""

import json
import re
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResultEntry, ModelCard, ModelCardData, eval_result_entries_to_yaml

from vanilla_transformer.shared.command_line import accept_settings

from ..run_files import (
    CheckedMapping,
    count_parameters,
    is_repository,
    language_name,
    local_paths,
    read_mapping,
    read_samples,
    sanitize_recipe,
)
from . import CardSettings

TEMPLATE = Path(__file__).with_name("model_card.md")
METRICS = {  # key of all_results.json -> label
    "test_bleu": "BLEU",
    "test_chrf": "chrF",
    "test_ter": "TER (lower is better)",
    "test_exact_match": "exact match, %",
    "test_token_error_rate": "token error rate, % (lower is better)",
    "test_character_error_rate": "character error rate, % (lower is better)",
    "test_per": "token error rate, % (lower is better)",  # in a run of version 0.1
}
SYNTHETIC = {"demo": "the built-in English-German corpus", "random": "random pairs of numbers"}
IMAGES = ("training_curve.png", "attention_*.png")  # uploaded and shown
MULTI30K = re.compile(r"multi30k|test_201[678]_(flickr|mscoco)", re.IGNORECASE)  # names of its data and test sets
NON_LANGUAGE_NAMES = ("cmd", "act", "src", "tgt", "trg", "in", "out")  # column names that resemble language codes


@accept_settings(CardSettings)
def make_card(checkpoint: str | Path, repo_id: str, revision: str = "main", **options: Any) -> ModelCard:
    """Generate the model card of a checkpoint.

    Args:
        checkpoint: Checkpoint directory.
        repo_id: Name of the repository, user/name.
        revision: Branch that the examples of the card load.
        options: Fields of `CardSettings`. `datasets` is used if the run did not log its data.

    Raises:
        ValueError: The directory is not a checkpoint, one of its files cannot be read, or an argument contradicts the
            run's files.
    """
    settings, checkpoint = CardSettings(**options), Path(checkpoint)
    if not (checkpoint / "config.json").is_file():
        raise ValueError(f"{checkpoint} is not a checkpoint: it has no config.json.")
    files = read_run(checkpoint)
    results, recipe, data = files["results"], files["recipe"], files["data"]
    datasets = [settings.datasets] if isinstance(settings.datasets, str) else list(settings.datasets or ())
    base, known_datasets = resolve_base_model(recipe, settings.base_model), resolve_datasets(data, datasets)
    hub_base = base if base and is_repository(base) else None
    codes, title = languages(recipe, data), repo_id.rpartition("/")[2]
    metadata = ModelCardData(
        language=[each.lower() for each in codes if is_language(each)] or None,
        license=settings.license,
        library_name="transformers",
        pipeline_tag="translation",
        tags=["vanilla_transformer", "encoder-decoder", "attention-is-all-you-need"],
        datasets=known_datasets or None,
        base_model=hub_base,
    )
    samples = read_samples(checkpoint / "samples.tsv") if results else []
    return ModelCard.from_template(
        metadata,
        template_path=str(TEMPLATE),
        **files,
        title=title,
        repo_id=repo_id,
        revision=revision,
        pair=[language_name(each) for each in codes],
        base=base,
        hub_base=hub_base,
        example=json.dumps(samples[0][0] if samples else "A sentence.", ensure_ascii=False),
        metrics=METRICS,
        known_sources=("hub", *SYNTHETIC),
        describe_split=describe_split,
        is_multi30k=MULTI30K.search(describe_split(data.mapping("test"))) is not None,
        escape_markdown=escape_markdown,
        parameters=count_parameters(checkpoint),
        owner_datasets=datasets,
        samples=samples,
        images=[path.name for name in IMAGES for path in sorted(checkpoint.glob(name)) if path.is_file() and results],
        recipe_text=sanitize_recipe(recipe, results, local_paths(checkpoint))[0].rstrip(),
    )


def read_run(checkpoint: Path) -> dict[str, Any]:
    """Read the files that describe a checkpoint. Those of a run are empty if the model was imported."""
    names = {"config": "config.json", "results": "all_results.json", "recipe": "recipe.yaml"}
    files = {key: read_mapping(checkpoint / name) for key, name in (names | {"report": "import_report.json"}).items()}
    if files["report"]:  # other files in the directory belong to a different model
        files |= {key: CheckedMapping({}, names[key]) for key in ("results", "recipe")}
    return files | {"data": files["results"].mapping("data")}


def make_eval_results(checkpoint: Path) -> dict[str, bytes]:
    """Return files with the scores on a data set of the Hub, which shows them on the page of the model."""
    files = read_run(checkpoint)
    results, test = files["results"], files["data"].mapping("test")
    contents = {}
    for key in [key for key in METRICS if key in results and test.text("source") == "hub"]:
        details = (METRICS[key], test.text("split"), results.text(f"{key}_signature"))
        entry = EvalResultEntry(
            dataset_id=test.text("dataset") or "unknown",
            task_id=test.text("config") or "default",
            value=round(results.number(key), 2),
            notes=", ".join(filter(None, details)),
        )
        text = yaml.safe_dump(eval_result_entries_to_yaml([entry]), sort_keys=False, allow_unicode=True)
        contents[f".eval_results/{key.removeprefix('test_')}.yaml"] = text.encode()
    return contents


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
    """Return the Hub datasets that the run has read. If it did not log them, return those of the owner."""
    parts = [data.mapping(split) for split in ("train", "validation")]
    read = list(dict.fromkeys(part.text("dataset") or "unknown" for part in parts if part.text("source") == "hub"))
    source = parts[0].text("source")
    wrong = [name for name in owner_datasets if name not in read] if source in ("hub", *SYNTHETIC) else []
    if wrong:
        used = ", ".join(read) or SYNTHETIC[str(source)]
        raise ValueError(f"--dataset {wrong[0]} contradicts all_results.json: the run used {used}. Remove the option.")
    return read or owner_datasets


def resolve_base_model(recipe: CheckedMapping, owner_base: str | None) -> str | None:
    """Return the Hub id or path of the model that was fine-tuned, or None."""
    base = recipe.text("base_model")
    if owner_base and recipe and owner_base != base and (base is None or is_repository(base)):
        start = f"fine-tuned {base}" if base else "started from random weights"
        raise ValueError(f"--base-model {owner_base} contradicts recipe.yaml: the run {start}. Remove the option.")
    return owner_base or base


def describe_split(part: CheckedMapping) -> str:
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


def escape_markdown(text: str) -> str:
    """Return the text on one line, with escaped Markdown characters."""
    return re.sub(r"([\\`*_\[\]<>|#~&$])", r"\\\1", " ".join(text.split()))
