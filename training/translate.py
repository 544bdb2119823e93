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

from dataclasses import fields

from vanilla_transformer.shared.command_line import (
    CHECKPOINTS,
    CommandLineParser,
    add_options,
    checkpoint_name,
    existing_path,
    exit_on_user_error,
    new_path,
    positive_int,
)


def make_parser() -> CommandLineParser:
    parser = CommandLineParser("training.translate", __doc__)
    add = parser.add_argument
    add("checkpoint", nargs="+", type=checkpoint_name, help=CHECKPOINTS)
    add("--input", type=existing_path, help="Text file to translate. Default: stdin.")
    add("--output", type=new_path, help="File to write. Default: stdout.")
    add("--nbest", type=positive_int, default=1, help="Translations per line, with scores if more than 1.")
    add("--scores", action="store_true", help="Print columns: line, score, translation.")
    # Not one document, so that any number of lines is translated with constant memory
    json_help = "Print one JSON object per line: source, translations, scores, tokens, token_scores, alignments."
    add("--json", action="store_true", help=json_help)
    add("--document", action="store_true", help="Split paragraphs into sentences and keep white space.")
    glossary_help = "Table with one term per line: source, a tab, and one or more tab-separated translations."
    add("--glossary", type=existing_path, help=glossary_help)
    rerank_help = "Target-to-source checkpoint that reranks the --num-beams best translations."
    add("--rerank", type=checkpoint_name, help=rerank_help)
    add("--rerank-weight", type=float, default=0.5, help="Weight of the --rerank checkpoint. Default: %(default)s.")
    add_options(parser, "num_beams", "length_penalty", "max_new_tokens", "batch_size", "engine", "quantization")
    add_options(parser, "source_lang", "device", "quiet")
    return parser


def main() -> None:
    parser = make_parser()
    arguments = parser.parse_args()

    from .inference.file_translation import translate_file  # slow imports
    from .inference.translation import TranslationSettings
    from .run.hardware import configure_malloc

    configure_malloc()
    with exit_on_user_error(parser.prog, ImportError, quiet=arguments.quiet):
        options = vars(arguments) | {"details": arguments.json}
        settings = TranslationSettings(**{field.name: options[field.name] for field in fields(TranslationSettings)})
        paths = arguments.input, arguments.output
        translate_file(arguments.checkpoint, *paths, settings, arguments.document, arguments.source_lang)


if __name__ == "__main__":
    main()
