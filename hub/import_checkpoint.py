"""Turns a checkpoint of a "Transformer from scratch" tutorial, of fairseq or of OpenNMT-py, or a model of transformers
such as MarianMT's, into a folder that `AutoModelForSeq2SeqLM` loads.

    python -m hub.import_checkpoint model.pt OUT --num_heads 8
    python -m hub.import_checkpoint tmodel_10.pt OUT --num_heads 8 \\
        --source_tokenizer tokenizer_en.json --target_tokenizer tokenizer_it.json
    python -m hub.import_checkpoint model.pt OUT --num_heads 8 --pad_token_id 0 --compare_with my_code:build_model
    python -m hub.import_checkpoint checkpoint_best.pt OUT --fairseq_data data-bin/iwslt14 --bpe_codes code
    python -m hub.import_checkpoint model_step_100000.pt OUT --bpe_codes bpe.codes
    python -m hub.import_checkpoint Helsinki-NLP/opus-mt-en-de OUT     # or a folder: Marian, Bart, MBart, Pegasus, ...

The layout of a file is found by its keys. Every tensor is accounted for in `import_report.json`, and so is everything
that the file cannot tell. Nothing in the file is run: it is read with `weights_only=True`.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from hub.atomic_dirs import validate_new_dir, write_dir_atomically
from hub.importing.checkpoint_file import read
from hub.importing.conversion import SPECIAL_IDS, ImportResult, convert
from hub.importing.layout import Layout
from hub.importing.layout_detection import find_layout
from hub.importing.layout_settings import settings
from hub.importing.layouts import LAYOUTS
from hub.importing.parity import compare
from hub.importing.tokenizer import TokenizerPair, read_tokenizers
from hub.importing.toolkits.subwords import read_toolkit
from hub.importing.transformers_models import import_transformers_model, is_transformers_model
from vanilla_transformer.shared.command_line import CommandLineParser, exit_on_user_error


def main() -> None:
    parser = CommandLineParser("hub.import_checkpoint", __doc__)
    parser.add_argument(
        "file",
        type=Path,
        help=".pt, .pth, .tar, .chkpt or .safetensors; or a MarianMT or alike: folder, or name on the Hub",
    )
    parser.add_argument("out", type=Path, help="folder to be made")
    parser.add_argument("--layout", choices=sorted(LAYOUTS), help="instead of finding it")
    parser.add_argument("--num_heads", type=int, help="attention heads; a file does not tell")
    parser.add_argument("--source_tokenizer", type=Path, help="tokenizers' JSON, or a text file with a token a line")
    parser.add_argument("--target_tokenizer", type=Path, help="likewise; without: the source's for both")
    parser.add_argument("--fairseq_data", type=Path, help="fairseq: folder with dict.SOURCE.txt and dict.TARGET.txt")
    parser.add_argument(
        *("--bpe_codes",),
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="fairseq, OpenNMT-py: BPE codes or a SentencePiece model, for both sides, or one for each",
    )
    for name in SPECIAL_IDS:
        parser.add_argument(f"--{name}", type=int, help="where layout and tokenizer do not tell")
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="what a layout asks for by name"
    )
    parser.add_argument(
        "--compare_with", metavar="MODULE:CALLABLE", help="builds your own model: log-probabilities are compared"
    )
    arguments = parser.parse_args()
    with exit_on_user_error(parser.prog):
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    disable_progress_bar()  # on stderr, where an error is to be one line
    validate_new_dir(arguments.out)
    if is_transformers_model(arguments.file):
        refuse_options(arguments)
        imported, tokenizer, report = import_transformers_model(arguments.file)
    else:
        imported, tokenizer, report = import_file(arguments)
    save(arguments.out, imported, tokenizer, report)
    print_summary(report, arguments.out, tokenizer)


def refuse_options(arguments: argparse.Namespace) -> None:
    """Raises ValueError where an option is given that tells what a folder tells itself."""
    given = [name for name, value in vars(arguments).items() if name not in ("file", "out") and value not in (None, [])]
    if given:
        raise ValueError(f"--{given[0]} is for files of tutorials: {arguments.file} tells all of it. Leave it out.")


def import_file(arguments: argparse.Namespace) -> tuple[ImportResult, PreTrainedTokenizerBase | None, dict[str, Any]]:
    """The model of somebody's file, its tokenizer where files of it are given, and the report."""
    state, metadata = read(arguments.file)
    with named(arguments.file):
        layout, evidence = find_layout(state, arguments.layout)
    print(f"looks like {layout.title}: {evidence}")
    chosen = settings(arguments.set, metadata, layout)
    tokenizers = tokenizers_for(arguments, layout, metadata | chosen)
    special_ids = {name: getattr(arguments, name) for name in SPECIAL_IDS if getattr(arguments, name) is not None}
    with named(arguments.file):
        imported = convert(state, layout, chosen, arguments.num_heads, special_ids)
    report = {"file": arguments.file.name, "layout": layout.name, "evidence": evidence, "settings": chosen}
    rows = tokenizers.apply_to(imported) if tokenizers else None
    report |= imported.report()
    if arguments.compare_with:
        report["parity"] = compare(arguments.compare_with, layout, state, imported.model, rows)
    return imported, tokenizers.tokenizer if tokenizers else None, report


