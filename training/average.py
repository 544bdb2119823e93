"""The mean of several checkpoints' weights (section 6.1: "obtained by averaging the last 5 checkpoints").

python -m training.average OUT RUN/checkpoint-800 RUN/checkpoint-1000
python -m training.average OUT RUN --last 5
python -m training.average OUT RUN --best 5        # by the metric that the run was evaluated with
"""

import argparse
import sys
from pathlib import Path

import yaml
from transformers import AutoTokenizer

from training.checkpoints import all_checkpoints, average, choose, why_not_whole


def main() -> None:
    parser = argparse.ArgumentParser(prog="training.average", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to be made, with the averaged model and its tokenizer")
    parser.add_argument("checkpoints", type=Path, nargs="+", help="folders of models, or one run with --last or --best")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--last", type=int, metavar="N", help="the run's last N checkpoints")
    which.add_argument("--best", type=int, metavar="N", help="those N that were evaluated best")
    arguments = parser.parse_args()
    try:
        run(arguments)
    except (ValueError, OSError) as error:
        print(f"training.average: {error}", file=sys.stderr)
        sys.exit(2)


def run(arguments: argparse.Namespace) -> None:
    out, folders = arguments.out, arguments.checkpoints
    if out.exists():
        raise ValueError(f"{out} exists already: give a folder that does not.")
    count = arguments.last or arguments.best
    if count is not None:
        if count < 1 or len(folders) != 1:
            raise ValueError("--last and --best take one run's folder and a number of at least 1.")
        folders = of_run(folders[0], count, "last" if arguments.last else "best")
    for folder in folders:
        if not (folder / "config.json").exists():
            raise ValueError(f"{folder} is no checkpoint: it has no config.json. For a whole run, add --last N.")
        reason = why_not_whole(folder) if folder.name.startswith("checkpoint-") else None
        if reason:
            raise ValueError(f"{folder} is not whole: {reason}. Leave it out.")
    model = average(folders)
    model.save_pretrained(out)
    tokenizers = [folder for folder in (*folders, folders[-1].parent) if (folder / "tokenizer_config.json").exists()]
    if tokenizers:
        AutoTokenizer.from_pretrained(tokenizers[-1]).save_pretrained(out)
    print(f"{out}: the mean of {', '.join(map(str, folders))}")


def of_run(run_folder: Path, count: int, by: str) -> list[Path]:
    """The checkpoints of a run that are asked for. Raises ValueError where it has fewer."""
    if not all_checkpoints(run_folder):
        raise ValueError(f"{run_folder} has no checkpoint-N folders.")
    metric, better = None, True
    if by == "best":
        recipe = run_folder / "recipe.yaml"
        settings = yaml.safe_load(recipe.read_text(encoding="utf-8")) if recipe.exists() else {}
        metric = settings.get("metric_for_best_model") or "bleu"
        better = settings.get("greater_is_better", True)
    folders = choose(run_folder, count, by, metric, better)
    if len(folders) < count:
        raise ValueError(f"{run_folder} has {len(folders)} whole checkpoints that could be taken, not {count}.")
    return folders


if __name__ == "__main__":
    main()
