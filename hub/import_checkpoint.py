r"""Convert a checkpoint of a tutorial, a toolkit or a native Transformers class to a vanilla_transformer checkpoint.

    vanilla-transformer import model.pt OUTPUT --num-heads 8        # in a clone also: python -m hub.import_checkpoint
    vanilla-transformer import tmodel_10.pt OUTPUT --num-heads 8 \
        --source-tokenizer tokenizer_en.json --target-tokenizer tokenizer_it.json
    vanilla-transformer import model.pt OUTPUT --num-heads 8 --pad-token-id 0 --compare-with my_code:build_model
    vanilla-transformer import checkpoint_best.pt OUTPUT --fairseq-data data-bin/iwslt14 --bpe-codes code
    vanilla-transformer import model_step_100000.pt OUTPUT --bpe-codes bpe.codes
    vanilla-transformer import Helsinki-NLP/opus-mt-en-de OUTPUT    # or a directory: Marian, Bart, MBart, Pegasus, ...

The layout of a file is detected from its keys. `import_report.json` lists every tensor, and all settings that the file
does not specify. No code in the file is executed: it is read with `weights_only=True`.
"""

from pathlib import Path
from typing import Any

from vanilla_transformer.shared.command_line import CommandLineParser, checkpoint_name, new_path, start_of_command

from .importing import ImportSettings


def main() -> None:
    parser = CommandLineParser("hub.import_checkpoint", __doc__)
    file_help = "Checkpoint file, or directory or Hub id of a Transformers model."
    parser.add_argument("file", type=checkpoint_name, help=file_help)
    parser.add_argument("output", type=new_path, help="Path of the new directory.")
    parser.add_settings(ImportSettings)
    options = parser.parse_options()
    from .importing.importer import import_checkpoint  # slow import

    with parser.exit_on_user_error():
        result = import_checkpoint(**options)
        parser.print_result({"folder": result.folder} | result.report, summarize(result.report, result.folder))


def summarize(report: dict[str, Any], folder: Path) -> str:
    """Return a text on what was imported, and how to use it."""
    lines = [f"Detected layout: {report['layout']} ({report['evidence']})"]
    shapes = ", ".join(f"{name} {value}" for name, value in report["shapes"].items())
    lines += [f"Inferred from the tensors: {shapes}"]
    lines += [f"  folded: {fold} [{bound}]" for fold, bound in report["folds"].items()]
    for reason in dict.fromkeys(report["left_out"].values()):
        names = [name for name, each in report["left_out"].items() if each == reason]
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        lines.append(f"  omitted: {', '.join(names[:2])}{more}: {reason}")
    lines += [f"  check: {line}" for line in report["check"]]
    if "parity" in report:
        difference = report["parity"]["largest_difference_of_log_probabilities"]
        lines.append(f"  {report['parity']['with']} agrees: log-probabilities differ by at most {difference:.1g}")
    lines += [f"\n{folder} contains {len(report['used'])} tensors and import_report.json. To load the model:"]
    lines += ["    import vanilla_transformer; from transformers import AutoModelForSeq2SeqLM"]
    lines += [f'    model = AutoModelForSeq2SeqLM.from_pretrained("{folder}")']
    if (folder / "tokenizer_config.json").exists():
        lines.append(f"    {start_of_command('training.translate')} {folder}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
