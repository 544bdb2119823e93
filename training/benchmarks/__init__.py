"""What `training.benchmark` measures, and what it compares with."""
