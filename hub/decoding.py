"""The paper's decoding as a repository of its own on the Hub, which any model of ours can decode with.

    python -m hub.decoding FOLDER                          # writes the repository
    python -m hub.decoding FOLDER --push user/name         # and uploads it

Then, without this package: `model.generate(**batch, custom_generate="user/name", trust_remote_code=True, num_beams=4)`.
It is never put into a model's repository: there, transformers would call it in place of `generate` without being asked.
"""

import argparse
import re
import shutil
import sys
from pathlib import Path

from httpx2 import TransportError  # of huggingface_hub
from huggingface_hub import HfApi, ModelCard, ModelCardData

import vanilla_transformer
from hub.folders import write_whole
from hub.push import in_words

CODE = Path(vanilla_transformer.__file__).parent / "generation_vanilla_transformer.py"
GENERATE = '''

def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """What transformers calls for `generate(custom_generate=REPOSITORY)`: `beam_search`, with its arguments."""
    return GenerationMixin.generate(model, *args, custom_generate=beam_search, **kwargs)
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
((5 + n) / 6)^alpha, at most 50 tokens more than the source. Greedy decoding is `num_beams=1`; sampling is refused.
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="hub.decoding", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="written anew; must not exist")
    parser.add_argument("--push", metavar="USER/NAME", help="upload it as this repository")
    parser.add_argument("--private", action="store_true", help="make the repository private, if it is new")
    arguments = parser.parse_args()
    try:
        write(arguments.folder, arguments.push or arguments.folder.name)
        if arguments.push:
            print(push(arguments.folder, arguments.push, arguments.private))
        print(f"{arguments.folder}: model.generate(custom_generate={str(arguments.folder)!r}, trust_remote_code=True)")
    except (ValueError, OSError, TransportError) as error:
        print(f"hub.decoding: {in_words(error, arguments.push or str(arguments.folder))}", file=sys.stderr)
        sys.exit(2)


def push(folder: Path, name: str, private: bool) -> str:
    """Uploads what `write` has written; the address of the commit. Where that fails the folder goes again."""
    try:
        api = HfApi()
        api.create_repo(name, private=private or None, exist_ok=True)
        return api.upload_folder(repo_id=name, folder_path=folder, commit_message="The paper's decoding").commit_url
    except BaseException:
        shutil.rmtree(folder)
        raise


def write(folder: Path, name: str) -> None:
    """The repository: custom_generate/generate.py and a card.

    Args:
        folder: does not exist yet.
        name: of the repository, for the card.

    Raises:
        ValueError: the folder exists.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists: remove it, or give another folder.")

    def fill(unfinished: Path) -> None:
        (unfinished / "custom_generate").mkdir()
        (unfinished / "custom_generate" / "generate.py").write_text(standalone(), encoding="utf-8")
        data = ModelCardData(license="apache-2.0", library_name="transformers", tags=["custom_generate"])
        card = f"---\n{data.to_yaml()}\n---\n{CARD.format(name=name)}"
        ModelCard(card).save(unfinished / "README.md")

    write_whole(folder, fill)


def standalone() -> str:
    """The module of the package without what it imports from there, which it needs for its annotations alone."""
    text = re.sub(r"if TYPE_CHECKING:\n    from \..*\n", "", CODE.read_text(encoding="utf-8"))
    return text.replace("import GenerationConfig,", "import GenerationConfig, GenerationMixin,") + GENERATE


if __name__ == "__main__":
    main()
