"""Results of a run: test scores, metadata, console report, upload to the Hub."""

import json
import logging
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import AutoModelForSeq2SeqLM

from vanilla_transformer.alignment_vanilla_transformer import choose_alignment_heads
from vanilla_transformer.shared.atomic_io import wrap_write_errors
from vanilla_transformer.shared.command_line import logger, start_of_command
from vanilla_transformer.shared.loading import load_tokenizer
from vanilla_transformer.shared.text_lines import read_lines, sanitize_tsv_cell

from ...data.corpora import describe_corpus
from ...data.parallel_text import ParallelText
from ...inference.metrics import make_metric, translate_and_score
from ...recipe.arguments import Recipe
from ..callbacks import MIN_SHUFFLED_LOSS_INCREASE
from ..factories import count_positions
from ..hardware import describe
from ..trainer import TokenBatchTrainer
from .baselines import BASELINES, compare_with_baselines
from .plots import plot_cross_attention

RESULTS = "all_results.json"  # written at the end of a run
NUM_SAMPLES = 100  # test sentences in samples.tsv
NUM_SAMPLES_SHOWN = 10  # test sentences on the console
NUM_ALIGNMENT_PAIRS = 20  # validation pairs that select the alignment heads
MAX_REPEATED_FRACTION = 0.5  # fraction of the test sentences that have the same translation
MAX_ALIGNMENT_SOURCE_CHARS = 300  # longer pairs are skipped: each source word takes a forward pass


def score_test_set(
    recipe: Recipe, folder: Path, test: ParallelText, trainer: TokenBatchTrainer, train: ParallelText | None = None
) -> dict[str, Any]:
    """Score the test set with the saved checkpoint, and write samples and attention heat maps.

    All processes translate. The main process writes the files, and compares the scores with those of baselines. One
    baseline uses the training pairs `train`.
    """
    args = trainer.args
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).to(args.device)
    tokenizer = load_tokenizer(folder)
    metric = make_metric(recipe.decoding.metric, recipe.data.target_lang)
    start = time.perf_counter()
    scores, translations = translate_and_score(model, tokenizer, test, metric.compute, args, recipe.decoding.engine)
    scores["seconds"] = time.perf_counter() - start
    if args.process_index == 0:
        scores |= compare_with_baselines(translations, test, train, recipe.decoding.metric)
        rows = list(zip(test.sources, test.targets, translations, strict=True))
        cells = [("source", "reference", "translation"), *rows[:NUM_SAMPLES]]
        lines = ["\t".join(map(sanitize_tsv_cell, row)) + "\n" for row in cells]
        with wrap_write_errors(folder):
            (folder / "samples.tsv").write_text("".join(lines), encoding="utf-8")
            for number in recipe.decoding.attention_plot_lines:
                if 1 <= number <= len(rows):
                    source, _, translation = rows[number - 1]
                    if has_positions(model, tokenizer, source, translation):
                        plot_cross_attention(model, tokenizer, source, translation, folder / f"attention_{number}.png")
    if problem := find_failure(scores, test, translations):
        is_post_norm = args.base_model is None and recipe.model.norm_position == "post"
        advice = "norm_position: pre" if is_post_norm else "a lower dropout"
        logger.warning(f"warning: {problem}. Set {advice} and a lower learning_rate (now {args.learning_rate:g}).")
    return {f"test_{name}": value for name, value in scores.items()}


def find_failure(scores: dict[str, Any], test: ParallelText, translations: list[str]) -> str | None:
    """Return a problem of a trained model or None: it ignores the source, repeats itself, or is below a baseline."""
    if (gain := scores.get("source_gain", MIN_SHUFFLED_LOSS_INCREASE)) < MIN_SHUFFLED_LOSS_INCREASE:
        return f"the model ignores the source: other sources raise the loss by only {gain:.3f} nats per token"
    (text, count), *_ = Counter(translations).most_common(1)
    expected = Counter(test.targets).most_common(1)[0][1]
    if len(translations) > 1 and count > max(2 * expected, MAX_REPEATED_FRACTION * len(translations)):
        return f"{count} of {len(translations)} test translations are {text[:80]!r}"
    key, label = ("bleu", "BLEU") if "bleu" in scores else ("exact_match", "exact match")
    for name, baseline in BASELINES.items():
        value = scores.get(f"{name}_{key}")
        if value is not None and scores.get(key, 100) <= value < 100:
            return f"the model is not better than {baseline}: {label} {scores[key]:.1f}, compared with {value:.1f}"
    return None


def has_positions(model: Any, tokenizer: Any, source: str, target: str) -> bool:
    """Return whether the model has a position for each token of a pair."""
    batch = tokenizer(source, text_target=target)
    return max(map(len, (batch["input_ids"], batch["labels"]))) <= count_positions(model)


