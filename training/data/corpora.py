"""The corpus of a run: its splits out of files or a dataset, or made up; saying what was left out."""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from training.arguments import DataArguments
from training.data.files import SEVERAL_TARGETS, TABLE_SUFFIXES, add_references, read_file
from training.data.hub_datasets import read_dataset, use_dataset
from training.data.parallel_text import ParallelText, some_lines
from training.demo import corpus as demo

RANDOM_PAIRS, RANDOM_LENGTH, RANDOM_WORDS = 64, 98, 4996  # of the corpus "random": see random_pairs


def read_corpus(arguments: DataArguments) -> dict[str, ParallelText]:
    """The splits "train" (not when streaming), "validation" and, where there is one, "test".

    From files in `data_dir`; where nobody gave a folder and the default one has none, from the recipe's dataset on the
    Hub; or made up. Pairs with a blank side or bytes that are not UTF-8, and training pairs whose source is also in the
    validation or test set, are treated as `on_bad_lines` and `on_eval_overlap` say.

    Raises:
        ValueError: files that are missing, of different length or not what their name says, bad lines; names the place.
    """
    if arguments.corpus == "demo":
        return {name: _from_pairs(pairs, "demo") for name, pairs in demo.generate().items()}
    if arguments.corpus == "random":
        return {"train": _from_pairs(random_pairs(), "random")}
    if use_dataset(arguments):
        corpus = read_dataset(arguments)
    else:
        names = {"train": arguments.train_file, "validation": arguments.validation_file, "test": arguments.test_file}
        if arguments.streaming:
            del names["train"]
        corpus = {split: read_file(arguments, name) for split, name in names.items() if name is not None}
    for split, text in corpus.items():
        if not len(text):
            raise ValueError(f"the {split} set has no pairs.")
        text.origin = describe_split(arguments, split)
    if arguments.test_references is not None:
        if "test" not in corpus:
            raise ValueError(f"test_references={arguments.test_references} needs test data: set test_file.")
        add_references(corpus["test"], Path(arguments.data_dir) / arguments.test_references)
    if "train" not in corpus:
        if corpus and arguments.on_eval_overlap == "keep":
            print("streaming: training pairs are not compared with validation and test data. Use on_eval_overlap=drop.")
        return corpus
    if corpus["train"].references:
        raise ValueError(f"{arguments.train_file} {SEVERAL_TARGETS}")
    if "validation" not in corpus and arguments.validation_size:
        corpus = _split_off_validation(corpus, arguments.validation_size)
    corpus = _filter_overlap(corpus, arguments.on_eval_overlap)
    return corpus | {"train": _add_swapped_pairs(corpus["train"])} if arguments.both_directions else corpus


def _add_swapped_pairs(text: ParallelText) -> ParallelText:
    """The pairs, and then each with its sides exchanged."""
    both = ParallelText(text.sources + text.targets, text.targets + text.sources, text.line_numbers * 2)
    both.dropped, both.origin = text.dropped, text.origin | {"both_directions": True}
    return both


def _split_off_validation(corpus: dict[str, ParallelText], size: int) -> dict[str, ParallelText]:
    """Takes `size` pairs out of the training set, the same ones in every run."""
    train = corpus["train"]
    if size >= len(train):
        raise ValueError(f"validation_size={size}, but there are only {len(train)} training pairs: give less.")
    order = list(range(len(train)))
    random.Random("validation").shuffle(order)
    parts = {"train": train.select(sorted(order[size:])), "validation": train.select(sorted(order[:size]))}
    parts["validation"].origin = train.origin | {"split_off": "train"}
    return parts | {name: text for name, text in corpus.items() if name != "train"}


def _filter_overlap(corpus: dict[str, ParallelText], overlap: str) -> dict[str, ParallelText]:
    """Tells which training pairs have a source of the validation or test set, and drops or refuses them."""
    train = corpus["train"]
    leaks: set[int] = set()
    for split, text in corpus.items():
        if split == "train":
            continue
        held_out = set(text.sources)
        same = [i for i, source in enumerate(train.sources) if source in held_out]
        if same:
            lines = some_lines(train.line_numbers[i] for i in same)
            told = f"{len(same)} training pairs have a source of the {split} set, at {lines}"
            if overlap == "error":
                raise ValueError(f"{told}. Remove them, or choose --on_eval_overlap drop or keep.")
            print(f"{told}: {'left out' if overlap == 'drop' else 'kept'}")
            leaks.update(same)
    if overlap != "drop" or not leaks:
        return corpus
    train.dropped["source held out"] += len(leaks)
    if len(leaks) == len(train):
        raise ValueError("every training pair has a source of the validation or test set: nothing is left to train on.")
    return corpus | {"train": train.select(i for i in range(len(train)) if i not in leaks)}


def _from_pairs(pairs: Iterable[tuple[str, str]], source: str) -> ParallelText:
    sources, targets = map(list, zip(*pairs, strict=True))
    return ParallelText(sources, targets, origin={"source": source})


def describe_split(arguments: DataArguments, split: str) -> dict[str, Any]:
    """What a split of a recipe's files or dataset is read from, for the record of a run: names, but no folders."""
    further: dict[str, Any] = {}
    if split == "test" and arguments.test_references is not None:
        further["references"] = Path(arguments.test_references).name
    if use_dataset(arguments):
        if Path(str(arguments.dataset_name)).exists():
            return {"source": "local_dataset", "split": split, **further}
        config = {} if arguments.dataset_config is None else {"config": arguments.dataset_config}
        return {"source": "hub", "dataset": arguments.dataset_name, **config, "split": split, **further}
    name = {"train": arguments.train_file, "validation": arguments.validation_file, "test": arguments.test_file}[split]
    path = Path(str(name))
    languages = (arguments.source_lang, arguments.target_lang)
    files = [path.name] if path.suffix in TABLE_SUFFIXES else [f"{path.name}.{language}" for language in languages]
    return {"source": "files", "files": files, **further}


def describe_corpus(corpus: dict[str, ParallelText], arguments: DataArguments) -> dict[str, dict[str, Any]]:
    """What a run has read, split by split: where it is from, how many pairs, and their SHA-256."""
    read = {split: text.origin | {"pairs": len(text), "sha256": text.sha256()} for split, text in corpus.items()}
    if "train" not in corpus:
        read["train"] = describe_split(arguments, "train") | {"streamed": True}
    return read


def random_pairs(seed: int = 42) -> list[tuple[str, str]]:
    """64 pairs of random numbers below 4,996 that have nothing to do with each other: what can only be memorized.

    With the four special tokens the vocabulary is 5,000, and a sequence has 100 tokens with its begin and end.
    """
    rng = random.Random(seed)

    def line(length: int) -> str:
        return " ".join(str(rng.randrange(RANDOM_WORDS)) for _ in range(length))

    return [(line(RANDOM_LENGTH + 1), line(RANDOM_LENGTH)) for _ in range(RANDOM_PAIRS)]
