"""Publishes a checkpoint on the Hub: weights, tokenizer, code, card, and nothing else.

    python -m hub.push runs/mine user/name --license cc-by-4.0 --dry_run
    python -m hub.push runs/mine user/name --license cc-by-4.0 --private

Before anything leaves the machine, what would be uploaded is loaded in a fresh process in which our package cannot be
imported, and translates. The upload is one commit: a push that breaks off leaves the repository as it was, and can be
done again. What anybody else has written or changed in the repository stays, or is replaced only if you say so.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from httpx2 import TransportError  # of huggingface_hub
from huggingface_hub import ModelCard

from hub.commits import MANIFEST_NAME, commit_files, full_name
from hub.hub_errors import hub_error_message
from hub.model_card import add_metadata_options, make_card, metadata
from hub.run_files import local_paths, read_record, read_samples, sanitize_recipe
from hub.sensitive_data import validate_private, without_metadata
from vanilla_transformer.shared.command_line import CommandLineParser, exit_on_user_error

LARGE_FILE_PATTERNS = "*.safetensors"  # sent from where they lie, never copied
SMALL = (  # with these all that a reader needs; optimizer states, pickles and logs stay at home
    *("config.json", "generation_config.json", "*.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"),
    *("vocab.json", "target_vocab.json", "merges.txt", "*.spm", "*.model"),  # tokenizers of imported models
    *("special_tokens_map.json", "source_tokenizer.json", "target_tokenizer.json", "*_vanilla_transformer.py"),
    *("all_results.json", "samples.tsv", "import_report.json", "training_curve.png", "attention_*.png"),
)
CARD = "README.md"
SMOKE_TEST_SCRIPT = """
import sys
sys.modules["vanilla_transformer"] = None  # as if it were not installed
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
model, found = AutoModelForSeq2SeqLM.from_pretrained(".", trust_remote_code=True, output_loading_info=True)
parameters = dict(model.named_parameters())
drawn = [name for name in sorted(found["missing_keys"]) if name in parameters]  # at random, and translates, too
useless = sorted(found["unexpected_keys"])
broken = [name for name in parameters if not parameters[name].isfinite().all()]
for names, what in ((drawn, "the weights lack"), (useless, "of no use is"), (broken, "not finite is")):
    if names:
        sys.exit(f"{what} {names[0]}" + f" and {len(names) - 1} more" * (len(names) > 1))
