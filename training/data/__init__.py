"""Reading, validation, tokenization and batching of parallel text."""
