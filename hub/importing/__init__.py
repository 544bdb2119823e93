"""Import of checkpoints: reading, layout detection, conversion and comparison."""
