"""Making use of the machine: its memory allocator, precision and attention by measurement, its name."""

import argparse
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
from transformers import PreTrainedModel

MAX_TIMING_FRACTION = 0.03  # of a run that may be spent on measuring precision and attention
SLOW = 2  # times the seconds of the best candidate: no more is measured
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h of glibc


def configure_malloc() -> None:
    """Tells glibc's malloc to keep freed blocks, instead of giving them back to the kernel at every step.

    Page faults on fresh memory otherwise take a third of a small model's step on a CPU. Elsewhere nothing is done.
    """
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
    """Resolves "auto": on a GPU bf16 where it can and sdpa; on a CPU what takes the least time for a training step.

    Several batches, since oneDNN compiles bf16 matrix products anew for each shape, which can cost more than they save:
    on one shape alone bf16 would look better than it is. bf16 with sdpa is not tried on a CPU: its backward is several
    times as slow as that of eager attention. Nor is bf16 tried on a processor without instructions for it.

    The measurement takes at most `MAX_TIMING_FRACTION` of the run, or one step more. Clearly slower
    candidates are dropped early.

    Args:
        batches: of different shapes, as they will come in training; the first is not counted.
        loss_of: the loss of a batch, computed as training computes it.
        steps: training steps of the run.
        clock: returns the time in seconds.

    Returns:
        precision, attention, and the median seconds a step of what was tried (empty where nothing was).
    """
    if model.device.type != "cpu":
        can = model.device.type == "cuda" and torch.cuda.is_bf16_supported()
        found = "bf16" if can else "fp32"
        return found if precision == "auto" else precision, "sdpa" if attention == "auto" else attention, {}
    candidates = [
        (p, a)
        for p, a in (("fp32", "sdpa"), ("fp32", "eager"), ("bf16", "eager"))
        if precision in ("auto", p) and attention in ("auto", a) and (p in ("fp32", precision) or has_bf16())
    ]
    if len(candidates) < 2 or MAX_TIMING_FRACTION * steps < 2 * len(candidates):
        given = ("fp32" if precision == "auto" else precision, "sdpa" if attention == "auto" else attention)
        return *(candidates or [given])[0], {}
    seconds: dict[tuple[str, str], list[float]] = {candidate: [] for candidate in candidates}
    medians: dict[tuple[str, str], float] = {}  # without the first batch
    implementation = model.config._attn_implementation
    model.train()
    for batch, candidate in itertools.product(batches, candidates):  # interleaved: other work meets all of them
        spent = [each for times in seconds.values() for each in times]
        slow = [each for each, median in medians.items() if median > SLOW * min(medians.values())]
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


def has_bf16() -> bool:
    """Return whether the processor has instructions for bf16; False if that is not known."""
    found: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    cpuinfo = Path("/proc/cpuinfo")
    if not found and cpuinfo.exists():  # before torch 2.12
        found = dict.fromkeys(cpuinfo.read_text(encoding="utf-8").split(), True)
    return any(found.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def device_type(text: str) -> str:
    """The type of an option that names a device: refused before a model is loaded if it cannot hold one."""
    try:
        torch.zeros(1, device=text).item()
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without CUDA
        reason = str(error).partition("\n")[0]
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used ({reason}): give cpu, or cuda for a GPU") from error
    return text


def describe(device: torch.device) -> dict[str, Any]:
    """The hardware, for the record of a run."""
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else processor_name(),
        "threads": torch.get_num_threads(),
        "cpu_cores": os.cpu_count(),
    }


def processor_name() -> str:
    """Such as "AMD EPYC", as the machine calls its processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
