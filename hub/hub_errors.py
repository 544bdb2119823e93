"""Messages for errors of the Hub client and for packages that are not installed."""

import importlib
from types import ModuleType

from httpx2 import TransportError  # raised by huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, RepositoryNotFoundError

INSTALL_HUB = 'pip install "vanilla-transformer[hub]"'


def hub_error_message(error: Exception, repo_id: str) -> str:
    """Return a message that suggests a fix, or the text of the error if it has another cause."""
    if "xet-write-token" in str(error):
        return "This Hub has no Xet storage. Set HF_HUB_DISABLE_XET=1 and push again. Nothing was committed."
    if isinstance(error, TransportError):
        return f"The Hub cannot be reached ({error or type(error).__name__}). Check your network and try again."
    if isinstance(error, LocalTokenNotFoundError):
        return "You are not logged in. Run `hf auth login` or set HF_TOKEN."
    if isinstance(error, HFValidationError):
        return f"{repo_id} is not a valid repository name ({error}). Use the form user/name."
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        status = error.response.status_code
        messages = {
            401: "Your token is not valid. Run `hf auth login` or set HF_TOKEN.",
            403: f"You have no write access to {repo_id}. Use a token with write permission, or another name.",
            404: f"{repo_id} does not exist, or you have no access to it. Check the user name.",
            409: f"{repo_id} is being changed by another user. Try again.",
            412: f"{repo_id} was changed by another user in the meantime. Try again. Nothing was committed.",
        }
        if isinstance(error, RepositoryNotFoundError):
            status = 401 if status == 401 else 404
        return messages.get(status, f"The Hub answered {status}. Try again later. The repository is unchanged.")
    return str(error)


def import_with_extra(module: str, feature: str) -> ModuleType:
    """Import a module of this package, such as ".export". Raise ValueError if it requires a missing package."""
    try:
        return importlib.import_module(module, __package__)
    except ModuleNotFoundError as error:
        raise ValueError(f"{feature} requires {error.name}. Run: {INSTALL_HUB}") from error
