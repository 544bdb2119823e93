"""Splits of the corpus of a run: from files, from a dataset, or generated."""

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from vanilla_transformer.shared.command_line import logger

from ..demo import corpus as demo
from ..recipe.arguments import DataArguments, use_dataset
from .analysis.direction import warn_if_swapped
from .analysis.held_out import filter_overlap, split_off
from .files import SEVERAL_TARGETS, TABLE_SUFFIXES, add_references, read_file
from .hub_datasets import read_dataset
from .parallel_text import ParallelText

RANDOM_PAIRS, RANDOM_LENGTH, RANDOM_WORDS = 64, 98, 4996  # see random_pairs


def read_corpus(arguments: DataArguments) -> dict[str, ParallelText]:
    """Read the splits "train" (unless streaming), "validation" and "test" (if available).

    They come from files in `data_dir`, or are generated. If `data_dir` is the default and contains no files, they come
    from the recipe's dataset. `on_bad_lines` and `on_eval_overlap` determine what happens to invalid pairs and to
    training pairs whose source is also in the validation or test set, or nearly. Then `train_fraction` and
    `both_directions` are applied.
    """
    if arguments.corpus == "demo":
        corpus = {name: _from_pairs(pairs, "demo") for name, pairs in demo.generate().items()}
    elif arguments.corpus == "random":
        corpus = {"train": _from_pairs(random_pairs(), "random")}
    else:
        corpus = _read_splits(arguments)
    if arguments.train_fraction < 1:
        corpus["train"] = select_fraction(corpus["train"], arguments.train_fraction)
    if arguments.both_directions:
        text = corpus["train"]
        both = ParallelText(text.sources + text.targets, text.targets + text.sources, text.line_numbers * 2)
        both.dropped, both.origin = text.dropped, text.origin | {"both_directions": True}
        corpus["train"] = both
    return corpus


def _read_splits(arguments: DataArguments) -> dict[str, ParallelText]:
    if use_dataset(arguments):
        corpus = read_dataset(arguments)
    else:
        if arguments.dataset_name is not None:
            logger.info(f"reading the files in {arguments.data_dir}, not the dataset {arguments.dataset_name}")
        splits = ("validation", "test") if arguments.streaming else ("train", "validation", "test")
        names = {split: getattr(arguments, f"{split}_file") for split in splits}
        corpus = {split: read_file(arguments, name) for split, name in names.items() if name is not None}
    for split, text in corpus.items():
        if not len(text):
            raise ValueError(f"the {split} set has no pairs.")
        text.origin = describe_split(arguments, split)
    if arguments.test_references is not None:
        if "test" not in corpus:
            raise ValueError(f"test_references={arguments.test_references} needs test data: set test_file.")
        path, languages = (
            Path(arguments.data_dir) / arguments.test_references,
            (arguments.source_lang, arguments.target_lang),
        )
        add_references(corpus["test"], path, languages)
    if "train" not in corpus:
        if corpus and arguments.on_eval_overlap == "keep":
            logger.info(
                "streaming: training pairs are not compared with validation and test data. Use on_eval_overlap=drop."
            )
        return corpus
    if corpus["train"].references:
        raise ValueError(f"{arguments.train_file} {SEVERAL_TARGETS}")
    sizes = {"validation": arguments.validation_size, "test": arguments.test_size}
    if missing := {split: size for split, size in sizes.items() if size and split not in corpus}:
        corpus = split_off(corpus, missing)
    warn_if_swapped(corpus, (arguments.source_lang, arguments.target_lang))
    return filter_overlap(corpus, arguments.on_eval_overlap)


def select_fraction(text: ParallelText, fraction: float) -> ParallelText:
    """Return a fraction of the pairs, at least one. A larger fraction contains the pairs of a smaller one."""
    order = list(range(len(text)))
    random.Random("train").shuffle(order)
    return text.select(sorted(order[: max(1, round(fraction * len(text)))]))


def _from_pairs(pairs: Iterable[tuple[str, ...]], source: str) -> ParallelText:
    sources, targets = map(list, zip(*pairs, strict=True))
    return ParallelText(sources, targets, origin={"source": source})


def describe_split(arguments: DataArguments, split: str) -> dict[str, Any]:
    """Return the provenance of a split, for the metadata of a run: names of files, without directories."""
    further: dict[str, Any] = {}
    if split == "test" and arguments.test_references is not None:
        further["references"] = Path(arguments.test_references).name
    if use_dataset(arguments):
        if Path(str(arguments.dataset_name)).exists():
            return {"source": "local_dataset", "split": split, **further}
        config = {} if arguments.dataset_config is None else {"config": arguments.dataset_config}
        return {"source": "hub", "dataset": arguments.dataset_name, **config, "split": split, **further}
    path = Path(getattr(arguments, f"{split}_file"))
    languages = (arguments.source_lang, arguments.target_lang)
    files = [path.name] if path.suffix in TABLE_SUFFIXES else [f"{path.name}.{language}" for language in languages]
    return {"source": "files", "files": files, **further}


def describe_corpus(corpus: dict[str, ParallelText], arguments: DataArguments) -> dict[str, dict[str, Any]]:
    splits = {split: text.origin | {"pairs": len(text), "sha256": text.sha256()} for split, text in corpus.items()}
    if "train" not in corpus:
        splits["train"] = describe_split(arguments, "train") | {"streamed": True}
    return splits


def random_pairs() -> Iterator[tuple[str, ...]]:
    """Yield 64 pairs of unrelated random numbers below 4,996, which a model can only memorize.

    With the four special tokens, the vocabulary has 5,000 tokens. A sequence has 100 tokens with BOS and EOS.
    """
    rng, lengths = random.Random(42), (RANDOM_LENGTH + 1, RANDOM_LENGTH)
    for _ in range(RANDOM_PAIRS):
        yield tuple(" ".join(str(rng.randrange(RANDOM_WORDS)) for _ in range(length)) for length in lengths)
