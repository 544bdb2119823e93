"""Export a vanilla_transformer checkpoint to a format that runs without this package.

    vanilla-transformer export runs/mine OUTPUT --to transformers                       # the native class that fits
    vanilla-transformer export runs/mine OUTPUT --to ctranslate2 --quantization int8    # CTranslate2, a fast engine
    vanilla-transformer export runs/mine OUTPUT --to onnx                               # for onnxruntime and browsers
    vanilla-transformer export runs/mine OUTPUT --to argos                              # for Argos Translate

In a clone also: `python -m hub.export`. The output directory is written atomically.
"""

from vanilla_transformer.shared.command_line import CommandLineParser, checkpoint_name, new_path

from .exporting import ExportSettings


def main() -> None:
    parser = CommandLineParser("hub.export", __doc__)
    checkpoint_help = "Path to a checkpoint with its tokenizer, or a repository on the Hub."
    parser.add_argument("checkpoint", type=checkpoint_name, help=checkpoint_help)
    parser.add_argument("output", type=new_path, help="Path of the new directory.")
    parser.add_settings(ExportSettings)
    options = parser.parse_options()
    from .exporting.exporter import export, usage  # slow import

    with parser.exit_on_user_error():
        folder = export(**options)
        parser.print_result({"folder": folder, "to": options["to"]}, usage(folder, options["to"]))


if __name__ == "__main__":
    main()
