"""Train a model from your files or a recipe, score it, and save a checkpoint that `from_pretrained` loads.

    python -m training.train --data-dir my_data --output-dir runs/mine --minutes 30
    python -m training.train training/recipes/demo.yaml
    python -m training.train training/recipes/multi30k_en_de.yaml --data-dir DIR --max-steps 500
    accelerate launch -m training.train training/recipes/wmt14_en_de_base.yaml

The output directory (`output_dir`) contains the model, the tokenizer, `recipe.yaml` (all settings),
`all_results.json`, `samples.tsv` (source, reference, translation), `training_curve.png` and `attention_1.png`. The same
command resumes an interrupted run from its last valid checkpoint.
"""

import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from contextlib import nullcontext
from pathlib import Path

from vanilla_transformer.shared.command_line import (
    CommandLineParser,
    add_options,
    exit_on_user_error,
    format_error,
    print_result,
)

from .recipe.packaged import find_recipe


def main() -> None:
    parser = CommandLineParser("training.train", add_help=False)
    add_own_options(parser)
    options, arguments = parser.parse_known_args()
    if arguments and not arguments[0].startswith("-"):
        try:
            find_recipe(arguments[0])
        except ValueError as error:
            parser.error(str(error))

    from httpx2 import TransportError  # raised by huggingface_hub

    from .recipe.reading import make_parser
    from .run.distributed import launcher
    from .run.hardware import configure_malloc

    if {"-h", "--help"} & set(arguments):
        parser = make_parser()
        add_own_options(parser)
        parser.print_help()
        return
    configure_malloc()
    launcher.watch()
    user_errors = FloatingPointError, ImportError, TransportError
    with exit_on_user_error(parser.prog, *user_errors, formatter=format_training_error, quiet=options.quiet):
        if options.learning_curve:
            train_parts(arguments, options)
        else:
            train_or_launch(arguments, options.json)


def add_own_options(parser: ArgumentParser) -> None:
    add_options(parser, "json", "quiet")
    text = "Within `minutes`, also train on 1/4 and 1/2 of the data and in half of the time, to compare scores."
    parser.add_argument("--learning-curve", action="store_true", help=text)


def train_parts(arguments: list[str], options: Namespace) -> None:
    """Train on parts of the data, in processes that this process starts. Print the learning curve."""
    from .run import distributed
    from .run.chosen_recipe import read_or_choose_recipe
    from .run.output_dir import lock_output_dir
    from .run.results import learning_curve
    from .run.results.evaluation import describe_results, read_results

    recipe = read_or_choose_recipe(arguments)
    if "minutes" in recipe.reasons:  # the saved recipe of the complete run contains its share of the time
        raise ValueError(learning_curve.MISSING)
    folder, processes = Path(recipe.training.output_dir), distributed.resolve_num_processes(recipe.training)
    arguments += ["--quiet"] if options.quiet else []

    def run_command(further: list[str], started: float) -> None:
        if status := distributed.launch(processes, [*arguments, *further], started, subprocess.DEVNULL):
            sys.exit(status)

    with lock_output_dir(folder, has_parts=True):
        points = learning_curve.run_parts(recipe, run_command)
    scores = read_results(folder)
    text = f"{describe_results(folder, scores)}\n\n{learning_curve.describe_learning_curve(points)}"
    print_result({"folder": str(folder), **scores, "learning_curve": points}, options.json, text)


def train_or_launch(arguments: list[str], as_json: bool) -> None:
    """Train in this process, or in multiple processes that it starts. The main process prints the results."""
    from .run import distributed, output_dir, training
    from .run.chosen_recipe import read_or_choose_recipe
    from .run.results.evaluation import describe_results

    recipe = read_or_choose_recipe(arguments)
    args = recipe.training
    should_lock = distributed.LAUNCHED not in os.environ and os.environ.get("RANK", "0") == "0"
    with output_dir.lock_output_dir(Path(args.output_dir)) if should_lock else nullcontext():
        is_launched = bool({"LOCAL_RANK", "ACCELERATE_USE_CPU"} & os.environ.keys())  # also by `accelerate launch`
        if not is_launched and (processes := distributed.resolve_num_processes(args)) > 1:
            sys.exit(distributed.launch(processes, sys.argv[1:]))
        with distributed.main_process_reports_first(args):
            result = training.run(recipe, float(os.environ.get(distributed.LAUNCHED, distributed.STARTED)))
    if result.finished and args.process_index == 0:
        scores = {"folder": str(result.folder)} | result.scores
        print_result(scores, as_json, "" if as_json else describe_results(result.folder, result.scores))
    status = 128 + result.stop_signal if result.stop_signal else 0
    if args.world_size > 1:
        sys.stdout.flush()
        args.distributed_state.wait_for_everyone()
        os._exit(status)  # without the destructors of gloo, which may wait for a process that has exited
    if status:
        sys.exit(status)


def format_training_error(error: Exception) -> str:
    from httpx2 import TransportError

    if isinstance(error, TransportError):  # with `push_to_hub`, the repository is created before training
        return f"The Hub cannot be reached ({error}). Check your network, or remove push_to_hub."
    return format_error(error)


if __name__ == "__main__":
    main()
