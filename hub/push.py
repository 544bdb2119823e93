"""Publish a checkpoint on the Hub: weights, tokenizer, model code and model card.

    python -m hub.push runs/mine user/name --license cc-by-4.0 --dry-run
    python -m hub.push runs/mine user/name --license cc-by-4.0 --private

Before the upload, a new process without this package loads the model from the files and translates a sentence. The
upload is a single commit: if it fails, the repository is unchanged, and you can push again. Files that others have
written or changed in the repository are overwritten only with --replace.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from httpx2 import TransportError  # raised by huggingface_hub
from huggingface_hub import ModelCard

from vanilla_transformer.shared.command_line import CommandLineParser, exit_on_user_error
from vanilla_transformer.shared.loading import EMA_SUBFOLDER

from .commits import MANIFEST_NAME, commit_files, resolve_repo_id
from .hub_errors import hub_error_message
from .model_card import add_metadata_options, card_metadata, make_card
from .run_files import local_paths, read_mapping, read_samples, sanitize_recipe
from .sensitive_data import strip_metadata, validate_no_sensitive_data

LARGE_FILE_PATTERN = "*.safetensors"  # uploaded without a copy in memory
SMALL_FILE_PATTERNS = (  # all other files, such as optimizer states, pickles and logs, are not uploaded
    *("config.json", "generation_config.json", "*.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"),
    *("vocab.json", "target_vocab.json", "merges.txt", "*.spm", "*.model"),  # tokenizers of imported models
    *("special_tokens_map.json", "source_tokenizer.json", "target_tokenizer.json", "*_vanilla_transformer.py"),
    *("all_results.json", "samples.tsv", "import_report.json", "training_curve.png", "attention_*.png"),
)
CARD = "README.md"
SMOKE_TEST_SCRIPT = """
import sys
sys.modules["vanilla_transformer"] = None  # the package cannot be imported
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
model, info = AutoModelForSeq2SeqLM.from_pretrained(".", trust_remote_code=True, output_loading_info=True)
parameters = dict(model.named_parameters())
missing = [name for name in sorted(info["missing_keys"]) if name in parameters]  # would be initialized at random
unexpected = sorted(info["unexpected_keys"])
invalid = [name for name in parameters if not parameters[name].isfinite().all()]
for names, problem in ((missing, "missing weights"), (unexpected, "unexpected weights"), (invalid, "invalid weights")):
    if names:
        sys.exit(f"{problem}: {names[0]}" + f" and {len(names) - 1} more" * (len(names) > 1))
