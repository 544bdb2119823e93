"""Shows a checkpoint on a page of its own: translations as they are generated, and the attention.

    python -m hub.space runs/demo                              # on this machine
    python -m hub.space user/model --push user/space           # publishes the page as a Space on the Hub

The files of the page stand alone: a Space has nothing else of this repository.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from httpx2 import TransportError  # of huggingface_hub
from huggingface_hub import HfApi, RepoCard

from hub.push import in_words

FILES = ("app.py", "requirements.txt", "README.md")


def main() -> None:
    parser = argparse.ArgumentParser(prog="hub.space", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="folder, or repository on the Hub")
    parser.add_argument("--port", type=int, help="default: the first free one from 7860")
    parser.add_argument("--push", metavar="USER/SPACE", help="publish the page as this Space instead of showing it")
    parser.add_argument("--private", action="store_true", help="make the Space private, if it is new")
    arguments = parser.parse_args()
    try:
        if arguments.push:
            print(push(arguments.checkpoint, arguments.push, arguments.private))
        else:
            show(arguments.checkpoint, arguments.port)
    except (ValueError, OSError, TransportError) as error:
        print(f"hub.space: {in_words(error, arguments.push or arguments.checkpoint)}", file=sys.stderr)
        sys.exit(2)


def show(checkpoint: str, port: int | None) -> None:
    try:
        from hub.space import app
    except ModuleNotFoundError as error:
        raise ValueError(f"the page needs {error.name}: pip install '.[hub]'") from error
    app.show(checkpoint, port)


def push(checkpoint: str, repo_id: str, private: bool) -> str:
    """Publishes the Space in one commit; its address.

    Raises:
        ValueError: a checkpoint that is not on the Hub, where the Space would look for it.
    """
    if Path(checkpoint).exists():
        raise ValueError(f"{checkpoint} is a folder of this machine: push it first (python -m hub.push), then name it.")
    api = HfApi()
    try:
        api.model_info(checkpoint)
    except (ValueError, OSError) as error:
        raise ValueError(in_words(error, checkpoint)) from error
    here = Path(__file__).parent
    card = RepoCard.load(here / "README.md")
    card.data.title, card.data.models = checkpoint.rpartition("/")[2], [checkpoint]
    with tempfile.TemporaryDirectory() as folder:
        for name in FILES:
            content = str(card) if name == "README.md" else (here / name).read_text(encoding="utf-8")
            Path(folder, name).write_text(content, encoding="utf-8")
        api.create_repo(repo_id, repo_type="space", space_sdk="gradio", private=private or None, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id, repo_type="space", folder_path=folder, commit_message=f"Page of {checkpoint}"
        )
    return commit.commit_url


if __name__ == "__main__":
    main()
