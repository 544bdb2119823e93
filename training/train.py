"""Train a model from a recipe, score it, and save a checkpoint that `from_pretrained` loads.

    python -m training.train training/recipes/demo.yaml
    python -m training.train training/recipes/multi30k_en_de.yaml --data-dir DIR --max-steps 500
    accelerate launch -m training.train training/recipes/wmt14_en_de_base.yaml

The output directory (`output_dir`) contains the model, the tokenizer, `recipe.yaml` (all settings),
`all_results.json`, `samples.tsv` (source, reference, translation), `training_curve.png` and `attention_1.png`. The same
command resumes an interrupted run from its last valid checkpoint.
"""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

from httpx2 import TransportError  # raised by huggingface_hub
from transformers import EarlyStoppingCallback, set_seed

from vanilla_transformer.shared.atomic_io import atomic_write, wrap_write_errors
from vanilla_transformer.shared.command_line import exit_on_user_error, format_error

from .data.collators import PaddingCollator
from .data.corpora import read_corpus
from .data.tokenization import validate_eval_lengths
from .data.tokenizer import vocabulary_sizes
from .inference.metrics import make_metric
from .recipe.arguments import Recipe
from .recipe.reading import read_recipe
from .run.checkpoints import MANIFEST, all_checkpoints, keep_only
from .run.distributed import (
    LAUNCHED,
    describe_plan,
    exit_after_barrier,
    launch,
    launcher,
    main_process_reports_first,
    mute_other_ranks,
    resolve_num_processes,
)
from .run.evaluation import last_metrics, push, run_metadata, save_alignment_heads, score_test_set, show_results
from .run.factories import (
    count_positions,
    make_model,
    make_tokenizer,
    make_train_set,
    resolve_precision_and_attention,
)
from .run.hardware import configure_malloc, fit_micro_batches
from .run.output_dir import (
    lock_output_dir,
    prepare_output_dir,
    validate_run_info,
    validate_same_recipe,
    write_recipe,
    write_run_info,
)
from .run.plots import plot_training_curve
from .run.time_budget import estimate_test_ratio
from .run.trainer import TokenBatchTrainer


def main() -> None:
    configure_malloc()
    launcher.watch()
    user_errors = FloatingPointError, ImportError, TransportError
    with exit_on_user_error("training.train", *user_errors, formatter=format_training_error):
        recipe = read_recipe()
        holds_lock = LAUNCHED not in os.environ and os.environ.get("RANK", "0") == "0"
        with lock_output_dir(Path(recipe.training.output_dir)) if holds_lock else nullcontext():
            is_launched = bool({"LOCAL_RANK", "ACCELERATE_USE_CPU"} & os.environ.keys())  # also by `accelerate launch`
            if not is_launched and (processes := resolve_num_processes(recipe.training)) > 1:
                sys.exit(launch(processes, sys.argv[1:]))
            mute_other_ranks(recipe.training)
            with main_process_reports_first(recipe.training):
                run(recipe)


def format_training_error(error: Exception) -> str:
    """Return the message of a user error."""
    if isinstance(error, TransportError):  # with `push_to_hub`, the repository is created before training
        return f"The Hub cannot be reached ({error}). Check your network, or remove push_to_hub."
    return format_error(error)


def run(recipe: Recipe) -> None:
    """Train and score a model: all steps from text to the final checkpoint."""
    args, folder = recipe.training, Path(recipe.training.output_dir)
    if (folder / "all_results.json").exists():
        validate_same_recipe(recipe, folder)
        print(f"{folder} contains the finished run. To train again, remove it or choose another --output-dir.\n")
        show_results(folder)
        return
    with args.main_process_first(local=False):
        checkpoint = prepare_output_dir(recipe, folder)
    set_seed(args.seed)
    corpus = read_corpus(recipe.data)
    print(", ".join(f"{name}: {len(text)} pairs" for name, text in corpus.items()))
    if args.eval_strategy != "no" and "validation" not in corpus:
        raise ValueError(f"eval_strategy={args.eval_strategy.value} requires validation data. Set validation_size.")
    if checkpoint:
        validate_run_info(corpus, folder)
    elif args.process_index == 0:
        write_run_info(corpus, folder)
    with args.main_process_first(local=False):  # the other ranks read what rank 0 has written
        tokenizer = make_tokenizer(recipe, corpus, folder, checkpoint)
    model = make_model(recipe, tokenizer)
    positions = count_positions(model)
    with args.main_process_first(local=False):
        validate_eval_lengths(corpus, tokenizer, recipe.data, positions)
        train_set = make_train_set(recipe, corpus, tokenizer, positions)
    print(f"{model.num_parameters():,} parameters, vocabulary {vocabulary_sizes(tokenizer)[1]:,}")
    collator = PaddingCollator(tokenizer.pad_token_id)
    resolve_precision_and_attention(recipe, model, train_set, collator, folder)
    fit_micro_batches(args, model, train_set)
    print(describe_plan(args))
    if args.process_index == 0 and not checkpoint:
        write_recipe(recipe, folder)
    metric = make_metric(recipe.decoding.metric, recipe.data.target_lang)
    trainer = TokenBatchTrainer(
        model=model,
        args=args,
        train_dataset=train_set,
        eval_dataset=corpus.get("validation"),
        processing_class=tokenizer,
        data_collator=collator,
        compute_metrics=metric.compute if args.predict_with_generate else None,
        test_ratio=estimate_test_ratio(corpus, recipe.decoding.num_beams, args.predict_with_generate),
        callbacks=[EarlyStoppingCallback(args.early_stopping_patience)] if args.early_stopping_patience else None,
    )
    outcome = trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    if trainer.stop.signal_number:
        saved = [path.name for path in all_checkpoints(folder) if (path / MANIFEST).exists()]
        update = f"update {trainer.state.global_step} of {trainer.state.max_steps}"
        start = saved[-1] if saved else "the start: nothing was saved"
        print(f"stopped at {update}. The same command resumes from {start}.")
        if args.world_size > 1:
            exit_after_barrier(trainer, 128 + trainer.stop.signal_number)
        sys.exit(128 + trainer.stop.signal_number)
    seconds = trainer.seconds
    with wrap_write_errors(folder):
        trainer.save_final()
        with args.main_process_first(local=False):
            pairs = corpus.get("validation", corpus.get("train"))
            if trainer.is_world_process_zero() and pairs is not None:
                save_alignment_heads(folder, pairs, args.device)
    results = outcome.metrics | run_metadata(recipe, corpus, trainer)
    results |= {"train_runtime": seconds, **last_metrics(trainer)}
    if "test" in corpus:
        results |= score_test_set(recipe, folder, corpus["test"], trainer)
    if trainer.is_world_process_zero():
        settings = args.label_smoothing_factor, args.rdrop_alpha, args.simcut_alpha
        plot_training_curve(trainer.state.log_history, folder / "training_curve.png", *settings)
        with atomic_write(folder / "all_results.json") as path:  # marks the run as finished
            path.write_text(json.dumps(results, indent=2, ensure_ascii=False), encoding="utf-8")
        keep_only(folder, trainer.checkpoints_to_keep())  # deletes a checkpoint that was saved on a signal
        show_results(folder)
        if args.push_to_hub:
            push(recipe, folder)
    if args.world_size > 1:
        exit_after_barrier(trainer)


if __name__ == "__main__":
    main()
