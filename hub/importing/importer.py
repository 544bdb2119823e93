"""Import of a checkpoint file or of a native Transformers model, with its tokenizer and a report."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedTokenizerBase

from vanilla_transformer.shared.atomic_io import validate_new_dir, write_dir_atomically
from vanilla_transformer.shared.command_line import option_name

from .checkpoint_file import read_checkpoint
from .conversion import SPECIAL_IDS, ImportResult, convert
from .layout import Layout
from .layout_detection import find_layout
from .layout_settings import resolve_settings
from .layouts import LAYOUTS
from .parity import compare_with_user_model
from .tokenizer import TokenizerPair, read_tokenizers
from .toolkits.subwords import read_toolkit_tokenizers
from .transformers_models import import_transformers_model, is_transformers_model

TOOLKITS = ("fairseq", "opennmt")  # layouts whose sources never begin with the BOS token


@dataclass
class ImportedCheckpoint:
    """Result of `import_checkpoint`: the new directory, and the contents of its `import_report.json`."""

    folder: Path
    report: dict[str, Any]


def import_checkpoint(
    file: str | Path, output: str | Path, *, layout: str | None = None, num_heads: int | None = None,
    source_tokenizer: str | Path | None = None, target_tokenizer: str | Path | None = None,
    fairseq_data: str | Path | None = None, bpe_codes: Sequence[str | Path] = (), pad_token_id: int | None = None,
    bos_token_id: int | None = None, eos_token_id: int | None = None, settings: Sequence[str] = (),
    compare_with: str | None = None,
) -> ImportedCheckpoint:  # fmt: skip
    """Convert a checkpoint of a tutorial, a toolkit or a native Transformers class.

    Args:
        file: Checkpoint file, or directory or Hub id of a Transformers model. No code in it is executed.
        output: Path of the new directory.
        layout: Layout of the file. Defaults to detected from the names of the tensors.
        num_heads: Number of attention heads, if the file does not specify it.
        source_tokenizer: A `tokenizer.json`, or a text file with one token per line.
        target_tokenizer: The same for the target. Defaults to the source tokenizer.
        fairseq_data: Directory with fairseq's `dict.*.txt` files.
        bpe_codes: BPE codes or SentencePiece models of fairseq and OpenNMT-py: one file, or one per side.
        pad_token_id: Token id, if neither the layout nor the tokenizer defines it.
        bos_token_id: The same for the BOS token.
        eos_token_id: The same for the EOS token.
        settings: Layout settings of the form `KEY=VALUE`.
        compare_with: `MODULE:CALLABLE` that builds the original model, to compare the log-probabilities.

    Raises:
        ValueError: If the checkpoint cannot be converted exactly, or `output` exists.
    """
    options = {name: value for name, value in locals().items() if name not in ("file", "output")}
    for name in ("source_tokenizer", "target_tokenizer", "fairseq_data"):
        options[name] = None if options[name] is None else Path(options[name])
    options["bpe_codes"] = [Path(each) for each in bpe_codes]
    file, output = Path(file), Path(output)
    validate_new_dir(output)
    if is_transformers_model(file):
        validate_no_file_options(file, options)
        imported, tokenizer, report = import_transformers_model(file)
    else:
        imported, tokenizer, report = import_file(SimpleNamespace(file=file, **options))
    save(output, imported, tokenizer, report)
    return ImportedCheckpoint(output, report)


def validate_no_file_options(file: Path, options: dict[str, Any]) -> None:
    """Raise ValueError if an option is set that native Transformers models do not need."""
    for name, value in options.items():
        if value:
            option = "--set" if name == "settings" else option_name(name)
            raise ValueError(f"{option} is not supported for {file}: its config defines it. Remove {option}.")


def import_file(arguments: SimpleNamespace) -> tuple[ImportResult, PreTrainedTokenizerBase | None, dict[str, Any]]:
    """Return the converted model of a checkpoint file, its tokenizer if available, and the report."""
    if arguments.layout not in (None, *LAYOUTS):
        raise ValueError(f"layout={arguments.layout} does not exist. Use one of {', '.join(sorted(LAYOUTS))}.")
    state, metadata = read_checkpoint(arguments.file)
    with prefix_errors_with(arguments.file):
        layout, evidence = find_layout(state, arguments.layout)
    layout_settings = resolve_settings(arguments.settings, metadata, layout)
    tokenizers = load_tokenizers(arguments, layout, metadata | layout_settings)
    special_ids = {name: getattr(arguments, name) for name in SPECIAL_IDS if getattr(arguments, name) is not None}
    with prefix_errors_with(arguments.file):
        imported = convert(state, layout, layout_settings, arguments.num_heads, special_ids)
    report = {"file": arguments.file.name, "layout": layout.name, "evidence": evidence, "settings": layout_settings}
    rows = tokenizers.apply_to(imported) if tokenizers else None
    if tokenizers and layout.name not in TOOLKITS and "source_begins" not in layout_settings:
        imported.user_notes.append(
            "Sources do not begin with the BOS token. If the original code puts BOS before sources, as most tutorials "
            "do, import again with a tokenizer for each side and --set source_begins=true."
        )
    report |= imported.report()
    if arguments.compare_with:
        report["parity"] = compare_with_user_model(arguments.compare_with, layout, state, imported.model, rows)
    return imported, tokenizers.tokenizer if tokenizers else None, report


def load_tokenizers(arguments: SimpleNamespace, layout: Layout, metadata: dict[str, Any]) -> TokenizerPair | None:
    """Return the tokenizers of the given files, or of the toolkit's dictionaries. `metadata` includes the settings."""
    files = [arguments.source_tokenizer, arguments.target_tokenizer]
    toolkits = {"--fairseq-data": TOOLKITS[:1], "--bpe-codes": TOOLKITS}
    for option, layouts in toolkits.items():
        if getattr(arguments, option[2:].replace("-", "_")) and (layout.name not in layouts or any(files)):
            reason = "excludes --source-tokenizer" if any(files) else f"is not supported for {layout.name}"
            raise ValueError(f"{option} {reason}. It requires a checkpoint of {' or '.join(layouts)}.")
    if len(arguments.bpe_codes) > 2:
        raise ValueError(f"--bpe-codes must be one file or one file per side, got {len(arguments.bpe_codes)} files.")
    if any(files) or layout.name not in toolkits["--bpe-codes"] or metadata.get("source_begins"):
        return read_tokenizers(files[0], files[1], metadata.get("source_begins"))
    return read_toolkit_tokenizers(layout.name, arguments.file, metadata, arguments.fairseq_data, arguments.bpe_codes)


@contextmanager
def prefix_errors_with(file: Path) -> Iterator[None]:
    """Context manager that puts the file name before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def save(out: Path, imported: ImportResult, tokenizer: PreTrainedTokenizerBase | None, report: dict[str, Any]) -> None:
    """Write the model, its tokenizer and the report atomically."""

    def write(folder: Path) -> None:
        imported.model.save_pretrained(folder)
        if tokenizer:
            tokenizer.save_pretrained(folder)
        text = json.dumps(report, indent=2, ensure_ascii=False)
        (folder / "import_report.json").write_text(text + "\n", encoding="utf-8")

    write_dir_atomically(out, write)
