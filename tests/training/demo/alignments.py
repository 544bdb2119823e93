"""Which words of the demo corpus translate each other, as its grammar knows, and how well a checkpoint knows it.

    python -m tests.training.demo.alignments runs/demo          # alignment error rate, in percent

Every word of the lexicon is drawn with a number inside, which both sentences of a pair then show at the word and at its
translation. The words that the grammar adds (articles, auxiliaries, conjunctions, ...) are told by what they are.
"""

import random
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from training.demo.corpus import CLAUSE_VERBS, MODALS, PRONOUNS, VERBS, SentenceGenerator
from training.run.hardware import configure_malloc
from training.translators import load_translator
from vanilla_transformer.alignment_vanilla_transformer import Link, align, word_spans
from vanilla_transformer.shared.command_line import CommandLineParser, exit_on_user_error

Links = set[tuple[int, int]]  # of a word of the source with one of the target, both counted from 0

NUMBERED = re.compile("⟦(\\d+)⟧")
CONTRACTIONS = {"(i⟦\\d+⟧)n dem\\b": "\\1m", "(i⟦\\d+⟧)n das\\b": "\\1ns", "(a⟦\\d+⟧uf) das\\b": "\\1s"}  # with numbers
ARTICLES = re.compile(
    "the|this|these|every|an?|my|his|her|our|two|three|some|many|d(er|ie|as|en|em)|zwei|drei"
    "|(dies|jed|k?ein|mein|sein|ihr|unser|einig|viel)(e[mnrs]?)?"
)
AUXILIARIES = {
    *("will", "be", "is", "am", "are", "was", "were", "do", "does", "did", "werde", "wird", "werden"),
    *("habe", "hat", "haben", "bin", "ist", "sind", "war", "waren", "sein"),
}
EQUAL = {  # of the words that the grammar adds
    *(("that", "dass"), ("because", "weil"), ("and", "und"), ("when", "als"), ("when", "wenn"), ("when", "wann")),
    *(("where", "wo"), ("why", "warum"), ("not", "nicht"), (".", "."), ("?", "?")),
}


class Aligned(NamedTuple):
    """A pair of sentences with the links that it must have, and with those that it may have, which include them."""

    source: str
    target: str
    sure: Links
    possible: Links


class Numbering(random.Random):
    """Draws rows of the lexicon with a number of their own behind the first letter of each English and German word."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.drawn = 0
        self.verbs: set[int] = set()  # their numbers

    def choice(self, seq: Any) -> Any:
        row: Any = super().choice(seq)
        if isinstance(row, str) or seq is MODALS:  # whose names the grammar compares
            return row
        self.drawn += 1
        if row in VERBS or row in CLAUSE_VERBS:
            self.verbs.add(self.drawn)
        if row in PRONOUNS:
            return tuple(self.mark(form) if isinstance(form, str) else form for form in row)
        return [[self.mark(form) for form in column] for column in row[:2]] + row[2:]

    def mark(self, form: str) -> str:
        return re.sub("([^\\W_])([^\\W_]*)", f"\\g<1>⟦{self.drawn}⟧\\2", form)


def aligned_sentences(n: int, seed: int = 0) -> list[Aligned]:
    """`n` pairs as in the demo corpus, but without modal verbs, each with its links."""
    rows = Numbering(seed)
    speaker = SentenceGenerator(rows)
    modals = {form for row in MODALS for form in row[1]}
    found: list[Aligned] = []
    while len(found) < n:
        source, target = speaker.sentence()
        if 3 <= len(source.split()) <= 20 and not modals & set(target.lower().split()):
            found.append(with_links(source, target, rows.verbs))
    return found


def with_links(source: str, target: str, verbs: set[int]) -> Aligned:
    """Two sentences with numbers in their words, some of them verbs' -> the sentences without them, and the links."""
    for numbered, short in CONTRACTIONS.items():
        target = re.sub(numbered, short, target, flags=re.IGNORECASE)
    source, words, units = without_numbers(source)
    target, others, partners = without_numbers(target)
    sure, possible = set[tuple[int, int]](), set[tuple[int, int]]()
    for unit in {each for each in units if each is not None}:
        here, there = ([i for i, each in enumerate(row) if each == unit] for row in (units, partners))
        possible |= {(i, j) for i in here for j in there}
        if len(here) > 1 < len(there):  # of an expression: word by word, or its noun, which stands last
            here, there = (here, there) if len(here) == len(there) else (here[-1:], there[-1:])
            sure |= set(zip(here, there, strict=True))
        else:
            sure |= {(i, j) for i in here for j in there}
    ours, theirs = articles(words, units), articles(others, partners)
    sure |= {(i, j) for i, noun in ours.items() for j, other in theirs.items() if noun == other}
    added = {
        (i, j) for i, j in every(words, others) if units[i] is partners[j] is None and (words[i], others[j]) in EQUAL
    }
    sure |= {(i, j) for i, j in added if [k for k, _ in added].count(i) == [k for _, k in added].count(j) == 1}
    for i, j in every(words, others):
        helps, helped = words[i] in AUXILIARIES, others[j] in AUXILIARIES
        auxiliary = helps and (helped or partners[j] in verbs) or helped and units[i] in verbs
        negation = words[i] == "not" and others[j].startswith("kein")
        contracted = i in ours and others[j] in ("im", "ins", "aufs", "am")
        joint = words[i] in (",", "that", "because", "when", "and") and (
            others[j] in (",", "der", "die", "das", "den", "dass")
        )
        if auxiliary or negation or contracted or joint:
            possible.add((i, j))
    return Aligned(source, target, sure, possible | sure | added)


