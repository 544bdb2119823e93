"""Checkpoints of a run: validation, selection and averaging.

A checkpoint is valid if its files match the sizes and hashes in its manifest, which is written last.
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

from vanilla_transformer.shared.command_line import logger
from vanilla_transformer.shared.loading import load_model

from ..inference.translators import RUN_CHECKPOINT

MANIFEST = "files.json"
TEMPORARY = "temporary"  # marker file of a checkpoint that was saved on a signal, only to resume the run


def write_manifest(folder: Path) -> None:
    """Write the manifest that marks a checkpoint as complete, after all its files are on the disk."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            with path.open("r+b") as file:  # Windows requires write access
                os.fsync(file.fileno())
            files[path.relative_to(folder).as_posix()] = _size_and_hash(path)
    temporary = folder / f"{MANIFEST}.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(files, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / MANIFEST)


def checkpoint_error(folder: Path) -> str | None:
    """Return a message about what is wrong with a checkpoint, or None if it is valid."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return "it is incomplete"
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
    """Return the `checkpoint-N` directories of a run, sorted by N, valid or not."""
    paths = map(Path, sort_checkpoints(str(run)) if run.exists() else [])
    return [path for path in paths if RUN_CHECKPOINT.fullmatch(path.name)]


def last_valid_checkpoint(run: Path) -> Path | None:
    """Return the last valid checkpoint, and print which later ones are skipped."""
    for folder in reversed(all_checkpoints(run)):
        reason = checkpoint_error(folder)
        if reason is None:
            return folder
        logger.warning(f"skipping {folder}: {reason}")
    return None


def select_checkpoints(
    run: Path, count: int, by: str, metric: str | None = None, greater_is_better: bool = True
) -> list[Path]:
    """Return at most `count` complete checkpoints that are not temporary: the "last", or the "best" by a metric."""
    complete = [f for f in all_checkpoints(run) if (f / MANIFEST).exists() and not (f / TEMPORARY).exists()]
    if by == "last":
        return complete[-count:]
    values = {folder: checkpoint_metric(folder, metric) for folder in complete}
    scores = {folder: value for folder, value in values.items() if value is not None}
    return sorted(scores, key=lambda folder: scores[folder], reverse=greater_is_better)[:count]


def checkpoint_metric(folder: Path, metric: str | None) -> float | None:
    """Return the metric of the evaluation at the step of a checkpoint, or None if there is no finite value."""
    path = folder / "trainer_state.json"
    key = f"eval_{str(metric).removeprefix('eval_')}"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        history = [entry for entry in state["log_history"] if entry["step"] == state["global_step"]]
        values = [float(entry[key]) for entry in history if key in entry]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise ValueError(f"cannot read {path} ({type(error).__name__}). Copy it again, or remove {folder}.") from error
    return values[-1] if values and math.isfinite(values[-1]) else None


def keep_only(run: Path, kept: Iterable[Path]) -> None:
    """Delete all other checkpoints of a run, including incomplete ones."""
    kept = set(kept)
    for folder in all_checkpoints(run):
        if folder not in kept:
            (folder / MANIFEST).unlink(missing_ok=True)  # first, so that a half-deleted checkpoint is not valid
            shutil.rmtree(folder)


@torch.no_grad()
def average_checkpoints(folders: list[Path]) -> PreTrainedModel:
    """Return a model whose weights are the mean over checkpoints (section 6.1), summed in float64."""
    model = load_model(folders[0]).float()
    sums = {name: tensor.double() for name, tensor in model.state_dict().items()}
    for folder in folders[1:]:
        state = load_model(folder).state_dict()
        different = [name for name in sums if name not in state or state[name].shape != sums[name].shape]
        if different or len(state) != len(sums):
            name = (different or [next(name for name in state if name not in sums)])[0]
            raise ValueError(f"{folders[0]} and {folder} are different models: {name} differs.")
        for name, tensor in state.items():
            sums[name] += tensor
    model.load_state_dict({name: (total / len(folders)).float() for name, total in sums.items()})
    return model
