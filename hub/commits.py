"""Writing to a repository on the Hub: in one commit, which touches nothing but what an earlier one of ours wrote.

Each commit leaves a list of its files with their hashes, `pushed_files.json`. What is not in the list of the commit
before, or has other content by now, is somebody's own: it is never deleted, and replaced only where that is asked for.
"""

import hashlib
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from httpx2 import TransportError  # of huggingface_hub
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import RevisionNotFoundError
from huggingface_hub.utils import validate_repo_id

MANIFEST_NAME = "pushed_files.json"
REVISION = re.compile(r"(?!.*(?:\.\.|//|/\.|\.lock(?:/|$)))\w[\w./-]*(?<![/.])", re.ASCII)  # as git has its branches


def repository_name(text: str) -> str:
    """The type of an option that names a repository. Raises ValueError where the Hub could not have it."""
    validate_repo_id(text)
    return text


def full_name(name: str) -> str:
    """The name with its user: that of whoever is logged in, where none is given."""
    validate_repo_id(name)
    return name if "/" in name else f"{HfApi().whoami()['name']}/{name}"


def commit_files(
    repo_id: str, files: dict[str, Path | bytes], message: str, *, private: bool = False, replace: bool = False,
    keep: tuple[str, ...] = (), revision: str = "main", repo_type: str | None = None, **creation: Any,
) -> str:  # fmt: skip
    """Commits `files` and deletes those of the commit before of ours that are no longer among them; its address.

    Args:
        files: their place or content, by their name in the repository.
        private: for a repository that is made now; one that is there must be private then.
        replace: files that somebody else has written, too.
        keep: names that are left as they are in the repository, if they are there.
        revision: a branch, made if need be.
        creation: further arguments of `create_repo`.

    Raises:
        ValueError: the repository holds other files of these names, keeps some out by its .gitignore, or is public
            though `private`.
    """
    if not message.strip():
        raise ValueError("the commit has no message: give --message a text.")
    if not REVISION.fullmatch(revision):
        raise ValueError(f"--revision {revision}: give the name of a branch, such as v2.")
    api = HfApi()
    is_new = not api.repo_exists(repo_id, repo_type=repo_type)
    api.create_repo(repo_id, repo_type=repo_type, private=private or None, exist_ok=True, **creation)
    if private and not api.repo_info(repo_id, repo_type=repo_type).private:
        raise ValueError(
            f"{repo_id} is there already, and public: make it private on its page first, or leave --private out. "
            f"Nothing was uploaded."
        )
    try:
        head, there = state_of(api, repo_id, revision, repo_type)
    except RevisionNotFoundError:
        api.create_branch(repo_id, branch=revision, repo_type=repo_type, exist_ok=True)
        head, there = state_of(api, repo_id, revision, repo_type)
    before = read_list(api, repo_id, head, repo_type) if MANIFEST_NAME in there else {}
    own = {name for name, found in there.items() if is_new or name == MANIFEST_NAME or found in before.get(name, [])}
    hashes = {name: hashes_of(content) for name, content in files.items()}
    new = {name: content for name, content in files.items() if name not in keep or name not in there}
    foreign = [name for name in new if name in there and name not in own and there[name] not in hashes[name]]
    if foreign and not replace:
        what = f"{foreign[0]} and {len(foreign) - 1} more files" if len(foreign) > 1 else foreign[0]
        raise ValueError(
            f"{repo_id} holds {what} that no push of this program wrote, or that was changed since: give --replace to "
            f"overwrite such files, or another name{cure_of(foreign)}. Nothing was uploaded."
        )
    kept = {name: before[name] for name in files if name not in new and name in own}
    listed = json.dumps({name: hashes[name] for name in new} | kept, indent=1, sort_keys=True)
    stale = [name for name in sorted(before) if name in own and name not in files and name != MANIFEST_NAME]
    additions = [
        CommitOperationAdd(name, content) for name, content in (new | {MANIFEST_NAME: listed.encode()}).items()
    ]
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        *additions,
        *(CommitOperationDelete(name) for name in stale),
    ]
    try:
        api.preupload_lfs_files(repo_id, additions, revision=revision, repo_type=repo_type)
        if ignored := [each.path_in_repo for each in additions if each._should_ignore]:  # a commit would go without
            raise ValueError(
                f"the .gitignore of {repo_id} keeps {', '.join(ignored)} out: change it on the Hub, and push again. "
                f"Nothing was uploaded."
            )
        commit = api.create_commit(
            repo_id, operations, commit_message=message, revision=revision, repo_type=repo_type, parent_commit=head
        )
    except (TransportError, RuntimeError) as error:  # RuntimeError: what the client makes of a refused large file
        cause = error.__cause__ or error
        raise ValueError(
            f"the upload broke off ({error}; {type(cause).__name__}): push again. Unless the Hub had taken all of it, "
            f"the repository is as it was."
        ) from error
    return commit.commit_url


def cure_of(foreign: list[str]) -> str:
    return "; --card keep leaves the card as it is there" if "README.md" in foreign else ""


def state_of(api: HfApi, repo_id: str, revision: str, repo_type: str | None) -> tuple[str, dict[str, str | None]]:
    """The hash of the last commit, and the files with their hashes."""
    info: Any = api.repo_info(repo_id, revision=revision, repo_type=repo_type, files_metadata=True)
    files = {each.rfilename: each.lfs.sha256 if each.lfs else each.blob_id for each in info.siblings or []}
    return info.sha, files


def read_list(api: HfApi, repo_id: str, commit: str, repo_type: str | None) -> dict[str, list[str]]:
    """The files of our last commit with their hashes; none where somebody has made something else of the list."""
    with tempfile.TemporaryDirectory() as folder:
        path = api.hf_hub_download(repo_id, MANIFEST_NAME, revision=commit, repo_type=repo_type, local_dir=folder)
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            return {}
    if not isinstance(found, dict):
        return {}
    return {name: hashes for name, hashes in found.items() if isinstance(hashes, list)}


def hashes_of(content: Path | bytes) -> list[str]:
    """What the Hub may call a file: git's hash, or where the file is large its SHA-256."""
    size = len(content) if isinstance(content, bytes) else content.stat().st_size
    git, sha256 = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False), hashlib.sha256()
    if isinstance(content, bytes):
        git.update(content)
        sha256.update(content)
    else:
        with content.open("rb") as file:
            while piece := file.read(1 << 24):
                git.update(piece)
                sha256.update(piece)
    return [git.hexdigest(), sha256.hexdigest()]
