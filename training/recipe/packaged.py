"""The packaged recipes. This module imports neither torch nor transformers, so that a mistyped name fails at once."""

import os
from pathlib import Path

RECIPES = Path(__file__).parents[1] / "recipes"


def find_recipe(name: str) -> str:
    """Return the path of a recipe. `name` is a path, or the name of a packaged recipe such as `demo`."""
    packaged = {path.stem: str(path) for path in sorted(RECIPES.glob("*.yaml"))}
    path = Path(name)
    if name in packaged and not path.is_file():
        return packaged[name]
    if not os.path.exists(name):  # unlike Path.exists, also for names that are too long
        raise ValueError(f"cannot read the recipe {name}: no such file. Packaged recipes: {', '.join(packaged)}.")
    if path.is_dir() or path.suffix not in (".yaml", ".yml", ".json", ""):
        raise ValueError(f"{name} is not a recipe (.yaml). To train on your own pairs, use --data-dir DIRECTORY.")
    return name
