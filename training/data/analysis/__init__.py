"""Analysis of parallel text: its languages, and pairs that are nearly equal."""
