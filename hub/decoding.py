"""The paper's decoding as a repository of its own on the Hub, which any model of ours can decode with.

    python -m hub.decoding FOLDER                          # writes the repository
    python -m hub.decoding FOLDER --push user/name         # and uploads it

Then, without this package: `model.generate(**batch, custom_generate="user/name", trust_remote_code=True, num_beams=4)`.
It is never put into a model's repository: there, transformers would call it in place of `generate` without being asked.
"""

import shutil
from functools import partial
from pathlib import Path

from httpx2 import TransportError  # of huggingface_hub
from huggingface_hub import ModelCard, ModelCardData

import vanilla_transformer
from hub.atomic_dirs import write_dir_atomically
from hub.commits import commit_files, full_name
from hub.hub_errors import hub_error_message
from vanilla_transformer.shared.command_line import CommandLineParser, exit_on_user_error

PACKAGE = Path(vanilla_transformer.__file__).parent
NAMES = ("generation", "incremental_decoding", "search", "constraints")
CODE = [PACKAGE / f"{name}_vanilla_transformer.py" for name in NAMES]
GENERATE = f'''"""What transformers calls for `generate(custom_generate=REPOSITORY)`: `beam_search`."""

from typing import Any

from transformers import GenerationMixin

from .{CODE[0].stem} import beam_search, handed_on

# transformers copies what is named in this very file
from .{CODE[1].stem} import IncrementalDecoder  # noqa: F401
from .{CODE[2].stem} import search  # noqa: F401
from .{CODE[3].stem} import prepare  # noqa: F401


def generate(model: Any, **kwargs: Any) -> Any:
    return GenerationMixin.generate(model, **handed_on(model, beam_search, kwargs))
'''
CARD = """
# Beam search of "Attention Is All You Need"

For checkpoints of the model type `vanilla_transformer`. Keys and values of the source are computed once and shared by
its beams, a sentence that is done leaves the batch, and the search ends as soon as no better result can come.

```python
model.generate(**batch, custom_generate="{name}", trust_remote_code=True, num_beams=4)
model.generate(**batch, custom_generate="{name}", trust_remote_code=True, num_beams=4, alpha=0.6, extra_tokens=50)
```

The first gives what `generate()` gives; the second is the paper's (section 6.1): length penalty
((5 + n) / 6)^alpha, at most 50 tokens more than the source. Greedy decoding is `num_beams=1`. Sampling, logits
processors, stop strings, streamers and what `generate()` returns of each step work as they do there.
"""


def main() -> None:
    parser = CommandLineParser("hub.decoding", __doc__)
    parser.add_argument("folder", type=Path, help="written anew; must not exist")
    parser.add_argument("--push", metavar="USER/NAME", help="upload it as this repository")
    parser.add_argument("--private", action="store_true", help="for a private repository, made if need be")
    parser.add_argument(
        "--replace", action="store_true", help="overwrite what somebody else has written or changed in the repository"
    )
    arguments = parser.parse_args()
    named = arguments.push or str(arguments.folder)
    with exit_on_user_error(parser.prog, TransportError, formatter=partial(hub_error_message, repo_id=named)):
        name = full_name(arguments.push) if arguments.push else arguments.folder.name
        write(arguments.folder, name)
        if arguments.push:
            print(push(arguments.folder, name, arguments.private, arguments.replace))
        print(f"{arguments.folder}: model.generate(custom_generate={str(arguments.folder)!r}, trust_remote_code=True)")


def push(folder: Path, name: str, private: bool = False, replace: bool = False) -> str:
    """Uploads what `write` has written; the address of the commit. Where that fails the folder goes again."""
    try:
        files: dict[str, Path | bytes] = {
            path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()
        }
        return commit_files(name, files, "The paper's decoding", private=private, replace=replace)
    except BaseException:
        shutil.rmtree(folder)
        raise


def write(folder: Path, name: str) -> None:
    """The repository: custom_generate/ with the package's own modules and generate.py beside them, and a card.

    Args:
        folder: does not exist yet.
        name: of the repository, for the card.

    Raises:
        ValueError: the folder exists.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists: remove it, or give another folder.")

    def fill(unfinished: Path) -> None:
        code = unfinished / "custom_generate"
        code.mkdir()
        for path in CODE:
            shutil.copy(path, code)
        (code / "generate.py").write_text(GENERATE, encoding="utf-8")
        data = ModelCardData(license="apache-2.0", library_name="transformers", tags=["custom_generate"])
        card = f"---\n{data.to_yaml()}\n---\n{CARD.format(name=name)}"
        ModelCard(card).save(unfinished / "README.md")

    write_dir_atomically(folder, fill)


if __name__ == "__main__":
    main()