def tokenizers_for(arguments: argparse.Namespace, layout: Layout, told: dict[str, Any]) -> TokenizerPair | None:
    """Those that the user gives, or those of a toolkit's vocabularies; `told` by file and user."""
    given = [arguments.source_tokenizer, arguments.target_tokenizer]
    toolkit = {"--fairseq_data": ("fairseq",), "--bpe_codes": ("fairseq", "opennmt")}
    for option, layouts in toolkit.items():
        if getattr(arguments, option[2:]) and (layout.name not in layouts or any(given)):
            reason = "goes without --source_tokenizer" if any(given) else f"is not for the layout {layout.name}"
            raise ValueError(f"{option} {reason}: it is for {' and '.join(layouts)}.")
    if len(arguments.bpe_codes) > 2:
        raise ValueError(f"--bpe_codes takes one file, or one for each side, not {len(arguments.bpe_codes)}.")
    if any(given) or layout.name not in toolkit["--bpe_codes"] or told.get("source_begins"):
        return read_tokenizers(arguments.source_tokenizer, arguments.target_tokenizer, told.get("source_begins"))
    return read_toolkit(layout.name, arguments.file, told, arguments.fairseq_data, arguments.bpe_codes)


@contextmanager
def named(file: Path) -> Iterator[None]:
    """Puts the file's name before what is wrong with it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def save(out: Path, imported: ImportResult, tokenizer: PreTrainedTokenizerBase | None, report: dict[str, Any]) -> None:
    """The model, its tokenizer and the report."""

    def write(folder: Path) -> None:
        imported.model.save_pretrained(folder)
        if tokenizer:
            tokenizer.save_pretrained(folder)
        text = json.dumps(report, indent=2, ensure_ascii=False)
        (folder / "import_report.json").write_text(text + "\n", encoding="utf-8")

    write_dir_atomically(out, write)


def print_summary(report: dict[str, Any], out: Path, tokenizer: PreTrainedTokenizerBase | None) -> None:
    print("read off the tensors: " + ", ".join(f"{name} {value}" for name, value in report["shapes"].items()))
    for fold, bound in report["folds"].items():
        print(f"  folded: {fold} [{bound}]")
    for reason in dict.fromkeys(report["left_out"].values()):
        names = [name for name, each in report["left_out"].items() if each == reason]
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        print(f"  left out: {', '.join(names[:2])}{more}: {reason}")
    for line in report["check"]:
        print(f"  check: {line}")
    if "parity" in report:
        difference = report["parity"]["largest_difference_of_log_probabilities"]
        print(f"  {report['parity']['with']} agrees: log-probabilities within {difference:.1g}")
    print(f"\n{len(report['used'])} tensors are in {out}, with import_report.json. To load it:")
    print("    import vanilla_transformer; from transformers import AutoModelForSeq2SeqLM")
    print(f'    model = AutoModelForSeq2SeqLM.from_pretrained("{out}")')
    if tokenizer:
        print(f"    python -m training.translate {out}")


if __name__ == "__main__":
    main()
