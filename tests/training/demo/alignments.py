"""Word alignments of the demo corpus, derived from its grammar, and the alignment error rate of a checkpoint.

    python -m tests.training.demo.alignments runs/demo          # alignment error rate, in percent

Every sampled word of the lexicon contains a number. The number identifies the word and its translation in a pair. Words
that the grammar adds (articles, auxiliaries, conjunctions, ...) are identified by lists.
"""

import random
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from training.demo.corpus import CLAUSE_VERBS, MODALS, PRONOUNS, VERBS, SentenceGenerator
from training.inference.translators import load_translator
from training.run.hardware import configure_malloc
from vanilla_transformer.alignment_vanilla_transformer import Link, align, word_spans
from vanilla_transformer.shared.command_line import CommandLineParser, exit_on_user_error

Links = set[tuple[int, int]]  # (source word, target word), 0-based

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
TRANSLATIONS = {  # of the words that the grammar adds
    *(("that", "dass"), ("because", "weil"), ("and", "und"), ("when", "als"), ("when", "wenn"), ("when", "wann")),
    *(("where", "wo"), ("why", "warum"), ("not", "nicht"), (".", "."), ("?", "?")),
}


class Aligned(NamedTuple):
    """A sentence pair with its sure links and its possible links, which include the sure ones."""

    source: str
    target: str
    sure: Links
    possible: Links


