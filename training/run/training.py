"""Training from a recipe: the Python function `train`, and its steps from text to the scored model."""

import json
import time
from collections.abc import Mapping
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import EarlyStoppingCallback, PreTrainedModel, set_seed

from vanilla_transformer.shared.atomic_io import UPLOAD_PENDING, atomic_write, wrap_write_errors
from vanilla_transformer.shared.command_line import logger
from vanilla_transformer.shared.loading import load_model, load_tokenizer

from ..data.collators import PaddingCollator
from ..data.corpora import read_corpus
from ..data.parallel_text import ParallelText
from ..data.tokenization import validate_eval_lengths
from ..data.tokenizer import vocabulary_sizes
from ..inference.metrics import make_metric
from ..recipe.arguments import Recipe
from .callbacks import StopOnIgnoredSource
from .checkpoints import MANIFEST, all_checkpoints, keep_only, select_checkpoints
from .chosen_recipe import describe_choice, has_chosen_post_norm, read_or_choose_recipe, with_safer_settings
from .compilation import resolve_step_mode
from .distributed import describe_plan, exit_with_signal_status, launcher, mute_other_ranks, resolve_num_processes
from .factories import count_positions, make_model, make_tokenizer, make_train_set, resolve_precision_and_attention
from .hardware import fit_micro_batches
from .output_dir import lock_output_dir, prepare_output_dir, validate_same_recipe, write_or_compare_hashes, write_recipe
from .results.evaluation import RESULTS, push, read_results, run_metadata, save_alignment_heads, score_test_set
from .results.plots import plot_training_curve
from .time_budget import estimate_test_ratio
from .trainer import TokenBatchTrainer