tokenizer = AutoTokenizer.from_pretrained(".", trust_remote_code=True)
limit = min(64, model.config.max_position_embeddings - 1)
ids = model.generate(**tokenizer(sys.stdin.buffer.read().decode(), return_tensors="pt"), max_new_tokens=limit)
sys.stdout.buffer.write(tokenizer.decode(ids[0], skip_special_tokens=True).encode())
"""


def main() -> None:
    parser = CommandLineParser("hub.push", __doc__)
    parser.add_argument("checkpoint", type=Path, help="folder")
    parser.add_argument("repo_id", help="user/name")
    parser.add_argument("--private", action="store_true", help="for a private repository, made if need be")
    parser.add_argument("--revision", default="main", help="branch, made if need be (default: %(default)s)")
    parser.add_argument("--message", default="Upload of the checkpoint", help="of the commit")
    parser.add_argument("--dry_run", action="store_true", help="show files, sizes and card; upload nothing")
    parser.add_argument(
        "--replace", action="store_true", help="overwrite what somebody else has written or changed in the repository"
    )
    parser.add_argument(
        "--card", choices=("generated", "local", "keep"),
        help="made from the results (default); the folder's own README.md; or keep the one in the repository",
    )  # fmt: skip
    add_metadata_options(parser)
    arguments = parser.parse_args()
    with exit_on_user_error(
        parser.prog, TransportError, formatter=partial(hub_error_message, repo_id=arguments.repo_id)
    ):
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    repo_id = full_name(arguments.repo_id)
    files = gather(arguments.checkpoint)
    card = choose_card(arguments, repo_id)
    files[CARD] = str(card).encode()
    validate_private(files, local_paths(arguments.checkpoint))
    source = first_source(arguments.checkpoint)
    print(f"loads without our package, and translates {source!r}: {smoke_test_upload(files, source)!r}")
    for name, content in sorted(files.items()):
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        print(f"{size:>14,}  {name}")
    print(f"{'a list of them':>14}  {MANIFEST_NAME}")
    if arguments.dry_run:
        print(f"\n{card}\nnothing was uploaded")
        return
    card.validate()  # by the Hub
    address = commit_files(
        repo_id, files, arguments.message, private=arguments.private, replace=arguments.replace,
        keep=(CARD,) if arguments.card == "keep" else (), revision=arguments.revision,
    )  # fmt: skip
    print(f'{address}\nAutoModelForSeq2SeqLM.from_pretrained("{repo_id}", trust_remote_code=True)')


def gather(checkpoint: Path) -> dict[str, Path | bytes]:
    """What is to be uploaded, by name: large files by their place, the others' content.

    Raises:
        ValueError: the folder is no checkpoint of ours.
    """
    for name in ("config.json", "tokenizer_config.json", "modeling_vanilla_transformer.py"):
        if not (checkpoint / name).is_file():
            raise ValueError(f"{checkpoint} is no checkpoint that can be shared: it has no {name}.")
    files: dict[str, Path | bytes] = {
        path.name: path for path in checkpoint.glob(LARGE_FILE_PATTERNS) if path.is_file()
    }
    if not files:
        raise ValueError(f"{checkpoint} is no checkpoint that can be shared: it has no weights (*.safetensors).")
    for path in (path for wanted in SMALL for path in checkpoint.glob(wanted) if path.is_file()):
        files[path.name] = without_metadata(path.name, path.read_bytes())
    recipe, results = read_record(checkpoint / "recipe.yaml"), read_record(checkpoint / "all_results.json")
    text, left_out = sanitize_recipe(recipe, results, local_paths(checkpoint))
    if text:
        files["recipe.yaml"] = text.encode()
    if left_out:
        print(f"left out of recipe.yaml: {', '.join(left_out)}")
    return files


def choose_card(arguments: argparse.Namespace, repo_id: str) -> ModelCard:
    """Raises ValueError where nobody has said what becomes of the folder's own README.md."""
    own = arguments.checkpoint / CARD
    if arguments.card is None and own.is_file():
        raise ValueError(f"{own} would not be uploaded: --card local takes it as the card, --card generated another.")
    if arguments.card in ("local", "keep") and any(metadata(arguments).values()):
        raise ValueError("--license, --dataset and --base_model go into a made card: write them into your README.md.")
    if arguments.card != "local":
        return make_card(arguments.checkpoint, repo_id, **metadata(arguments))
    try:
        return ModelCard(own.read_text(encoding="utf-8"), ignore_metadata_errors=True)
    except UnicodeDecodeError as error:
        raise ValueError(f"{own} is not UTF-8: mend it.") from error


def first_source(checkpoint: Path) -> str:
    samples = read_samples(checkpoint / "samples.tsv")
    return (samples[0][0].strip() if samples else "") or "A sentence."


def smoke_test_upload(files: dict[str, Path | bytes], source: str) -> str:
    """What the files' model makes of `source`, in a process without our package; ValueError where it cannot."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, home = Path(temporary, "checkpoint"), Path(temporary, "home")
        folder.mkdir()
        for name, content in files.items():
            if isinstance(content, bytes):
                (folder / name).write_bytes(content)
            else:
                (folder / name).symlink_to(content.resolve())  # a kill would leave a copy of the weights behind
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", SMOKE_TEST_SCRIPT]
        process = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, input=source.encode(), check=False
        )
    if process.returncode:
        reason = process.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise ValueError(
            f"what would be uploaded does not load without our package: {reason[0]}. Nothing was uploaded."
        )
    return process.stdout.decode().strip()


if __name__ == "__main__":
    main()
