"""fairseq and OpenNMT-py: what their files tell besides weights, one file each, and their subwords."""

from typing import Any

from hub.importing.toolkits import fairseq, opennmt


def parse_checkpoint(content: Any) -> tuple[dict, dict[str, Any]] | None:
    """A toolkit's tensors by name and what else its file tells; None of a file of anybody else's.

    Raises:
        ValueError: a model of theirs that is none of ours; names the setting that makes it so.
    """
    for toolkit in (fairseq, opennmt):
        if toolkit.is_toolkit_checkpoint(content):
            return toolkit.parse_checkpoint(content)
    return None
