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

from training.run.losses import cross_entropy, smooths_labels

BACKEND = "inductor"
RECORDED = 30_000_000  # parameters of a model that waits for its launches: on an H100 base (60 million) gains nothing
HEARTBEAT = 20  # seconds between two signs of life while it compiles
COMPILER_ERRORS = (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError)


def choose_step(asked: str, model: Any, args: Any, lengths_vary: bool = False) -> str:
    """Resolves "auto", and what cannot be compiled: "plain", "compiled" or "recorded"; says why in a line.

    Args:
        asked: the recipe's key `step`.
        model: as it will be trained, inside peft's class where LoRA has put it there.
        args: the recipe's `TrainingArguments`.
        lengths_vary: whether the number of tokens of a sentence differs from epoch to epoch.
    """
    device = args.device.type
    if asked == "plain" or (asked == "auto" and device != "cuda"):
        return "plain"
    reasons = {
        "FSDP keeps parts of the weights": bool(args.fsdp),
        "LoRA changes what is computed": isinstance(model, PeftModel),
        "gradient_checkpointing computes parts again": args.gradient_checkpointing,
        "BPE-dropout makes sentences longer than the shapes that are chosen before": lengths_vary,
        "SimCut cuts tokens off inside of it": bool(args.simcut_alpha),
        f"it is made for our model, not for a {model.config.model_type}": not smooths_labels(model),
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        print(f"the training step is not compiled: {found[0]}")
        return "plain"
    if asked == "recorded" and device != "cuda":
        print("the training step is compiled, not recorded: that is for a GPU")
        return "compiled"
    if asked == "auto":
        return "recorded" if model.num_parameters() < RECORDED else "compiled"
    return asked


def compile_loss(recorded: bool) -> Callable[..., torch.Tensor]:
    """`whole_loss`, compiled for batches of any shape when it is first called; `recorded`: as a CUDA graph for each."""
    folder = Path(HF_HOME, "vanilla_transformer", "compiled")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))  # kept from run to run
    torch.fx.experimental._config.use_duck_shape = False  # equal sizes of the first batch are a coincidence
    options: dict[str, Any] = {"mode": "reduce-overhead"} if recorded else {}
    compiled = torch.compile(whole_loss, dynamic=True, backend=BACKEND, **options)

    def run(*arguments: Any) -> torch.Tensor:
        if recorded:
            torch.compiler.cudagraph_mark_step_begin()
        return compiled(*arguments)

    return run


def whole_loss(model: nn.Module, inputs: dict[str, torch.Tensor], smoothing: float, rdrop_alpha: float) -> torch.Tensor:
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
def sign_of_life(what: str) -> Iterator[None]:
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
