"""The training step: forward and backward pass, beside stock models that do the same work; its time and its memory."""

import copy
import resource
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from training.benchmarks.peers import TorchPeer, TutorialPeer, bart
from training.benchmarks.sizes import LENGTH, PADDED, WMT
from training.run.losses import training_loss
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.shared.stock import to_marian

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
    models |= {"torch.nn.Transformer": TorchPeer(ours), "tutorial": TutorialPeer(ours)}
    if device.type == "cuda":
        models |= {
            f"{name} compiled": torch.compile(copy.deepcopy(models[name])) for name in ("ours sdpa", "Marian sdpa")
        }
    return {name: model.to(device).train() for name, model in models.items()}


def loss_of(name: str, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The plain cross-entropy; ours without logits."""
    return model(**batch, **({"smoothing": 0.0} if name.startswith("ours") else {}))["loss"]


def step(name: str, model: Any, batch: dict[str, torch.Tensor], precision: str) -> None:
    with torch.autocast(batch["labels"].device.type, torch.bfloat16, enabled=precision == "bf16"):
        loss = loss_of(name, model, batch)
    loss.backward()
    model.zero_grad()


def regularized(
    config: VanillaTransformerConfig, batch: dict[str, torch.Tensor], precision: str
) -> dict[str, Callable[[], None]]:
    """Training steps of one model, with label smoothing and with R-Drop or SimCut beside it, by name."""
    device = batch["labels"].device
    model = VanillaTransformerForConditionalGeneration(copy.deepcopy(config)).to(device).train()
    model.set_attn_implementation("sdpa")
    batch = batch | {"decoder_input_ids": model.prepare_decoder_input_ids_from_labels(batch["labels"])}

    def turn(rdrop_alpha: float, simcut_alpha: float) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss, _ = training_loss(model, batch, 0.1, rdrop_alpha, True, simcut_alpha)
        loss.backward()
        model.zero_grad()

    weights = {"plain": (0.0, 0.0), "R-Drop": (2.0, 0.0), "SimCut": (0.0, 3.0)}
    return {name: partial(turn, *each) for name, each in weights.items()}


def make_batch(sentences: int, vocab_size: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Random tokens, LENGTH on either side, with padding at the end of every second sentence."""
    source, labels = torch.randint(4, vocab_size, (2, sentences, LENGTH), device=device)
    mask = torch.ones_like(source)
    mask[::2, -PADDED:] = 0
    labels[::2, -PADDED:] = -100
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
    sizes = {name: size for name, size in sizes.items() if name.split()[0] in ("ours", "Marian", "Bart")}
    if max(sizes.values()) > 1.01 * min(sizes.values()):
        raise AssertionError(f"not the same work: weights {sizes}")


def peak_memory(name: str, device: torch.device) -> float:
    """MiB that a step of "ours" or "Marian" needs beyond the model and what was there before."""
    config = WMT["base"]
    ours = VanillaTransformerForConditionalGeneration(config)
    model = (ours if name == "ours" else to_marian(ours)).to(device).train()
    batch = make_batch(8192 // LENGTH, config.vocab_size, device)
    step(name, model, {key: each[:4] for key, each in batch.items()}, "bf16")  # what is needed once
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(name, model, batch, "bf16")
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(name, model, batch, "bf16")
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10
