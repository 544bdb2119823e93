"""Measurements of `training.benchmark`, and the baseline models."""
