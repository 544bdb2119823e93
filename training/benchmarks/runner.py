"""Runner of the benchmarks: candidates are timed in alternation, and compared with the native class."""

import argparse
import copy
import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from tqdm.auto import tqdm
from transformers import set_seed

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.shared.command_line import logger, shows_progress

from ..inference.translators import select_device
from ..run.hardware import describe, has_bf16
from .decoding import DecodingBenchmark
from .forward_backward import DTYPES, peak_flops, run_step, validate_models
from .models import SENTENCE_LENGTH, SIZES, build_variants, make_batch
from .recipe import BASELINE, compare

NUM_BEAMS = 5
TRAINING_UNIT = "target tokens/s"
MIN_EQUAL_FRACTION = 0.995  # minimum fraction of equal translations; the others are ties
Rates = dict[str, list[float]]


def run_benchmarks(arguments: argparse.Namespace, show: Callable[[str], Any]) -> dict[str, Any]:
    """Run the benchmarks, pass each comparison to `show` when it is complete, and return and save all."""
    device = torch.device(select_device(arguments.device))
    if {"greedy", "beam"} & set(arguments.benchmarks) and device.type == "cpu" and find_spec("torchao") is None:
        raise ValueError(
            "greedy and beam require torchao for int8: pip install '.[dev]', or choose other --benchmarks."
        )
    torch.set_num_threads(arguments.threads)
    set_seed(0)
    benchmark = Benchmark(arguments, device, show)
    for name in arguments.benchmarks:
        benchmark.measure(name)
    result = {"machine": benchmark.machine, "rows": benchmark.rows}
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    (arguments.output_dir / "benchmark.json").write_text(json.dumps(result, indent=2), encoding="utf-8")
    logger.info(f"Results saved to {arguments.output_dir}/benchmark.json")
    return result


