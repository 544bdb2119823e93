"""The training step: forward and backward pass, compared with stock models that do the same work."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import BartConfig, BartForConditionalGeneration

from training.benchmarks.model_sizes import NUM_PADDING_TOKENS, SENTENCE_LENGTH
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.shared.transformers_conversion import SAME_FIELDS, to_marian

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def matrix_speed(device: torch.device, dtype: torch.dtype, clock: Callable[[], float]) -> float:
    """Floating-point operations a second of a large matrix product: the best of many."""
    size = 1024 if device.type == "cpu" else 8192
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    seconds = []
    for _ in range(30):
        start = clock()
        left @ right
        seconds.append(clock() - start)
    return 2 * size**3 / min(seconds)


def step_models(config: VanillaTransformerConfig, device: torch.device) -> dict[str, Any]:
    """What takes a batch and gives a loss, by name; on a GPU compiled, too."""
    models: dict[str, Any] = {}
    ours = VanillaTransformerForConditionalGeneration(copy.deepcopy(config))
    for name, model in (("ours", ours), ("Marian", to_marian(ours)), ("Bart", bart(config))):
        for attention in ("eager", "sdpa"):
            own = copy.deepcopy(model).to(device).train()
            own.set_attn_implementation(attention)
            models[f"{name} {attention}"] = own
    if device.type == "cuda":
        models |= {
            f"{name} compiled": torch.compile(copy.deepcopy(models[name])) for name in ("ours sdpa", "Marian sdpa")
        }
    return models


def bart(config: VanillaTransformerConfig) -> BartForConditionalGeneration:
    """Build a Bart of the same size with new weights. It also has learned positions and a norm on its embeddings."""
    fields = {name: getattr(config, name) for name in SAME_FIELDS}
    return BartForConditionalGeneration(BartConfig(forced_eos_token_id=None, **fields))


def loss_of(name: str, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The plain cross-entropy; ours without logits."""
    return model(**batch, **({"smoothing": 0.0} if name.startswith("ours") else {}))["loss"]


def step(name: str, model: Any, batch: dict[str, torch.Tensor], precision: str) -> None:
    with torch.autocast(batch["labels"].device.type, torch.bfloat16, enabled=precision == "bf16"):
        loss = loss_of(name, model, batch)
    loss.backward()
    model.zero_grad()


def make_batch(sentences: int, vocab_size: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Random tokens, LENGTH on either side, with padding at the end of every second sentence."""
    source, labels = torch.randint(4, vocab_size, (2, sentences, SENTENCE_LENGTH), device=device)
    mask = torch.ones_like(source)
    mask[::2, -NUM_PADDING_TOKENS:] = 0
    labels[::2, -NUM_PADDING_TOKENS:] = -100
    return {"input_ids": source * mask, "attention_mask": mask, "labels": labels}


@torch.no_grad()
def check_same_loss(models: dict[str, Any], batch: dict[str, torch.Tensor]) -> None:
    """Raises AssertionError unless all have as many weights, and but for Bart the same loss."""
    losses, sizes = {}, {}
    for name, model in models.items():
        sizes[name] = sum(
            p.numel() for n, p in model.named_parameters() if "position" not in n and "embedding" not in n
        )
        if not name.startswith("Bart"):
            losses[name] = float(loss_of(name, model.eval(), batch))
            model.train()
    spread = max(losses.values()) - min(losses.values())
    if spread > 1e-4 * max(losses.values()):
        raise AssertionError(f"not the same work: losses {losses}")
    if max(sizes.values()) > 1.01 * min(sizes.values()):
        raise AssertionError(f"not the same work: weights {sizes}")
