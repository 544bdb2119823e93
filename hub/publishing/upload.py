"""Upload of a checkpoint to the Hub: weights, tokenizer, model code and model card."""

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from vanilla_transformer.shared.atomic_io import UPLOAD_PENDING
from vanilla_transformer.shared.command_line import accept_settings, start_of_command
from vanilla_transformer.shared.loading import EMA_SUBFOLDER

from ..commits import commit_files, resolve_repo_id
from ..run_files import find_weights, local_paths, read_mapping, read_samples, sanitize_recipe
from ..sensitive_data import strip_metadata, validate_no_sensitive_data
from . import CardSettings, PushSettings
from .card import IMAGES, make_card, make_eval_results

SMALL_FILE_PATTERNS = (  # except for the weights, other files such as optimizer states and logs are not uploaded
    *("config.json", "generation_config.json", SAFE_WEIGHTS_INDEX_NAME, "tokenizer.json", "tokenizer_config.json"),
    *("vocab.json", "target_vocab.json", "merges.txt", "*.spm", "*.model", "dict.txt", "vocab.txt", "bpe.codes"),
    *("special_tokens_map.json", "source_tokenizer.json", "target_tokenizer.json", "*_vanilla_transformer.py"),
    *("all_results.json", "samples.tsv", "import_report.json", *IMAGES),
)
CARD = "README.md"
SMOKE_TEST_SCRIPT = """
import inspect
import sys
sys.modules["vanilla_transformer"] = None  # the package cannot be imported
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.modeling_outputs import Seq2SeqLMOutput
model, info = AutoModelForSeq2SeqLM.from_pretrained(".", trust_remote_code=True, output_loading_info=True)
parameters = dict(model.named_parameters())
missing = [name for name in sorted(info["missing_keys"]) if name in parameters]  # would be initialized at random
unexpected = sorted(info["unexpected_keys"])
invalid = [name for name in parameters if not parameters[name].isfinite().all()]
for names, problem in ((missing, "missing weights"), (unexpected, "unexpected weights"), (invalid, "invalid weights")):
    if names:
        sys.exit(f"{problem}: {names[0]}" + f" and {len(names) - 1} more" * (len(names) > 1))
if hasattr(Seq2SeqLMOutput, "cache") and "past_key_values" in inspect.signature(model.forward).parameters:
    sys.exit("its code is for transformers before 5.24. Load the model with the package, and save it again")
tokenizer = AutoTokenizer.from_pretrained(".", trust_remote_code=True)
positions = model.config.max_position_embeddings
text = sys.stdin.buffer.read().decode()
batch = tokenizer(text, return_tensors="pt", truncation=True, max_length=positions)
target = tokenizer.stock("target") if hasattr(tokenizer, "stock") else tokenizer  # for stop_strings
options = {"max_new_tokens": min(64, positions - 1), "return_dict_in_generate": False, "tokenizer": target}
ids = model.generate(**batch, **options)
sys.stdout.buffer.write(tokenizer.decode(ids[0], skip_special_tokens=True).encode())
"""


@dataclass
class PushResult:
    """Result of `push`."""

    repo_id: str
    revision: str
    url: str | None  # of the commit, None after a dry run
    files: dict[str, int]  # sizes in bytes
    removed_keys: list[str]  # keys of recipe.yaml that are not uploaded
    example: tuple[str, str]  # sentence and its translation by the uploaded model
    card: str


@accept_settings(PushSettings)
def push(checkpoint: str | Path, repo_id: str, **options: Any) -> PushResult:
    """Publish a checkpoint on the Hub in a single commit, after a test that it loads without this package.

    Args:
        checkpoint: Checkpoint directory.
        repo_id: Name of the repository, user/name.
        options: Fields of `PushSettings`.

    Raises:
        ValueError: If the directory cannot be published, or files of other users would be overwritten.
    """
    settings = PushSettings(**options)
    checkpoint, repo_id = Path(checkpoint), resolve_repo_id(repo_id)
    files, removed_keys = gather_files(checkpoint)
    metadata = {each.name: getattr(settings, each.name) for each in fields(CardSettings)}
    text = resolve_card(checkpoint, repo_id, settings, metadata)
    model_card = ModelCard(text, ignore_metadata_errors=True)  # for validation, as it drops some metadata
    files[CARD] = text.encode()
    files |= make_eval_results(checkpoint)
    validate_no_sensitive_data(files, local_paths(checkpoint))
    samples = read_samples(checkpoint / "samples.tsv")
    source = (samples[0][0].strip() if samples else "") or "A sentence."
    example = source, smoke_test_upload(files, source)
    sizes = {name: len(each) if isinstance(each, bytes) else each.stat().st_size for name, each in files.items()}
    url = None
    if not settings.dry_run:
        model_card.validate()  # request to the Hub
        url = commit_files(
            repo_id, files, settings.message, private=settings.private, replace=settings.replace,
            keep=(CARD,) if settings.card == "keep" else (), revision=settings.revision,
        )  # fmt: skip
        with suppress(OSError):  # a read-only disk
            (checkpoint / UPLOAD_PENDING).unlink()
    sizes = dict(sorted(sizes.items()))
    return PushResult(repo_id, settings.revision, url, sizes, removed_keys, example, text)


