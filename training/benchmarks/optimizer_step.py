"""A complete optimizer step: forward, backward, gradient clipping at 1, AdamW.

The vanilla transformer is trained with `TokenBatchTrainer`, including its sampler, collator and callbacks. MarianMT is
trained in a minimal loop on one fixed batch of the same text.
"""

import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback

from training.arguments import TrainingArguments
from training.benchmarks.forward_backward import make_batch
from training.benchmarks.model_sizes import SENTENCE_LENGTH
from training.data.collators import PaddingCollator
from training.run.trainer import TokenBatchTrainer
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.shared.transformers_conversion import to_marian

SMOOTHING = 0.1
Batch = dict[str, torch.Tensor]
Updates = Callable[[int], tuple[int, float]]  # number of updates -> target tokens, seconds


def compare_updates(
    config: VanillaTransformerConfig, tokens: int, precision: str, device: torch.device, rounds: int, updates: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return the target tokens per second of each candidate and round, and the peak memory (on a GPU).

    An update has `tokens` target tokens, including padding. A round has `updates` updates of each candidate. The first
    round is not counted, because it includes the compilation.
    """
    batch = make_batch(tokens // SENTENCE_LENGTH, config.vocab_size, device)
    candidates = build_candidates(config, batch, tokens, precision)
    rates: dict[str, list[float]] = {name: [] for name in candidates}
    peaks = {}
    for i in tqdm(range(rounds + 1), leave=False, desc="rounds"):
        for name, run in candidates.items():
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            count, seconds = run(updates)
            if device.type == "cuda":
                peaks[name] = f"{(torch.cuda.max_memory_allocated() - before) / 2**20:,.0f} MiB"
            if i:
                rates[name].append(count / seconds)
    return rates, peaks


def build_candidates(config: VanillaTransformerConfig, batch: Batch, tokens: int, precision: str) -> dict[str, Updates]:
    model = VanillaTransformerForConditionalGeneration(config)
    device = batch["labels"].device
    candidates = {
        "Vanilla eager": trainer_updates(deepcopy(model), batch, tokens, precision, "eager"),
        "Marian eager": loop_updates(to_marian(model).to(device), batch, precision),
    }
    if device.type == "cuda":  # on a CPU, compilation is not faster
        candidates["Vanilla compiled"] = trainer_updates(deepcopy(model), batch, tokens, precision, "compiled")
        candidates["Marian compiled"] = loop_updates(torch.compile(to_marian(model).to(device)), batch, precision)
    return candidates


def loop_updates(model: Any, batch: Batch, precision: str) -> Updates:
    """Train a native Transformers model on one batch in a minimal loop."""
    device = batch["labels"].device
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, 1e-4, (0.9, 0.98), 1e-9, weight_decay=0, fused=True)

    def update() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            logits = model(**batch)["logits"]
            logits, labels = logits.float().flatten(0, 1), batch["labels"].flatten()
            loss = nn.functional.cross_entropy(logits, labels, label_smoothing=SMOOTHING)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    def run(updates: int) -> tuple[int, float]:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(updates):
            update()
        synchronize(device)
        return updates * int((batch["labels"] != -100).sum()), time.perf_counter() - start

    return run


class Stopwatch(TrainerCallback):
    """Callback that records the time and the target tokens at the end of the first and of the last update."""

    first: tuple[float, int]  # seconds, target tokens
    last: tuple[float, int]

    def __init__(self, trainer: TokenBatchTrainer):
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in (1, state.max_steps):
            synchronize(args.device)
            self.last = time.perf_counter(), self.trainer.target_tokens
            if state.global_step == 1:
                self.first = self.last


def trainer_updates(model: Any, batch: Batch, tokens: int, precision: Any, step_mode: Any) -> Updates:
    """Train with `TokenBatchTrainer` on eight copies of the batch."""
    lengths = ((batch["labels"] != -100).sum(1).tolist(), batch["attention_mask"].sum(1).tolist())
    rows = list(zip(batch["input_ids"].tolist(), batch["labels"].tolist(), *lengths, strict=True)) * 8
    columns = {
        "input_ids": [source[:length] for source, _, _, length in rows],
        "labels": [target[:length] for _, target, length, _ in rows],
    }
    vocabulary = {f"t{i}": i for i in range(model.config.vocab_size)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="t3"))
    special = {name: f"t{getattr(model.config, name + '_id')}" for name in ("pad_token", "eos_token")}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        tokens_per_update=tokens,
        max_tokens=tokens,
        precision=precision,
        bf16=precision == "bf16",
        step_mode=step_mode,
        label_smoothing_factor=SMOOTHING,
        learning_rate=1e-4,
        max_grad_norm=1.0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=100,
        use_cpu=batch["labels"].device.type == "cpu",
    )
    data, collator = Dataset.from_dict(columns), PaddingCollator(tokenizer.pad_token_id)
    trainer = TokenBatchTrainer(
        model=model, args=arguments, train_dataset=data, processing_class=tokenizer, data_collator=collator
    )
    trainer.pop_callback(PrinterCallback)
    watch = Stopwatch(trainer)
    trainer.add_callback(watch)

    def run(updates: int) -> tuple[int, float]:
        trainer.args.max_steps = updates + 1
        trainer.train()
        (start, before), (end, after) = watch.first, watch.last
        return after - before, end - start

    return run


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
