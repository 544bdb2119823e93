"""The compiled training step: forward pass and loss, compiled once for all batch shapes."""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch._dynamo
import torch.distributed
import torch.fx.experimental._config
from huggingface_hub.constants import HF_HOME
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from vanilla_transformer.shared.command_line import logger

from ..data.tokenization import sequence_lengths
from ..recipe.arguments import TrainingArguments
from .losses import supports_fused_loss, training_loss

BACKEND = "inductor"
MIN_UPDATES = 5_000  # for `auto`; on an H100, compilation took 90 s and saved 40 ms per step of the base model
MIN_MINUTES = 10  # for `auto` with `minutes`: the first compilation takes a few minutes
RECOMPILE_LIMIT = 64  # per process: each run with other settings compiles its step
HEARTBEAT = 20  # seconds between progress messages during compilation
# Relative difference of loss and gradient norm from those of the eager step, without dropout
TOLERANCE = 1e-3
LOW_PRECISION_TOLERANCE = 2e-2  # with bf16 or fp16


def resolve_step_mode(model: Any, args: Any, dataset: Any) -> Literal["eager", "compiled"]:
    """Return "eager" or "compiled", and print the reason if the requested mode is not supported."""
    step_mode, device = args.step_mode, args.device.type
    if step_mode == "eager" or (step_mode == "auto" and device != "cuda"):
        return "eager"
    reasons = {
        "FSDP shards the weights": bool(args.fsdp),
        "LoRA adds layers": isinstance(model, PeftModel),
        "activation_checkpointing repeats parts of the forward pass": args.activation_checkpointing,
        "with BPE-dropout, sentences can become longer than the batch shapes": (
            "lengths" in (getattr(dataset, "column_names", None) or ())
        ),
        "SimCut masks embeddings in hooks": bool(args.simcut_alpha),
        f"model type {model.config.model_type} is not supported": not supports_fused_loss(model),
        f"a run of less than {MIN_UPDATES:,} updates or {MIN_MINUTES} minutes is too short": (
            step_mode == "auto" and estimate_updates(args, dataset) < MIN_UPDATES
        ),
    }
    if active := [reason for reason, holds in reasons.items() if holds]:
        logger.info(f"the training step is not compiled: {active[0]}")
        return "eager"
    return "compiled"


def estimate_updates(args: TrainingArguments, dataset: Any) -> float:
    if args.minutes is not None:
        return MIN_UPDATES * args.minutes / MIN_MINUTES
    if args.max_steps > 0:
        return args.max_steps
    return args.num_train_epochs * float(sequence_lengths(dataset).max(1).sum()) / args.tokens_per_update


def make_compiled_loss(model: Any, args: TrainingArguments, dataset: Any) -> "CompiledLoss | None":
    """Return the compiled loss for `step_mode`, or None for eager steps."""
    if resolve_step_mode(model, args, dataset) == "eager":
        return None
    return CompiledLoss(LOW_PRECISION_TOLERANCE if args.bf16 or args.fp16 else TOLERANCE)


class CompiledLoss:
    """`masked_training_loss`, compiled at the first call for all batch shapes.

    `tolerance` is the relative difference from the eager step at which `find_error` reports an error.
    """

    def __init__(self, tolerance: float = TOLERANCE):
        folder = Path(HF_HOME, "vanilla_transformer", "compiled")
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))  # reused by later runs
        torch.fx.experimental._config.use_duck_shape = False  # equal sizes in the first batch are coincidental
        torch._dynamo.config.specialize_float = True  # otherwise traced twice, with float64 tensors on the CPU
        torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
        self.tolerance = tolerance
        self.compiled = torch.compile(masked_training_loss, dynamic=True, backend=BACKEND)
        self.shapes: set[tuple[torch.Size, ...]] = set()  # of verified batches

    def __call__(self, *arguments: Any) -> torch.Tensor:
        return self.compiled(*arguments)

    def is_new_shape(self, inputs: dict[str, torch.Tensor]) -> bool:
        """Return whether no batch of this shape was checked before."""
        shape = tuple(each.shape for each in inputs.values())
        is_new = shape not in self.shapes
        self.shapes.add(shape)
        return is_new

    def find_error(
        self,
        model: PreTrainedModel,
        inputs: dict[str, torch.Tensor],
        smoothing: float,
        rdrop_alpha: float,
        autocast: Callable[[], AbstractContextManager],
    ) -> str | None:
        """Run forward and backward pass on a batch, and return an error message, or None.

        Without dropout, loss and gradient norm must be those of the eager step. With dropout, the first call must not
        raise an exception. Accumulated gradients and random numbers do not change.
        """
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        rates = (model.config.dropout, model.config.attention_dropout, model.config.activation_dropout)

        def run(is_compiled: bool) -> list[float]:
            with autocast():
                if is_compiled:
                    loss = self(model, inputs, smoothing, rdrop_alpha)
                else:
                    loss, _ = training_loss(model, inputs, smoothing, rdrop_alpha, use_fused_loss=True)
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            norm = nn.utils.get_total_norm([each for each in gradients if each is not None])
            return torch.stack([loss.detach(), norm]).tolist()

        with torch.random.fork_rng([parameters[0].device] if parameters[0].is_cuda else []):
            model.train(not any(rates))
            try:
                expected, found = run(is_compiled=False), run(is_compiled=True)
                model.train()
                run(is_compiled=True)
            except Exception as error:  # also of compilers, and torch.OutOfMemoryError
                reason = " ".join(str(error).partition("\n\n")[0].split())
                return f"{type(error).__name__}: {reason}"
            finally:
                model.train()
        for name, value, other in zip(("loss", "gradient norm"), found, expected, strict=True):
            if math.isfinite(other) and not math.isclose(value, other, rel_tol=self.tolerance):
                return f"the {name} is {value:.6g} instead of {other:.6g}"
        return None


def average_gradients(model: nn.Module) -> None:
    """Replace gradients by their mean over processes.

    A compiled step does not call `DistributedDataParallel`, which would split it into three graphs.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    mean = torch.cat([gradient.flatten() for gradient in gradients]) / torch.distributed.get_world_size()
    torch.distributed.all_reduce(mean)
    for gradient, part in zip(gradients, mean.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def masked_training_loss(
    model: nn.Module, inputs: dict[str, torch.Tensor], smoothing: float, rdrop_alpha: float
) -> torch.Tensor:
    """Return `training_loss` with fixed shapes."""
    return training_loss(model, inputs, smoothing, rdrop_alpha, use_fused_loss=False, has_fixed_shapes=True)[0]


@contextmanager
def log_progress(task: str) -> Iterator[None]:
    """Context manager that prints a progress message every 20 seconds, and the total time at the end."""
    start, finished = time.monotonic(), threading.Event()

    def report() -> None:
        while not finished.wait(HEARTBEAT):
            logger.info(f"{task}: {time.monotonic() - start:.0f} s so far")

    logger.info(f"{task}: takes a few minutes the first time")
    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        finished.set()
        reporter.join()
    logger.info(f"{task}: {time.monotonic() - start:.0f} s")
