"""Commits to a Hub repository that protect the files of other users.

Each commit includes `pushed_files.json`, a list of its files with their hashes. A file that is not in the
previous list, or that has changed since, belongs to another user. It is never deleted, and overwritten only on request.
"""

import hashlib
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from httpx2 import TransportError  # raised by huggingface_hub
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import RevisionNotFoundError
from huggingface_hub.utils import validate_repo_id

MANIFEST_NAME = "pushed_files.json"
NEW_SPACE_FILES = {".gitattributes", "README.md"}  # which the Hub creates
REVISION = re.compile(r"(?!.*(?:\.\.|//|/\.|\.lock(?:/|$)))\w[\w./-]*(?<![/.])", re.ASCII)  # branch names of git


def resolve_repo_id(name: str) -> str:
    """Return the name with its user, which defaults to the logged-in user. Raise ValueError if it is not valid."""
    validate_repo_id(name)
    return name if "/" in name else f"{HfApi().whoami()['name']}/{name}"


def files_in(folder: Path) -> dict[str, Path | bytes]:
    """Return the files below a directory by their relative names, as `commit_files` expects them."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def commit_files(
    repo_id: str, files: dict[str, Path | bytes], message: str, *, private: bool = False, replace: bool = False,
    keep: tuple[str, ...] = (), revision: str = "main", space_sdk: str | None = None,
) -> str:  # fmt: skip
    """Commit `files`, delete the other files of this program's previous commit, and return the URL of the commit.

    Args:
        repo_id: Name of the repository, user/name. It is created if it does not exist.
        files: Path or content of each file, by its name in the repository.
        private: Whether to create a private repository. An existing repository must be private.
        replace: Whether to overwrite files that others have written or changed, and to delete an earlier push that
            has no file in common with `files` except the card.
        keep: Names of files that are not overwritten if they exist in the repository.
        revision: Branch, which is created if it does not exist.
        space_sdk: SDK of a Space, such as gradio. By default, the repository is a model.

    Raises:
        ValueError: The upload fails or an argument is not valid. Without `replace`, also if the repository contains an
            earlier push of something else, or a file of another user with the same name as one of `files`.
    """
    if not message.strip():
        raise ValueError("The commit message is empty. Set --message to a text.")
    if not REVISION.fullmatch(revision):
        raise ValueError(f"--revision {revision} is not a valid branch name. Use a name such as v2.")
    api, repo_type = HfApi(), "space" if space_sdk else None
    target: dict[str, Any] = {"repo_id": repo_id, "repo_type": repo_type, "revision": revision}
    is_new = not api.repo_exists(repo_id, repo_type=repo_type)
    info = create_branch(api, target, private, space_sdk)
    remote = {each.rfilename: each.lfs.sha256 if each.lfs else each.blob_id for each in info.siblings or []}
    if space_sdk and remote.keys() <= NEW_SPACE_FILES:  # an earlier call may have created it, and then failed
        commits = api.list_repo_commits(repo_id, repo_type=repo_type, revision=revision)
        is_new |= [each.title for each in commits] == ["initial commit"]
    previous = fetch_manifest(api, repo_id, info.sha, repo_type) if MANIFEST_NAME in remote else {}
    owned = set(remote) if is_new else {name for name, hash_ in remote.items() if hash_ in previous.get(name, [])}
    stale = [name for name in sorted(previous) if name in owned and name not in files and name != MANIFEST_NAME]
    if stale and not replace and not previous.keys() & files.keys() - {"README.md"}:
        raise ValueError(
            f"{repo_id} contains an earlier push of something else, with {stale[0]}. Choose another repository, or use "
            f"--replace to delete the files of that push. Nothing was uploaded."
        )
    new = [CommitOperationAdd(name, each) for name, each in files.items() if name not in keep or name not in remote]
    hashes = {each.path_in_repo: hash_content(each) for each in new}
    conflicts = [name for name in hashes if name in remote.keys() - owned and remote[name] not in hashes[name]]
    if conflicts and not replace:
        names = f"{conflicts[0]} and {len(conflicts) - 1} more files" if len(conflicts) > 1 else conflicts[0]
        has_card = "README.md" in conflicts and not space_sdk
        hint = " Use --card keep to keep the card of the repository." if has_card else ""
        raise ValueError(
            f"{repo_id} contains {names} that this program did not write, or that was changed since. Use --replace to "
            f"overwrite such files, or choose another repository.{hint} Nothing was uploaded."
        )
    hashes |= {name: previous[name] for name in files if name not in hashes and name in owned & previous.keys()}
    new.append(CommitOperationAdd(MANIFEST_NAME, json.dumps(hashes, indent=1, sort_keys=True).encode()))
    return commit(api, target, new, stale, message, info.sha)


def create_branch(api: HfApi, target: dict[str, Any], private: bool, space_sdk: str | None) -> Any:
    """Create the repository and its branch if they do not exist. Return the metadata of the branch and its files."""
    repo_id, repo_type = target["repo_id"], target["repo_type"]
    api.create_repo(repo_id, repo_type=repo_type, private=private or None, exist_ok=True, space_sdk=space_sdk)
    if private and not api.repo_info(repo_id, repo_type=repo_type).private:
        raise ValueError(f"{repo_id} exists and is public. Make it private or remove --private. Nothing was uploaded.")
    try:
        return api.repo_info(**target, files_metadata=True)
    except RevisionNotFoundError:
        api.create_branch(repo_id, branch=target["revision"], repo_type=repo_type, exist_ok=True)
        return api.repo_info(**target, files_metadata=True)


def commit(
    api: HfApi, target: dict[str, Any], new: list[CommitOperationAdd], stale: list[str], message: str, parent: str
) -> str:
    """Upload the new files and delete the stale ones in a commit after `parent`. Return the URL of the commit."""
    try:
        api.preupload_lfs_files(**target, additions=new)
        if ignored := [each.path_in_repo for each in new if each._should_ignore]:  # create_commit skips them
            excluded = f"The .gitignore of {target['repo_id']} excludes {', '.join(ignored)}"
            raise ValueError(f"{excluded}. Change it on the Hub and push again. Nothing was uploaded.")
        operations: list[Any] = [*new, *(CommitOperationDelete(name) for name in stale)]
        options: dict[str, Any] = target | {"commit_message": message, "parent_commit": parent}
        return api.create_commit(operations=operations, **options).commit_url
    except (TransportError, RuntimeError) as error:  # the client raises RuntimeError if a large file is rejected
        cause = error.__cause__ or error
        raise ValueError(
            f"The upload failed ({error}; {type(cause).__name__}). Push again. The repository is unchanged, unless the "
            f"Hub had received the complete commit."
        ) from error


def fetch_manifest(api: HfApi, repo_id: str, commit: str, repo_type: str | None) -> dict[str, list[str]]:
    """Return the file hashes in `pushed_files.json` of a commit, or an empty dictionary if the file is malformed."""
    with tempfile.TemporaryDirectory() as folder:
        path = api.hf_hub_download(repo_id, MANIFEST_NAME, revision=commit, repo_type=repo_type, local_dir=folder)
        try:
            manifest = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            return {}
    if not isinstance(manifest, dict):
        return {}
    return {name: hashes for name, hashes in manifest.items() if isinstance(hashes, list)}


def hash_content(operation: CommitOperationAdd) -> list[str]:
    """Return both hashes by which the Hub may identify a file: git's SHA-1, and the SHA-256 of large files."""
    git = hashlib.sha1(f"blob {operation.upload_info.size}\0".encode(), usedforsecurity=False)
    with operation.as_file() as file:
        digest = hashlib.file_digest(file, lambda: git)  # type: ignore[arg-type]  # it has all required methods
    return [digest.hexdigest(), operation.upload_info.sha256.hex()]
