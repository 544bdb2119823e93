"""A complete optimizer step: forward, backward, gradient clipping at 1, AdamW.

The vanilla transformer is trained with `TokenBatchTrainer`, including its sampler, collator and callbacks. MarianMT is
trained in a minimal loop on one fixed batch of the same text.
"""

import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import TrainerCallback

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.shared.transformers_conversion import to_marian

from ..data.collators import PaddingCollator
from ..recipe.arguments import TrainingArguments
from ..run.callbacks import LogMessages
from ..run.trainer import TokenBatchTrainer

SMOOTHING = 0.1
Batch = dict[str, torch.Tensor]
Updates = Callable[[int], tuple[int, float]]  # number of updates -> target tokens, seconds
Measurement = tuple[float, str]  # target tokens per second, peak memory


def build_candidates(
    config: VanillaTransformerConfig, batch: Batch, tokens: int, precision: str, updates: int
) -> dict[str, Callable[[], Measurement]]:
    """Return the candidates by name. Each runs `updates` updates of `tokens` target tokens, including padding."""
    model, device = VanillaTransformerForConditionalGeneration(config), batch["labels"].device
    runs: dict[str, Updates] = {}
    for mode in ("eager", "compiled") if device.type == "cuda" else ("eager",):  # on a CPU, compilation is not faster
        native: Any = to_marian(model).to(device)
        runs[f"Vanilla {mode}"] = trainer_updates(deepcopy(model), batch, tokens, precision, mode)
        runs[f"Marian {mode}"] = loop_updates(native if mode == "eager" else torch.compile(native), batch, precision)
    return {name: partial(measure, run, updates, device) for name, run in runs.items()}


def measure(run: Updates, updates: int, device: torch.device) -> Measurement:
    """Return the target tokens per second of a candidate, and on a GPU its peak memory."""
    if device.type != "cuda":
        count, seconds = run(updates)
        return count / seconds, ""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    count, seconds = run(updates)
    return count / seconds, f"{(torch.cuda.max_memory_allocated() - before) / 2**20:,.0f} MiB"


def loop_updates(model: Any, batch: Batch, precision: str) -> Updates:
    """Train a native Transformers model on one batch in a minimal loop."""
    device = batch["labels"].device
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, 1e-4, (0.9, 0.98), 1e-9, weight_decay=0, fused=True)

    count = int((batch["labels"] != -100).sum())

    def run(updates: int) -> tuple[int, float]:
        start = read_clock(device)
        for _ in range(updates):
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                logits, labels = model(**batch)["logits"].float().flatten(0, 1), batch["labels"].flatten()
                loss = nn.functional.cross_entropy(logits, labels, label_smoothing=SMOOTHING)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad()
        return updates * count, read_clock(device) - start

    return run


class Stopwatch(TrainerCallback):
    """Callback that records the time and the target tokens at the end of the first and of the last update."""

    def __init__(self, trainer: TokenBatchTrainer):
        self.trainer = trainer
        self.laps: list[tuple[float, int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in (1, state.max_steps):
            self.laps.append((read_clock(args.device), self.trainer.target_tokens))


def trainer_updates(model: Any, batch: Batch, tokens: int, precision: Any, step_mode: Any) -> Updates:
    """Train with `TokenBatchTrainer` on eight copies of the batch."""
    pairs = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
    columns = {"input_ids": [ids[mask].tolist() for ids, mask in pairs] * 8}
    columns["labels"] = [labels[labels != -100].tolist() for labels in batch["labels"]] * 8
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
    data, collator = Dataset.from_dict(columns), PaddingCollator(model.config.pad_token_id)
    trainer = TokenBatchTrainer(model=model, args=arguments, train_dataset=data, data_collator=collator)
    trainer.pop_callback(LogMessages)
    watch = Stopwatch(trainer)
    trainer.add_callback(watch)

    def run(updates: int) -> tuple[int, float]:
        trainer.args.max_steps = updates + 1
        trainer.train()
        (start, before), (end, after) = watch.laps[-2:]
        return after - before, end - start

    return run


def read_clock(device: torch.device) -> float:
    """Return the wall time in seconds, after all work on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
