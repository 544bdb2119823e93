"""Repository on the Hub with the paper's beam search, for any vanilla_transformer model."""

import shutil
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

import vanilla_transformer
from vanilla_transformer.shared.atomic_io import write_dir_atomically

from ..commits import commit_files, files_in

PACKAGE = Path(vanilla_transformer.__file__).parent
CODE = [PACKAGE / f"{name}_vanilla_transformer.py" for name in ("generation", "decoder", "beam_search")]
GENERATE = f'''"""Entry point of `generate(custom_generate=REPOSITORY)`: calls `beam_search`."""

from typing import Any

from transformers import GenerationMixin

from .{CODE[0].stem} import beam_search, prepare_custom_generate_kwargs

# transformers copies only the modules that this file imports
from .{CODE[1].stem} import IncrementalDecoder  # noqa: F401
from .{CODE[2].stem} import BeamSearch  # noqa: F401


def generate(model: Any, **kwargs: Any) -> Any:
    return GenerationMixin.generate(model, **prepare_custom_generate_kwargs(model, beam_search, kwargs))
'''
CARD = """
# Beam search of "Attention Is All You Need"

For checkpoints of the model type `vanilla_transformer`. The keys and values of the source are computed once and shared
by all beams. Finished sentences are removed from the batch. The search ends when no better hypothesis is possible.

```python
model.generate(**batch, custom_generate="{name}", trust_remote_code=True, num_beams=4)
model.generate(**batch, custom_generate="{name}", trust_remote_code=True, num_beams=4, alpha=0.6, extra_tokens=50)
```

The first call returns the same result as `generate()`. The second uses the settings of the paper (section 6.1): length
penalty ((5 + n) / 6)^alpha, and at most 50 tokens more than the source. `num_beams=1` is greedy decoding. Sampling,
assisted decoding, streamers, per-step outputs and modified models use the decoding loops of transformers.
"""


def push(folder: Path, name: str, private: bool = False, replace: bool = False) -> str:
    """Upload the directory and return the URL of the commit. Delete the directory if the upload fails."""
    try:
        return commit_files(name, files_in(folder), "The paper's decoding", private=private, replace=replace)
    except BaseException:
        shutil.rmtree(folder)
        raise


def write(folder: Path, name: str) -> None:
    """Write the repository `name`, with modules, generate.py and card, to a new directory."""

    def fill(temporary: Path) -> None:
        code = temporary / "custom_generate"
        code.mkdir()
        for path in CODE:
            shutil.copy(path, code)
        (code / "generate.py").write_text(GENERATE, encoding="utf-8")
        data = ModelCardData(license="apache-2.0", library_name="transformers", tags=["custom_generate"])
        card = f"---\n{data.to_yaml()}\n---\n{CARD.format(name=name)}"
        ModelCard(card).save(temporary / "README.md")

    write_dir_atomically(folder, fill)