tokenizer = AutoTokenizer.from_pretrained(".", trust_remote_code=True)
limit = min(64, model.config.max_position_embeddings - 1)
ids = model.generate(**tokenizer(sys.stdin.buffer.read().decode(), return_tensors="pt"), max_new_tokens=limit)
sys.stdout.buffer.write(tokenizer.decode(ids[0], skip_special_tokens=True).encode())
"""


def main() -> None:
    parser = CommandLineParser("hub.push", __doc__)
    parser.add_argument("checkpoint", type=Path, help="Path to the checkpoint directory.")
    parser.add_argument("repo_id", help="Name of the repository, user/name.")
    parser.add_argument("--private", action="store_true", help="Whether to create a private repository.")
    parser.add_argument("--revision", default="main", help="Branch, created if it is missing. Default: %(default)s.")
    parser.add_argument("--message", default="Upload of the checkpoint", help="The commit message.")
    parser.add_argument("--dry-run", action="store_true", help="Whether to only print the files and the card.")
    parser.add_argument("--replace", action="store_true", help="Whether to overwrite files of other users.")
    parser.add_argument(
        "--card", choices=("generated", "local", "keep"),
        help="Card from the results (default), README.md of the checkpoint directory, or card in the repository.",
    )  # fmt: skip
    add_metadata_options(parser)
    arguments = parser.parse_args()
    formatter = partial(hub_error_message, repo_id=arguments.repo_id)
    with exit_on_user_error(parser.prog, TransportError, formatter=formatter):
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    repo_id = resolve_repo_id(arguments.repo_id)
    files = gather_files(arguments.checkpoint)
    card = resolve_card(arguments, repo_id)
    files[CARD] = str(card).encode()
    validate_no_sensitive_data(files, local_paths(arguments.checkpoint))
    source = example_source(arguments.checkpoint)
    translation = smoke_test_upload(files, source)
    print(f"The files load without the package. Translation of {source!r}: {translation!r}")
    for name, content in sorted(files.items()):
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        print(f"{size:>14,}  {name}")
    print(f"{'file list':>14}  {MANIFEST_NAME}")
    if arguments.dry_run:
        print(f"\n{card}\nNothing was uploaded.")
        return
    card.validate()  # request to the Hub
    url = commit_files(
        repo_id, files, arguments.message, private=arguments.private, replace=arguments.replace,
        keep=(CARD,) if arguments.card == "keep" else (), revision=arguments.revision,
    )  # fmt: skip
    print(f'{url}\nAutoModelForSeq2SeqLM.from_pretrained("{repo_id}", trust_remote_code=True)')


def gather_files(checkpoint: Path) -> dict[str, Path | bytes]:
    """Return the files to upload by name: the paths of large files, the content of others.

    Raises:
        ValueError: The directory is not a complete checkpoint, or a file cannot be read.
    """
    for name in ("config.json", "tokenizer_config.json", "modeling_vanilla_transformer.py"):
        if not (checkpoint / name).is_file():
            raise ValueError(f"{checkpoint} cannot be published: it has no {name}.")
    if (checkpoint / EMA_SUBFOLDER / "config.json").exists():
        advice = f"Run python -m training.average OUT {checkpoint}, and publish OUT."
        raise ValueError(f"{checkpoint} cannot be published: it has a moving average of its weights. {advice}")
    if (checkpoint / "adapter_config.json").exists():
        advice = "Call merge_and_unload() on the PeftModel, and publish the saved result."
        raise ValueError(f"{checkpoint} cannot be published: it has a PEFT adapter. {advice}")
    files: dict[str, Path | bytes] = {path.name: path for path in checkpoint.glob(LARGE_FILE_PATTERN) if path.is_file()}
    if not files:
        raise ValueError(f"{checkpoint} cannot be published: it has no weights (*.safetensors).")
    for path in (path for pattern in SMALL_FILE_PATTERNS for path in checkpoint.glob(pattern) if path.is_file()):
        files[path.name] = strip_metadata(path.name, path.read_bytes())
    recipe, results = read_mapping(checkpoint / "recipe.yaml"), read_mapping(checkpoint / "all_results.json")
    text, removed_keys = sanitize_recipe(recipe, results, local_paths(checkpoint))
    if text:
        files["recipe.yaml"] = text.encode()
    if removed_keys:
        print(f"Removed from recipe.yaml: {', '.join(removed_keys)}")
    return files


def resolve_card(arguments: argparse.Namespace, repo_id: str) -> ModelCard:
    """Return the model card. Raise ValueError if a local README.md exists and --card is not set."""
    readme = arguments.checkpoint / CARD
    if arguments.card is None and readme.is_file():
        raise ValueError(f"{readme} exists. Use --card local to upload it, or --card generated to replace it.")
    if arguments.card in ("local", "keep") and any(card_metadata(arguments).values()):
        raise ValueError("--license, --dataset and --base-model require --card generated. Edit your README.md instead.")
    if arguments.card != "local":
        return make_card(arguments.checkpoint, repo_id, **card_metadata(arguments))
    try:
        return ModelCard(readme.read_text(encoding="utf-8"), ignore_metadata_errors=True)
    except UnicodeDecodeError as error:
        raise ValueError(f"{readme} is not encoded in UTF-8. Convert the file.") from error


def example_source(checkpoint: Path) -> str:
    samples = read_samples(checkpoint / "samples.tsv")
    return (samples[0][0].strip() if samples else "") or "A sentence."


def smoke_test_upload(files: dict[str, Path | bytes], source: str) -> str:
    """Translate `source` with the files to upload, in a process that cannot import vanilla_transformer.

    Raises:
        ValueError: The files cannot be loaded, or the weights do not match the config.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder, home = Path(temporary, "checkpoint"), Path(temporary, "home")
        folder.mkdir()
        for name, content in files.items():
            if isinstance(content, bytes):
                (folder / name).write_bytes(content)
            else:
                try:
                    (folder / name).symlink_to(content.resolve())  # a copy would stay on the disk after a kill
                except OSError:  # Windows allows links only with a privilege
                    shutil.copyfile(content, folder / name)
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        env |= {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", SMOKE_TEST_SCRIPT]
        process = subprocess.run(command, cwd=folder, env=env, input=source.encode(), capture_output=True, check=False)
    if process.returncode:
        reason = process.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        message = f"The files to upload cannot be loaded without the vanilla_transformer package: {reason[0]}."
        raise ValueError(f"{message} Nothing was uploaded.")
    return process.stdout.decode().strip()


if __name__ == "__main__":
    main()