def error_rate(found: Iterable[Links], gold: Iterable[Aligned]) -> float:
    """Alignment error rate in percent (Och and Ney 2003): 1 - (|A & S| + |A & P|) / (|A| + |S|) over all sentences."""
    right = total = 0
    for links, sentence in zip(found, gold, strict=True):
        right += len(links & sentence.sure) + len(links & sentence.possible)
        total += len(links) + len(sentence.sure)
    return 100 * (1 - right / max(total, 1))


def by_word(links: Iterable[Link], sentence: Aligned) -> Links:
    """Links of spans of characters as links of words."""
    places = [{span: i for i, span in enumerate(word_spans(text))} for text in (sentence.source, sentence.target)]
    return {(places[0][here], places[1][there]) for here, there in links}


def every(words: list[str], others: list[str]) -> Iterable[tuple[int, int]]:
    return ((i, j) for i in range(len(words)) for j in range(len(others)))


def without_numbers(text: str) -> tuple[str, list[str], list[int | None]]:
    """The sentence, its words in lower case, and their numbers."""
    plain = NUMBERED.sub("", text)
    marked = re.findall("(?:\\w|⟦\\d+⟧)+|[^\\w\\s]", text)
    words = [plain[start:end].lower() for start, end in word_spans(plain)]
    assert [NUMBERED.sub("", word).lower() for word in marked] == words
    return plain, words, [int(found[1]) if (found := NUMBERED.search(word)) else None for word in marked]


def articles(words: list[str], units: list[int | None]) -> dict[int, int]:
    """The places of articles, each with the number of the word behind it, which belongs to its noun."""
    return {
        i: unit
        for i, unit in enumerate(units[1:])
        if unit is not None and units[i] is None and ARTICLES.fullmatch(words[i])
    }


def main() -> None:
    parser = CommandLineParser("tests.training.demo.alignments", __doc__)
    parser.add_argument("checkpoint", help="folder of a model that was trained on the demo corpus")
    parser.add_argument("--sentences", type=int, default=200, help="how many to draw (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="another seed draws others (default: %(default)s)")
    arguments = parser.parse_args()
    configure_malloc()
    with exit_on_user_error(parser.prog):
        if arguments.sentences < 1:
            raise ValueError(f"--sentences {arguments.sentences}: give a number of at least 1.")
        translator = load_translator(arguments.checkpoint)
        gold = aligned_sentences(arguments.sentences, arguments.seed)
        sources, targets, sure, _ = zip(*gold, strict=True)
        found = align(translator.model, translator.tokenizer, sources, targets)
        rate = error_rate((by_word(*pair) for pair in zip(found, gold, strict=True)), gold)
        links = sum(map(len, sure))
        print(f"alignment error rate {rate:.1f} % on {len(gold)} sentences, which have {links} sure links")


if __name__ == "__main__":
    main()
