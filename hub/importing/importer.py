"""Import of a checkpoint file or of a native Transformers model, with its tokenizer and a report."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from vanilla_transformer.shared.atomic_io import validate_new_dir, write_dir_atomically
from vanilla_transformer.shared.command_line import accept_settings, option_name

from . import ImportSettings
from .checkpoint_file import prefix_errors_with, read_checkpoint
from .conversion import SPECIAL_IDS, ImportResult, convert
from .layout import Layout
from .layout_detection import find_layout
from .layout_settings import format_setting, resolve_settings
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


@accept_settings(ImportSettings)
def import_checkpoint(file: str | Path, output: str | Path, **options: Any) -> ImportedCheckpoint:
    """Convert a checkpoint of a tutorial, a toolkit or a native Transformers class.

    Args:
        file: Checkpoint file, or directory or Hub id of a Transformers model. No code in it is executed.
        output: Path of the new directory.
        options: Fields of `ImportSettings`.

    Raises:
        ValueError: If the checkpoint cannot be converted exactly, or `output` exists.
    """
    settings = ImportSettings(**options)
    file, output = Path(file), Path(output)
    validate_new_dir(output)
    if is_transformers_model(file):
        for each in fields(settings):
            if getattr(settings, each.name) not in (None, [], ()):
                option = each.metadata.get("name", option_name(each.name))
                raise ValueError(f"{option} is not supported for {file}: its config defines it. Remove {option}.")
        imported, tokenizer, report = import_transformers_model(file)
    else:
        imported, tokenizer, report = import_file(file, settings)

    def write(folder: Path) -> None:
        imported.model.save_pretrained(folder)
        if tokenizer:
            tokenizer.save_pretrained(folder)
        text = json.dumps(report, indent=2, ensure_ascii=False)
        (folder / "import_report.json").write_text(text + "\n", encoding="utf-8")

    write_dir_atomically(output, write)
    return ImportedCheckpoint(output, report)


def import_file(
    file: Path, settings: ImportSettings
) -> tuple[ImportResult, PreTrainedTokenizerBase | None, dict[str, Any]]:
    """Return the converted model of a checkpoint file, its tokenizer if available, and the report."""
    if settings.layout not in (None, *LAYOUTS):
        raise ValueError(f"layout={settings.layout} does not exist. Use one of {', '.join(sorted(LAYOUTS))}.")
    state, metadata = read_checkpoint(file)
    with prefix_errors_with(f"{file}: "):
        layout, evidence = find_layout(state, settings.layout)
    layout_settings = resolve_settings(list(settings.settings or ()), metadata, layout)
    tokenizers = load_tokenizers(file, settings, layout, metadata, layout_settings)
    special_ids = {name: getattr(settings, name) for name in SPECIAL_IDS if getattr(settings, name) is not None}
    with prefix_errors_with(f"{file}: "):
        imported = convert(state, layout, layout_settings, settings.num_heads, special_ids)
    report = {"file": file.name, "layout": layout.name, "evidence": evidence, "settings": layout_settings}
    rows = tokenizers.apply_to(imported) if tokenizers else None
    for name, value in special_ids.items():
        if rows and (row := rows["target"][getattr(imported.model.config, name)]) != value:
            option = option_name(name)
            raise ValueError(f"{option} {value} contradicts the tokenizer, which has {row}. Remove {option}.")
    if tokenizers and layout.name not in TOOLKITS and "source_begins" not in layout_settings:
        imported.user_notes.append(
            "Sources do not begin with the BOS token. If the original code puts BOS before sources, as most tutorials "
            "do, import again with --set source_begins=true."
        )
    if names := [name for name in SPECIAL_IDS if getattr(imported.model.config, name) is None]:
        options = " ".join(f"{option_name(name)} N" for name in names)
        imported.user_notes.append(
            f"The file does not specify {', '.join(names)}, which generation needs. Import again with {options}."
        )
    report |= imported.report()
    if settings.compare_with:
        report["parity"] = compare_with_user_model(settings.compare_with, layout, state, imported.model, rows)
    return imported, tokenizers.tokenizer if tokenizers else None, report


def load_tokenizers(
    file: Path, settings: ImportSettings, layout: Layout, metadata: dict[str, Any], layout_settings: dict[str, Any]
) -> TokenizerPair | None:
    """Return the tokenizers of the given files, or of the toolkit's dictionaries."""
    paths = (settings.source_tokenizer, settings.target_tokenizer, settings.fairseq_data)
    source, target, data = (None if path is None else Path(path) for path in paths)
    files, codes = [source, target], [Path(each) for each in settings.bpe_codes]
    for option, layouts in {"--fairseq-data": TOOLKITS[:1], "--bpe-codes": TOOLKITS}.items():
        if getattr(settings, option[2:].replace("-", "_")) and (layout.name not in layouts or any(files)):
            reason = "excludes --source-tokenizer" if any(files) else f"is not supported for {layout.name}"
            raise ValueError(f"{option} {reason}. It requires a checkpoint of {' or '.join(layouts)}.")
    if len(codes) > 2:
        raise ValueError(f"--bpe-codes must be one file or one file per side, got {len(codes)} files.")
    defaults = {"source_begins": False, "source_ends": layout.name != "opennmt"}
    affixes = {name: layout_settings.get(name, default) for name, default in defaults.items()}
    if changed := [name for name in affixes if affixes[name] != defaults[name] and source is None]:
        setting = f"{changed[0]}={format_setting(affixes[changed[0]])}"
        raise ValueError(f"--set {setting} requires a tokenizer. Set --source-tokenizer.")
    if any(files) or layout.name not in TOOLKITS:
        return read_tokenizers(source, target, **affixes)
    return read_toolkit_tokenizers(layout.name, file, metadata | layout_settings, data, codes)
