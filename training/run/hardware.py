"""Hardware: memory allocator, choice of precision and attention by timing, description of the machine."""

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

MAX_TIMING_FRACTION = 0.03  # of the run time, for timing precision and attention
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
    """Resolve "auto": sdpa and bf16 (if supported) on a GPU, the fastest combination on a CPU.

    The timing takes at most `MAX_TIMING_FRACTION` of the `steps` of the run, plus one step. The first batch is a
    warm-up. `batches` must have different shapes: oneDNN compiles bf16 kernels for each shape, so that bf16 would look
    too fast with one shape. On a CPU, bf16 requires bf16 instructions. It is not timed with sdpa, whose backward pass
    is then several times as slow as that of eager attention.

    Returns:
        Precision, attention implementation, and median seconds per step of each timed candidate.
    """
    if model.device.type != "cpu":
        has_gpu_bf16 = model.device.type == "cuda" and torch.cuda.is_bf16_supported()
        best_precision = "bf16" if has_gpu_bf16 else "fp32"
        return best_precision if precision == "auto" else precision, "sdpa" if attention == "auto" else attention, {}
    candidates = [
        (p, a)
        for p, a in (("fp32", "sdpa"), ("fp32", "eager"), ("bf16", "eager"))
        if precision in ("auto", p) and attention in ("auto", a) and (p in ("fp32", precision) or has_bf16())
    ]
    if len(candidates) < 2 or MAX_TIMING_FRACTION * steps < 2 * len(candidates):
        default = ("fp32" if precision == "auto" else precision, "sdpa" if attention == "auto" else attention)
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


def has_bf16() -> bool:
    """Return whether the CPU has bf16 instructions; False if this is unknown."""
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    cpuinfo = Path("/proc/cpuinfo")
    if not capabilities and cpuinfo.exists():  # before torch 2.12
        capabilities = dict.fromkeys(cpuinfo.read_text(encoding="utf-8").split(), True)
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def device_type(text: str) -> str:
    """Argparse type: a device that can hold a tensor."""
    try:
        torch.zeros(1, device=text).item()
    except (RuntimeError, AssertionError) as error:  # AssertionError if torch was built without CUDA
        reason = str(error).partition("\n")[0]
        raise argparse.ArgumentTypeError(f"{text!r} is not a usable device ({reason}): use cpu or cuda") from error
    return text


def describe(device: torch.device) -> dict[str, Any]:
    """Return the hardware of a run, for `all_results.json`."""
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
