"""What a run has left beside its weights, read as it stands: results, recipe, samples, sizes.

A value that is missing is None; one of another kind than it must be is a mistake of the file, which is told by name.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from hub.sensitive_data import SECRET_KEYS, find_path, find_token, read_safetensors, strings_in
from vanilla_transformer.shared.text_lines import read_lines

PATH_KEYS = ("output_dir", "data_dir", "logging_dir", "tokenizer_path")  # keys of a recipe that name folders
DATASET_KEYS = ("dataset_name", "dataset_config")  # which training passes over where it was given files
LARGEST = 1e100  # number that can be meant


class CheckedMapping:
    """A mapping out of a file, each of whose values is asked for by its kind.

    Args:
        name: of the file, for messages.
    """

    def __init__(self, values: Any, name: str):
        if not isinstance(values, dict):
            raise ValueError(f"{name} holds {shown(values)}, where keys and values should stand.")
        self.values, self.name = values, name

    def __bool__(self) -> bool:
        return bool(self.values)

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def value(self, key: str, kind: str, is_valid: Callable[[Any], bool]) -> Any:
        """Returns the value of a key, or None. Raises ValueError if it is not valid."""
        value = self.values.get(key)
        if value is None or is_valid(value):
            return value
        raise ValueError(f"{self.name}: {key} is {shown(value)}, which is no {kind}.")

    def number(self, key: str) -> Any:
        return self.value(key, "number", is_number)

    def count(self, key: str) -> int | None:
        self.number(key)
        return self.value(key, "count", lambda value: isinstance(value, int) and value >= 0)

    def text(self, key: str) -> str | None:
        """On one line."""
        text = self.value(key, "text", lambda value: isinstance(value, str))
        return text and " ".join(text.split())

    def texts(self, key: str) -> list[str]:
        found = self.value(
            key, "list of texts", lambda value: isinstance(value, list) and set(map(type, value)) <= {str}
        )
        return [" ".join(each.split()) for each in found or []]

    def record(self, key: str) -> "CheckedMapping":
        """Empty where it is missing."""
        value = self.values.get(key)
        return CheckedMapping({} if value is None else value, f"{self.name}: {key}")


def is_number(value: Any) -> bool:
    """Whether a value is a number that is neither infinite nor nan."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST


def shown(value: Any) -> str:
    text = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else f"a {type(value).__name__}"
    return text if len(text) < 60 else f"{text[:57]}..."


def read_record(path: Path) -> CheckedMapping:
    """A file of JSON or YAML; empty where there is none.

    Raises:
        ValueError: it cannot be read, or holds something else than keys and values.
    """
    if not path.is_file():
        return CheckedMapping({}, path.name)
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        "".join(each for _, each in strings_in(value)).encode()  # half a pair of surrogates could not be written again
    except (ValueError, yaml.YAMLError, RecursionError, OverflowError) as error:
        what = {".json": "JSON", ".yaml": "YAML"}[path.suffix]
        raise ValueError(f"{path} is no {what} that can be read ({error or type(error).__name__}): mend it.") from error
    return CheckedMapping({} if value is None else value, path.name)


def read_samples(path: Path) -> list[list[str]]:
    """Rows (source, reference, translation)."""
    if not path.is_file():
        return []
    rows = [line.split("\t") for line in read_lines(path)[1:]]
    for number, row in enumerate(rows, start=2):
        if len(row) != 3:
            raise ValueError(f"{path}, line {number}: {len(row)} columns instead of three; mend or remove the file.")
    return rows


def is_repository(name: str) -> bool:
    """Whether a name is one of the Hub, and not a folder's, which a recipe writes from the root."""
    return re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name, re.ASCII) is not None


def local_paths(checkpoint: Path) -> tuple[str, ...]:
    """Return exact local paths: home, working folder, those of the checkpoint, and absolute ones of its recipe."""
    recipe = read_record(checkpoint / "recipe.yaml").values
    named = {text for _, text in strings_in(recipe) if Path(text).is_absolute()}
    own = {str(path) for path in (Path.home(), Path.cwd(), checkpoint.resolve(), checkpoint.resolve().parent)}
    return tuple(sorted(place for place in named | own if place != "/"))


def sanitize_recipe(recipe: CheckedMapping, results: CheckedMapping, places: tuple[str, ...]) -> tuple[str, list[str]]:
    """The recipe as YAML for others, and the keys that are left out: those that name folders of the owner's machine or
    hold a token, and the dataset where the run has read something else."""
    train = results.record("data").record("train")
    left_out = [key for key in PATH_KEYS if key in recipe]
    if train.text("source") != "hub":
        left_out += [key for key in DATASET_KEYS if key in recipe]
    if (base := recipe.text("base_model")) and not is_repository(base):
        left_out.append("base_model")
    for key, value in recipe.values.items():
        for name, text in strings_in({key: value}):
            if find_path(text, places) or find_token(text) or (name and text and SECRET_KEYS.search(name)):
                left_out.append(key)
                break
    values = {key: value for key, value in recipe.values.items() if key not in left_out}
    try:
        return (yaml.safe_dump(values, sort_keys=False, allow_unicode=True) if values else ""), [
            str(key) for key in dict.fromkeys(left_out)
        ]
    except RecursionError:
        raise ValueError(f"{recipe.name} is nested too deeply: mend it.") from None


def count_parameters(folder: Path) -> int | None:
    """The sizes of all tensors in the heads of the weights' files; None where there are none, or they are broken."""
    files = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    try:
        shapes = [shape for path in files for shape in read_safetensors(path)[1].values()]
    except ValueError:
        return None
    return sum(map(math.prod, shapes)) if files else None
