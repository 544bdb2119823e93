"""Checkpoints: validation and selection in a run, and averaging.

A checkpoint is valid if its files match the sizes and hashes in its manifest, which is written last.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PreTrainedModel
from transformers.trainer_utils import sort_checkpoints

from vanilla_transformer.shared.atomic_io import atomic_write
from vanilla_transformer.shared.command_line import logger
from vanilla_transformer.shared.loading import load_model, load_tokenizer
from vanilla_transformer.shared.transformers_conversion import validate_no_adapter

from ..inference.translators import RUN_CHECKPOINT, Paths, as_names, read_run_recipe, validate_same_tokenizer
from ..recipe.resolution import LOWER_IS_BETTER, default_metric

MANIFEST = "files.json"
TEMPORARY = "temporary"  # marker file of a checkpoint that was saved on a signal, only to resume the run
ARCHITECTURE_KEYS = (  # of a model's config, which have no effect on the shapes of its weights
    *("model_type", "activation_function", "encoder_attention_heads", "decoder_attention_heads"),
    *("layer_norm_eps", "norm_position", "position_embedding_type", "scale_embedding"),
    *("tie_word_embeddings", "share_encoder_decoder_embeddings"),
)


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
    validate_no_adapter(model, str(folders[0]))
    sums = {name: tensor.double() for name, tensor in model.state_dict().items()}
    for folder in folders[1:]:
        other = load_model(folder)
        validate_no_adapter(other, str(folder))
        state = other.state_dict()
        configs = model.config, other.config
        different = [name for name in ARCHITECTURE_KEYS if len({getattr(each, name, None) for each in configs}) > 1]
        different += [name for name in sums if name not in state or state[name].shape != sums[name].shape]
        if different or len(state) != len(sums):
            name = (different or [next(name for name in state if name not in sums)])[0]
            raise ValueError(f"{folders[0]} and {folder} are different models: {name} differs.")
        for name, tensor in state.items():
            sums[name] += tensor
    model.load_state_dict({name: (total / len(folders)).float() for name, total in sums.items()})
    return model


def average(checkpoints: Paths, output: str | Path, *, last: int | None = None, best: int | None = None) -> Path:
    """Average the weights of checkpoints (section 6.1: "obtained by averaging the last 5 checkpoints").

    Example: `average("runs/demo", "runs/mean", last=5)`.

    Args:
        checkpoints: Directories of models with the same tokenizer, or one run with `last` or `best`.
        output: Directory to write the model to, with its tokenizer, and a recipe with the settings that all share.
        last: Average the last checkpoints of the run, this many.
        best: Average the best ones, by the evaluation metric of the run.

    Returns:
        The path of `output`.

    Raises:
        ValueError: If the output exists, or the checkpoints cannot be averaged.
    """
    output, folders = Path(output), choose_checkpoints(checkpoints, last=last, best=best)
    if output.exists():
        raise ValueError(f"{output} already exists. Choose another path.")
    for folder in folders:
        if all_checkpoints(folder) and not (folder / "config.json").exists():
            raise ValueError(f"{folder} is a run without a final model. Add --last N, or list its checkpoints.")
        belongs_to_run = RUN_CHECKPOINT.fullmatch(folder.name) and (folder.parent / "recipe.yaml").exists()
        if belongs_to_run and (reason := checkpoint_error(folder)):
            raise ValueError(f"{folder} cannot be averaged: {reason}. Remove it from the list.")
    tokenizers = load_same_tokenizers(folders)
    first, *others = map(read_run_recipe, folders)
    recipe = {key: value for key, value in first.items() if all(each.get(key) == value for each in others)}
    recipe.pop("output_dir", None)
    model = average_checkpoints(folders)
    with atomic_write(output) as temporary:
        for each in (model, *tokenizers[-1:]):
            each.save_pretrained(temporary)
        if recipe:
            text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
            (temporary / "recipe.yaml").write_text(text, encoding="utf-8")
    return output


def choose_checkpoints(checkpoints: Paths, *, last: int | None = None, best: int | None = None) -> list[Path]:
    folders = [Path(name) for name in as_names(checkpoints)]
    count = best if last is None else last
    if count is None:
        return folders
    if count < 1 or len(folders) != 1 or None not in (last, best):
        raise ValueError("--last and --best require one run directory and a number of at least 1.")
    return select_run_checkpoints(folders[0], count, "best" if last is None else "last")


def load_same_tokenizers(folders: list[Path]) -> list[Any]:
    """Load the tokenizers of checkpoints or of their runs, if any. Raises ValueError if they differ."""
    tokenizers = []
    for folder in folders:
        sources = [each for each in (folder, folder.parent) if (each / "tokenizer_config.json").exists()]
        tokenizers += [(str(folder), load_tokenizer(each)) for each in sources[:1]]
    for name, tokenizer in tokenizers[1:]:
        validate_same_tokenizer(*tokenizers[0], name, tokenizer)
    return [tokenizer for _, tokenizer in tokenizers]


def select_run_checkpoints(run_folder: Path, count: int, by: str) -> list[Path]:
    """Return the last or best `count` checkpoints of a run. Raises ValueError if it has fewer."""
    if not all_checkpoints(run_folder):
        raise ValueError(f"{run_folder} has no checkpoint-N directories.")
    metric, better = None, True
    if by == "best":
        settings = read_run_recipe(run_folder)
        usual = default_metric(settings.get("metric", "translation"), settings.get("predict_with_generate", True))
        metric = settings.get("metric_for_best_model") or usual
        better = settings.get("greater_is_better", metric not in LOWER_IS_BETTER)
    folders = select_checkpoints(run_folder, count, by, metric, better)
    if len(folders) < count:
        scored = f" with {metric}" if by == "best" else ""
        message = f"{run_folder} has only {len(folders)} complete checkpoints{scored}, expected {count}."
        limit = read_run_recipe(run_folder).get("save_total_limit")
        if limit and limit < count:
            message += (
                f" The run kept save_total_limit={limit}. Train with --save-total-limit {count}, or average {limit}."
            )
        raise ValueError(message)
    return folders
