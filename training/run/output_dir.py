"""Output directory of a run: creation, checks before resuming, `recipe.yaml` and `run.json`."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from vanilla_transformer.shared.atomic_io import atomic_write, lock_exclusively
from vanilla_transformer.shared.command_line import logger

from ..data.parallel_text import ParallelText
from ..inference.translators import read_run_recipe
from ..recipe.arguments import MACHINE_KEYS, UNSUPPORTED, Recipe, former_tokens_per_update
from .checkpoints import all_checkpoints, last_valid_checkpoint

RESUME_MUTABLE_KEYS = {  # keys that may change when a run is resumed
    *("output_dir", "data_dir", "report_to", "logging_steps", "attention_plot_lines", "disable_tqdm"),
    *MACHINE_KEYS,
}
RUN_INFO = "run.json"  # hashes of the data at the start of the run
LOCK = "run.lock"  # empty file that is locked during training; the system unlocks the file of a killed process


@contextmanager
def lock_output_dir(folder: Path, has_parts: bool = False) -> Iterator[None]:
    """Context manager that creates the output directory, and locks it against other commands until the run is finished.

    With `has_parts`, it is also locked if the run is finished, because further runs in subdirectories follow.
    """
    if (folder / "all_results.json").exists() and not has_parts:
        yield
        return
    existing = [path for name in ("*config.json", "*.safetensors", "checkpoint-*") for path in folder.glob(name)]
    if existing and not (folder / "recipe.yaml").exists():
        raise ValueError(f"{folder} already contains {existing[0].name}. Move it, or choose another --output-dir.")
    folder.mkdir(parents=True, exist_ok=True)
    message = f"another command trains in {folder}. Wait until it ends, or choose another --output-dir."
    with lock_exclusively(folder / LOCK, message):
        yield


def prepare_output_dir(recipe: Recipe, folder: Path) -> Path | None:
    """Write the recipe to a new output directory, or return the valid checkpoint to resume from, if any.

    A run that failed before its first checkpoint can be started again with other settings. Raises ValueError if the
    directory contains a different run, or a `recipe.yaml` that is not from a run.
    """
    path = folder / "recipe.yaml"
    if not is_trained(folder):
        is_from_run = not path.exists() or (folder / RUN_INFO).exists()
        if not is_from_run and recipe.to_dict().keys() - read_run_recipe(folder).keys():
            raise ValueError(
                f"{path} is not from a run, because it has only some of the keys. A run would overwrite it with all "
                f"settings. Move it, or choose another --output-dir."
            )
        if recipe.training.process_index == 0:
            write_recipe(recipe, folder)
        return None
    validate_same_recipe(recipe, folder)
    checkpoint = last_valid_checkpoint(folder)
    if checkpoint and "tokens_per_update" not in read_run_recipe(folder):
        raise ValueError(
            f"{folder} contains an interrupted run of an earlier version, whose updates have other pairs. It cannot be "
            f"resumed. Choose another --output-dir, or finish it with the earlier version."
        )
    if checkpoint:
        logger.info(f"resuming from {checkpoint}")
    return checkpoint


def is_trained(folder: Path) -> bool:
    return bool(all_checkpoints(folder)) or any(folder.glob("*.safetensors"))


def validate_same_recipe(recipe: Recipe, folder: Path) -> None:
    """Raise ValueError if the run was started with a different recipe.

    "auto" matches every earlier value. A key that is missing in the saved recipe has its default value.
    """
    saved, new = read_run_recipe(folder), yaml.safe_load(recipe.to_yaml())
    names = (saved.keys() | new.keys()) - RESUME_MUTABLE_KEYS - UNSUPPORTED
    new = recipe.defaults() | new
    saved = recipe.defaults() | {"tokens_per_update": former_tokens_per_update(saved)} | saved
    for name in sorted(names - {"bf16"}):  # bf16 only sets `precision`, which is compared
        if saved.get(name) != new.get(name) and new.get(name) != "auto":
            raise ValueError(
                f"{folder} contains a different run: {name} was {saved.get(name)}, now it is {new.get(name)}. Choose "
                f"another --output-dir, or use the original settings to resume."
            )


def write_or_compare_hashes(corpus: dict[str, ParallelText], folder: Path, is_resumed: bool) -> None:
    """Write the hashes of the data, or raise ValueError if a resumed run started with other data."""
    hashes = {name: text.sha256() for name, text in corpus.items()}
    if not is_resumed:
        with atomic_write(folder / RUN_INFO) as path:
            path.write_text(json.dumps({"data": hashes}, indent=1), encoding="utf-8")
        return
    try:
        saved = dict(json.loads((folder / RUN_INFO).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder / RUN_INFO} is damaged ({error}). Choose another --output-dir.") from error
    for name, sha256 in hashes.items():
        # With streaming, training pairs with a test source may be dropped, so that the test data affect training.
        is_used = name != "test" or "train" not in corpus
        if is_used and saved["data"].get(name) != sha256:
            raise ValueError(
                f"{folder} contains a run on different data: sha256 of the {name} data was {saved['data'].get(name)}, "
                f"now it is {sha256}. Choose another --output-dir, or use the original data to resume."
            )


def write_recipe(recipe: Recipe, folder: Path) -> None:
    with atomic_write(folder / "recipe.yaml") as path:
        path.write_text(recipe.to_yaml(), encoding="utf-8")
