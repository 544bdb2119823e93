"""Settings, layouts and tokenizers of the checkpoints of fairseq and OpenNMT-py."""

from typing import Any

from . import fairseq, opennmt


def parse_checkpoint(content: Any) -> tuple[dict, dict[str, Any]] | None:
    """Return the tensors and settings of a toolkit checkpoint, or None for other files.

    Raises:
        ValueError: If the model has an unsupported setting. The message contains its name.
    """
    for toolkit in (fairseq, opennmt):
        if toolkit.is_toolkit_checkpoint(content):
            return toolkit.parse_checkpoint(content)
    return None
