"""Hardware: memory allocator, precision and attention by timing, size of micro-batches, description of the machine."""

import ctypes
import itertools
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from transformers import PreTrainedModel

from vanilla_transformer.shared.command_line import logger

from ..data.batch_shapes import Shape
from ..data.streaming import TokenBatchStream
from ..data.tokenization import sequence_lengths
from ..inference.decoder_input import add_decoder_input_ids
from ..recipe.arguments import TrainingArguments
from .losses import supports_fused_loss, training_loss

MAX_TIMING_FRACTION = 0.03  # of the run time, for timing precision and attention
AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MAX_SLOWDOWN = 2  # slower candidates, relative to the fastest, are not timed further
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h of glibc


def configure_malloc() -> None:
    """Let glibc's malloc keep freed memory: page faults would take a third of a small model's step on a CPU."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
        libc.mallopt(M_TOP_PAD, 64 << 20)


def choose_precision_and_attention(
    model: PreTrainedModel,
    batches: list[dict[str, torch.Tensor]],
    precision: str,
    attention: str,
    loss_of: Callable[[dict[str, torch.Tensor]], torch.Tensor],
    steps: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[str, str, dict[str, float]]:
    """Resolve "auto": sdpa on a GPU, with bf16 if its hardware supports it, else fp16; the fastest choice on a CPU.

    The timing takes at most `MAX_TIMING_FRACTION` of the `steps` of the run, plus one step. The first batch is a
    warm-up. `batches` must have different shapes: oneDNN compiles bf16 kernels for each shape, so that bf16 would look
    too fast with one shape. On a CPU, bf16 requires bf16 instructions. It is not timed with sdpa, whose backward pass
    is then several times as slow as that of eager attention.

    Returns:
        Precision, attention implementation, and median seconds per step of each timed candidate.
    """
    best_precision = "fp32"
    if model.device.type == "cuda":  # emulated bf16 is slow, and not supported by compilers
        best_precision = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    default = best_precision if precision == "auto" else precision, "sdpa" if attention == "auto" else attention
    if model.device.type != "cpu":
        return *default, {}
    candidates = [
        (p, a)
        for p, a in (("fp32", "sdpa"), ("fp32", "eager"), ("bf16", "eager"))
        if precision in ("auto", p) and attention in ("auto", a) and (p in ("fp32", precision) or has_bf16())
    ]
    if len(candidates) < 2 or MAX_TIMING_FRACTION * steps < 2 * len(candidates):  # no choice, or too few steps
        return *(candidates or [default])[0], {}
    seconds: dict[tuple[str, str], list[float]] = {candidate: [] for candidate in candidates}
    medians: dict[tuple[str, str], float] = {}  # without the first batch
    implementation = model.config._attn_implementation
    model.train()
    for batch, candidate in itertools.product(batches, candidates):  # interleaved: other load affects all
        spent = [each for times in seconds.values() for each in times]
        slow = [each for each, median in medians.items() if median > MAX_SLOWDOWN * min(medians.values())]
        if len(slow) == len(candidates) - 1 or (spent and sum(spent) > MAX_TIMING_FRACTION * steps * min(spent)):
            break
        if candidate in slow:
            continue
        model.set_attn_implementation(candidate[1])
        start = clock()
        with torch.autocast("cpu", torch.bfloat16, enabled=candidate[0] == "bf16"):
            loss = loss_of(batch)
        loss.backward()
        model.zero_grad()
        seconds[candidate].append(clock() - start)
        if len(seconds[candidate]) > 1:
            medians[candidate] = statistics.median(seconds[candidate][1:])
    model.set_attn_implementation(implementation)
    best = min(candidates, key=lambda candidate: medians.get(candidate, math.inf))
    return *best, {" ".join(candidate): median for candidate, median in medians.items()}


def fit_micro_batches(args: TrainingArguments, model: Any, train_set: Any) -> None:
    """Double `gradient_accumulation_steps` until the largest micro-batch fits into the memory of the accelerator.

    This runs forward and backward pass of the largest micro-batch, before any update. The pairs of an update do not
    change. Nothing is tried on a CPU, or if FSDP shards the model. Raises ValueError if `max_tokens` was set and is too
    large, or if a single pair is too large.
    """
    if args.device.type == "cpu" or args.fsdp:
        return
    model.to(args.device)
    if args.activation_checkpointing:  # the Trainer enables it only when training starts
        model.activation_checkpointing_enable(args.activation_checkpointing_kwargs)
    update = largest_update(args, train_set)
    requested = args.gradient_accumulation_steps
    while not all(gather_object([fits_memory(args, model, update.split(args.gradient_accumulation_steps))])):
        if args.gradient_accumulation_steps >= update.rows:
            raise ValueError(
                f"a pair of {update.source} and {update.target} tokens does not fit into the memory of the device. "
                "Reduce max_length or the size of the model."
            )
        args.gradient_accumulation_steps *= 2
    if args.gradient_accumulation_steps == requested:
        return
    tokens = -(-args.tokens_per_update // (args.world_size * args.gradient_accumulation_steps))
    if args.max_tokens != "auto":
        raise ValueError(
            f"max_tokens={args.max_tokens} does not fit into the memory of the device, but {tokens} does. Set "
            f"max_tokens to {tokens}, or remove it."
        )
    logger.info(
        f"larger batches do not fit into memory: {args.gradient_accumulation_steps} accumulation steps, not {requested}"
    )
    if isinstance(train_set, TokenBatchStream):
        train_set.micro_batches = args.gradient_accumulation_steps


def largest_update(args: TrainingArguments, train_set: Any) -> Shape:
    """Return the shape of one process's part of the largest update, with the longest source and target of all pairs."""
    if isinstance(train_set, TokenBatchStream):
        source = target = train_set.arguments.max_length
    else:
        source, target = map(int, sequence_lengths(train_set).max(0))
    rows = max(1, args.tokens_per_update // max(source, target))
    return Shape(-(-rows // args.world_size), source, target)


def fits_memory(args: TrainingArguments, model: Any, shape: Shape) -> bool:
    """Return whether forward and backward pass of a batch fit into memory, in addition to all copies of the weights."""
    copies = 2 + bool(args.ema_decay) + (args.world_size > 1)  # Adam, moving average, gradients in DDP
    ids = torch.ones(shape.rows, shape.source, dtype=torch.long, device=args.device)
    labels = torch.ones(shape.rows, shape.target, dtype=torch.long, device=args.device)
    batch = add_decoder_input_ids(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    settings = args.label_smoothing_factor, args.rdrop_alpha, supports_fused_loss(model), args.simcut_alpha
    dtype = AUTOCAST_DTYPES.get(args.precision)
    model.train()
    try:
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        reserved = [torch.empty_like(weight) for weight in weights * copies]
        with torch.autocast(args.device.type, dtype, enabled=dtype is not None):
            loss, _ = training_loss(model, batch, *settings)
        loss.backward()
        del reserved
    except Exception as error:
        if not should_reduce_batch_size(error):
            raise
        return False
    finally:
        model.zero_grad()
        clear_device_cache(garbage_collection=True)
    return True


def has_bf16() -> bool:
    """Return whether the CPU has bf16 instructions; False if this is unknown."""
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    cpuinfo = Path("/proc/cpuinfo")
    if not capabilities and cpuinfo.exists():  # before torch 2.12
        capabilities = dict.fromkeys(cpuinfo.read_text(encoding="utf-8").split(), True)
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def describe(device: torch.device) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else processor_name(),
        "threads": torch.get_num_threads(),
        "cpu_cores": os.cpu_count(),
    }


def processor_name() -> str:
    """Return the model name of the CPU, such as "AMD EPYC"."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
