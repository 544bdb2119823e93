"""Parts of `training.train`: output directory, model and data, trainer, evaluation."""
