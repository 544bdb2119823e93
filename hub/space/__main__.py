"""Shows a checkpoint on a page of its own: translations as they are generated, and the attention.

    python -m hub.space runs/demo                              # on this machine
    python -m hub.space user/model --push user/space           # publishes the page as a Space on the Hub
    python -m hub.space runs/demo --static OUT                 # a folder whose page translates in the visitor's browser
    python -m hub.space runs/demo --static OUT --push user/space    # and publishes that as a static Space

The files of the page stand alone: a Space has nothing else of this repository.
"""

from functools import partial
from pathlib import Path

from httpx2 import TransportError  # of huggingface_hub
from huggingface_hub import HfApi, RepoCard

from hub.commits import commit_files, full_name
from hub.hub_errors import hub_error_message
from hub.run_files import local_paths
from hub.sensitive_data import validate_private
from vanilla_transformer.shared.command_line import CommandLineParser, exit_on_user_error

FILES = ("app.py", "requirements.txt")


def main() -> None:
    parser = CommandLineParser("hub.space", __doc__)
    parser.add_argument("checkpoint", help="folder, or repository on the Hub")
    parser.add_argument("--port", type=int, help="default: the first free one from 7860")
    parser.add_argument("--push", metavar="USER/SPACE", help="publish the page as this Space instead of showing it")
    parser.add_argument(
        "--static", metavar="OUT", type=Path, help="make a page that needs no server, in this new folder"
    )
    parser.add_argument("--private", action="store_true", help="for a private Space, made if need be")
    parser.add_argument(
        "--replace", action="store_true", help="overwrite what somebody else has written or changed in the Space"
    )
    arguments = parser.parse_args()
    named = arguments.push or arguments.checkpoint
    with exit_on_user_error(parser.prog, TransportError, formatter=partial(hub_error_message, repo_id=named)):
        if arguments.static:
            make_static(arguments.checkpoint, arguments.static)
            if arguments.push:
                repo_id = full_name(arguments.push)
                print(push_static(arguments.static, repo_id, arguments.private, arguments.replace))
        elif arguments.push:
            print(push(arguments.checkpoint, full_name(arguments.push), arguments.private, arguments.replace))
        else:
            show(arguments.checkpoint, arguments.port)


def show(checkpoint: str, port: int | None) -> None:
    try:
        from hub.space import app
    except ModuleNotFoundError as error:
        raise ValueError(f"the page needs {error.name}: pip install '.[hub]'") from error
    app.show(checkpoint, port)


def make_static(checkpoint: str, out: Path) -> None:
    try:
        from hub.space import static_page
    except ModuleNotFoundError as error:
        raise ValueError(f"the page needs {error.name}: pip install '.[hub]'") from error
    static_page.make(checkpoint, out)
    print(f"{out} holds the page. To look at it: python -m http.server --directory {out}")


def push_static(page: Path, repo_id: str, private: bool = False, replace: bool = False) -> str:
    """Publishes the folder of a page as a static Space, in one commit; its address."""
    files: dict[str, Path | bytes] = {
        path.relative_to(page).as_posix(): path for path in sorted(page.rglob("*")) if path.is_file()
    }
    validate_private(files, local_paths(page))
    return commit_files(
        repo_id, files, "Page that translates in the browser", private=private, replace=replace, repo_type="space",
        space_sdk="static",
    )  # fmt: skip


def push(checkpoint: str, repo_id: str, private: bool = False, replace: bool = False) -> str:
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
        raise ValueError(hub_error_message(error, checkpoint)) from error
    here = Path(__file__).parent
    card = RepoCard.load(here / "README.md")
    card.data.title, card.data.models = checkpoint.rpartition("/")[2], [checkpoint]
    files: dict[str, Path | bytes] = {name: here / name for name in FILES}
    files["README.md"] = str(card).encode()
    return commit_files(
        repo_id, files, f"Page of {checkpoint}", private=private, replace=replace, repo_type="space", space_sdk="gradio"
    )


if __name__ == "__main__":
    main()
