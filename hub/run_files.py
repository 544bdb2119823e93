"""Validated reading of the files that a run saves with its weights: results, recipe, samples and parameter counts.

Missing values are None. A value of the wrong type raises ValueError with the name of the file.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from transformers.models.whisper.tokenization_whisper import LANGUAGES
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from vanilla_transformer.shared.text_lines import read_lines

from .sensitive_data import SECRET_KEYS, find_credential, find_local_path, iter_strings, read_safetensors

PATH_KEYS = ("output_dir", "data_dir", "logging_dir", "tokenizer_path")  # recipe keys that name directories
FILE_KEYS = ("train_file", "validation_file", "test_file", "test_references")  # recipe keys that name files
DATASET_KEYS = ("dataset_name", "dataset_config")  # recipe keys that training ignores if text files are given
MAX_NUMBER = 1e100


class CheckedMapping:
    """Mapping read from the file `name`, with typed and validated access."""

    def __init__(self, values: Any, name: str):
        if not isinstance(values, dict):
            raise ValueError(f"{name} contains {preview(values)}, expected keys and values.")
        self.values, self.name = values, name

    def __bool__(self) -> bool:
        return bool(self.values)

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def value(self, key: str, kind: str, is_valid: Callable[[Any], bool]) -> Any:
        """Return the value of a key, or None. Raise ValueError if it is not valid."""
        value = self.values.get(key)
        if value is None or is_valid(value):
            return value
        raise ValueError(f"{self.name}: {key} is {preview(value)}, expected a {kind}.")

    def number(self, key: str) -> Any:
        return self.value(key, "number", lambda each: type(each) in (int, float) and abs(each) < MAX_NUMBER)

    def count(self, key: str) -> int | None:
        self.number(key)
        return self.value(key, "non-negative integer", lambda each: isinstance(each, int) and each >= 0)

    def text(self, key: str) -> str | None:
        """Return a string with line breaks replaced by spaces."""
        text = self.value(key, "string", lambda value: isinstance(value, str))
        return text and " ".join(text.split())

    def texts(self, key: str) -> list[str]:
        texts = self.value(key, "list of strings", lambda each: type(each) is list and set(map(type, each)) <= {str})
        return [" ".join(each.split()) for each in texts or []]

    def mapping(self, key: str) -> "CheckedMapping":
        """Return a nested mapping, empty if the key is missing."""
        value = self.values.get(key)
        return CheckedMapping({} if value is None else value, f"{self.name}: {key}")


def preview(value: Any) -> str:
    text = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else f"a {type(value).__name__}"
    return text if len(text) < 60 else f"{text[:57]}..."


def read_mapping(path: Path) -> CheckedMapping:
    """Read a JSON or YAML file of keys and values. The mapping is empty if the file does not exist."""
    if not path.is_file():
        return CheckedMapping({}, path.name)
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        "".join(each for _, each in iter_strings(value)).encode()  # raises for lone surrogates, not valid in UTF-8
    except (ValueError, yaml.YAMLError, RecursionError, OverflowError) as error:
        kind = {".json": "JSON", ".yaml": "YAML"}[path.suffix]
        raise ValueError(f"{path} is not valid {kind} ({error or type(error).__name__}). Fix the file.") from error
    return CheckedMapping({} if value is None else value, path.name)


def read_samples(path: Path) -> list[list[str]]:
    """Return the rows (source, reference, translation), or [] if the file does not exist."""
    if not path.is_file():
        return []
    rows = [line.split("\t") for line in read_lines(path)[1:]]
    for number, row in enumerate(rows, start=2):
        if len(row) != 3:
            raise ValueError(f"{path}, line {number}: expected 3 columns, got {len(row)}. Fix or remove the file.")
    return rows


def is_repository(name: str) -> bool:
    """Return whether a name is a Hub id. Recipes store directories as absolute paths, which are not."""
    return re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name, re.ASCII) is not None


def language_name(code: str) -> str:
    """Return the English name of a language code, or the code if the name is unknown."""
    return LANGUAGES[code.lower()].title() if code.lower() in LANGUAGES else code


def local_paths(checkpoint: Path) -> tuple[str, ...]:
    """Return exact local paths: home, working directory, the checkpoint, and absolute paths in its recipe."""
    recipe = read_mapping(checkpoint / "recipe.yaml").values
    recipe_paths = {text for _, text in iter_strings(recipe) if Path(text).is_absolute()}
    own = {str(path) for path in (Path.home(), Path.cwd(), checkpoint.resolve(), checkpoint.resolve().parent)}
    return tuple(sorted(path for path in recipe_paths | own if path != "/"))


def sanitize_recipe(recipe: CheckedMapping, results: CheckedMapping, paths: tuple[str, ...]) -> tuple[str, list[str]]:
    """Return the recipe as YAML without directories, credentials and unused dataset keys, and the removed keys."""
    train = results.mapping("data").mapping("train")
    removed = [key for key in PATH_KEYS if key in recipe]
    if train.text("source") != "hub":
        removed += [key for key in DATASET_KEYS if key in recipe]
    if (base := recipe.text("base_model")) and not is_repository(base):
        removed.append("base_model")
    for key, value in recipe.values.items():
        for name, text in iter_strings({key: value}):
            if find_local_path(text, paths) or find_credential(text) or (name and text and SECRET_KEYS.search(name)):
                removed.append(key)
                break
    values = {key: value for key, value in recipe.values.items() if key not in removed}
    values |= {key: Path(values[key]).name for key in FILE_KEYS if isinstance(values.get(key), str)}
    try:
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True) if values else ""
    except RecursionError:
        raise ValueError(f"{recipe.name} is nested too deeply. Fix the file.") from None
    return text, [str(key) for key in dict.fromkeys(removed)]


def find_weights(folder: Path) -> list[Path]:
    """Return the files that contain the weights: model.safetensors, or those in its index.

    Raises ValueError if one of them is missing, in another directory, or not a safetensors file.
    """
    index, names = folder / SAFE_WEIGHTS_INDEX_NAME, [SAFE_WEIGHTS_NAME]
    if index.is_file() and not (folder / SAFE_WEIGHTS_NAME).is_file():
        names = sorted({*map(str, read_mapping(index).mapping("weight_map").values.values())})
    existing = {path.name for path in folder.glob("*.safetensors") if path.is_file()}
    for name in names or [SAFE_WEIGHTS_NAME]:
        if name not in existing:
            raise ValueError(f"{folder} cannot be used: it has no weights ({name}). Save the model again.")
    return [folder / name for name in names]


def count_parameters(folder: Path) -> int | None:
    """Return the number of elements of all tensors, or None if weight files are missing or cannot be read."""
    try:
        shapes = [shape for path in find_weights(folder) for shape in read_safetensors(path)[1].values()]
    except ValueError:
        return None
    return sum(map(math.prod, shapes))
