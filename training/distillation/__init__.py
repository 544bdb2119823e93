"""Sentence pairs with a translated side, for `training.distill` and `training.diversify`."""
