"""The compiled training step: forward pass and loss, on a GPU optionally captured as one CUDA graph per batch shape.

The loss equals that of `training.run.losses`. It covers all positions and multiplies padding by zero, so that all
tensor sizes follow from the batch shape, without host-device synchronization.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._inductor.exc
import torch.fx.experimental._config
from huggingface_hub.constants import HF_HOME
from peft import PeftModel
from torch import nn

from training.run.losses import cross_entropy, supports_fused_loss

BACKEND = "inductor"
# Smaller models are limited by kernel-launch overhead. On an H100 the base model (60 million) gains nothing.
MAX_CUDA_GRAPH_PARAMETERS = 30_000_000
HEARTBEAT = 20  # seconds between progress messages during compilation
COMPILER_ERRORS = (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError)


def resolve_step_mode(step_mode: str, model: Any, args: Any, lengths_vary: bool = False) -> str:
    """Return "eager", "compiled" or "cuda_graph", and print the reason if the requested mode is not supported.

    `lengths_vary` means that the number of tokens of a sentence changes between epochs.
    """
    device = args.device.type
    if step_mode == "eager" or (step_mode == "auto" and device != "cuda"):
        return "eager"
    reasons = {
        "FSDP shards the weights": bool(args.fsdp),
        "LoRA adds layers": isinstance(model, PeftModel),
        "gradient_checkpointing repeats parts of the forward pass": args.gradient_checkpointing,
        "with BPE-dropout, sentences can become longer than the batch shapes": lengths_vary,
        "SimCut masks embeddings in hooks": bool(args.simcut_alpha),
        f"model type {model.config.model_type} is not supported": not supports_fused_loss(model),
    }
    if active := [reason for reason, holds in reasons.items() if holds]:
        print(f"the training step is not compiled: {active[0]}")
        return "eager"
    if step_mode == "cuda_graph" and device != "cuda":
        print("the training step is compiled, but not captured: CUDA graphs require a GPU")
        return "compiled"
    if step_mode == "auto":
        return "cuda_graph" if model.num_parameters() < MAX_CUDA_GRAPH_PARAMETERS else "compiled"
    return step_mode


def compile_loss(use_cuda_graphs: bool) -> Callable[..., torch.Tensor]:
    """Return `masked_training_loss`, compiled at the first call for all batch shapes, optionally with CUDA graphs."""
    folder = Path(HF_HOME, "vanilla_transformer", "compiled")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))  # reused by later runs
    torch.fx.experimental._config.use_duck_shape = False  # equal sizes in the first batch are coincidental
    options: dict[str, Any] = {"mode": "reduce-overhead"} if use_cuda_graphs else {}
    compiled = torch.compile(masked_training_loss, dynamic=True, backend=BACKEND, **options)

    def run(*arguments: Any) -> torch.Tensor:
        if use_cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        return compiled(*arguments)

    return run


def masked_training_loss(
    model: nn.Module, inputs: dict[str, torch.Tensor], smoothing: float, rdrop_alpha: float
) -> torch.Tensor:
    """Return the label-smoothed cross-entropy (section 5.4) with R-Drop, summed over target tokens."""
    labels = inputs["labels"]  # (B, T)
    passes = 2 if rdrop_alpha else 1
    rest = {name: torch.cat([value] * passes) for name, value in inputs.items() if name != "labels"}
    log_p = model(**rest).logits.float().log_softmax(-1)  # (passes * B, T, V)
    loss = cross_entropy(log_p, labels.repeat(passes, 1), smoothing) / passes
    if passes == 2:
        p, q = log_p.chunk(2)
        divergence = ((p.exp() - q.exp()) * (p - q)).sum(-1) / 2  # (B, T)
        loss = loss + rdrop_alpha / 2 * (divergence * (labels != -100)).sum()
    return loss


@contextmanager
def log_progress(task: str) -> Iterator[None]:
    """Context manager that prints a progress message every 20 seconds, and the total time at the end."""
    start, finished = time.monotonic(), threading.Event()

    def report() -> None:
        while not finished.wait(HEARTBEAT):
            print(f"{task}: {time.monotonic() - start:.0f} s so far", flush=True)

    print(f"{task}: takes a few minutes the first time", flush=True)
    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        finished.set()
        reporter.join()
    print(f"{task}: {time.monotonic() - start:.0f} s")
