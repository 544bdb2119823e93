"""What a run of `training.train` is made of: its folder, its model, the trainer, the results."""
