"""Training, run from the clone: `python -m training.train RECIPE.yaml`. It imports vanilla_transformer, never hub."""
