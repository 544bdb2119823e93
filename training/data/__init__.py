"""Parallel text on its way into a model: read, checked, split into tokens, cut into batches."""
