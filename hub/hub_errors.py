"""What the Hub and its client answer, in words for the user."""

from httpx2 import TransportError  # of huggingface_hub
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
)


def hub_error_message(error: Exception, repo_id: str) -> str:
    """One line with the cure; of any other error what it says itself."""
    if "xet-write-token" in str(error):
        return "this Hub has no Xet storage: set HF_HUB_DISABLE_XET=1 and push again. Nothing was committed."
    if isinstance(error, TransportError):
        return f"the Hub cannot be reached ({error or type(error).__name__}): is there a network? Then try again."
    if isinstance(error, LocalTokenNotFoundError):
        return "you are not logged in: run `hf auth login`, or set HF_TOKEN."
    if isinstance(error, HFValidationError):
        return f"{repo_id} is no name for a repository: give user/name ({error})."
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        status = error.response.status_code
        cures = {
            401: "your token is not valid: run `hf auth login`, or set HF_TOKEN.",
            403: f"you may not write to {repo_id}: use a token with the right to write, or another name.",
            404: f"there is no {repo_id} that you may see: is the user's name right?",
            409: f"{repo_id} is being changed by somebody else: try again.",
            412: f"{repo_id} was changed by somebody else in the meantime: try again. Nothing was committed.",
        }
        if isinstance(error, RepositoryNotFoundError):
            status = 401 if status == 401 else 404
        return cures.get(status, f"the Hub answered {status}: try again later; the repository is as it was.")
    return str(error)
