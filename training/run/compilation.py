"""The compiled training step: forward pass and loss as one program, and on a GPU recorded as a graph once a shape.

Its loss is that of `training.run.losses` over all positions, padding multiplied by zero: the sizes of everything follow
from the batch's shape, and nothing has to be asked from the GPU.
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
MAX_CUDA_GRAPH_PARAMETERS = (
    30_000_000  # parameters of a model that waits for its launches: on an H100 base (60 million) gains nothing
)
HEARTBEAT = 20  # seconds between two signs of life while it compiles
COMPILER_ERRORS = (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError)


def resolve_step_mode(asked: str, model: Any, args: Any, lengths_vary: bool = False) -> str:
    """Resolves "auto", and what cannot be compiled: "eager", "compiled" or "cuda_graph"; says why in a line.

    Args:
        asked: the recipe's key `step_mode`.
        model: as it will be trained, inside peft's class where LoRA has put it there.
        args: the recipe's `TrainingArguments`.
        lengths_vary: whether the number of tokens of a sentence differs from epoch to epoch.
    """
    device = args.device.type
    if asked == "eager" or (asked == "auto" and device != "cuda"):
        return "eager"
    reasons = {
        "FSDP keeps parts of the weights": bool(args.fsdp),
        "LoRA changes what is computed": isinstance(model, PeftModel),
        "gradient_checkpointing computes parts again": args.gradient_checkpointing,
        "BPE-dropout makes sentences longer than the shapes that are chosen before": lengths_vary,
        "SimCut cuts tokens off inside of it": bool(args.simcut_alpha),
        f"it is made for our model, not for a {model.config.model_type}": not supports_fused_loss(model),
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        print(f"the training step is not compiled: {found[0]}")
        return "eager"
    if asked == "cuda_graph" and device != "cuda":
        print("the training step is compiled, not recorded: that is for a GPU")
        return "compiled"
    if asked == "auto":
        return "cuda_graph" if model.num_parameters() < MAX_CUDA_GRAPH_PARAMETERS else "compiled"
    return asked


def compile_loss(recorded: bool) -> Callable[..., torch.Tensor]:
    """Return `masked_training_loss`, compiled for all batch shapes at the first call (or captured as CUDA graphs)."""
    folder = Path(HF_HOME, "vanilla_transformer", "compiled")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))  # kept from run to run
    torch.fx.experimental._config.use_duck_shape = False  # equal sizes of the first batch are a coincidence
    options: dict[str, Any] = {"mode": "reduce-overhead"} if recorded else {}
    compiled = torch.compile(masked_training_loss, dynamic=True, backend=BACKEND, **options)

    def run(*arguments: Any) -> torch.Tensor:
        if recorded:
            torch.compiler.cudagraph_mark_step_begin()
        return compiled(*arguments)

    return run


def masked_training_loss(
    model: nn.Module, inputs: dict[str, torch.Tensor], smoothing: float, rdrop_alpha: float
) -> torch.Tensor:
    """What `training_loss` gives: the smoothed cross-entropy (section 5.4) with R-Drop, summed over tokens."""
    labels = inputs["labels"]  # (B, T)
    passes = 2 if rdrop_alpha else 1
    rest = {name: torch.cat([value] * passes) for name, value in inputs.items() if name != "labels"}
    log_p = model(**rest).logits.float().log_softmax(-1)  # (passes * B, T, V)
    loss = cross_entropy(log_p, labels.repeat(passes, 1), smoothing) / passes
    if passes == 2:
        p, q = log_p.chunk(2)
        apart = ((p.exp() - q.exp()) * (p - q)).sum(-1) / 2  # (B, T)
        loss = loss + rdrop_alpha / 2 * (apart * (labels != -100)).sum()
    return loss


@contextmanager
def log_progress(what: str) -> Iterator[None]:
    """Says what is under way, again every 20 seconds, and how long it took."""
    start, over = time.monotonic(), threading.Event()

    def tell() -> None:
        while not over.wait(HEARTBEAT):
            print(f"{what}: {time.monotonic() - start:.0f} s so far", flush=True)

    print(f"{what}: some minutes at the first time", flush=True)
    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()
    print(f"{what}: {time.monotonic() - start:.0f} s")
