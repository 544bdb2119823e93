"""Results of a run: scores, samples, plots, upload."""
