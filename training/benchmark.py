"""Measure the speed compared with stock models of equal size and weights, as a table and `benchmark.json`.

    python -m training.benchmark                                                # three sizes, one thread, random text
    python -m training.benchmark --benchmarks step --precision bf16 --sizes base     # one measurement
    python -m training.benchmark --benchmarks greedy beam --model CHECKPOINT --source test.en --reference test.de
    python -m training.benchmark --benchmarks recipe --recipe RECIPE.yaml --data_dir FOLDER

All that is compared takes turns in one run, since machines are noisy: each line tells the median of tokens a second,
its ratio to the best of Marian, and the range. Before a comparison it is checked that the work is the same:
weights, loss, translations. The floor is the time that the matrix products of the work would take alone at the speed
that this machine has for a large one; "of limit" is its share of the time that was measured. In decoding it is that of
float32, which bfloat16 and int8 weights may pass.

On a CPU with one thread times are those of the processor, else of the wall.
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

from training.benchmarks.decoding import DecodingBenchmark
from training.benchmarks.forward_backward import DTYPES, check_same_loss, make_batch, matrix_speed, step, step_models
from training.benchmarks.model_sizes import SENTENCE_LENGTH, SIZES, WMT_SIZES
from training.benchmarks.optimizer_step import compare_updates
from training.benchmarks.recipe import compare
from training.run.hardware import configure_malloc, describe, device_type
from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.shared.command_line import CommandLineParser, exit_on_user_error
from vanilla_transformer.shared.text_lines import read_lines

LINES = ("step", "greedy", "beam", "update", "recipe")
UPDATES = 20  # of each in a round of the line `update`
NUM_BEAMS = 5
MIN_EQUAL_FRACTION = 0.995  # share of translations that have to be equal; the others are ties
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
    for line in arguments.benchmarks:
        benchmark.measure(line)
    benchmark.save(arguments.output_dir)


def parse() -> argparse.Namespace:
    parser = CommandLineParser("training.benchmark", __doc__)
    parser.add_argument("--benchmarks", nargs="+", choices=LINES, default=LINES[:3], help="what is measured")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["t128", "d256", "base"], help="of random models")
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"], help="of a step")
    parser.add_argument("--target_tokens", nargs="+", type=int, default=[1536], help="target tokens in a step's batch")
    parser.add_argument("--rounds", type=int, default=7, help="timed turns of each, after one that is not counted")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch on a CPU")
    parser.add_argument("--default_malloc", action="store_true", help="leave the C library's allocator as it is")
    parser.add_argument(
        "--device", type=device_type, default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda"
    )
    parser.add_argument("--model", help="decode with this checkpoint, a folder or a name on the Hub")
    parser.add_argument("--source", type=Path, help="with --model: a text file to translate")
    parser.add_argument("--reference", type=Path, help="with --source: its translations, for BLEU")
    parser.add_argument("--sentences", type=int, default=128, help="so many are decoded, in batches")
    parser.add_argument("--batch_size", type=int, default=32, help="sentences in a batch of decoding")
    parser.add_argument("--recipe", type=Path, help="for the line `recipe`: a recipe with text files")
    parser.add_argument("--data_dir", type=Path, help="with --recipe: folder of its files")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/benchmark"), help="directory of benchmark.json")
    arguments = parser.parse_args()
    if arguments.source and not arguments.model:
        parser.error("--source needs --model, which translates it")
    if arguments.reference and not arguments.source:
        parser.error("--reference needs --source, which it translates")
    for path in (arguments.source, arguments.reference, arguments.recipe, arguments.data_dir):
        if path and not path.exists():
            parser.error(f"{path} does not exist")
    if arguments.reference:
        lines = [len(read_lines(path)) for path in (arguments.source, arguments.reference)]
        if lines[0] != lines[1]:
            parser.error(f"{arguments.source} has {lines[0]} lines, {arguments.reference} {lines[1]}: give a pair")
    if (arguments.output_dir / "benchmark.json").exists():
        parser.error(f"{arguments.output_dir} holds an earlier benchmark: remove it, or give another --output_dir")
    decodes = {"greedy", "beam"} & set(arguments.benchmarks)
    if decodes and torch.device(arguments.device).type == "cpu" and find_spec("torchao") is None:
        parser.error(
            "the lines greedy and beam need torchao for int8: pip install '.[dev]', or choose other --benchmarks"
        )
    if "recipe" in arguments.benchmarks and not (arguments.recipe and arguments.data_dir):
        parser.error("the line `recipe` needs --recipe and --data_dir")
    return arguments


class Benchmark:
    """Measures line by line, prints each as soon as it is there, and keeps everything for the files."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        self.rows: list[dict[str, Any]] = []
        self.speeds = {name: matrix_speed(self.device, dtype, self.clock) for name, dtype in DTYPES.items()}
        self.machine = describe(self.device) | {"threads": arguments.threads, "torch": torch.__version__}
        self.machine["GFLOP/s"] = {name: round(speed / 1e9) for name, speed in self.speeds.items()}
        self.machine["malloc"] = "default" if arguments.default_malloc else "keeps its memory"
        print(json.dumps(self.machine), flush=True)

    def measure(self, line: str) -> None:
        arguments = self.arguments
        if line == "recipe":
            rates = compare(arguments.recipe, arguments.data_dir)
            self.add("", "whole recipe beside the stock Trainer", rates, "Seq2SeqTrainer", "target tokens/s")
        elif line in ("step", "update"):
            measure = self.step if line == "step" else self.update
            for size in arguments.sizes:
                for tokens in arguments.target_tokens:
                    measure(size, tokens)
        else:
            for size in [arguments.model] if arguments.model else arguments.sizes:
                self.decode(size, line)

    def step(self, size: str, tokens: int) -> None:
        """Forward and backward pass, the plain cross-entropy."""
        models = step_models(SIZES[size], self.device)
        batch = make_batch(tokens // SENTENCE_LENGTH, SIZES[size].vocab_size, self.device)
        check_same_loss(models, batch)
        count = int((batch["labels"] != -100).sum())
        for precision in self.arguments.precision:
            turns = {name: partial(step, name, model, batch, precision) for name, model in models.items()}
            with FlopCounterMode(display=False) as counter:
                turns["ours eager"]()
            rates, _ = self.time_interleaved(turns, lambda _: count)
            floor = counter.get_total_flops() / self.speeds[precision]
            title = f"training step of {tokens} tokens, {precision}"
            self.add(size, title, rates, "Marian", "target tokens/s", limit=count / floor)

    def update(self, size: str, tokens: int) -> None:
        """The whole update, ours by the Trainer; its share of the limit is the utilisation of the machine (MFU)."""
        config = WMT_SIZES[size]
        for precision in self.arguments.precision:
            rates, peaks = compare_updates(config, tokens, precision, self.device, self.arguments.rounds, UPDATES)
            model = VanillaTransformerForConditionalGeneration(config).to(self.device)
            batch = make_batch(tokens // SENTENCE_LENGTH, config.vocab_size, self.device)
            with FlopCounterMode(display=False) as counter:
                step("ours", model, batch, precision)
            limit = int((batch["labels"] != -100).sum()) * self.speeds[precision] / counter.get_total_flops()
            title = f"update of {tokens} tokens, vocabulary of {config.vocab_size}, {precision}"
            self.add(size, title, rates, "Marian", "target tokens/s", limit, peaks or None)

    def decode(self, size: str, line: str) -> None:
        """Measure greedy decoding or beam search, and compare our translations with those of the other models."""
        task = DecodingBenchmark(self.arguments, size, self.device)
        options = {"num_beams": NUM_BEAMS if line == "beam" else 1, "do_sample": False}
        decoders = task.decoders(options)
        rates, first = self.time_interleaved(decoders, lambda translations: sum(map(len, translations)))
        reference = first["Marian sdpa"]
        same = {name: sum(map(list.__eq__, ids, reference)) / len(ids) for name, ids in first.items()}
        wrong = [
            name
            for name, share in same.items()
            if share < MIN_EQUAL_FRACTION and name.endswith(("eager", "sdpa", "static", "beam_search"))
        ]
        if wrong:
            raise AssertionError(f"not the same translations as Marian's, of the share of {MIN_EQUAL_FRACTION}: {same}")
        with FlopCounterMode(display=False) as counter:
            # steps that a GPU replays as a CUDA graph are not counted
            decoders["ours beam_search" if self.device.type == "cpu" else "Marian sdpa"]()
        told = {name: f"{100 * share:.1f} % the same" for name, share in same.items()}
        if self.arguments.reference:
            told = {name: f"{text}, BLEU {task.bleu(first[name]):.1f}" for name, text in told.items()}
        title = f"{NUM_BEAMS} beams" if line == "beam" else "greedy"
        limit = sum(map(len, reference)) * self.speeds["fp32"] / counter.get_total_flops()
        self.add(size, f"{title}, {len(reference)} sentences", rates, "Marian", "tokens/s", limit, told)

    def time_interleaved(
        self, turns: Mapping[str, Callable[[], Any]], count: Callable[[Any], int]
    ) -> tuple[Rates, dict[str, Any]]:
        """How much each does a second, `count` of what it returns; and what it returned in a turn that is not timed."""
        rates: Rates = {name: [] for name in turns}
        first = {name: run() for name, run in turns.items()}
        for _ in tqdm(range(self.arguments.rounds), leave=False, desc="turns"):
            for name, run in turns.items():
                start = self.clock()
                found = run()
                seconds = self.clock() - start
                rates[name].append(count(found) / seconds)
        return rates, first

    def clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        one = self.device.type == "cpu" and self.arguments.threads == 1
        return time.process_time() if one else time.perf_counter()

    def add(
        self, size: str, title: str, rates: Rates, rival: str, unit: str, limit: float | None = None, told: Any = None
    ) -> None:
        """Keeps and prints one comparison. `limit`: what the matrix products alone would allow, in `unit`."""
        medians = {name: statistics.median(values) for name, values in rates.items()}
        best = max(value for name, value in medians.items() if name.startswith(rival))
        row: dict[str, Any] = {"size": size, "line": title, "unit": unit, "limit": limit, "rates": {}}
        print(f"\n{size}  {title}  ({unit})")
        for name, value in medians.items():
            low, high = min(rates[name]), max(rates[name])
            row["rates"][name] = {"median": value, "low": low, "high": high, "ratio": value / best}
            text = f"  {name:26}{value:11,.1f}   {value / best:5.2f}   ({low:,.1f} to {high:,.1f})"
            text += f"   {100 * value / limit:5.1f} % of limit" if limit else ""
            if told:
                row["rates"][name]["note"] = told[name]
                text += f"   {told[name]}"
            print(text, flush=True)
        self.rows.append(row)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"machine": self.machine, "rows": self.rows}, indent=2)
        (folder / "benchmark.json").write_text(text, encoding="utf-8")
        print(f"\n{folder}/benchmark.json holds all of this")


if __name__ == "__main__":
    main()
