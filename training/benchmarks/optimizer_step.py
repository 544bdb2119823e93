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
from tokenizers import Tokenizer, models
from torch import nn
from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.shared.transformers_conversion import to_marian

from ..data.collators import PaddingCollator
from ..recipe.arguments import TrainingArguments
from ..run.trainer import TokenBatchTrainer

SMOOTHING = 0.1
Batch = dict[str, torch.Tensor]
Updates = Callable[[int], tuple[int, float]]  # number of updates -> target tokens, seconds
Measurement = tuple[float, str]  # target tokens per second, peak memory


def build_candidates(
    config: VanillaTransformerConfig, batch: Batch, tokens: int, precision: str, updates: int
) -> dict[str, Callable[[], Measurement]]:
    """Return the candidates by name. Each runs `updates` updates of `tokens` target tokens, including padding."""
    model = VanillaTransformerForConditionalGeneration(config)
    device = batch["labels"].device
    candidates = {
        "Vanilla eager": trainer_updates(deepcopy(model), batch, tokens, precision, "eager"),
        "Marian eager": loop_updates(to_marian(model).to(device), batch, precision),
    }
    if device.type == "cuda":  # on a CPU, compilation is not faster
        candidates["Vanilla compiled"] = trainer_updates(deepcopy(model), batch, tokens, precision, "compiled")
        candidates["Marian compiled"] = loop_updates(torch.compile(to_marian(model).to(device)), batch, precision)
    return {name: partial(measure, run, updates, device) for name, run in candidates.items()}


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
    pairs = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
    columns = {"input_ids": [ids[mask].tolist() for ids, mask in pairs] * 8}
    columns["labels"] = [labels[labels != -100].tolist() for labels in batch["labels"]] * 8
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
