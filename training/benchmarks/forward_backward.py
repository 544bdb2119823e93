"""Forward and backward pass, compared with MarianMT, which gets the same weights."""

import copy
from collections.abc import Callable
from typing import Any

import torch

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.shared.transformers_conversion import to_marian

from .model_sizes import NUM_PADDING_TOKENS, SENTENCE_LENGTH

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def peak_flops(device: torch.device, dtype: torch.dtype, clock: Callable[[], float]) -> float:
    """Return the highest measured throughput of a large matrix product, in FLOP/s."""
    size = 1024 if device.type == "cpu" else 8192
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    seconds = []
    for _ in range(30):
        start = clock()
        left @ right
        seconds.append(clock() - start)
    return 2 * size**3 / min(seconds)


def step_models(config: VanillaTransformerConfig, device: torch.device) -> dict[str, Any]:
    """Build the models to compare, by name, with all attention implementations, and compiled on a GPU."""
    models: dict[str, Any] = {}
    vanilla = VanillaTransformerForConditionalGeneration(copy.deepcopy(config))
    for name, model in (("Vanilla", vanilla), ("Marian", to_marian(vanilla))):
        for attention in ("eager", "sdpa"):
            models[f"{name} {attention}"] = copy.deepcopy(model).to(device).train()
            models[f"{name} {attention}"].set_attn_implementation(attention)
    if device.type == "cuda":
        for name in ("Vanilla sdpa", "Marian sdpa"):
            models[f"{name} compiled"] = torch.compile(copy.deepcopy(models[name]))
    return models


def compute_loss(name: str, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the unsmoothed cross-entropy. The vanilla transformer computes it in chunks, without returning logits."""
    return model(**batch, **({"smoothing": 0.0} if name.startswith("Vanilla") else {}))["loss"]


def run_step(name: str, model: Any, batch: dict[str, torch.Tensor], precision: str) -> None:
    with torch.autocast(batch["labels"].device.type, torch.bfloat16, enabled=precision == "bf16"):
        loss = compute_loss(name, model, batch)
    loss.backward()
    model.zero_grad()


def make_batch(sentences: int, vocab_size: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return random tokens (B, SENTENCE_LENGTH), with padding at the end of every second sentence."""
    source, labels = torch.randint(4, vocab_size, (2, sentences, SENTENCE_LENGTH), device=device)
    mask = torch.ones_like(source)
    mask[::2, -NUM_PADDING_TOKENS:] = 0
    labels[::2, -NUM_PADDING_TOKENS:] = -100
    return {"input_ids": source * mask, "attention_mask": mask, "labels": labels}


@torch.no_grad()
def validate_models(models: dict[str, Any], batch: dict[str, torch.Tensor]) -> None:
    """Raise AssertionError unless all models have the same loss."""
    losses = {name: float(compute_loss(name, model.eval(), batch)) for name, model in models.items()}
    for model in models.values():
        model.train()
    spread = max(losses.values()) - min(losses.values())
    if spread > 1e-4 * max(losses.values()):
        raise AssertionError(f"The losses of the models differ: {losses}")