@dataclass(frozen=True)
class TrainingResult:
    """Result of a training run."""

    folder: Path  # the output directory
    scores: dict[str, Any]  # contents of `all_results.json`: scores, losses, cost, versions; empty if it was stopped
    stop_signal: int = 0  # number of the signal that stopped the run, or 0

    @property
    def finished(self) -> bool:
        """Whether the run is finished. A stopped run is resumed by the same call of `train`."""
        return not self.stop_signal

    @cached_property
    def model(self) -> PreTrainedModel:
        """The final model of a finished run."""
        return load_model(self.folder)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of a finished run."""
        return load_tokenizer(self.folder)


def train(recipe: str | Path | None = None, **settings: Any) -> TrainingResult:
    """Train a model from a recipe in this process, score it, and save a checkpoint that `from_pretrained` loads.

        result = train("demo", max_steps=500, output_dir="runs/short")
        print(result.scores["test_bleu"])
        result = train(data_dir="my_data", minutes=10, output_dir="runs/mine")

    Ctrl-C saves a checkpoint and returns. The same call resumes the run. The updates are the same as with multiple
    processes. Messages are sent to the logger `vanilla_transformer`.

    Args:
        recipe: Path of a recipe, or name of a packaged one such as "demo". If None, the settings are chosen from the
            data in `data_dir`, and from `minutes`.
        settings: Keys of the recipe, which override its values.

    Raises:
        ValueError: if a setting or the data are invalid, or if the output directory contains a different run.
        FloatingPointError: if the loss is not finite.
    """
    started = time.time()
    resolved_recipe = read_or_choose_recipe([] if recipe is None else [str(recipe)], settings)
    args = resolved_recipe.training
    is_automatic_cpu = args.device.type == "cpu" and args.num_processes == "auto"
    if args.world_size == 1 and not is_automatic_cpu and (count := resolve_num_processes(args)) > 1:
        logger.warning(
            f"Training in 1 process. To use {count}, run `vanilla-transformer train`, or in a notebook with GPUs "
            f"`accelerate.notebook_launcher(functools.partial(train, recipe, **settings), num_processes={count})`."
        )
    with lock_output_dir(Path(args.output_dir)) if args.process_index == 0 else nullcontext():
        return run(resolved_recipe, started)


def run(recipe: Recipe, started: float, previous_seconds: float = 0.0) -> TrainingResult:
    """Train and score a model. `started` is the time from which `minutes` counts.

    `previous_seconds` is the training time of a model that diverged or ignored the source.
    """
    args, folder = recipe.training, Path(recipe.training.output_dir)
    mute_other_ranks(args)
    if (folder / RESULTS).exists():
        validate_same_recipe(recipe, folder)
        if args.process_index == 0 and (folder / UPLOAD_PENDING).exists():
            push(recipe, folder)
        logger.info(f"{folder} contains the finished run. To train again, remove it or choose another --output-dir.")
        return TrainingResult(folder, read_results(folder))
    with args.main_process_first(local=False):
        checkpoint = prepare_output_dir(recipe, folder)
    if recipe.reasons:
        logger.info(describe_choice(recipe))
    set_seed(args.seed)
    corpus = load_corpus(recipe, folder, checkpoint)
    trainer = make_trainer(recipe, corpus, folder, checkpoint, started)
    trainer.previous_seconds = previous_seconds
    metrics, problem = fit(recipe, trainer, checkpoint)
    if trainer.stop.signal_number:
        saved = [path.name for path in all_checkpoints(folder) if (path / MANIFEST).exists()]
        update = f"update {trainer.state.global_step} of {trainer.state.max_steps}"
        start = saved[-1] if saved else "the start, because nothing was saved"
        logger.warning(f"stopped at {update}. The same command resumes from {start}.")
        return TrainingResult(folder, {}, trainer.stop.signal_number)
    if problem:
        safer_recipe, change = with_safer_settings(recipe)
        logger.warning(f"after update {trainer.state.global_step} {problem}. Training starts again, with {change}.")
        if args.process_index == 0:  # the other processes wait for it in `run`
            keep_only(folder, [])
        started, previous_seconds = started - trainer.previous_elapsed, trainer.seconds
        del corpus, trainer  # their memory
        return run(safer_recipe, started, previous_seconds)
    metrics["train_runtime"] = trainer.seconds
    save_model(trainer, corpus, folder)
    results = score_model(recipe, corpus, trainer, metrics)
    if trainer.is_world_process_zero():
        with wrap_write_errors(folder):
            if args.push_to_hub:
                (folder / UPLOAD_PENDING).touch()
            save_results(trainer, results, folder)
        if args.push_to_hub:
            push(recipe, folder)
    trainer.accelerator.wait_for_everyone()
    return TrainingResult(folder, read_results(folder))


def fit(recipe: Recipe, trainer: TokenBatchTrainer, checkpoint: Path | None) -> tuple[dict[str, Any], str]:
    """Train the model. Return the metrics, and the problem because of which training has to start again, or "".

    Training only starts again if the rules have chosen the settings that may have caused the problem. If the loss
    becomes not finite after the first checkpoint, this remains an error, because the checkpoint may be useful.
    """
    source_check = StopOnIgnoredSource()
    if has_chosen_post_norm(recipe):
        trainer.add_callback(source_check)
    try:
        metrics = trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint)).metrics
    except FloatingPointError:
        if "learning_rate" not in recipe.reasons or select_checkpoints(Path(recipe.training.output_dir), 1, "last"):
            raise
        launcher.on_signal = exit_with_signal_status  # as at the end of training
        return {}, "the loss is not finite"
    return metrics, "the model ignores the source" if source_check.has_stopped else ""


def load_corpus(recipe: Recipe, folder: Path, checkpoint: Path | None) -> dict[str, ParallelText]:
    """Read the data of the recipe, and save their hashes or compare them with those of the interrupted run."""
    args = recipe.training
    corpus = read_corpus(recipe.data)
    logger.info(", ".join(f"{name}: {len(text)} pairs" for name, text in corpus.items()))
    if args.eval_strategy != "no" and "validation" not in corpus:
        raise ValueError(f"eval_strategy={args.eval_strategy.value} requires validation data. Set validation_size.")
    if checkpoint or args.process_index == 0:
        write_or_compare_hashes(corpus, folder, is_resumed=checkpoint is not None)
    return corpus


def make_trainer(
    recipe: Recipe, corpus: dict[str, ParallelText], folder: Path, checkpoint: Path | None, started: float
) -> TokenBatchTrainer:
    """Create tokenizer, model, training set and trainer, and resolve the settings that depend on the machine."""
    args = recipe.training
    with args.main_process_first(local=False):  # the other ranks read what rank 0 has written
        tokenizer = make_tokenizer(recipe, corpus, folder, checkpoint)
    model = make_model(recipe, tokenizer)
    positions = count_positions(model)
    with args.main_process_first(local=False):
        validate_eval_lengths(corpus, tokenizer, recipe.data, positions)
        train_set = make_train_set(recipe, corpus, tokenizer, positions)
    logger.info(f"{model.num_parameters():,} parameters, vocabulary {vocabulary_sizes(tokenizer)[1]:,}")
    collator = PaddingCollator(tokenizer.pad_token_id)
    resolve_precision_and_attention(recipe, model, train_set, collator, folder)
    if args.step_mode == "auto":  # a resumed run keeps the result, because compiled updates have other pairs
        args.step_mode = resolve_step_mode(model, args, train_set)
    fit_micro_batches(args, model, train_set)
    logger.info(describe_plan(args))
    if args.process_index == 0 and not checkpoint:
        write_recipe(recipe, folder)
    metric = make_metric(recipe.decoding.metric, recipe.data.target_lang)
    return TokenBatchTrainer(
        model=model,
        args=copy(args),  # the trainer changes it
        train_dataset=train_set,
        eval_dataset=corpus.get("validation"),
        processing_class=tokenizer,
        data_collator=collator,
        compute_metrics=metric.compute if args.predict_with_generate else None,
        test_ratio=estimate_test_ratio(corpus, recipe.decoding.num_beams, args.predict_with_generate),
        started=started,
        callbacks=[EarlyStoppingCallback(args.early_stopping_patience)] if args.early_stopping_patience else None,
    )


def save_model(trainer: TokenBatchTrainer, corpus: dict[str, ParallelText], folder: Path) -> None:
    with wrap_write_errors(folder):
        trainer.save_final()
        with trainer.args.main_process_first(local=False):
            pairs = corpus.get("validation", corpus.get("train"))
            if trainer.is_world_process_zero() and pairs is not None:
                save_alignment_heads(folder, pairs, trainer.args.device)


def score_model(
    recipe: Recipe, corpus: dict[str, ParallelText], trainer: TokenBatchTrainer, metrics: dict[str, Any]
) -> dict[str, Any]:
    """Return the metrics of training and last evaluation, the costs, and the scores of the test set."""
    results = metrics | run_metadata(recipe, corpus, trainer)
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    results |= {name: value for name, value in (evaluations or [{}])[-1].items() if name.startswith("eval_")}
    if "test" in corpus:
        folder = Path(recipe.training.output_dir)
        results |= score_test_set(recipe, folder, corpus["test"], trainer, corpus.get("train"))
    return results


def save_results(trainer: TokenBatchTrainer, results: Mapping[str, Any], folder: Path) -> None:
    """Write the training curve and `all_results.json`, which marks the run as finished, and delete old checkpoints."""
    args = trainer.args
    settings = args.label_smoothing_factor, args.rdrop_alpha, args.simcut_alpha
    plot_training_curve(trainer.state.log_history, folder / "training_curve.png", *settings)
    with atomic_write(folder / RESULTS) as path:
        path.write_text(json.dumps(results, indent=2, ensure_ascii=False), encoding="utf-8")
    keep_only(folder, trainer.checkpoints_to_keep())  # deletes a checkpoint that was saved on a signal
