"""Settings, layouts and tokenizers of the checkpoints of fairseq and OpenNMT-py."""
