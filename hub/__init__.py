"""Bringing checkpoints in and sharing them; run from the clone. It imports vanilla_transformer, never training."""