def save_alignment_heads(folder: Path, validation: ParallelText, device: Any) -> None:
    """Select alignment heads on validation pairs and save them in `generation_config.json`."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).to(device)
    tokenizer = load_tokenizer(folder)
    pairs = zip(validation.sources, validation.targets, strict=True)
    short = (pair for pair in pairs if len(pair[0]) < MAX_ALIGNMENT_SOURCE_CHARS)
    chosen = list(islice((pair for pair in short if has_positions(model, tokenizer, *pair)), NUM_ALIGNMENT_PAIRS))
    sources, targets = ([pair[side] for pair in chosen] for side in (0, 1))
    if tokenizer.is_fast and (heads := choose_alignment_heads(model, tokenizer, sources, targets)):
        model.generation_config.alignment_heads = heads
        model.generation_config.save_pretrained(folder)


def run_metadata(recipe: Recipe, corpus: dict[str, ParallelText], trainer: TokenBatchTrainer) -> dict[str, Any]:
    """Return data, cost, hardware and versions of a run, for `all_results.json`."""
    metadata = {
        "recipe": recipe.name,
        "data": describe_corpus(corpus, recipe.data),
        "updates": trainer.state.global_step,
        "train_target_tokens": trainer.target_tokens,
        "parameters": sum(each.numel() for name, each in trainer.model.named_parameters() if "lora_" not in name),
        **describe(trainer.args.device),
        "processes": trainer.args.world_size,
        "precision": trainer.args.precision,
        "attention": trainer.args.attn_implementation,
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers", "sacrebleu")},
    }
    if "train" in corpus:
        metadata |= {"train_pairs": len(trainer.train_dataset), "train_sha256": corpus["train"].sha256()}
        metadata["train_pairs_dropped"] = dict(corpus["train"].dropped)
    else:
        stream = trainer.train_dataset
        metadata |= {"train_pairs_read": stream.pairs_read, "train_pairs_dropped": stream.pairs_dropped}
    return metadata


def read_results(folder: Path) -> dict[str, Any]:
    path = folder / RESULTS
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}). Remove it and run the same command again.") from error


def describe_results(folder: Path, results: dict[str, Any]) -> str:
    """Return samples, scores, cost and files of a finished run as a text."""
    lines = []
    if (folder / "samples.tsv").exists():
        for line in read_lines(folder / "samples.tsv")[1 : NUM_SAMPLES_SHOWN + 1]:
            names = "source", "reference", "translation"
            lines += [f"{name:>12}: {text}" for name, text in zip(names, line.split("\t"), strict=True)] + [""]
    if "test_bleu" in results:
        for name, label in (("bleu", "BLEU"), ("chrf", "chrF"), ("ter", "TER")):
            lines.append(f"{label:>12} {format_score(results, name, 1)}   {results[f'test_{name}_signature']}")
        lines.append(f"{'BLEU':>12} {results['test_bleu_tokenized_lc']:.1f}   normalized, lower-cased, Moses tokens")
    elif "test_exact_match" in results:
        for name in ("exact_match", "token_error_rate", "character_error_rate"):
            if f"test_{name}" in results:  # not in a run of an earlier version
                lines.append(f"{name.replace('_', ' '):>20} {format_score(results, name, 2)} %")
    key = "bleu" if "test_bleu" in results else "exact_match"
    for name, baseline in BASELINES.items():
        if (value := results.get(f"test_{name}_{key}")) is not None:
            lines.append(
                f"{'compared with':>12} {value:.1f}   {key.replace('_', ' ').replace('bleu', 'BLEU')} of {baseline}"
            )
    if "test_source_gain" in results:
        lines.append(f"{'source gain':>12} {results['test_source_gain']:.2f} nats per token")
    lines.append(
        f"trained {results['train_runtime'] / 60:.1f} minutes, {results['train_target_tokens']:,} target tokens; "
        f"output directory: {folder}"
    )
    return "\n".join(lines + [f"  {path.name}" for path in sorted(folder.glob("*.png"))])


def format_score(results: dict[str, Any], name: str, digits: int) -> str:
    """Return a test score with half of its 95 % confidence interval, if available."""
    interval = results.get(f"test_{name}_interval_95")
    return f"{results[f'test_{name}']:.{digits}f}" + ("" if interval is None else f" ± {interval:.{digits}f}")


def push(recipe: Recipe, folder: Path) -> None:
    """Upload a finished run with `hub.push`, which validates the files, skips pickles and deletes `UPLOAD_PENDING`."""
    args = recipe.training
    options = [str(folder.resolve()), args.hub_model_id or folder.resolve().name]
    options += ["--private"] if args.hub_private_repo else []
    options += ["--revision", args.hub_revision] if args.hub_revision else []
    module = __package__.removesuffix("training.run.results") + "hub.push"
    command = [sys.executable, "-m", module, *options, *([] if logger.isEnabledFor(logging.INFO) else ["--quiet"])]
    environment = os.environ | ({"HF_TOKEN": args.hub_token} if args.hub_token else {})
    root = Path(__file__).parents[__name__.count(".")]
    process = subprocess.run(command, env=environment, check=False, cwd=root, stdout=subprocess.PIPE, text=True)
    logger.info(process.stdout)
    if process.returncode:
        advice = f"Repeat the command, or run: {start_of_command('hub.push')} {shlex.join(options)}"
        raise ValueError(f"the model was not uploaded. {advice}")
