"""Files, format and languages of a directory of training data."""

import os
import re
import sys
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path
from typing import Any

from vanilla_transformer.shared.command_line import LAUNCHED, logger

from .analysis.languages import SIDES, find_columns, language_code
from .files import TABLE_SUFFIXES, iter_cells, iter_records
from .hub_datasets import SAVED_DATASET, load_saved

SPLIT_NAMES = {  # names of files, or words in their names
    "train": {"train", "training"},
    "validation": {"val", "valid", "validation", "dev"},
    "test": {"test"},
}
OTHER_ENDINGS = {"gz", "bz2", "xz", "zip", "md", "yaml", "yml", "py", "sh", "log", "pdf", "arrow"}  # not languages
MAX_LISTED = 12  # files in a message
MAX_RECORDS = 100  # rows or translation units that are searched for columns with text


def discover_files(
    data_dir: str | Path | None = None,
    train_file: str | None = None,
    validation_file: str | None = None,
    test_file: str | None = None,
    source_lang: str | None = None,
    target_lang: str | None = None,
) -> dict[str, Any]:
    """Find the data files of a directory, their format and their languages, and log them in one line.

    The name of a file, or a word in it, determines the split. A single table or pair of text files can have any name.
    Languages are detected from the endings of text files or the names of columns. If one of two languages is English,
    it is the source. In tables without column names, they are src and tgt. The result is the same in every process.

    Args:
        data_dir: Directory of the files, or of a dataset that `save_to_disk` wrote. Defaults to that of `train_file`.

    Returns:
        Values of these recipe keys. Validation and test files are None if they do not exist. For a saved dataset,
        the keys are `data_dir`, `dataset_name` (the same directory), the languages, and the files of missing splits.

    Raises:
        ValueError: If there are no training data, or several candidates.
    """
    given = {"train": train_file, "validation": validation_file, "test": test_file}
    if data_dir is None:
        if train_file is None:
            raise ValueError("no training data are given. Use --data-dir DIRECTORY or --train-file FILE.")
        data_dir = Path(train_file).parent
        given = {split: name and os.path.relpath(name, data_dir) for split, name in given.items()}
    folder = Path(data_dir)
    if folder.is_file():
        raise ValueError(f"{folder} is a file. Use --train-file {folder} instead of --data-dir.")
    try:
        names = sorted(path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    except OSError as error:
        raise ValueError(f"cannot read the directory {folder}: {error.strerror}. Check --data-dir.") from error
    if SAVED_DATASET & set(names):
        return _discover_dataset(folder, source_lang, target_lang)
    candidates = _find_candidates(names)
    for name in filter(None, given.values()):
        candidates |= _find_in_other_directory(folder, name)
    train = _select("train", given["train"], candidates, folder, names)
    kind, source, target = _find_direction(folder, train, candidates.get(train), source_lang, target_lang)
    usable = {name: each for name, each in candidates.items() if not each or {source, target} <= set(each)}
    usable.pop(train, None)
    splits = {split: _select(split, given[split], usable, folder, names) for split in ("validation", "test")}
    for name in sorted(candidates.keys() - usable.keys() - {train}):
        if (split := _split_of(name.lower())) and not splits.get(split, train):
            unused = ", ".join(f"{name}.{ending}" for ending in candidates[name])
            _log(f"{unused}: not used. {split.capitalize()} data must be named {name}.{source} and {name}.{target}")
    found = ", ".join(f"{split}: {name or 'none'}" for split, name in {"training": train, **splits}.items())
    _log(f"{found}; from {source} to {target}; {kind}; directory: {folder}")
    files = {"train_file": train} | {f"{split}_file": name for split, name in splits.items()}
    return {"data_dir": str(folder), **files, "source_lang": source, "target_lang": target}


def _find_in_other_directory(folder: Path, name: str) -> dict[str, list[str]]:
    """Return the candidate with this name if it is in another directory."""
    path = folder / name
    if path.parent == folder or not path.parent.is_dir():
        return {}
    candidates = _find_candidates([each.name for each in sorted(path.parent.iterdir()) if each.is_file()])
    return {name: candidates[path.name]} if path.name in candidates else {}


def _find_direction(
    folder: Path, train: str, endings: list[str] | None, source_lang: str | None, target_lang: str | None
) -> tuple[str, str, str]:
    """Return the kind of the training data, for messages, and their source and target language."""
    if endings:
        found = ", ".join(f"{train}.{ending}" for ending in endings)
        return "text files", *choose_direction(endings, source_lang, target_lang, found)
    columns = read_column_names(folder / train, (source_lang, target_lang))
    if not columns:
        return "no header, column 1 is the source", source_lang or SIDES[0], target_lang or SIDES[1]
    kind = f"columns {', '.join(columns)}"
    source, target = choose_columns(columns, source_lang, target_lang, f"the {kind} in {train}")
    codes = language_code(source) or "", language_code(target) or ""
    if all(codes) and find_columns(columns, codes) == find_columns(columns, (source, target)):
        source, target = codes
    return kind, source, target


def _discover_dataset(folder: Path, source_lang: str | None, target_lang: str | None) -> dict[str, Any]:
    try:
        dataset = load_saved(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the dataset {folder} is damaged ({error}). Save it again with save_to_disk.") from error
    if "train" not in dataset:
        raise ValueError(f"the dataset {folder} has no split 'train' (found: {', '.join(dataset)}).")
    columns = _columns_with_text(islice(dataset["train"], MAX_RECORDS))
    found = f"the columns {', '.join(columns)} in {folder}"
    source, target = choose_columns(columns, source_lang, target_lang, found)
    _log(f"splits: {', '.join(dataset)}; from {source} to {target}; saved dataset; directory: {folder}")
    missing = {f"{split}_file": None for split in ("validation", "test") if split not in dataset}
    names = {"data_dir": str(folder), "dataset_name": str(folder)}
    return names | missing | {"source_lang": source, "target_lang": target}


def _log(message: str) -> None:
    """Log a message in the process that the user started, or in rank 0 if a launcher such as torchrun started all."""
    if LAUNCHED not in os.environ and os.environ.get("RANK", "0") == "0":
        logger.info(message)


def read_column_names(path: Path, languages: tuple[str | None, str | None] = (None, None)) -> list[str]:
    """Return the names of the columns with text, or [] for a .tsv or .csv file without a header."""
    if path.suffix in (".tsv", ".csv"):
        cells = next(filter(any, iter_cells(path)), [])
        is_header = find_columns(cells, (languages[0] or "", languages[1] or ""))
        codes = {language_code(cell) for cell in cells} - {None}
        return list(dict.fromkeys(cells)) if is_header or len(codes) > 1 else []
    records = [record for record in islice(iter_records(path), MAX_RECORDS) if isinstance(record, dict)]
    if not records:
        raise ValueError(f"{path} contains no pairs.")
    return _columns_with_text(records, at_least=sys.maxsize if path.suffix == ".tmx" else 2)


def _columns_with_text(records: Iterable[dict[str, Any]], at_least: int = 2) -> list[str]:
    """Return the columns with text in the first record, or in any record if these are too few."""
    rows = [each["translation"] if isinstance(each.get("translation"), dict) else each for each in records]
    names = [[name for name, value in row.items() if isinstance(value, str)] for row in rows]
    return names[0] if names and len(names[0]) >= at_least else list(dict.fromkeys(chain.from_iterable(names)))


def choose_columns(columns: list[str], source_lang: str | None, target_lang: str | None, found: str) -> tuple[str, str]:
    """Return the source and target language of a table. Columns named source and target can have any languages."""
    languages = source_lang or "", target_lang or ""
    if all(languages) and find_columns(columns, languages):
        return languages
    return choose_direction(columns, source_lang, target_lang, found)


def choose_direction(
    options: list[str], source_lang: str | None, target_lang: str | None, found: str
) -> tuple[str, str]:
    """Return the source and target language. Raises ValueError if one is missing or ambiguous.

    `options` are endings of files or names of columns, and `found` is their description for error messages.
    """
    given = {"--source-lang": source_lang, "--target-lang": target_lang}
    matches = {option: language and _match(language, options) for option, language in given.items()}
    source, target = matches.values()
    rest = [each for each in options if each not in (source, target)]
    for option, language in given.items():
        if language and not matches[option]:
            remedy = " or ".join(f"{option} {each}" for each in rest[:MAX_LISTED])
            raise ValueError(f"found {found}, but not {language}. Use {remedy or 'files of two languages'}.")
    if source and target:
        if source == target:
            raise ValueError(f"found {found}: --source-lang and --target-lang are both {source}. Use two languages.")
        return source, target
    if len(rest) + bool(source or target) > 2:  # some columns do not contain text
        rest = [each for each in rest if language_code(each) and each != "id"] or rest
    if source or target:
        option = "--target-lang" if source else "--source-lang"
        if len(rest) == 1:
            return (source, rest[0]) if source else (rest[0], str(target))
        remedy = " or ".join(f"{option} {each}" for each in rest[:MAX_LISTED]) or "files of two languages"
        raise ValueError(f"found {found}: the second language is ambiguous. Use {remedy}.")
    if len(rest) < 2:
        raise ValueError(f"found {found}: only one language. Training needs two.")
    if len(rest) > 2:
        raise ValueError(
            f"found {found}: several languages. Use two of them, for example --source-lang {rest[0]} --target-lang "
            f"{rest[1]}."
        )
    for first, second in (rest, rest[::-1]):
        if language_code(first) in ("en", SIDES[0]) and language_code(second) not in ("en", SIDES[0]):
            return first, second
    raise ValueError(f"found {found}: unknown direction. Use --source-lang {rest[0]} or --source-lang {rest[1]}.")


def _match(language: str, options: list[str]) -> str | None:
    """Return the option with this name, or the only option with a different name of the same language."""
    code = language_code(language)
    same = [option for option in options if code and language_code(option) == code]
    return language if language in options else same[0] if len(same) == 1 else None


def _find_candidates(names: list[str]) -> dict[str, list[str]]:
    """Return the possible files: {table: []}, and {base name: endings} of text files with at least two endings."""
    tables = [name for name in names if Path(name).suffix in TABLE_SUFFIXES]
    endings: dict[str, list[str]] = {}
    for name in names:
        base, _, ending = name.rpartition(".")
        if base and name not in tables and ending.lower() not in OTHER_ENDINGS:
            endings.setdefault(base, []).append(ending)
    return {table: [] for table in tables} | {base: each for base, each in endings.items() if len(each) > 1}


def _select(split: str, given: str | None, candidates: dict[str, list[str]], folder: Path, names: list[str]) -> Any:
    """Return the given file or the only candidate of a split, or None. Missing training data raise ValueError."""
    option = f"--{split}-file"
    listed = ", ".join(names[:MAX_LISTED]) + (", ..." if len(names) > MAX_LISTED else "") or "no files"
    if given is not None:
        if given not in candidates:
            raise ValueError(
                f"cannot find {option} {given} in {folder}, as a table or as two text files. Found: {listed}."
            )
        return given
    bases = {name: (name if endings else Path(name).stem).lower() for name, endings in candidates.items()}
    splits = {name: _split_of(base) for name, base in bases.items()}
    found = [name for name in candidates if splits[name] == split]
    found = [name for name in found if bases[name] in SPLIT_NAMES[split]] or found
    if split == "train":
        found = found or [name for name in candidates if splits[name] is None]
    if len(found) > 1:
        remedy = " or ".join(f"{option} {name}" for name in found[:MAX_LISTED])
        raise ValueError(f"several possibilities for the {split} data in {folder}. Use {remedy}.")
    if not found and split == "train":
        raise ValueError(
            f"no training data in {folder}: found {listed}. Expected two text files train.<language>, or a table "
            f"train{', train'.join(TABLE_SUFFIXES)}."
        )
    return found[0] if found else None


def _split_of(base: str) -> str | None:
    words = set(re.split(r"[\W_]+", base))
    return next((split for split, names in SPLIT_NAMES.items() if words & names), None)