class Benchmark:
    def __init__(self, arguments: argparse.Namespace, device: torch.device, show: Callable[[str], Any]):
        self.arguments, self.device, self.show = arguments, device, show
        self.rows: list[dict[str, Any]] = []
        self.speeds = {name: peak_flops(self.device, dtype, self.clock) for name, dtype in DTYPES.items()}
        self.machine = describe(self.device) | {"threads": arguments.threads, "torch": torch.__version__}
        self.machine["GFLOP/s"] = {name: round(speed / 1e9) for name, speed in self.speeds.items()}
        self.machine["malloc"] = "default" if arguments.default_malloc else "keeps freed memory"
        self.show(json.dumps(self.machine))

    def measure(self, name: str) -> None:
        arguments = self.arguments
        if name == "recipe":
            rates = compare(arguments.recipe, arguments.data_dir, self.show)
            self.add_comparison("", f"complete recipe compared with {BASELINE}", rates, BASELINE, TRAINING_UNIT)
        elif name == "step":
            for size, tokens in itertools.product(arguments.sizes, arguments.target_tokens):
                self.step(size, tokens)
        else:
            for size in [arguments.model] if arguments.model else arguments.sizes:
                self.decode(size, name)

    def step(self, size: str, tokens: int) -> None:
        """Measure forward and backward passes with the unsmoothed cross-entropy, on a GPU also compiled."""
        peer, models = build_variants(VanillaTransformerForConditionalGeneration(SIZES[size]), self.device)
        if self.device.type == "cuda":
            for name in ("Vanilla sdpa", f"{peer} sdpa"):
                models[f"{name} compiled"] = torch.compile(copy.deepcopy(models[name]))
        batch = make_batch(tokens // SENTENCE_LENGTH, SIZES[size].vocab_size, self.device)
        validate_models(models, batch)
        count = int((batch["labels"] != -100).sum())
        for precision in self.arguments.precision:
            steps = {name: partial(run_step, name, model, batch, precision) for name, model in models.items()}
            limit = self.limit(steps["Vanilla eager"], count, precision)
            rates, _ = self.time_interleaved(steps, lambda _, seconds: count / seconds)
            self.add_comparison(
                size, f"training step of {tokens} tokens, {precision}", rates, peer, TRAINING_UNIT, limit
            )

    def decode(self, size: str, name: str) -> None:
        """Measure greedy decoding or beam search. Raises AssertionError if exact decoders differ from the peer."""
        task = DecodingBenchmark(self.arguments, size, self.device)
        decoders = task.decoders({"num_beams": NUM_BEAMS if name == "beam" else 1, "do_sample": False})
        rates, outputs = self.time_interleaved(decoders, lambda ids, seconds: sum(map(len, ids)) / seconds)
        expected = outputs[f"{task.peer} sdpa"]
        equal = {name: sum(map(list.__eq__, ids, expected)) / len(ids) for name, ids in outputs.items()}
        exact = {key: rate for key, rate in equal.items() if key.endswith(("eager", "sdpa", "static", "beam_search"))}
        if min(exact.values()) < MIN_EQUAL_FRACTION:
            raise AssertionError(f"fractions of translations that equal those of {task.peer}: {equal}")
        notes = {key: f"{100 * rate:.1f} % equal" for key, rate in equal.items()}
        if self.arguments.reference:
            notes = {key: f"{note}, BLEU {task.bleu(outputs[key]):.1f}" for key, note in notes.items()}
        # the counter does not see replayed CUDA graphs
        counted = decoders["Vanilla beam_search" if self.device.type == "cpu" else f"{task.peer} sdpa"]
        limit = self.limit(counted, sum(map(len, expected)))
        title = f"{f'{NUM_BEAMS} beams' if name == 'beam' else 'greedy'}, {len(expected)} sentences"
        self.add_comparison(size, title, rates, task.peer, "tokens/s", limit, notes)

    def limit(self, run: Callable[[], Any], count: int, precision: str = "fp32") -> float | None:
        """Return the tokens per second if a run for `count` tokens consisted only of matrix products.

        Returns None for bf16 on a CPU without bf16 instructions, where large products are slower than small ones.
        """
        if precision == "bf16" and self.device.type == "cpu" and not has_bf16():
            return None
        with FlopCounterMode(display=False) as counter:
            run()
        return count * self.speeds[precision] / counter.get_total_flops()

    def time_interleaved(
        self, candidates: Mapping[str, Callable[[], Any]], rate: Callable[[Any, float], float]
    ) -> tuple[Rates, dict[str, Any]]:
        """Return `rate(output, seconds)` of each candidate and round after a warm-up round, and the last outputs."""
        rates: Rates = {name: [] for name in candidates}
        outputs = {name: run() for name, run in candidates.items()}
        for _ in tqdm(range(self.arguments.rounds), leave=False, desc="rounds", disable=not shows_progress()):
            for name, run in candidates.items():
                start = self.clock()
                outputs[name] = run()
                rates[name].append(rate(outputs[name], self.clock() - start))
        return rates, outputs

    def clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        is_single_thread = self.device.type == "cpu" and self.arguments.threads == 1
        return time.process_time() if is_single_thread else time.perf_counter()

    def add_comparison(
        self,
        size: str,
        title: str,
        rates: Rates,
        baseline: str,
        unit: str,
        limit: float | None = None,
        notes: Mapping[str, str] | None = None,
    ) -> None:
        """Store and show a comparison. `limit` is the maximum rate in `unit` if only matrix products took time."""
        medians = {name: statistics.median(values) for name, values in rates.items()}
        best = max(value for name, value in medians.items() if name.startswith(baseline))
        row: dict[str, Any] = {"size": size, "line": title, "unit": unit, "limit": limit, "rates": {}}
        self.show(f"\n{size}  {title}  ({unit})")
        for name, value in medians.items():
            low, high, note = min(rates[name]), max(rates[name]), (notes or {}).get(name)
            row["rates"][name] = {"median": value, "low": low, "high": high, "ratio": value / best}
            row["rates"][name] |= {"note": note} if note else {}
            text = f"  {name:26}{value:11,.1f}   {value / best:5.2f}   ({low:,.1f} to {high:,.1f})"
            text += f"   {100 * value / limit:5.1f} % of limit" if limit else ""
            self.show(f"{text}   {note}" if note else text)
        self.rows.append(row)
