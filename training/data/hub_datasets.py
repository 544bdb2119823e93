"""Parallel text in a dataset on the Hub or in a local directory."""

from pathlib import Path
from typing import Any

from datasets import DatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError

from vanilla_transformer.shared.command_line import logger

from ..recipe.arguments import DataArguments
from .parallel_text import ParallelText, collect_valid_pairs, pair_of_row

SAVED_DATASET = {"dataset_dict.json", "state.json"}  # files that `save_to_disk` writes


def load_saved(folder: Path) -> DatasetDict:
    """Load a dataset that `save_to_disk` wrote. A dataset without splits is training data."""
    saved = load_from_disk(str(folder))
    return saved if isinstance(saved, DatasetDict) else DatasetDict(train=saved)


def load(arguments: DataArguments, streaming: bool = False) -> Any:
    name, split = str(arguments.dataset_name), "train" if streaming else None
    try:
        if any(Path(name, file).exists() for file in SAVED_DATASET):
            splits = load_saved(Path(name))
            return splits["train"].to_iterable_dataset() if streaming else splits
        return load_dataset(name, arguments.dataset_config, split=split, streaming=streaming)
    except (OSError, ValueError, KeyError, TypeError, DatasetsError) as error:
        raise ValueError(
            f"the dataset {name} could not be loaded ({error}). Connect to the network, or set --data-dir to the "
            f"directory of your files."
        ) from error


def read_dataset(arguments: DataArguments) -> dict[str, ParallelText]:
    if arguments.dataset_name != arguments.data_dir:
        logger.info(f"no files in {arguments.data_dir}: loading the dataset {arguments.dataset_name}")
    splits = load(arguments)
    if not isinstance(splits, DatasetDict) or "train" not in splits:
        raise ValueError(f"the dataset {arguments.dataset_name} has no split named 'train'.")
    languages = (arguments.source_lang, arguments.target_lang)
    corpus = {}
    for split in ("validation", "test") if arguments.streaming else ("train", "validation", "test"):
        if split in splits:
            name = f"{arguments.dataset_name}, {split}"
            rows = (pair_of_row(row, languages, f"{name}, row {i}") for i, row in enumerate(splits[split], start=1))
            corpus[split] = collect_valid_pairs(rows, name, arguments.on_bad_lines)
    return corpus
