"""More pairs out of the same pairs: data diversification (Nguyen et al. 2020, "Data Diversification: A Simple Strategy
For Neural Machine Translation").

    python -m training.diversify FORWARD BACKWARD --source D/train.en --target D/train.de --output D/diverse.tsv
    python -m training.train RECIPE.yaml --data_dir D --train_file diverse.tsv

FORWARD translates from source to target, BACKWARD from target to source; both were trained on these pairs. Written is
each pair twice, then each source with its two best translations, then the three best translations of each target with
it. A fresh model that learns from this sees the same captions in many wordings and learns fewer of them by heart.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from training.data import read_pair
from training.hardware import keep_memory
from training.translate import load
from vanilla_transformer import TranslationPipeline

COPIES, FORWARD, BACKWARD = 2, 2, 3  # of a pair; translations of its source; of its target


def main() -> None:
    parser = argparse.ArgumentParser(prog="training.diversify", description="More pairs out of the same pairs.")
    parser.add_argument("forward", help="checkpoint that translates from source to target, a folder or on the Hub")
    parser.add_argument("backward", help="checkpoint that translates from target to source")
    parser.add_argument("--source", type=Path, required=True, help="text file, a sentence a line")
    parser.add_argument("--target", type=Path, required=True, help="text file, its translations line by line")
    parser.add_argument("--output", type=Path, required=True, help="table (.tsv) to be made: source, target")
    arguments = parser.parse_args()
    keep_memory()
    try:
        run(arguments)
    except (ValueError, OSError) as error:
        print(f"training.diversify: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def run(arguments: argparse.Namespace) -> None:
    output: Path = arguments.output
    if output.suffix != ".tsv" or output.exists():
        raise ValueError(f"--output {output}: give the name of a .tsv file that does not exist.")
    text = read_pair(arguments.source, arguments.target, bad_lines="drop")
    forward, backward = load(arguments.forward), load(arguments.backward)
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(f"{output.name}.unfinished")
    pairs = 0
    with unfinished.open("w", encoding="utf-8") as file:
        for source, target in diversify(forward, backward, text.sources, text.targets):
            file.write(f"{_cell(source)}\t{_cell(target)}\n")
            pairs += 1
    unfinished.replace(output)
    print(f"{output}: {pairs:,} pairs out of {len(text):,}")


def diversify(
    forward: TranslationPipeline, backward: TranslationPipeline, sources: list[str], targets: list[str]
) -> Iterator[tuple[str, str]]:
    """Each pair `COPIES` times, then pairs of which one side is a model's; those that it leaves blank are left out."""
    for pair in zip(sources, targets, strict=True):
        yield from [pair] * COPIES
    for source, translations in zip(sources, best(forward, sources, FORWARD), strict=True):
        yield from ((source, translation) for translation in translations)
    for target, translations in zip(targets, best(backward, targets, BACKWARD), strict=True):
        yield from ((translation, target) for translation in translations)


def best(translator: TranslationPipeline, sentences: list[str], n: int) -> Iterator[list[str]]:
    """The n best translations of each sentence, with the checkpoint's beam size, or n beams where that is smaller."""
    beams = max(n, translator.model.generation_config.num_beams or 1)
    for candidates in translator(sentences, num_beams=beams, num_return_sequences=n, progress=True):
        yield [text for candidate in candidates if (text := candidate["translation_text"].strip())]


def _cell(text: str) -> str:
    return text.replace("\t", " ").replace("\n", " ")


if __name__ == "__main__":
    main()
