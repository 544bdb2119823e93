"""More pairs out of the same pairs: data diversification (Nguyen et al. 2020, "Data Diversification: A Simple Strategy
For Neural Machine Translation").

    python -m training.diversify FORWARD BACKWARD --source D/train.en --target D/train.de --output D/diverse.tsv
    python -m training.train RECIPE.yaml --data_dir D --train_file diverse.tsv

FORWARD translates from source to target, BACKWARD from target to source; both were trained on these pairs. Written is
each pair twice, then each source with its two best translations, then the three best translations of each target with
it. A fresh model that learns from this sees the same captions in many wordings and learns fewer of them by heart.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from training.data.files import read_pair
from training.loading import load_translator, n_best
from training.outputs import whole
from training.run.hardware import keep_memory
from vanilla_transformer import TranslationPipeline
from vanilla_transformer.shared.command_line import CommandLine, one_line_errors
from vanilla_transformer.shared.lines import as_cell

COPIES, FORWARD, BACKWARD = 2, 2, 3  # of a pair; translations of its source; of its target


def main() -> None:
    parser = CommandLine("training.diversify", __doc__)
    parser.add_argument("forward", help="checkpoint that translates from source to target, a folder or on the Hub")
    parser.add_argument("backward", help="checkpoint that translates from target to source")
    parser.add_argument("--source", type=Path, required=True, help="text file, a sentence a line")
    parser.add_argument("--target", type=Path, required=True, help="text file, its translations line by line")
    parser.add_argument("--output", type=Path, required=True, help="table (.tsv) to be made: source, target")
    arguments = parser.parse_args()
    keep_memory()
    with one_line_errors(parser.prog):
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    output: Path = arguments.output
    if output.suffix != ".tsv" or output.exists():
        raise ValueError(f"--output {output}: give the name of a .tsv file that does not exist.")
    text = read_pair(arguments.source, arguments.target, bad_lines="drop")
    forward, backward = load_translator(arguments.forward), load_translator(arguments.backward)
    pairs = 0
    with whole(output) as path, path.open("w", encoding="utf-8") as file:
        for source, target in diversify(forward, backward, text.sources, text.targets):
            file.write(f"{as_cell(source)}\t{as_cell(target)}\n")
            pairs += 1
    print(f"{output}: {pairs:,} pairs out of {len(text):,}")


def diversify(
    forward: TranslationPipeline, backward: TranslationPipeline, sources: list[str], targets: list[str]
) -> Iterator[tuple[str, str]]:
    """Each pair `COPIES` times, then pairs of which one side is a model's; those that it leaves blank are left out."""
    for pair in zip(sources, targets, strict=True):
        yield from [pair] * COPIES
    for source, translations in zip(sources, n_best(forward, sources, FORWARD), strict=True):
        yield from ((source, translation) for translation in translations)
    for target, translations in zip(targets, n_best(backward, targets, BACKWARD), strict=True):
        yield from ((translation, target) for translation in translations)


if __name__ == "__main__":
    main()
