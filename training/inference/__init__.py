"""Translation with checkpoints, and scoring of the translations."""
