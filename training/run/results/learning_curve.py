"""Learning curve: the gain of twice the data, compared with the gain of twice the time."""

import json
import os
import time
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

from vanilla_transformer.shared.atomic_io import atomic_write
from vanilla_transformer.shared.command_line import logger

from ...recipe.arguments import Recipe, use_dataset
from .evaluation import read_results
from .plots import plot_learning_curve

FOLDER, FILE = "learning_curve", "learning_curve.json"
MISSING = "--learning-curve requires --minutes and test data. Set --minutes N, and --test-size if needed."
# names of the directories (empty for the complete run), fractions of the data, fractions of the time
PARTS = ("", 1, 1), ("quarter_of_data", 0.25, 1), ("half_of_data", 0.5, 1), ("half_of_time", 1, 0.5)


def run_parts(recipe: Recipe, run_command: Callable[[list[str], float], None]) -> list[dict[str, Any]]:
    """Train with the settings of a recipe on parts of its data, and write `learning_curve.json` and a plot of it.

    The parts share the time of the recipe. The complete run has the output directory of the recipe, the others have
    subdirectories. Finished parts are not trained again. `run_command` trains with further options, from a start time.

    Returns:
        The points of the curve: complete run, quarter and half of the data, half of the time.
    """
    args, data = recipe.training, recipe.data
    has_test = data.corpus == "demo" or data.test_file or data.test_size or use_dataset(data)
    if args.minutes is None or not has_test:
        raise ValueError(MISSING)
    if data.streaming:
        raise ValueError("--learning-curve requires the number of pairs in advance. Remove streaming.")
    if "LOCAL_RANK" in os.environ:
        raise ValueError("--learning-curve starts its own processes. Run it without torchrun or accelerate launch.")
    complete_minutes = args.minutes / sum(time_fraction for _, _, time_fraction in PARTS)
    folder = Path(args.output_dir)
    points: list[dict[str, Any]] = []
    for number, (name, train_fraction, time_fraction) in enumerate(PARTS, 1):
        started = time.time()
        output_dir = folder / FOLDER / name if name else folder
        minutes = round(complete_minutes * time_fraction, 3)
        options = {
            "output_dir": output_dir,
            "minutes": minutes,
            "train_fraction": data.train_fraction * train_fraction,
            "predict_with_generate": args.predict_with_generate,
            "push_to_hub": args.push_to_hub and not name,
        }
        logger.info(
            f"learning curve, run {number} of {len(PARTS)}: {train_fraction:.0%} of the training pairs, "
            f"{minutes:.1f} minutes"
        )
        run_command([f"--{key}={value}" for key, value in options.items()], started)
        results = read_results(output_dir)
        metric = "bleu" if "test_bleu" in results else "exact_match"
        if f"test_{metric}" not in results:  # a dataset without a test split
            raise ValueError(MISSING)
        points.append(
            {
                "train_pairs": results["train_pairs"],
                "minutes": minutes,
                "metric": metric,
                "score": results[f"test_{metric}"],
                "interval_95": results.get(f"test_{metric}_interval_95"),
            }
        )
    with atomic_write(folder / FILE) as path:
        path.write_text(json.dumps(points, indent=1), encoding="utf-8")
    plot_learning_curve(points, folder / "learning_curve.png")
    return points


def describe_learning_curve(points: list[dict[str, Any]]) -> str:
    """Return the scores of a learning curve, and a sentence on whether more data or more time would help more."""
    label = points[0]["metric"].replace("_", " ").replace("bleu", "BLEU")
    lines = [
        f"{point['train_pairs']:>12,} training pairs, {point['minutes']:g} minutes: {label} {point['score']:.1f}"
        for point in sorted(points, key=itemgetter("train_pairs", "minutes"))
    ]
    complete, _, half_data, half_time = points
    data, more_time = (complete["score"] - part["score"] for part in (half_data, half_time))
    if max(data, more_time) <= (complete["interval_95"] or 0.0):
        advice = "Both differences are within the confidence interval: neither would help much."
    else:
        advice = f"More {'data' if data > more_time else 'time'} would help more."
    return "\n".join(
        [*lines, f"Twice the data changes {label} by {data:+.1f}, twice the time by {more_time:+.1f}. {advice}"]
    )
