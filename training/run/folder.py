"""The folder of a run: whose it is, what it goes on from, and its `recipe.yaml`."""

from pathlib import Path

import yaml

from training.data.pairs import ParallelText
from training.loading import read_settings
from training.outputs import whole
from training.recipe import Recipe
from training.run.checkpoints import last_whole

FREE = {"output_dir", "data_dir", "processes", "report_to", "logging_steps", "attention_lines", "disable_tqdm"}
# keys that may differ between the command that began a run and the one that goes on with it


def claim(recipe: Recipe, folder: Path) -> Path | None:
    """The checkpoint that this run goes on from, or None where it begins; the folder is this run's from then on.

    Raises:
        ValueError: the folder holds a model that this command did not make, or another run.
    """
    if not (folder / "recipe.yaml").exists():
        foreign = [path for name in ("*config.json", "*.safetensors", "checkpoint-*") for path in folder.glob(name)]
        if foreign:
            raise ValueError(
                f"{folder} already holds a model ({foreign[0].name}): move it away, or give another --output_dir."
            )
        folder.mkdir(parents=True, exist_ok=True)
        write_recipe(recipe, folder)
        return None
    refuse_other_run(recipe, folder)
    checkpoint = last_whole(folder)
    if checkpoint:
        print(f"going on from {checkpoint}")
    return checkpoint


def refuse_other_run(recipe: Recipe, folder: Path) -> None:
    """Raises ValueError where the folder's recipe is not this one; "auto" agrees with what was chosen then, and the
    default of a key with a recipe of a version that did not have it."""
    before, now = read_settings(folder), yaml.safe_load(recipe.to_yaml())
    older = recipe.defaults() | before
    for name in sorted((before.keys() | now.keys()) - FREE):
        if older.get(name) != now.get(name) and now.get(name) != "auto" and name != "bf16":
            raise ValueError(
                f"{folder} holds another run: its {name} is {older.get(name)}, here it is {now.get(name)}. Give "
                f"another --output_dir, or the same settings to go on with it."
            )


def data_lines(corpus: dict[str, ParallelText]) -> str:
    """What the data were, as comments of YAML."""
    return "".join(f"# {name}: {len(text)} pairs, sha256 {text.digest()}\n" for name, text in corpus.items())


def refuse_other_data(corpus: dict[str, ParallelText], folder: Path) -> None:
    """Raises ValueError where the texts are not those that the run began with."""
    before = (folder / "recipe.yaml").read_text(encoding="utf-8")
    for line in data_lines(corpus).splitlines():
        if line not in before:
            raise ValueError(
                f"{folder} holds a run on other data: {line.removeprefix('# ')} is not in its recipe.yaml. Give "
                f"another --output_dir, or the data that it began with."
            )


def write_recipe(recipe: Recipe, folder: Path, head: str = "") -> None:
    """`recipe.yaml`: every setting, below what the data were."""
    with whole(folder / "recipe.yaml") as path:
        path.write_text(head + recipe.to_yaml(), encoding="utf-8")