class Numbering(random.Random):
    """Random generator that inserts a number after the first letter of each word of a sampled row."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.count = 0
        self.verbs: set[int] = set()  # numbers of verbs

    def choice(self, seq: Any) -> Any:
        row: Any = super().choice(seq)
        if isinstance(row, str) or seq is MODALS:  # the grammar compares these words
            return row
        self.count += 1
        if row in VERBS or row in CLAUSE_VERBS:
            self.verbs.add(self.count)
        if row in PRONOUNS:
            return tuple(self.mark(form) if isinstance(form, str) else form for form in row)
        return [[self.mark(form) for form in column] for column in row[:2]] + row[2:]

    def mark(self, form: str) -> str:
        return re.sub("([^\\W_])([^\\W_]*)", f"\\g<1>⟦{self.count}⟧\\2", form)


def aligned_sentences(n: int, seed: int = 0) -> list[Aligned]:
    """Return `n` pairs of the demo corpus without modal verbs, with their links."""
    rows = Numbering(seed)
    generator = SentenceGenerator(rows)
    modals = {form for row in MODALS for form in row[1]}
    pairs: list[Aligned] = []
    while len(pairs) < n:
        source, target = generator.sentence()
        if 3 <= len(source.split()) <= 20 and not modals & set(target.lower().split()):
            pairs.append(with_links(source, target, rows.verbs))
    return pairs


def with_links(source: str, target: str, verbs: set[int]) -> Aligned:
    """Return the sentences without numbers, and their links. `verbs` are the numbers of verbs."""
    for numbered, short in CONTRACTIONS.items():
        target = re.sub(numbered, short, target, flags=re.IGNORECASE)
    source, words, units = without_numbers(source)
    target, target_words, target_units = without_numbers(target)
    sure, possible = set[tuple[int, int]](), set[tuple[int, int]]()
    for unit in {each for each in units if each is not None}:
        sources, targets = ([i for i, each in enumerate(row) if each == unit] for row in (units, target_units))
        possible |= {(i, j) for i in sources for j in targets}
        if len(sources) > 1 < len(targets):  # an expression: word by word, or only its noun, which is last
            if len(sources) != len(targets):
                sources, targets = sources[-1:], targets[-1:]
            sure |= set(zip(sources, targets, strict=True))
        else:
            sure |= {(i, j) for i in sources for j in targets}
    source_articles, target_articles = articles(words, units), articles(target_words, target_units)
    sure |= {(i, j) for i, noun in source_articles.items() for j, other in target_articles.items() if noun == other}
    added = {
        (i, j)
        for i, j in all_links(words, target_words)
        if units[i] is target_units[j] is None and (words[i], target_words[j]) in TRANSLATIONS
    }
    sure |= {(i, j) for i, j in added if [k for k, _ in added].count(i) == [k for _, k in added].count(j) == 1}
    for i, j in all_links(words, target_words):
        source_aux, target_aux = words[i] in AUXILIARIES, target_words[j] in AUXILIARIES
        auxiliary = source_aux and (target_aux or target_units[j] in verbs) or target_aux and units[i] in verbs
        negation = words[i] == "not" and target_words[j].startswith("kein")
        contracted = i in source_articles and target_words[j] in ("im", "ins", "aufs", "am")
        joint = words[i] in (",", "that", "because", "when", "and") and (
            target_words[j] in (",", "der", "die", "das", "den", "dass")
        )
        if auxiliary or negation or contracted or joint:
            possible.add((i, j))
    return Aligned(source, target, sure, possible | sure | added)


def error_rate(alignments: Iterable[Links], gold: Iterable[Aligned]) -> float:
    """Return the alignment error rate in percent (Och and Ney 2003): 1 - (|A & S| + |A & P|) / (|A| + |S|)."""
    right = total = 0
    for links, sentence in zip(alignments, gold, strict=True):
        right += len(links & sentence.sure) + len(links & sentence.possible)
        total += len(links) + len(sentence.sure)
    return 100 * (1 - right / max(total, 1))


def to_word_links(links: Iterable[Link], sentence: Aligned) -> Links:
    """Convert links of character spans to links of words."""
    indexes = [{span: i for i, span in enumerate(word_spans(text))} for text in (sentence.source, sentence.target)]
    return {(indexes[0][source], indexes[1][target]) for source, target in links}


def all_links(words: list[str], target_words: list[str]) -> Iterable[tuple[int, int]]:
    return ((i, j) for i in range(len(words)) for j in range(len(target_words)))


def without_numbers(text: str) -> tuple[str, list[str], list[int | None]]:
    """Return the sentence without numbers, its words in lower case, and their numbers."""
    plain = NUMBERED.sub("", text)
    marked = re.findall("(?:\\w|⟦\\d+⟧)+|[^\\w\\s]", text)
    words = [plain[start:end].lower() for start, end in word_spans(plain)]
    assert [NUMBERED.sub("", word).lower() for word in marked] == words
    return plain, words, [int(match[1]) if (match := NUMBERED.search(word)) else None for word in marked]


def articles(words: list[str], units: list[int | None]) -> dict[int, int]:
    """Return the positions of articles, each with the number of the next word, which belongs to its noun."""
    return {
        i: unit
        for i, unit in enumerate(units[1:])
        if unit is not None and units[i] is None and ARTICLES.fullmatch(words[i])
    }


def main() -> None:
    parser = CommandLineParser("tests.training.demo.alignments", __doc__)
    parser.add_argument("checkpoint", help="Directory of a model that was trained on the demo corpus.")
    parser.add_argument("--sentences", type=int, default=200, help="The number of sentences (default: %(default)s).")
    parser.add_argument("--seed", type=int, default=1, help="The random seed (default: %(default)s).")
    arguments = parser.parse_args()
    configure_malloc()
    with exit_on_user_error(parser.prog):
        if arguments.sentences < 1:
            raise ValueError(f"--sentences {arguments.sentences} must be at least 1.")
        translator = load_translator(arguments.checkpoint)
        gold = aligned_sentences(arguments.sentences, arguments.seed)
        sources, targets, sure, _ = zip(*gold, strict=True)
        alignments = align(translator.model, translator.tokenizer, sources, targets)
        rate = error_rate((to_word_links(*pair) for pair in zip(alignments, gold, strict=True)), gold)
        links = sum(map(len, sure))
        print(f"alignment error rate {rate:.1f} % on {len(gold)} sentences, which have {links} sure links")


if __name__ == "__main__":
    main()