def gather_files(checkpoint: Path) -> tuple[dict[str, Path | bytes], list[str]]:
    """Return the files to upload by name, and the keys that are removed from recipe.yaml.

    Weights are paths, other files their content. Raises ValueError if the directory is not a complete checkpoint.
    """
    for name in ("config.json", "tokenizer_config.json", "modeling_vanilla_transformer.py"):
        if not (checkpoint / name).is_file():
            raise ValueError(f"{checkpoint} cannot be published: it has no {name}.")
    if (checkpoint / EMA_SUBFOLDER / "config.json").exists():
        advice = f"Run {start_of_command('training.average')} {checkpoint} --output OUT, and publish OUT."
        raise ValueError(f"{checkpoint} cannot be published: it has a moving average of its weights. {advice}")
    if (checkpoint / "adapter_config.json").exists():
        advice = "Call merge_and_unload() on the PeftModel, and publish the saved result."
        raise ValueError(f"{checkpoint} cannot be published: it has a PEFT adapter. {advice}")
    files: dict[str, Path | bytes] = {path.name: path for path in find_weights(checkpoint)}
    for path in (path for pattern in SMALL_FILE_PATTERNS for path in checkpoint.glob(pattern) if path.is_file()):
        files[path.name] = strip_metadata(path.name, path.read_bytes())
    if SAFE_WEIGHTS_NAME in files:
        files.pop(SAFE_WEIGHTS_INDEX_NAME, None)  # of an earlier save
    recipe, results = read_mapping(checkpoint / "recipe.yaml"), read_mapping(checkpoint / "all_results.json")
    text, removed_keys = sanitize_recipe(recipe, results, local_paths(checkpoint))
    if text:
        files["recipe.yaml"] = text.encode()
    return files, removed_keys


def resolve_card(checkpoint: Path, repo_id: str, settings: PushSettings, metadata: dict[str, Any]) -> str:
    """Return the model card. Raise ValueError if a local README.md exists and `settings.card` is None."""
    readme, card = checkpoint / CARD, settings.card
    if card is None and readme.is_file():
        raise ValueError(f"{readme} exists. Use --card local to upload it, or --card generated to replace it.")
    if card in ("local", "keep") and any(metadata.values()):
        raise ValueError("--license, --dataset and --base-model require --card generated. Edit your README.md instead.")
    if card != "local":
        return str(make_card(checkpoint, repo_id, settings.revision, **metadata))
    try:
        return readme.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{readme} is not encoded in UTF-8. Convert the file.") from error


def smoke_test_upload(files: dict[str, Path | bytes], source: str) -> str:
    """Translate `source` with the files to upload, in a process that cannot import vanilla_transformer.

    Raises ValueError if the files cannot be loaded, or the weights do not match the config.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder, home = Path(temporary, "checkpoint"), Path(temporary, "home")
        folder.mkdir()
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            if isinstance(content, bytes):
                path.write_bytes(content)
                continue
            try:  # a copy would stay on the disk if the process is killed
                path.symlink_to(content.resolve())
            except OSError:  # Windows allows links only with a privilege
                shutil.copyfile(content, path)
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        env |= {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", SMOKE_TEST_SCRIPT]
        process = subprocess.run(command, cwd=folder, env=env, input=source.encode(), capture_output=True, check=False)
    if process.returncode:
        reason = process.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        message = "The files to upload cannot be used without the vanilla_transformer package: "
        message += reason[0].removesuffix(".") + "."
        raise ValueError(f"{message} Nothing was uploaded.")
    return process.stdout.decode().strip()
