"""Recipes: keys, reading from YAML and the command line, resolution and validation."""
