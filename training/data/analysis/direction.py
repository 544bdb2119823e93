"""Detection of swapped source and target by their words, without a model."""

import re
from collections import Counter

from vanilla_transformer.shared.command_line import logger

from ..parallel_text import ParallelText
from .languages import language_code

NUM_SAMPLED_SENTENCES = 2000  # per side
FUNCTION_WORDS = {
    "en": "the of and to is was that with for you this are",
    "de": "der die das und ist nicht ein eine mit zu auf ich",
    "fr": "le la les des et est une dans que pour pas je",
    "es": "el los las que una para con por del esta muy no",
    "it": "il di che una per sono non della con gli mi è",
    "pt": "o os que uma para com não do da em um eu",
    "nl": "de het een van en is niet dat met op zijn ik",
    "pl": "się nie jest na że do to jak ale z w czy",
    "sv": "och att det som är en på inte jag med för av",
    "cs": "se je že na to jsem ale v jak tak si bylo",
    "ru": "и в не на что я с он как это по у",
    "tr": "bir ve bu için ne de da çok ben mi daha değil",
}


def warn_if_swapped(corpus: dict[str, ParallelText], languages: tuple[str, str]) -> None:
    """Warn if training sources resemble the target language, or the targets of validation or test data."""
    counts = {split: [count_words(side) for side in (text.sources, text.targets)] for split, text in corpus.items()}
    lists = [FUNCTION_WORDS.get(language_code(language) or "", "").split() for language in languages]
    profiles = {"the languages": [Counter(each) for each in lists]} if all(lists) else {}
    profiles |= {f"the {split} data": sides for split, sides in counts.items() if split != "train"}
    for name, (source, target) in profiles.items():
        own_source, own_target = counts["train"]
        unswapped = similarity(own_source, source) + similarity(own_target, target)
        if similarity(own_source, target) + similarity(own_target, source) > 2 * unswapped:
            logger.warning(
                f"warning: source and target of the training data seem to be swapped, compared with {name} "
                f"({' and '.join(languages)}). Check --source-lang and --target-lang, or the order of the columns."
            )


def count_words(sentences: list[str]) -> Counter:
    step = max(1, len(sentences) // NUM_SAMPLED_SENTENCES)
    sample = sentences[::step][:NUM_SAMPLED_SENTENCES]
    return Counter(word for sentence in sample for word in re.findall(r"\w+", sentence.lower()))


def similarity(counts: Counter, profile: Counter) -> float:
    """Return the fraction of all counted words that are in a profile."""
    return sum(count for word, count in counts.items() if word in profile) / max(1, counts.total())
