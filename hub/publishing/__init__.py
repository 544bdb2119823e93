"""Publication on the Hub: model card, upload, and the repository of the beam search."""
