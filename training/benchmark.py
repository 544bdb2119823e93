"""Measure the speed compared with native Transformers models of the same size, as a table and `benchmark.json`.

    vanilla-transformer benchmark
    vanilla-transformer benchmark --benchmarks beam --model CHECKPOINT --source test.en --reference test.de
    vanilla-transformer benchmark --benchmarks recipe --recipe RECIPE.yaml --data-dir DIRECTORY

Candidates are timed in alternation within one run, because machine speed fluctuates. Each row reports the median
throughput (mostly in tokens per second), its ratio to the fastest variant of the native class, and the range. Losses
and translations are compared. "of limit" relates the throughput to the limit that a large matrix product sets on this
machine. In decoding, the limit is for float32; bfloat16 and int8 weights can exceed it. On a CPU with one thread, times
are CPU times.
"""

import os
from argparse import Namespace
from functools import partial
from pathlib import Path

from vanilla_transformer.shared.command_line import (
    CommandLineParser,
    checkpoint_name,
    existing_path,
    logger,
    positive_int,
)
from vanilla_transformer.shared.text_lines import read_lines

from .inference.settings import ModelSettings

BENCHMARKS = ("step", "greedy", "beam", "recipe")
SIZES = ("t128", "d256", "base", "big")
PRECISIONS = ("fp32", "bf16")


def main() -> None:
    parser = CommandLineParser("training.benchmark", __doc__)
    add = parser.add_argument
    add("--benchmarks", nargs="+", choices=BENCHMARKS, default=BENCHMARKS[:3], help="The measurements to run.")
    add("--sizes", nargs="+", choices=SIZES, default=SIZES[:3], help="The sizes of random models.")
    add("--precision", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="The precisions of training steps.")
    add("--target-tokens", nargs="+", type=positive_int, default=[1536], help="The target tokens per training step.")
    rounds_help = "The number of timed runs of each candidate, after a warm-up run."
    add("--rounds", type=positive_int, default=7, help=rounds_help)
    add("--threads", type=positive_int, default=1, help="The number of PyTorch threads on a CPU.")
    add("--default-malloc", action="store_true", help="Whether to keep the default settings of the C allocator.")
    add("--model", type=checkpoint_name, help="Checkpoint directory or Hub id of a model to decode with.")
    add("--source", type=existing_path, help="Path to a text file to translate. Requires --model.")
    reference_help = "Path to the reference translations, for BLEU. Requires --source."
    add("--reference", type=existing_path, help=reference_help)
    add("--sentences", type=positive_int, default=128, help="The number of sentences to decode.")
    add("--batch-size", type=positive_int, default=32, help="The number of sentences per batch in decoding.")
    add("--recipe", type=existing_path, help="Path to a recipe with text files, for the benchmark `recipe`.")
    add("--data-dir", type=existing_path, help="The directory of the recipe's text files. Requires --recipe.")
    add("--output-dir", type=Path, default=Path("runs/benchmark"), help="The directory to write benchmark.json to.")
    parser.add_settings(ModelSettings, "device")
    arguments = Namespace(**parser.parse_options())
    if arguments.source and not arguments.model:
        parser.error("--source requires --model")
    if arguments.reference and not arguments.source:
        parser.error("--reference requires --source")
    if "recipe" in arguments.benchmarks and not (arguments.recipe and arguments.data_dir):
        parser.error("the benchmark `recipe` requires --recipe and --data-dir")
    if os.path.exists(arguments.output_dir / "benchmark.json"):
        parser.error(f"{arguments.output_dir} contains an earlier benchmark: remove it, or use another --output-dir")

    from .benchmarks.runner import run_benchmarks  # slow imports
    from .run.hardware import configure_malloc

    with parser.exit_on_user_error():
        if arguments.reference:
            lines = [len(read_lines(path)) for path in (arguments.source, arguments.reference)]
            if lines[0] != lines[1]:
                raise ValueError(
                    f"{arguments.source} has {lines[0]} lines, {arguments.reference} has {lines[1]}: must be equal"
                )
        if not arguments.default_malloc:
            configure_malloc()
        result = run_benchmarks(arguments, logger.info if parser.json else partial(print, flush=True))
        if parser.json:
            parser.print_result(result)


if __name__ == "__main__":
    main()
