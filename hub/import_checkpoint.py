r"""Convert a checkpoint of a tutorial, a toolkit or a native Transformers class to a vanilla_transformer checkpoint.

    python -m hub.import_checkpoint model.pt OUT --num-heads 8
    python -m hub.import_checkpoint tmodel_10.pt OUT --num-heads 8 \
        --source-tokenizer tokenizer_en.json --target-tokenizer tokenizer_it.json
    python -m hub.import_checkpoint model.pt OUT --num-heads 8 --pad-token-id 0 --compare-with my_code:build_model
    python -m hub.import_checkpoint checkpoint_best.pt OUT --fairseq-data data-bin/iwslt14 --bpe-codes code
    python -m hub.import_checkpoint model_step_100000.pt OUT --bpe-codes bpe.codes
    python -m hub.import_checkpoint Helsinki-NLP/opus-mt-en-de OUT   # or a directory: Marian, Bart, MBart, Pegasus, ...

The layout of a file is detected from its keys. `import_report.json` lists every tensor, and all settings that the file
does not specify. No code in the file is executed: it is read with `weights_only=True`.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from vanilla_transformer.shared.atomic_io import validate_new_dir, write_dir_atomically
from vanilla_transformer.shared.command_line import CommandLineParser, exit_on_user_error, option_name

from .importing.checkpoint_file import read_checkpoint
from .importing.conversion import SPECIAL_IDS, ImportResult, convert
from .importing.layout import Layout
from .importing.layout_detection import find_layout
from .importing.layout_settings import resolve_settings
from .importing.layouts import LAYOUTS
from .importing.parity import compare_with_user_model
from .importing.tokenizer import TokenizerPair, read_tokenizers
from .importing.toolkits.subwords import read_toolkit_tokenizers
from .importing.transformers_models import import_transformers_model, is_transformers_model

TOOLKITS = ("fairseq", "opennmt")  # layouts whose sources never begin with the BOS token


def main() -> None:
    parser = CommandLineParser("hub.import_checkpoint", __doc__)
    parser.add_argument("file", type=Path, help="Checkpoint file, or directory or Hub id of a Transformers model.")
    parser.add_argument("out", type=Path, help="Path of the new directory. It must not exist.")
    parser.add_argument("--layout", choices=sorted(LAYOUTS), help="Layout of the file. Default: detected.")
    parser.add_argument("--num-heads", type=int, help="Number of attention heads, if the file does not specify it.")
    parser.add_argument("--source-tokenizer", type=Path, help="A tokenizer.json or a text file, one token per line.")
    parser.add_argument("--target-tokenizer", type=Path, help="The same for the target. Default: the source tokenizer.")
    parser.add_argument("--fairseq-data", type=Path, help="Directory with fairseq's dict.*.txt files.")
    parser.add_argument(
        "--bpe-codes", nargs="+", type=Path, default=[], metavar="FILE",
        help="With fairseq and OpenNMT-py: BPE codes or SentencePiece models, one file for both sides or one per side.",
    )  # fmt: skip
    for name in SPECIAL_IDS:
        parser.add_argument(f"--{name}", type=int, help="Token id, if neither the layout nor the tokenizer defines it.")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="Layout settings.")
    parser.add_argument("--compare-with", metavar="MODULE:CALLABLE", help="Builds the original model to compare with.")
    arguments = parser.parse_args()
    with exit_on_user_error(parser.prog):
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    disable_progress_bar()  # an error must be a single line on stderr
    validate_new_dir(arguments.out)
    if is_transformers_model(arguments.file):
        validate_no_file_options(arguments)
        imported, tokenizer, report = import_transformers_model(arguments.file)
    else:
        imported, tokenizer, report = import_file(arguments)
    save(arguments.out, imported, tokenizer, report)
    print_summary(report, arguments.out, tokenizer)


def validate_no_file_options(arguments: argparse.Namespace) -> None:
    """Raise ValueError if an option is set that native Transformers models do not need."""
    options = {name: value for name, value in vars(arguments).items() if name not in ("file", "out")}
    for name, value in options.items():
        if value not in (None, []):
            given = option_name(name)
            raise ValueError(f"{given} is not supported for {arguments.file}: its config defines it. Remove {given}.")


def import_file(arguments: argparse.Namespace) -> tuple[ImportResult, PreTrainedTokenizerBase | None, dict[str, Any]]:
    """Return the converted model of a checkpoint file, its tokenizer if available, and the report."""
    state, metadata = read_checkpoint(arguments.file)
    with prefix_errors_with(arguments.file):
        layout, evidence = find_layout(state, arguments.layout)
    print(f"Detected layout: {layout.title} ({evidence})")
    layout_settings = resolve_settings(arguments.set, metadata, layout)
    tokenizers = load_tokenizers(arguments, layout, metadata | layout_settings)
    special_ids = {name: getattr(arguments, name) for name in SPECIAL_IDS if getattr(arguments, name) is not None}
    with prefix_errors_with(arguments.file):
        imported = convert(state, layout, layout_settings, arguments.num_heads, special_ids)
    report = {"file": arguments.file.name, "layout": layout.name, "evidence": evidence, "settings": layout_settings}
    rows = tokenizers.apply_to(imported) if tokenizers else None
    if tokenizers and layout.name not in TOOLKITS and "source_begins" not in layout_settings:
        imported.user_notes.append(
            "Sources do not begin with the BOS token. If those of the original code do, as in most tutorials, import "
            "again with a tokenizer for each side and --set source_begins=true."
        )
    report |= imported.report()
    if arguments.compare_with:
        report["parity"] = compare_with_user_model(arguments.compare_with, layout, state, imported.model, rows)
    return imported, tokenizers.tokenizer if tokenizers else None, report


def load_tokenizers(arguments: argparse.Namespace, layout: Layout, metadata: dict[str, Any]) -> TokenizerPair | None:
    """Return the tokenizers of the given files, or of the toolkit's dictionaries. `metadata` includes the settings."""
    files = [arguments.source_tokenizer, arguments.target_tokenizer]
    toolkits = {"--fairseq-data": TOOLKITS[:1], "--bpe-codes": TOOLKITS}
    for option, layouts in toolkits.items():
        if getattr(arguments, option[2:]) and (layout.name not in layouts or any(files)):
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


def print_summary(report: dict[str, Any], out: Path, tokenizer: PreTrainedTokenizerBase | None) -> None:
    print("Inferred from the tensors: " + ", ".join(f"{name} {value}" for name, value in report["shapes"].items()))
    for fold, bound in report["folds"].items():
        print(f"  folded: {fold} [{bound}]")
    for reason in dict.fromkeys(report["left_out"].values()):
        names = [name for name, each in report["left_out"].items() if each == reason]
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        print(f"  omitted: {', '.join(names[:2])}{more}: {reason}")
    for line in report["check"]:
        print(f"  check: {line}")
    if "parity" in report:
        difference = report["parity"]["largest_difference_of_log_probabilities"]
        print(f"  {report['parity']['with']} agrees: log-probabilities differ by at most {difference:.1g}")
    print(f"\n{out} contains {len(report['used'])} tensors and import_report.json. To load the model:")
    print("    import vanilla_transformer; from transformers import AutoModelForSeq2SeqLM")
    print(f'    model = AutoModelForSeq2SeqLM.from_pretrained("{out}")')
    if tokenizer:
        print(f"    python -m training.translate {out}")


if __name__ == "__main__":
    main()
