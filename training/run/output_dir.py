"""The folder of a run: whose it is, what it goes on from, its `recipe.yaml` and its `run.json`."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from training.arguments import UNSUPPORTED
from training.data.parallel_text import ParallelText
from training.recipe import Recipe
from training.run.checkpoints import last_valid_checkpoint
from training.translators import read_run_recipe
from vanilla_transformer.shared.atomic_io import atomic_write

RESUME_MUTABLE_KEYS = {
    "output_dir",
    "data_dir",
    "num_processes",
    "report_to",
    "logging_steps",
    "attention_plot_lines",
    "disable_tqdm",
}
# keys that may differ between the command that began a run and the one that goes on with it
STATE = "run.json"  # hashes of the data and the number of processes, as the first command found them


def prepare_output_dir(recipe: Recipe, folder: Path) -> Path | None:
    """The checkpoint that this run goes on from, or None where it begins; the folder is this run's from then on.

    Raises:
        ValueError: the folder holds a model that this command did not make, or another run.
    """
    if not (folder / "recipe.yaml").exists():
        foreign = [path for name in ("*config.json", "*.safetensors", "checkpoint-*") for path in folder.glob(name)]
        if foreign:
            raise ValueError(
                f"{folder} already holds a model ({foreign[0].name}): move it away, or give another --output_dir."
            )
        folder.mkdir(parents=True, exist_ok=True)
        write_recipe(recipe, folder)
        return None
    validate_same_recipe(recipe, folder)
    checkpoint = last_valid_checkpoint(folder)
    if checkpoint:
        print(f"going on from {checkpoint}")
    return checkpoint


def validate_same_recipe(recipe: Recipe, folder: Path) -> None:
    """Raises ValueError where the folder's recipe is not this one; "auto" agrees with what was chosen then, and the
    default of a key with a recipe of a version that did not have it."""
    before, now = read_run_recipe(folder), yaml.safe_load(recipe.to_yaml())
    older = recipe.defaults() | before
    for name in sorted((before.keys() | now.keys()) - RESUME_MUTABLE_KEYS - UNSUPPORTED):
        if older.get(name) != now.get(name) and now.get(name) != "auto" and name != "bf16":
            raise ValueError(
                f"{folder} holds another run: its {name} is {older.get(name)}, here it is {now.get(name)}. Give "
                f"another --output_dir, or the same settings to go on with it."
            )


def write_state(corpus: dict[str, ParallelText], processes: int, folder: Path) -> None:
    """Record the data and the number of processes of a run that begins."""
    state = {"data": {name: text.sha256() for name, text in corpus.items()}, "processes": processes}
    with atomic_write(folder / STATE) as path:
        path.write_text(json.dumps(state, indent=1), encoding="utf-8")


def read_state(folder: Path, checkpoint: Path) -> dict[str, Any]:
    """Return what `write_state` recorded. Earlier versions recorded the data in comments of `recipe.yaml`."""
    try:
        return dict(json.loads((folder / STATE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        comments = (folder / "recipe.yaml").read_text(encoding="utf-8")
        data = dict(re.findall(r"^# (\w+): \d+ pairs, sha256 (\w+)$", comments, re.MULTILINE))
        return {"data": data, "processes": len(list(checkpoint.glob("rng_state*.pth")))}
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{folder / STATE} is damaged ({error}): copy it again, or give another --output_dir."
        ) from error


def validate_state(corpus: dict[str, ParallelText], processes: int, folder: Path, checkpoint: Path) -> None:
    """Raises ValueError if the run began with other training or validation data, or another number of processes."""
    before = read_state(folder, checkpoint)
    for name, text in corpus.items():
        is_used = name != "test" or "train" not in corpus  # on_eval_overlap=drop compares a stream with the test data
        if is_used and before["data"].get(name) != text.sha256():
            raise ValueError(
                f"{folder} holds a run on other data: the {name} data have the sha256 {text.sha256()}, those of the "
                f"run {before['data'].get(name)}. Give another --output_dir, or the data that the run began with."
            )
    if before["processes"] != processes:
        raise ValueError(
            f"{folder} holds a run of {before['processes']} processes, but this command has {processes}. To resume "
            f"the run, start {before['processes']} (--num_processes, or your launcher's option). For a new run, give "
            f"another --output_dir."
        )


def write_recipe(recipe: Recipe, folder: Path) -> None:
    """`recipe.yaml`: every setting."""
    with atomic_write(folder / "recipe.yaml") as path:
        path.write_text(recipe.to_yaml(), encoding="utf-8")
