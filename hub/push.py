"""Publishes a checkpoint on the Hub: weights, tokenizer, code, card, and nothing else.

    python -m hub.push runs/mine user/name --license cc-by-4.0 --dry-run
    python -m hub.push runs/mine user/name --license cc-by-4.0 --private

Before anything leaves the machine, what would be uploaded is loaded in a fresh process in which our package cannot be
imported, and translates. The upload is one commit: a push that breaks off leaves the repository as it was, and can be
done again.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from httpx2 import TransportError  # of huggingface_hub
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
)

from hub.model_card import add_statements, make_card, statements, without_places

CARRIED = (  # all that a reader needs; optimizer states, pickles and logs stay at home
    *("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "source_tokenizer.json"),
    *("target_tokenizer.json", "*_vanilla_transformer.py", "all_results.json", "samples.tsv", "import_report.json"),
    *("training_curve.png", "attention_*.png", "recipe.yaml"),
)
PRIVATE = {  # what must not be uploaded, in text files
    "a path of this machine": re.compile(
        r"(?<![\w/.:])(?:/(?:home|root|tmp|Users|work|mnt|data)/|[A-Z]:\\\\)[\w./\\-]+"
    ),
    "a token": re.compile(r"\bhf_[A-Za-z0-9]{20,}\b"),
}
CHECK = """
import sys
sys.modules["vanilla_transformer"] = None  # as if it were not installed
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
model = AutoModelForSeq2SeqLM.from_pretrained(".", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(".", trust_remote_code=True)
ids = model.generate(**tokenizer(sys.argv[1], return_tensors="pt"), max_new_tokens=64)
print(tokenizer.decode(ids[0], skip_special_tokens=True))
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="hub.push", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="folder")
    parser.add_argument("repo_id", help="user/name")
    parser.add_argument("--private", action="store_true", help="make the repository private, if it is new")
    parser.add_argument("--revision", default="main", help="branch, made if need be (default: %(default)s)")
    parser.add_argument("--message", default="Upload of the checkpoint", help="of the commit")
    parser.add_argument("--dry-run", action="store_true", help="show files, sizes and card; upload nothing")
    add_statements(parser)
    arguments = parser.parse_args()
    try:
        run(arguments)
    except (ValueError, OSError) as error:
        print(f"hub.push: {in_words(error, arguments.repo_id)}", file=sys.stderr)
        sys.exit(2)


def run(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "repository")
        stage(arguments.checkpoint, folder)
        card = make_card(arguments.checkpoint, arguments.repo_id, **statements(arguments))
        (folder / "README.md").write_text(str(card), encoding="utf-8")
        refuse_private(folder)
        source = first_source(folder)
        print(f"loads without our package, and translates {source!r}: {translate_elsewhere(folder, source)!r}")
        files = sorted(path for path in folder.iterdir())
        for path in files:
            print(f"{path.stat().st_size:>14,}  {path.name}")
        if arguments.dry_run:
            print(f"\n{card}\nnothing was uploaded")
            return
        card.validate()  # by the Hub
        try:
            print(upload(files, arguments))
        except (TransportError, RuntimeError) as error:  # RuntimeError: what the client makes of a refused large file
            cause = error.__cause__ or error
            raise ValueError(
                f"the upload broke off ({error}; {type(cause).__name__}): push again. Unless the Hub had taken all of "
                f"it, the repository is as it was."
            ) from error


def stage(checkpoint: Path, folder: Path) -> None:
    """Copies what is to be uploaded. Raises ValueError for a folder that is no checkpoint of ours."""
    for name in ("config.json", "tokenizer_config.json", "modeling_vanilla_transformer.py"):
        if not (checkpoint / name).exists():
            raise ValueError(f"{checkpoint} is no checkpoint that can be shared: it has no {name}.")
    folder.mkdir()
    for wanted in CARRIED:
        for path in checkpoint.glob(wanted):
            shutil.copy(path, folder / path.name)
    if not list(folder.glob("*.safetensors")):
        raise ValueError(f"{checkpoint} is no checkpoint that can be shared: it has no weights (*.safetensors).")
    recipe = folder / "recipe.yaml"
    if recipe.exists():
        recipe.write_text(without_places(recipe.read_text(encoding="utf-8")), encoding="utf-8")


def refuse_private(folder: Path) -> None:
    """Raises ValueError where a file names a path of this machine or a token."""
    for path in folder.iterdir():
        if path.suffix in (".safetensors", ".png") or path.name in ("tokenizer.json", "samples.tsv"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            for what, regex in PRIVATE.items():
                if found := regex.search(line):
                    shown = found[0] if "path" in what else f"{found[0][:6]}..."
                    place = f"{path.name}, line {number}"
                    raise ValueError(f"{place} holds {what} ({shown}): remove it. Nothing was uploaded.")


def first_source(folder: Path) -> str:
    samples = folder / "samples.tsv"
    lines = samples.read_text(encoding="utf-8").splitlines() if samples.exists() else []
    return lines[1].split("\t")[0] if len(lines) > 1 else "A sentence."


def translate_elsewhere(folder: Path, source: str) -> str:
    """What the folder's model makes of `source`, in a process without our package; ValueError where it cannot."""
    with tempfile.TemporaryDirectory() as home:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"HF_HOME": home, "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", CHECK, source]
        process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if process.returncode:
        reason = process.stderr.strip().splitlines()[-1:] or ["no message"]
        raise ValueError(
            f"what would be uploaded does not load without our package: {reason[0]}. Nothing was uploaded."
        )
    return process.stdout.strip().splitlines()[-1] if process.stdout.strip() else ""


def upload(files: list[Path], arguments: argparse.Namespace) -> str:
    """One commit with all files, less those of an earlier push that are gone; its address."""
    api = HfApi()
    repo_id, revision = arguments.repo_id, arguments.revision
    api.create_repo(repo_id, private=arguments.private or None, exist_ok=True)
    if revision != "main":
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    new = {path.name for path in files}
    stale = [name for name in api.list_repo_files(repo_id, revision=revision) if is_ours(name) and name not in new]
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        *(CommitOperationAdd(path.name, path) for path in files),
        *(CommitOperationDelete(name) for name in stale),
    ]
    commit = api.create_commit(repo_id, operations, commit_message=arguments.message, revision=revision)
    return f"{commit.commit_url}\n" + f'AutoModelForSeq2SeqLM.from_pretrained("{repo_id}", trust_remote_code=True)'


def is_ours(name: str) -> bool:
    return any(Path(name).match(wanted) for wanted in CARRIED)


def in_words(error: Exception, repo_id: str) -> str:
    """One line with the cure."""
    if "xet-write-token" in str(error):
        return "this Hub has no Xet storage: set HF_HUB_DISABLE_XET=1 and push again. Nothing was committed."
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
        }
        if isinstance(error, RepositoryNotFoundError):
            status = 401 if status == 401 else 404
        return cures.get(status, f"the Hub answered {status}: try again later; the repository is as it was.")
    return str(error)


if __name__ == "__main__":
    main()
