"""Average the weights of several checkpoints (section 6.1: "obtained by averaging the last 5 checkpoints").

python -m training.average OUT RUN/checkpoint-800 RUN/checkpoint-1000
python -m training.average OUT RUN --last 5
python -m training.average OUT RUN --best 5        # by the evaluation metric of the run
"""

import argparse
from pathlib import Path
from typing import Any

import yaml

from vanilla_transformer.shared.atomic_io import atomic_write
from vanilla_transformer.shared.command_line import CommandLineParser, exit_on_user_error
from vanilla_transformer.shared.loading import load_tokenizer

from .inference.translators import read_run_recipe, validate_same_tokenizer
from .recipe.resolution import LOWER_IS_BETTER, default_metric
from .run.checkpoints import all_checkpoints, average_checkpoints, checkpoint_error, select_checkpoints


def main() -> None:
    parser = CommandLineParser("training.average", __doc__)
    parser.add_argument("out", type=Path, help="Path to write the averaged model and its tokenizer to.")
    parser.add_argument("checkpoints", type=Path, nargs="+", help="Checkpoints, or one run with --last or --best.")
    selection = parser.add_mutually_exclusive_group()
    selection.add_argument("--last", type=int, metavar="N", help="Average the last N checkpoints of the run.")
    selection.add_argument("--best", type=int, metavar="N", help="Average the best N checkpoints of the run.")
    arguments = parser.parse_args()
    with exit_on_user_error(parser.prog):
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    out, folders = arguments.out, arguments.checkpoints
    if out.exists():
        raise ValueError(f"{out} already exists. Choose another path.")
    count = arguments.best if arguments.last is None else arguments.last
    if count is not None:
        if count < 1 or len(folders) != 1:
            raise ValueError("--last and --best require one run directory and a number of at least 1.")
        folders = select_run_checkpoints(folders[0], count, "best" if arguments.last is None else "last")
    for folder in folders:
        if all_checkpoints(folder) and not (folder / "config.json").exists():
            raise ValueError(f"{folder} is a run without a final model. Add --last N, or list its checkpoints.")
        reason = checkpoint_error(folder) if folder.name.startswith("checkpoint-") else None
        if reason:
            raise ValueError(f"{folder} is incomplete: {reason}. Remove it from the list.")
    tokenizers = load_same_tokenizers(folders)
    recipe = read_common_recipe(folders)
    model = average_checkpoints(folders)
    with atomic_write(out) as folder:
        for each in (model, *tokenizers[-1:]):
            each.save_pretrained(folder)
        if recipe:
            text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
            (folder / "recipe.yaml").write_text(text, encoding="utf-8")
    print(f"{out}: mean of {', '.join(map(str, folders))}")


def load_same_tokenizers(folders: list[Path]) -> list[Any]:
    """Load the tokenizers of checkpoints or of their runs, if any. Raises ValueError if they differ."""
    tokenizers = []
    for folder in folders:
        sources = [each for each in (folder, folder.parent) if (each / "tokenizer_config.json").exists()]
        tokenizers += [(str(folder), load_tokenizer(each)) for each in sources[:1]]
    for name, tokenizer in tokenizers[1:]:
        validate_same_tokenizer(*tokenizers[0], name, tokenizer)
    return [tokenizer for _, tokenizer in tokenizers]


def read_common_recipe(folders: list[Path]) -> dict[str, Any]:
    """Return the settings that the recipes of all checkpoints have in common, except the output directory."""
    first, *others = map(read_run_recipe, folders)
    settings = {key: value for key, value in first.items() if all(each.get(key) == value for each in others)}
    settings.pop("output_dir", None)
    return settings


def select_run_checkpoints(run_folder: Path, count: int, by: str) -> list[Path]:
    """Return the last or best `count` checkpoints of a run. Raises ValueError if it has fewer."""
    if not all_checkpoints(run_folder):
        raise ValueError(f"{run_folder} has no checkpoint-N directories.")
    metric, better = None, True
    if by == "best":
        settings = read_run_recipe(run_folder)
        usual = default_metric(settings.get("metric", "translation"), settings.get("predict_with_generate", True))
        metric = settings.get("metric_for_best_model") or usual
        better = settings.get("greater_is_better", metric not in LOWER_IS_BETTER)
    folders = select_checkpoints(run_folder, count, by, metric, better)
    if len(folders) < count:
        scored = f" with {metric}" if by == "best" else ""
        raise ValueError(f"{run_folder} has only {len(folders)} complete checkpoints{scored}, expected {count}.")
    return folders


if __name__ == "__main__":
    main()
