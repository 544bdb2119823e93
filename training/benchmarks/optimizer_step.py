"""The whole update of a training: forward, backward, clipping at 1, Adam; ours as `training.train` runs it.

That is the Trainer itself, with its sampler, its collator and whatever it does between two steps. The stock models
train on one fixed batch of the same text in the shortest loop that one can write.
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
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast, PrinterCallback, TrainerCallback

from training.arguments import TrainingArguments
from training.benchmarks.forward_backward import make_batch
from training.benchmarks.model_sizes import SENTENCE_LENGTH
from training.run.trainer import TokenBatchTrainer
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.shared.transformers_conversion import to_marian

SMOOTHING = 0.1
Updates = Callable[[int], tuple[int, float]]  # so many updates -> target tokens, seconds


def compare_updates(
    config: VanillaTransformerConfig, tokens: int, precision: str, device: torch.device, rounds: int, updates: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Target tokens a second of each, a figure a round, and what memory each took (on a GPU).

    Args:
        tokens: target tokens of an update, with padding.
        updates: of each in a round; the first round, in which is compiled, is not counted.
    """
    batch = make_batch(tokens // SENTENCE_LENGTH, config.vocab_size, device)
    contenders = contestants(config, batch, tokens, precision)
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    peaks = {}
    for turn in tqdm(range(rounds + 1), leave=False, desc="rounds"):
        for name, run in contenders.items():
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            count, seconds = run(updates)
            if device.type == "cuda":
                peaks[name] = f"{(torch.cuda.max_memory_allocated() - before) / 2**20:,.0f} MiB"
            if turn:
                rates[name].append(count / seconds)
    return rates, peaks


def contestants(
    config: VanillaTransformerConfig, batch: dict[str, torch.Tensor], tokens: int, precision: str
) -> dict[str, Updates]:
    ours = VanillaTransformerForConditionalGeneration(config)
    device = batch["labels"].device
    found = {
        "ours plain": trainer_updates(deepcopy(ours), batch, tokens, precision, "eager"),
        "Marian eager": loop_updates(to_marian(ours).to(device), batch, precision),
    }
    if device.type == "cuda":  # on a CPU, compiling pays for neither of them
        found["ours"] = trainer_updates(deepcopy(ours), batch, tokens, precision, "auto")
        found["Marian compiled"] = loop_updates(torch.compile(to_marian(ours).to(device)), batch, precision)
    return found


def loop_updates(model: Any, batch: dict[str, torch.Tensor], precision: str) -> Updates:
    """A stock model on one batch."""
    device = batch["labels"].device
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, 1e-4, (0.9, 0.98), 1e-9, weight_decay=0, fused=True)

    def update() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            logits = model(**batch)["logits"]
            loss = nn.functional.cross_entropy(
                logits.float().flatten(0, 1), batch["labels"].flatten(), label_smoothing=SMOOTHING
            )
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
    """Reads the clock at the end of the first update and of the last."""

    first: tuple[float, int]  # seconds, target tokens so far
    last: tuple[float, int]

    def __init__(self, trainer: TokenBatchTrainer):
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in (1, state.max_steps):
            synchronize(args.device)
            now = time.perf_counter(), self.trainer.target_tokens
            self.last = now
            if state.global_step == 1:
                self.first = now


def trainer_updates(
    model: VanillaTransformerForConditionalGeneration,
    batch: dict[str, torch.Tensor],
    tokens: int,
    precision: Any,
    step: Any,
) -> Updates:
    """Ours, by the Trainer of `training.train`, on the same sentences in eight batches."""
    config: Any = model.config
    lengths = ((batch["labels"] != -100).sum(1).tolist(), batch["attention_mask"].sum(1).tolist())
    rows = list(zip(batch["input_ids"].tolist(), batch["labels"].tolist(), *lengths, strict=True)) * 8
    columns = {
        "input_ids": [source[:length] for source, _, _, length in rows],
        "labels": [target[:length] for _, target, length, _ in rows],
    }
    vocabulary = {f"t{i}": i for i in range(config.vocab_size)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t3")),
        pad_token=f"t{config.pad_token_id}",
        eos_token=f"t{config.eos_token_id}",
    )
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_tokens=tokens,
        precision=precision,
        bf16=precision == "bf16",
        step=step,
        label_smoothing_factor=SMOOTHING,
        learning_rate=1e-4,
        max_grad_norm=1.0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=100,
        use_cpu=batch["labels"].device.type == "cpu",
    )
    trainer = TokenBatchTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict(columns),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
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
