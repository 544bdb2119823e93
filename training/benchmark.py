"""Measure the speed compared with native Transformers models of the same size, as a table and `benchmark.json`.

    python -m training.benchmark
    python -m training.benchmark --benchmarks beam --model CHECKPOINT --source test.en --reference test.de
    python -m training.benchmark --benchmarks recipe --recipe RECIPE.yaml --data-dir DIRECTORY

Candidates are timed in alternation within one run, because machine speed fluctuates. Each row reports the median
throughput (mostly in tokens per second), its ratio to the fastest variant of the native class, and the range. Losses
and translations are compared. "of limit" relates the throughput to the limit that a large matrix product sets on this
machine. In decoding, the limit is for float32; bfloat16 and int8 weights can exceed it. On a CPU with one thread, times
are CPU times.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from tqdm.auto import tqdm
from transformers import set_seed

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.shared.command_line import CommandLineParser, exit_on_user_error
from vanilla_transformer.shared.text_lines import read_lines

from .benchmarks.decoding import DecodingBenchmark
from .benchmarks.forward_backward import DTYPES, make_batch, peak_flops, run_step, step_models, validate_models
from .benchmarks.model_sizes import SENTENCE_LENGTH, SIZES, WMT_SIZES
from .benchmarks.optimizer_step import build_candidates
from .benchmarks.recipe import BASELINE, compare
from .run.hardware import configure_malloc, describe, device_type

BENCHMARKS = ("step", "greedy", "beam", "update", "recipe")
UPDATES = 20  # per candidate and round
NUM_BEAMS = 5
MIN_EQUAL_FRACTION = 0.995  # minimum fraction of equal translations; the others are ties
Rates = dict[str, list[float]]


def main() -> None:
    with exit_on_user_error("training.benchmark"):
        run(parse())


def run(arguments: argparse.Namespace) -> None:
    if not arguments.default_malloc:
        configure_malloc()
    torch.set_num_threads(arguments.threads)
    set_seed(0)
    benchmark = Benchmark(arguments)
    for name in arguments.benchmarks:
        benchmark.measure(name)
    benchmark.save(arguments.output_dir)


def parse() -> argparse.Namespace:
    parser = CommandLineParser("training.benchmark", __doc__)
    add, device = parser.add_argument, "cuda" if torch.cuda.is_available() else "cpu"
    add("--benchmarks", nargs="+", choices=BENCHMARKS, default=BENCHMARKS[:3], help="The measurements to run.")
    add("--sizes", nargs="+", choices=SIZES, default=["t128", "d256", "base"], help="The sizes of random models.")
    add("--precision", nargs="+", choices=DTYPES, default=[*DTYPES], help="The precisions of training steps.")
    add("--target-tokens", nargs="+", type=int, default=[1536], help="The target tokens per training step.")
    add("--rounds", type=int, default=7, help="The number of timed runs of each candidate, after a warm-up run.")
    add("--threads", type=int, default=1, help="The number of PyTorch threads on a CPU.")
    add("--default-malloc", action="store_true", help="Whether to keep the default settings of the C allocator.")
    add("--device", type=device_type, default=device, help="`cpu` or `cuda`. Default: a GPU, if available.")
    add("--model", help="Checkpoint directory or Hub id of a model to decode with.")
    add("--source", type=Path, help="Path to a text file to translate. Requires --model.")
    add("--reference", type=Path, help="Path to the reference translations, for BLEU. Requires --source.")
    add("--sentences", type=int, default=128, help="The number of sentences to decode.")
    add("--batch-size", type=int, default=32, help="The number of sentences per batch in decoding.")
    add("--recipe", type=Path, help="Path to a recipe with text files, for the benchmark `recipe`.")
    add("--data-dir", type=Path, help="The directory of the recipe's text files. Requires --recipe.")
    add("--output-dir", type=Path, default=Path("runs/benchmark"), help="The directory to write benchmark.json to.")
    arguments = parser.parse_args()
    if arguments.source and not arguments.model:
        parser.error("--source requires --model")
    if arguments.reference and not arguments.source:
        parser.error("--reference requires --source")
    for path in (arguments.source, arguments.reference, arguments.recipe, arguments.data_dir):
        if path and not path.exists():
            parser.error(f"{path} does not exist")
    if arguments.reference:
        lines = [len(read_lines(path)) for path in (arguments.source, arguments.reference)]
        if lines[0] != lines[1]:
            parser.error(
                f"{arguments.source} has {lines[0]} lines, {arguments.reference} has {lines[1]}: must be equal"
            )
    if (arguments.output_dir / "benchmark.json").exists():
        parser.error(f"{arguments.output_dir} contains an earlier benchmark: remove it, or use another --output-dir")
    decodes = {"greedy", "beam"} & set(arguments.benchmarks)
    if decodes and torch.device(arguments.device).type == "cpu" and find_spec("torchao") is None:
        parser.error("greedy and beam require torchao for int8: pip install '.[dev]', or choose other --benchmarks")
    if "recipe" in arguments.benchmarks and not (arguments.recipe and arguments.data_dir):
        parser.error("the benchmark `recipe` requires --recipe and --data-dir")
    return arguments


class Benchmark:
    """Runner of the benchmarks. It prints each comparison when it is complete, and collects all for benchmark.json."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        self.rows: list[dict[str, Any]] = []
        self.speeds = {name: peak_flops(self.device, dtype, self.clock) for name, dtype in DTYPES.items()}
        self.machine = describe(self.device) | {"threads": arguments.threads, "torch": torch.__version__}
        self.machine["GFLOP/s"] = {name: round(speed / 1e9) for name, speed in self.speeds.items()}
        self.machine["malloc"] = "default" if arguments.default_malloc else "keeps freed memory"
        print(json.dumps(self.machine), flush=True)

    def measure(self, name: str) -> None:
        arguments = self.arguments
        if name == "recipe":
            rates = compare(arguments.recipe, arguments.data_dir)
            self.add_comparison("", f"complete recipe compared with {BASELINE}", rates, BASELINE, "target tokens/s")
        elif name in ("step", "update"):
            measure = self.step if name == "step" else self.update
            for size in arguments.sizes:
                for tokens in arguments.target_tokens:
                    measure(size, tokens)
        else:
            for size in [arguments.model] if arguments.model else arguments.sizes:
                self.decode(size, name)

    def step(self, size: str, tokens: int) -> None:
        """Measure forward and backward passes with the unsmoothed cross-entropy."""
        models = step_models(SIZES[size], self.device)
        batch = make_batch(tokens // SENTENCE_LENGTH, SIZES[size].vocab_size, self.device)
        validate_models(models, batch)
        count = int((batch["labels"] != -100).sum())
        for precision in self.arguments.precision:
            steps = {name: partial(run_step, name, model, batch, precision) for name, model in models.items()}
            limit = self.limit(steps["Vanilla eager"], count, precision)
            rates, _ = self.time_interleaved(steps, lambda _, seconds: count / seconds)
            title = f"training step of {tokens} tokens, {precision}"
            self.add_comparison(size, title, rates, "Marian", "target tokens/s", limit)

    def update(self, size: str, tokens: int) -> None:
        """Measure complete optimizer steps. The fraction of the limit is the model FLOPs utilization (MFU)."""
        config = WMT_SIZES[size]
        batch = make_batch(tokens // SENTENCE_LENGTH, config.vocab_size, self.device)
        model = VanillaTransformerForConditionalGeneration(config).to(self.device)
        for precision in self.arguments.precision:
            step = partial(run_step, "Vanilla", model, batch, precision)
            limit = self.limit(step, int((batch["labels"] != -100).sum()), precision)
            candidates = build_candidates(config, batch, tokens, precision, UPDATES)
            rates, results = self.time_interleaved(candidates, lambda result, _: result[0])
            peaks = {name: peak for name, (_, peak) in results.items() if peak}
            title = f"update of {tokens} tokens, vocabulary of {config.vocab_size}, {precision}"
            self.add_comparison(size, title, rates, "Marian", "target tokens/s", limit, peaks)

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

    def limit(self, run: Callable[[], Any], count: int, precision: str = "fp32") -> float:
        """Return the tokens per second if a run for `count` tokens consisted only of matrix products."""
        with FlopCounterMode(display=False) as counter:
            run()
        return count * self.speeds[precision] / counter.get_total_flops()

    def time_interleaved(
        self, candidates: Mapping[str, Callable[[], Any]], rate: Callable[[Any, float], float]
    ) -> tuple[Rates, dict[str, Any]]:
        """Return `rate(output, seconds)` of each candidate and round after a warm-up round, and the last outputs."""
        rates: Rates = {name: [] for name in candidates}
        outputs = {name: run() for name, run in candidates.items()}
        for _ in tqdm(range(self.arguments.rounds), leave=False, desc="rounds"):
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
        notes: Any = None,
    ) -> None:
        """Store and print a comparison. `limit` is the maximum rate in `unit` if only matrix products took time."""
        medians = {name: statistics.median(values) for name, values in rates.items()}
        best = max(value for name, value in medians.items() if name.startswith(baseline))
        row: dict[str, Any] = {"size": size, "line": title, "unit": unit, "limit": limit, "rates": {}}
        print(f"\n{size}  {title}  ({unit})")
        for name, value in medians.items():
            low, high = min(rates[name]), max(rates[name])
            row["rates"][name] = {"median": value, "low": low, "high": high, "ratio": value / best}
            text = f"  {name:26}{value:11,.1f}   {value / best:5.2f}   ({low:,.1f} to {high:,.1f})"
            text += f"   {100 * value / limit:5.1f} % of limit" if limit else ""
            if notes:
                row["rates"][name]["note"] = notes[name]
                text += f"   {notes[name]}"
            print(text, flush=True)
        self.rows.append(row)

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"machine": self.machine, "rows": self.rows}, indent=2)
        (directory / "benchmark.json").write_text(text, encoding="utf-8")
        print(f"\nResults saved to {directory}/benchmark.json")


if __name__ == "__main__":
    main()
