"""Translate lines of text or a document, from stdin to stdout or between files.

    echo "A dog runs." | vanilla-transformer translate runs/demo
    vanilla-transformer translate runs/demo --input source.en --output target.de --num-beams 5
    vanilla-transformer translate runs/demo --input source.en --nbest 3      # columns: line, score, translation
    vanilla-transformer translate runs/demo --input source.en --glossary terms.tsv
    vanilla-transformer translate runs/demo --input source.en --engine ctranslate2 --quantization int8   # on a CPU
    vanilla-transformer translate runs/demo --input source.en --json         # one object per line, with all details
    vanilla-transformer translate runs/demo --input letter.en --document     # paragraphs of several sentences
    vanilla-transformer translate runs/forward --input source.en --rerank runs/backward
    vanilla-transformer translate runs/one runs/two --input source.en        # ensemble: averaged probabilities

The output has one line per input line, in the same order. If a line cannot be translated, its output line is empty and
stderr gets the reason with the line number. With `--document`, such text is kept unchanged. The function with the same
options is `training.inference.translation.translate`.
"""

from vanilla_transformer.shared.command_line import CommandLineParser, existing_path, new_path

from .inference.settings import CHECKPOINTS, TranslationSettings


def main() -> None:
    parser = CommandLineParser("training.translate", __doc__)
    parser.add_argument("checkpoints", **CHECKPOINTS)
    parser.add_argument(
        "--input", dest="source", metavar="INPUT", type=existing_path, help="Text file to translate. Default: stdin."
    )
    parser.add_argument("--output", type=new_path, help="File to write. Default: stdout.")
    document_help = "Split paragraphs into sentences and keep white space."
    parser.add_argument("--document", dest="is_document", action="store_true", help=document_help)
    parser.add_argument(
        "--source-lang", help="Source language of a --document such as en. Default: that of the recipe."
    )
    parser.add_settings(TranslationSettings)
    options = parser.parse_options()
    if options["source_lang"] and not options["is_document"]:
        parser.error("--source-lang requires --document.")

    from .inference.file_translation import translate_file  # slow imports
    from .run.hardware import configure_malloc

    configure_malloc()
    with parser.exit_on_user_error(ImportError):
        translate_file(**options)


if __name__ == "__main__":
    main()
