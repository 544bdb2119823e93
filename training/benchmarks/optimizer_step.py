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

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.shared.transformers_conversion import to_marian

from ..data.collators import PaddingCollator
from ..recipe.arguments import TrainingArguments
from ..run.callbacks import LogMessages
from ..run.trainer import TokenBatchTrainer

SMOOTHING = 0.1
UPDATES = 20  # per candidate and round
Batch = dict[str, torch.Tensor]
Measurement = tuple[float, str]  # target tokens per second, peak memory


def build_candidates(
    config: VanillaTransformerConfig, batch: Batch, tokens: int, precision: str
) -> dict[str, Callable[[], Measurement]]:
    """Return the candidates by name. Each runs `UPDATES` updates of `tokens` target tokens, including padding."""
    model, device = VanillaTransformerForConditionalGeneration(config), batch["labels"].device
    runs: dict[str, Callable[[], float]] = {}
    for mode in ("eager", "compiled") if device.type == "cuda" else ("eager",):  # on a CPU, compilation is not faster
        native: Any = to_marian(model).to(device).train()
        optimizer = torch.optim.AdamW(native.parameters(), 1e-4, (0.9, 0.98), 1e-9, weight_decay=0, fused=True)
        trainer = make_trainer(deepcopy(model), batch, tokens, precision, mode)
        runs[f"Vanilla {mode}"] = partial(run_trainer, trainer)
        compiled = native if mode == "eager" else torch.compile(native)
        runs[f"Marian {mode}"] = partial(run_loop, compiled, optimizer, batch, precision)
    return {name: partial(measure, run, device) for name, run in runs.items()}


def measure(run: Callable[[], float], device: torch.device) -> Measurement:
    """Return the target tokens per second of a candidate, and on a GPU its peak memory."""
    if device.type != "cuda":
        return run(), ""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    return run(), f"{(torch.cuda.max_memory_allocated() - before) / 2**20:,.0f} MiB"


def run_loop(model: Any, optimizer: torch.optim.Optimizer, batch: Batch, precision: str) -> float:
    device, labels = batch["labels"].device, batch["labels"].flatten()
    start = time.perf_counter()
    for _ in range(UPDATES):
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            logits = model(**batch)["logits"].float().flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, labels, label_smoothing=SMOOTHING)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return UPDATES * int((labels != -100).sum()) / (time.perf_counter() - start)


def run_trainer(trainer: TokenBatchTrainer) -> float:
    trainer.train()
    return [entry["tokens_per_second"] for entry in trainer.state.log_history if "tokens_per_second" in entry][-1]


def make_trainer(model: Any, batch: Batch, tokens: int, precision: Any, step_mode: Any) -> TokenBatchTrainer:
    """Build a trainer for eight copies of the batch. Its last log has the speed of all updates after the first."""
    pairs = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
    columns = {"input_ids": [ids[mask].tolist() for ids, mask in pairs] * 8}
    columns["labels"] = [labels[labels != -100].tolist() for labels in batch["labels"]] * 8
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        tokens_per_update=tokens,
        max_tokens=tokens,
        max_steps=UPDATES + 1,
        precision=precision,
        bf16=precision == "bf16",
        step_mode=step_mode,
        label_smoothing_factor=SMOOTHING,
        learning_rate=1e-4,
        max_grad_norm=1.0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_first_step=True,
        logging_steps=UPDATES + 1,
        use_cpu=batch["labels"].device.type == "cpu",
    )
    data, collator = Dataset.from_dict(columns), PaddingCollator(model.config.pad_token_id)
    trainer = TokenBatchTrainer(model=model, args=arguments, train_dataset=data, data_collator=collator)
    trainer.pop_callback(LogMessages)
    return trainer
