"""Analysis of parallel text: languages, direction and near-duplicates."""
