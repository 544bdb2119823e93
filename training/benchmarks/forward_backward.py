"""Forward and backward pass, compared with the native class, which gets the same weights."""

import timeit
from collections.abc import Callable
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def peak_flops(device: torch.device, dtype: torch.dtype, clock: Callable[[], float]) -> float:
    """Return the highest measured throughput of a large matrix product, in FLOP/s."""
    size = 1024 if device.type == "cpu" else 8192
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / min(timeit.repeat(lambda: left @ right, timer=clock, repeat=30, number=1))


def compute_loss(name: str, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the unsmoothed cross-entropy. The vanilla transformer computes it in chunks, without returning logits."""
    return model(**batch, **({"smoothing": 0.0} if name.startswith("Vanilla") else {}))["loss"]


def run_step(name: str, model: Any, batch: dict[str, torch.Tensor], precision: str) -> None:
    with torch.autocast(batch["labels"].device.type, torch.bfloat16, enabled=precision == "bf16"):
        loss = compute_loss(name, model, batch)
    loss.backward()
    model.zero_grad()


@torch.no_grad()
def validate_models(models: dict[str, Any], batch: dict[str, torch.Tensor]) -> None:
    """Raise AssertionError unless all models have the same loss."""
    losses = {name: float(compute_loss(name, model.eval(), batch)) for name, model in models.items()}
    for model in models.values():
        model.train()
    if max(losses.values()) - min(losses.values()) > 1e-4 * max(losses.values()):
        raise AssertionError(f"The losses of the models differ: {losses}")
