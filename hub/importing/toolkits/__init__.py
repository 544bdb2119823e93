"""fairseq and OpenNMT-py: what their files tell besides weights, one file each, and their subwords."""

from typing import Any

from hub.importing.toolkits import fairseq, opennmt


def opened(content: Any) -> tuple[dict, dict[str, Any]] | None:
    """A toolkit's tensors by name and what else its file tells; None of a file of anybody else's.

    Raises:
        ValueError: a model of theirs that is none of ours; names the setting that makes it so.
    """
    for toolkit in (fairseq, opennmt):
        if toolkit.wrote(content):
            return toolkit.opened(content)
    return None
