"""Parallel text in a dataset: on the Hub, or in a local folder of one."""

from pathlib import Path
from typing import Any

from datasets import DatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError

from training.arguments import DataArguments
from training.data.parallel_text import ParallelText, collect_valid_pairs, pair_of_row


def use_dataset(arguments: DataArguments) -> bool:
    """Whether the recipe's dataset is asked for: it has one, and nobody gave a folder (a slip in its name would train
    on other data)."""
    if arguments.dataset_name is None or arguments.data_dir != DataArguments.data_dir:
        return False
    folder, name = Path(arguments.data_dir), arguments.train_file
    return not (folder / name).exists() and not (folder / f"{name}.{arguments.source_lang}").exists()


def load(arguments: DataArguments, streaming: bool = False) -> Any:
    """The recipe's dataset: a dictionary of its splits, or its training split as a stream."""
    name, split = str(arguments.dataset_name), "train" if streaming else None
    try:
        if Path(name, "dataset_dict.json").exists():  # of save_to_disk
            splits = load_from_disk(name)
            return splits[split].to_iterable_dataset() if streaming else splits
        return load_dataset(name, arguments.dataset_config, split=split, streaming=streaming)
    except (OSError, ValueError, KeyError, TypeError, DatasetsError) as error:
        raise ValueError(
            f"the dataset {name} could not be loaded ({error}): give the folder of your files with --data_dir, or "
            f"connect to the network."
        ) from error


def read_dataset(arguments: DataArguments) -> dict[str, ParallelText]:
    print(f"no files in {arguments.data_dir}: loading the dataset {arguments.dataset_name}")
    splits = load(arguments)
    if not isinstance(splits, DatasetDict) or "train" not in splits:
        raise ValueError(f"the dataset {arguments.dataset_name} has no split named 'train'.")
    languages = (arguments.source_lang, arguments.target_lang)
    wanted = ("validation", "test") if arguments.streaming else ("train", "validation", "test")
    corpus = {}
    for split in wanted:
        if split in splits:
            place = f"{arguments.dataset_name}, {split}"
            rows = (pair_of_row(row, languages, f"{place}, row {i}") for i, row in enumerate(splits[split], start=1))
            corpus[split] = collect_valid_pairs(rows, place, arguments.on_bad_lines)
    return corpus
