"""Export a vanilla_transformer checkpoint to a format that runs without this package.

    vanilla-transformer export runs/mine OUTPUT --to transformers                       # the native class that fits
    vanilla-transformer export runs/mine OUTPUT --to ctranslate2 --quantization int8    # CTranslate2, a fast engine
    vanilla-transformer export runs/mine OUTPUT --to onnx                               # for onnxruntime and browsers
    vanilla-transformer export runs/mine OUTPUT --to argos                              # for Argos Translate

In a clone also: `python -m hub.export`. The output directory is written atomically.
"""

from argparse import ArgumentTypeError

from vanilla_transformer.shared.command_line import (
    CommandLineParser,
    add_options,
    checkpoint_name,
    exit_on_user_error,
    new_path,
    print_result,
)

from .exporting import QUANTIZATIONS, TARGETS


def target_name(text: str) -> str:
    """Return the value of `--to`. Raise ArgumentTypeError for `marian`, a target of earlier versions."""
    if text == "marian":
        raise ArgumentTypeError("marian was removed. Use --to transformers, which exports to MarianMTModel if it fits")
    return text


def main() -> None:
    parser = CommandLineParser("hub.export", __doc__)
    parser.add_argument(
        "checkpoint", type=checkpoint_name, help="Path to a checkpoint with its tokenizer, or a repository on the Hub."
    )
    parser.add_argument("output", type=new_path, help="Path of the new directory.")
    parser.add_argument("--to", type=target_name, choices=TARGETS, required=True, help="The format to export to.")
    choices = sorted({each for types in QUANTIZATIONS.values() for each in types})
    by_target = "; ".join(f"{to}: {', '.join(types)}" for to, types in QUANTIZATIONS.items())
    parser.add_argument("--quantization", choices=choices, help=f"Type of the weights. Default: float32. {by_target}.")
    for side in ("source", "target"):
        parser.add_argument(f"--{side}-lang", help="With argos: language code such as en. Default: the recipe's.")
    add_options(parser, "json", "quiet")
    arguments = vars(parser.parse_args())
    as_json, quiet = arguments.pop("json"), arguments.pop("quiet")
    from .exporting.exporter import export, usage  # slow import

    with exit_on_user_error(parser.prog, quiet=quiet):
        folder = export(**arguments)
        print_result({"folder": folder, "to": arguments["to"]}, as_json, usage(folder, arguments["to"]))


if __name__ == "__main__":
    main()
