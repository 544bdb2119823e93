"""Upload of the page as a Space on the Hub."""

from pathlib import Path

from huggingface_hub import HfApi, RepoCard

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.shared.command_line import start_of_command

from ..commits import commit_files, files_in
from ..hub_errors import hub_error_message
from ..run_files import local_paths
from ..sensitive_data import validate_no_sensitive_data

FILES = ("app.py", "requirements.txt")


def push_static_page(page: Path, repo_id: str, private: bool = False, replace: bool = False) -> str:
    """Publish the directory of a page as a static Space in one commit, and return the URL of the commit."""
    files = files_in(page)
    validate_no_sensitive_data(files, local_paths(page))
    message = "Page that translates in the browser"
    return commit_files(repo_id, files, message, private=private, replace=replace, space_sdk="static")


def push(checkpoint: str, repo_id: str, private: bool = False, replace: bool = False) -> str:
    """Publish the page of a checkpoint on the Hub as a Space in one commit, and return the URL of the commit."""
    if Path(checkpoint).exists():
        command = start_of_command("hub.push")
        raise ValueError(f"{checkpoint} is a local directory. Run {command} first, then use its Hub id.")
    try:
        info = HfApi().model_info(checkpoint)
    except (ValueError, OSError) as error:
        raise ValueError(hub_error_message(error, checkpoint)) from error
    model_type = (info.config or {}).get("model_type")  # None if the Hub has not read the config yet
    if model_type not in (None, VanillaTransformerConfig.model_type):
        command = f"{start_of_command('hub.import_checkpoint')} {checkpoint} OUTPUT"
        raise ValueError(f"{checkpoint} has model_type={model_type}. Convert it with {command}, and push OUTPUT.")
    here = Path(__file__).parent
    card = RepoCard.load(here / "README.md")
    card.data.title, card.data.models = checkpoint.rpartition("/")[2], [checkpoint]
    files: dict[str, Path | bytes] = {name: here / name for name in FILES}
    files["README.md"] = str(card).encode()
    message = f"Page of {checkpoint}"
    return commit_files(repo_id, files, message, private=private, replace=replace, space_sdk="gradio")
