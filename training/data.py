"""Parallel text: reading it, encoding it, and saying what was left out."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset, load_dataset
from transformers import PreTrainedTokenizerFast

from training.demo_corpus import generate
from training.recipe import DataArguments


@dataclass
class ParallelText:
    """Sentence pairs of one split: `sources[i]` and `targets[i]` belong together."""

    sources: list[str]
    targets: list[str]

    def __len__(self) -> int:
        return len(self.sources)

    def digest(self) -> str:
        """SHA-256 of the text, for the record of a run."""
        lines = (f"{source}\t{target}\n" for source, target in zip(self.sources, self.targets, strict=True))
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def read_corpus(arguments: DataArguments) -> dict[str, ParallelText]:
    """The splits "train", "validation" and, where there is one, "test".

    From text files `<data_dir>/<name>.<language>`; where nobody gave a folder and the default one has none, from the
    recipe's dataset on the Hub; or from the embedded grammar.

    Raises:
        ValueError: no such file, sides of different length, blank lines, bytes that are not UTF-8; names the place.
    """
    if arguments.demo_corpus:
        return {name: ParallelText(*map(list, zip(*pairs, strict=True))) for name, pairs in generate().items()}
    languages = (arguments.source_lang, arguments.target_lang)
    names = {"train": arguments.train_file, "validation": arguments.validation_file, "test": arguments.test_file}
    folder = Path(arguments.data_dir)
    train_path = folder / f"{arguments.train_file}.{languages[0]}"
    nobody_gave_a_folder = arguments.data_dir == DataArguments.data_dir  # else a slip would train on other data
    if arguments.dataset_name and nobody_gave_a_folder and not train_path.exists():
        print(f"{train_path} does not exist: loading {arguments.dataset_name} from the Hub")
        return _read_from_hub(arguments.dataset_name, languages, train_path)
    return {
        split: read_pair(*(folder / f"{name}.{language}" for language in languages))
        for split, name in names.items()
        if name is not None
    }


def read_pair(source_path: Path, target_path: Path) -> ParallelText:
    """Two text files with a sentence a line; line i of one translates line i of the other."""
    sources, targets = read_lines(source_path), read_lines(target_path)
    if len(sources) != len(targets):
        raise ValueError(
            f"{source_path} has {len(sources)} lines and {target_path} has {len(targets)}: line i of one must "
            f"translate line i of the other."
        )
    for path, lines in ((source_path, sources), (target_path, targets)):
        blank = [number for number, line in enumerate(lines, start=1) if not line]
        if blank:
            raise ValueError(
                f"{path} has {len(blank)} blank lines, the first at line {blank[0]}: remove them from both files."
            )
    return ParallelText(sources, targets)


def read_lines(path: Path) -> list[str]:
    """Lines without surrounding space. Only "\\n" ends a line: other separators of Unicode stay inside."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}. Give the folder with --data_dir.") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: not UTF-8 (byte {data[error.start]:#04x}). Convert the file.") from None
    return [line.strip() for line in text.removesuffix("\n").split("\n")]


def _read_from_hub(name: str, languages: tuple[str, str], missing: Path) -> dict[str, ParallelText]:
    try:
        splits = load_dataset(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{missing} does not exist, and the dataset {name} could not be loaded from the Hub ({error}): give the "
            f"folder of the text files with --data_dir, or connect to the network."
        ) from error
    return {split: ParallelText(*(list(rows[language]) for language in languages)) for split, rows in splits.items()}


def encode(text: ParallelText, tokenizer: PreTrainedTokenizerFast, max_length: int | None = None) -> Dataset:
    """Token ids of both sides: `input_ids` and `labels`, each ending with `</s>`.

    Args:
        max_length: pairs with a longer side are left out, and their number is printed; None: none are.
    """
    encoded = tokenizer(text.sources, text_target=text.targets, return_attention_mask=False)
    pairs = list(zip(encoded["input_ids"], encoded["labels"], strict=True))
    kept = [pair for pair in pairs if max_length is None or max(map(len, pair)) <= max_length]
    if len(kept) < len(pairs):
        print(f"left out {len(pairs) - len(kept)} of {len(pairs)} pairs: a side is longer than {max_length} tokens")
    if not kept:
        raise ValueError(f"no pair has at most max_length={max_length} tokens on both sides: raise max_length.")
    return Dataset.from_dict({"input_ids": [source for source, _ in kept], "labels": [target for _, target in kept]})
