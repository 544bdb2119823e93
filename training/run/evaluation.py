"""What comes out of a run: scores of its test set, the facts to judge them by, all on the screen, and on the Hub."""

import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from training.data.corpora import describe_corpus
from training.data.parallel_text import ParallelText
from training.metrics import make_metric, translate_and_score
from training.recipe import Recipe
from training.run.factories import count_positions
from training.run.hardware import describe
from training.run.plots import plot_cross_attention
from training.run.trainer import TokenBatchTrainer
from vanilla_transformer.alignment_vanilla_transformer import choose_alignment_heads
from vanilla_transformer.shared.text_lines import read_lines, sanitize_tsv_cell

SAMPLES = 100  # of the test set, in samples.tsv
NUM_SAMPLES_SHOWN = 10  # of them on the screen
NUM_ALIGNMENT_PAIRS = 20  # pairs of the validation set, by which the heads that align are chosen ...
MAX_ALIGNMENT_SOURCE_CHARS = 300  # ... of those with fewer characters: each word of them takes a pass


def score_test_set(recipe: Recipe, folder: Path, test: ParallelText, trainer: TokenBatchTrainer) -> dict[str, Any]:
    """Load the checkpoint as an external user would, score the test set, and write samples and heat maps.

    All processes translate. The main process writes the files.
    """
    args = trainer.args
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).to(args.device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    metric = make_metric(recipe.decoding.metric, recipe.data.target_lang)
    start = time.perf_counter()
    scores, translations = translate_and_score(model, tokenizer, test, metric.compute, args)
    scores["seconds"] = time.perf_counter() - start
    if args.process_index == 0:
        rows = list(zip(test.sources, test.targets, translations, strict=True))
        lines = [
            "source\treference\ttranslation",
            *("\t".join(map(sanitize_tsv_cell, row)) for row in rows[:SAMPLES]),
            "",
        ]
        (folder / "samples.tsv").write_text("\n".join(lines), encoding="utf-8")
        for number in recipe.decoding.attention_plot_lines:
            if 1 <= number <= len(rows):
                source, _, translation = rows[number - 1]
                if has_positions(model, tokenizer, source, translation):
                    plot_cross_attention(model, tokenizer, source, translation, folder / f"attention_{number}.png")
    return {f"test_{name}": value for name, value in scores.items()}


def has_positions(model: Any, tokenizer: Any, source: str, target: str) -> bool:
    """Return whether the model has a position for each token of a pair."""
    batch = tokenizer(source, text_target=target)
    return max(map(len, (batch["input_ids"], batch["labels"]))) <= count_positions(model)


def save_alignment_heads(folder: Path, validation: ParallelText, device: Any) -> None:
    """Which attention tells the words that translate each other, into the checkpoint's `generation_config.json`."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).to(device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    every = zip(validation.sources, validation.targets, strict=True)
    fitting = (
        pair for pair in every if len(pair[0]) < MAX_ALIGNMENT_SOURCE_CHARS and has_positions(model, tokenizer, *pair)
    )
    pairs = list(islice(fitting, NUM_ALIGNMENT_PAIRS))
    sources, targets = ([pair[side] for pair in pairs] for side in (0, 1))
    if tokenizer.is_fast and (heads := choose_alignment_heads(model, tokenizer, sources, targets)):
        model.generation_config.alignment_heads = heads
        model.generation_config.save_pretrained(folder)


def run_metadata(recipe: Recipe, corpus: dict[str, ParallelText], trainer: TokenBatchTrainer) -> dict[str, Any]:
    """What one must know to judge the scores: data, amount of training, hardware, versions."""
    found = {
        "recipe": recipe.name,
        "data": describe_corpus(corpus, recipe.data),
        "updates": trainer.state.global_step,
        "train_target_tokens": trainer.target_tokens,
        "parameters": trainer.model.num_parameters(),
        **describe(trainer.args.device),
        "processes": trainer.args.world_size,
        "precision": trainer.args.precision,
        "attention": trainer.args.attn_implementation,
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers", "sacrebleu")},
    }
    if "train" in corpus:
        dropped = corpus["train"].dropped
        found |= {"train_pairs": len(trainer.train_dataset), "train_sha256": corpus["train"].sha256()}
        found["train_pairs_dropped"] = dict(dropped)
    else:
        stream = trainer.train_dataset
        counts = zip(*gather_object([(stream.pairs_read, stream.pairs_dropped)]), strict=True)
        found |= zip(("train_pairs_read", "train_pairs_dropped"), map(sum, counts), strict=True)
    return found


def last_losses(trainer: TokenBatchTrainer) -> dict[str, float]:
    """The last loss and scores on the validation set."""
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    return {name: value for name, value in (evaluations or [{}])[-1].items() if name.startswith("eval_")}


def show(folder: Path) -> None:
    """The result of a run on the screen."""
    path = folder / "all_results.json"
    try:
        results: dict[str, Any] = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}): remove it, and the same command makes it anew.") from error
    if (folder / "samples.tsv").exists():
        for line in read_lines(folder / "samples.tsv")[1 : NUM_SAMPLES_SHOWN + 1]:
            for name, text in zip(("source", "reference", "translation"), line.split("\t"), strict=True):
                print(f"{name:>12}: {text}")
            print()
    if "test_bleu" in results:
        for name in ("bleu", "chrf", "ter"):
            label = {"bleu": "BLEU", "chrf": "chrF", "ter": "TER"}[name]
            print(f"{label:>12} {results[f'test_{name}']:.1f}   {results[f'test_{name}_signature']}")
        print(f"{'BLEU':>12} {results['test_bleu_tokenized_lc']:.1f}   normalised, lower-cased, Moses tokens")
    elif "test_exact_match" in results:
        for name, label in (("exact_match", "exact match"), ("wer", "WER"), ("per", "PER")):
            print(f"{label:>12} {results[f'test_{name}']:.2f} %")
    print(
        f"trained {results['train_runtime'] / 60:.1f} minutes, {results['train_target_tokens']:,} target tokens; "
        f"everything is in {folder}"
    )
    print("\n".join(f"  {path.name}" for path in sorted(folder.glob("*.png"))))


def push(recipe: Recipe, folder: Path) -> None:
    """Uploads what a finished run has made, by `hub.push`, which looks at it first and leaves pickles at home."""
    args = recipe.training
    command = [sys.executable, "-m", "hub.push", str(folder.resolve()), args.hub_model_id or folder.resolve().name]
    command += ["--private"] if args.hub_private_repo else []
    command += ["--revision", args.hub_revision] if args.hub_revision else []
    environment = os.environ | ({"HF_TOKEN": args.hub_token} if args.hub_token else {})
    if subprocess.run(command, env=environment, check=False, cwd=Path(__file__).parents[2]).returncode:
        raise ValueError(f"the model was not uploaded; it is whole in {folder}: python -m hub.push {folder} USER/NAME")
