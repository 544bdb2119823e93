"""Checkpoints of a run: which are whole, which are kept, and the mean of several.

A checkpoint counts as whole when it holds a list of its files with their sizes and hashes, written last, and the files
agree with it. One that was cut off while it was written, or damaged since, is passed over.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.trainer_utils import sort_checkpoints

from vanilla_transformer.shared.loading import load_model

MANIFEST = "files.json"
TEMPORARY = "temporary"  # marks a checkpoint of a stop, which only serves to resume the run
EMA_SUBFOLDER = "ema"  # subfolder: the moving average of the weights, a model as save_pretrained writes it


def write_manifest(folder: Path) -> None:
    """Writes the list that makes a checkpoint whole; the files are on the disk before it is."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            with path.open("rb") as file:
                os.fsync(file.fileno())
            files[str(path.relative_to(folder))] = _size_and_hash(path)
    temporary = folder / f"{MANIFEST}.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(files, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / MANIFEST)


def checkpoint_error(folder: Path) -> str | None:
    """What is wrong with a checkpoint, in words; None: nothing."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return "it was cut off while it was written"
    if not isinstance(files, dict) or not files:
        return f"its {MANIFEST} is damaged"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if _size_and_hash(path) != expected:
            return f"{name} is damaged"
    return None


def _size_and_hash(path: Path) -> list[int | str]:
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def all_checkpoints(run: Path) -> list[Path]:
    """`checkpoint-N` of a run, by N, whole or not."""
    return [Path(path) for path in sort_checkpoints(str(run))] if run.exists() else []


def last_valid_checkpoint(run: Path) -> Path | None:
    """The last whole checkpoint; those passed over for it are told."""
    for folder in reversed(all_checkpoints(run)):
        reason = checkpoint_error(folder)
        if reason is None:
            return folder
        print(f"{folder} is passed over: {reason}")
    return None


def select_checkpoints(
    run: Path, count: int, by: str, metric: str | None = None, greater_is_better: bool = True
) -> list[Path]:
    """The last `count` checkpoints, or those with the best `metric`; whole ones, as far as there are so many. Those
    of a stop are left out."""
    whole = [f for f in all_checkpoints(run) if (f / MANIFEST).exists() and not (f / TEMPORARY).exists()]
    if by == "last":
        return whole[-count:]
    scores = {folder: score(folder, metric) for folder in whole}
    scored = {folder: value for folder, value in scores.items() if value is not None}
    return sorted(scored, key=lambda folder: scored[folder], reverse=greater_is_better)[:count]


def score(folder: Path, metric: str | None) -> float | None:
    """What the evaluation at this very update gave; None: there was none, or it was no number."""
    path = folder / "trainer_state.json"
    key = f"eval_{str(metric).removeprefix('eval_')}"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        history = [entry for entry in state["log_history"] if entry["step"] == state["global_step"]]
        found = [float(entry[key]) for entry in history if key in entry]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({type(error).__name__}): copy it anew, or leave it out.") from error
    return found[-1] if found and math.isfinite(found[-1]) else None


def keep_only(run: Path, kept: Iterable[Path]) -> None:
    """Removes the other checkpoints of a run, half-written ones included."""
    kept = set(kept)
    for folder in all_checkpoints(run):
        if folder not in kept:
            (folder / MANIFEST).unlink(missing_ok=True)  # first: a half-removed one is not whole either
            shutil.rmtree(folder)


def load(folder: Path) -> PreTrainedModel:
    """The model of a checkpoint: the moving average of its weights where it has one."""
    return load_model(folder / EMA_SUBFOLDER if (folder / EMA_SUBFOLDER).exists() else folder)


@torch.no_grad()
def average(folders: list[Path]) -> PreTrainedModel:
    """A model whose every weight is the plain mean over checkpoints (section 6.1), in float32 and more.

    Raises:
        ValueError: the checkpoints are models of different shapes.
    """
    model = load(folders[0]).float()
    sums = {name: tensor.double() for name, tensor in model.state_dict().items()}
    for folder in folders[1:]:
        state = load(folder).state_dict()
        different = [name for name in sums if name not in state or state[name].shape != sums[name].shape]
        if different or len(state) != len(sums):
            name = (different or [next(name for name in state if name not in sums)])[0]
            raise ValueError(f"{folders[0]} and {folder} are different models: {name} does not agree.")
        for name, tensor in state.items():
            sums[name] += tensor
    model.load_state_dict({name: (total / len(folders)).float() for name, total in sums.items()})
    return model
