"""Show a checkpoint on a web page: translations as they are generated, and attention.

    python -m hub.space runs/demo                              # on this machine
    python -m hub.space user/model --push user/space           # publish the page as a Space on the Hub
    python -m hub.space runs/demo --static OUT                 # directory of a page that translates in the browser
    python -m hub.space runs/demo --static OUT --push user/space    # also publish it as a static Space

The files of the page do not import this repository, because a Space does not contain it.
"""

from functools import partial
from pathlib import Path

from httpx2 import TransportError  # raised by huggingface_hub
from huggingface_hub import HfApi, RepoCard

from vanilla_transformer.shared.command_line import CommandLineParser, exit_on_user_error

from ..commits import commit_files, files_in, resolve_repo_id
from ..hub_errors import hub_error_message, import_with_extra
from ..run_files import local_paths
from ..sensitive_data import validate_no_sensitive_data

FILES = ("app.py", "requirements.txt")


def main() -> None:
    parser = CommandLineParser("hub.space", __doc__)
    parser.add_argument("checkpoint", help="Path to a checkpoint directory, or a repository on the Hub.")
    parser.add_argument("--port", type=int, help="Port of the page. Default: the first free port from 7860.")
    parser.add_argument("--push", metavar="USER/SPACE", help="Name of the Space to publish the page as.")
    parser.add_argument("--static", metavar="OUT", type=Path, help="New directory for a page that runs in the browser.")
    parser.add_argument("--private", action="store_true", help="Whether to create a private Space.")
    parser.add_argument("--replace", action="store_true", help="Whether to overwrite files of other users.")
    arguments = parser.parse_args()
    formatter = partial(hub_error_message, repo_id=arguments.push or arguments.checkpoint)
    with exit_on_user_error(parser.prog, TransportError, formatter=formatter):
        if out := arguments.static:
            import_with_extra(".space.static_page", "hub.space").create_page(arguments.checkpoint, out)
            print(f"{out} contains the page. To view it, run: python -m http.server --directory {out}")
            if arguments.push:
                print(push_static_page(out, resolve_repo_id(arguments.push), arguments.private, arguments.replace))
        elif arguments.push:
            print(push(arguments.checkpoint, resolve_repo_id(arguments.push), arguments.private, arguments.replace))
        else:
            import_with_extra(".space.app", "hub.space").show(arguments.checkpoint, arguments.port)


def push_static_page(page: Path, repo_id: str, private: bool = False, replace: bool = False) -> str:
    """Publish the directory of a page as a static Space in one commit, and return the URL of the commit."""
    files = files_in(page)
    validate_no_sensitive_data(files, local_paths(page))
    return commit_files(
        repo_id, files, "Page that translates in the browser", private=private, replace=replace, repo_type="space",
        space_sdk="static",
    )  # fmt: skip


def push(checkpoint: str, repo_id: str, private: bool = False, replace: bool = False) -> str:
    """Publish the page as a Space in one commit, and return the URL of the commit.

    Raises:
        ValueError: The checkpoint is not on the Hub, from which the Space loads it.
    """
    if Path(checkpoint).exists():
        raise ValueError(f"{checkpoint} is a local directory. Run python -m hub.push first, then use its Hub id.")
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
