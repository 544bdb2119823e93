"""A synthetic English-German parallel corpus, generated from a small grammar: the data of `make demo`.

    python -m training.demo.corpus DIRECTORY        # writes train.en, train.de, val.en, ...

Every English sentence has exactly one German translation. A model needs grammar to find it: gender, number and case,
with three genders that English does not mark. There are adjective endings in three declensions, and separable verbs.
The finite verb is in second position, or last in subordinate clauses. Further topics are participles and their
auxiliaries, negation with "nicht" and "kein", two-way prepositions, and the order of time, manner and place.
"""

import random
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from vanilla_transformer.shared.atomic_io import atomic_write
from vanilla_transformer.shared.command_line import CommandLineParser, exit_on_user_error

from .grammar import DETERMINERS, PRONOUNS, Clause, NounPhrase, Pronoun, Row, finish, join
from .lexicon import ADJECTIVES, CLAUSE_VERBS, MANNERS, MODALS, NOUNS, PLACES, PREPOSITIONS, TIMES, VERBS


@dataclass
class SentenceGenerator:
    """Random generator of sentence trees. `combinations` collects pairs of related words, such as ("eat", "apple")."""

    rng: random.Random
    combinations: set[tuple[str, str]] = field(default_factory=set)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def noun_phrase(self, classes: list[str], verb: str = "", plain: bool = False, depth: int = 0) -> NounPhrase:
        """Sample a noun phrase. `plain` excludes numbers and quantities, which are ambiguous in negated clauses."""
        noun = self.rng.choice(NOUNS.rows_with(3, *classes))
        plural = self.chance(0.25)
        usable = [name for name, row in DETERMINERS.items() if row[int(plural)] is not None]
        if plain:
            usable = [name for name in usable if name not in ("every", "some", "many", "two", "three")]
        weights = [{"the": 8, "a": 5}.get(name, 1) for name in usable]
        phrase = NounPhrase(self.rng.choices(usable, weights)[0], noun, plural)
        if verb:
            self.combinations.add((verb, noun[0][0]))
        if self.chance(0.3):
            phrase.adjective = self.adjective(noun)
        if depth == 0 and set(noun[3]) & {"person", "animal", "thing", "food"} and self.chance(0.06):
            phrase.relative = self.relative(phrase)
        return phrase

    def adjective(self, noun: Row) -> Row | None:
        fitting = ADJECTIVES.rows_with(2, *noun[3])
        if not fitting:
            return None
        adjective = self.rng.choice(fitting)
        self.combinations.add((adjective[0][0], noun[0][0]))
        return adjective

    def relative(self, head: NounPhrase) -> Clause:
        """Sample a relative clause. Its head is the subject or the object; things are always the object."""
        if not set(head.noun[3]) & {"person", "animal"} or self.chance(0.4):
            subject = self.noun_phrase(["person"], depth=1)
            verbs = [row for row in VERBS if row[3] == ["transitive"] and set(row[5]) & set(head.noun[3])]
            return Clause(subject, subject.number, self.rng.choice(["present", "past"]), self.rng.choice(verbs))
        clause = self.clause(head)
        clause.tense = self.rng.choice(["present", "past"])
        return clause

    def subject(self, classes: list[str], verb: str) -> NounPhrase | Pronoun:
        if "person" in classes and self.chance(0.3):
            return Pronoun(self.rng.choice(PRONOUNS))
        return self.noun_phrase(classes, verb)

    def clause(self, head: NounPhrase | None = None) -> Clause:
        """Sample a clause. With `head`, it is a relative clause without adverbs, negation and modal verbs."""
        if self.chance(0.12):
            return self.copula(head)
        verb = self.rng.choice(VERBS if head is None else VERBS.rows_with(4, *head.noun[3]))
        actor = self.subject(verb[4], verb[0][0]) if head is None else head
        tense = self.rng.choice(["present", "present", "past", "future"])
        clause = Clause(actor if head is None else None, actor.number, tense, verb)
        if head is None:
            clause.negated = self.chance(0.2)
            if clause.tense == "present" and self.chance(0.2):
                clause.modal = self.rng.choice(MODALS)
                clause.negated &= clause.modal[0][0] in ("can", "wants to", "should")
        self.add_objects(clause, verb, depth=0 if head is None else 1)
        if head is None:
            self.add_adverbs(clause, verb)
        return clause

    def copula(self, head: NounPhrase | None) -> Clause:
        actor = self.subject(["person", "animal", "thing", "food"], "be") if head is None else head
        fitting = ADJECTIVES.rows_with(2, *(actor.noun[3] if actor.noun else ["person"]))
        predicate = self.rng.choice(fitting)
        if isinstance(actor, NounPhrase):
            actor.adjective = None
            self.combinations.add((predicate[0][0], actor.noun[0][0]))
        tense = self.rng.choice(["present", "past", "future"])
        clause = Clause(actor if head is None else None, actor.number, tense, predicate=predicate)
        if head is None:
            clause.negated = self.chance(0.2)
            clause.time = self.time(clause.tense) if self.chance(0.3) else None
        return clause

    def add_objects(self, clause: Clause, verb: Row, depth: int) -> None:
        frame, name = verb[3][0], verb[0][0]
        phrase: NounPhrase | Pronoun
        if frame in ("dative", "transitive"):
            if "person" in verb[5] and self.chance(0.2):
                phrase = self.object_pronoun(clause)
            else:
                phrase = self.noun_phrase(verb[5], name, plain=clause.negated, depth=depth)
            setattr(clause, "dative" if frame == "dative" else "accusative", phrase)
        elif frame in ("ditransitive", "placement"):
            if frame == "ditransitive":
                is_pronoun = self.chance(0.25)
                clause.dative = self.object_pronoun(clause) if is_pronoun else self.noun_phrase(["person"], depth=1)
            clause.accusative = self.noun_phrase(verb[5], name, plain=clause.negated, depth=1)
        if frame in ("motion", "placement"):
            clause.place = self.direction(into=frame == "motion")

    def object_pronoun(self, clause: Clause) -> Pronoun:
        """Sample a pronoun that does not refer to the subject, which would require a reflexive one."""
        return Pronoun(self.rng.choice([row for row in PRONOUNS if row[5] == 1 or row[5] != clause.number]))

    def direction(self, into: bool) -> tuple[str, str]:  # a two-way preposition with the accusative
        english, german, classes = self.rng.choice(PREPOSITIONS[: 2 if into else 3])
        where = self.noun_phrase(classes, depth=1)
        name = english[0] + "to" if into else english[0]
        return join(name, where.english()), join(german[0], where.german("acc"))

    def add_adverbs(self, clause: Clause, verb: Row) -> None:
        if self.chance(0.2):
            clause.manner = self.rng.choice(MANNERS)
        if clause.place is None and self.chance(0.3):
            if self.chance(0.3):
                english, german = self.rng.choice(PLACES)
                clause.place = (english[0], german[0])
            else:  # location: with the dative
                english, german, classes = self.rng.choice(PREPOSITIONS)
                where = self.noun_phrase(classes, verb[0][0] if verb[3] == ["intransitive"] else "", depth=1)
                clause.place = join(english[0], where.english()), join(german[0], where.german("dat"))
        if self.chance(0.35):
            clause.time = self.time("present" if clause.modal else clause.tense)
            clause.time_first = self.chance(0.4)

    def time(self, tense: str) -> Row:
        return self.rng.choice(TIMES.rows_with(2, tense))

    def sentence(self) -> tuple[str, str]:
        kind = self.rng.choices(["statement", "question", "that", "because", "when", "and"], [60, 12, 10, 7, 6, 5])[0]
        clause = self.clause()
        if kind == "question":
            return self.question(clause)
        if kind == "statement":
            english, german = clause.english(), clause.german()
        elif kind == "that":
            subject = self.subject(["person"], "")
            tense = self.rng.choice(["present", "past"])
            verb = self.rng.choice(CLAUSE_VERBS)
            outer = Clause(subject, subject.number, tense, verb, complement=clause)
            clause.time_first = False
            english, german = outer.english(), outer.german()
        else:
            second = self.clause()
            second.time_first = False
            if kind == "and":
                english = join(clause.english(), "and", second.english())
                german = join(clause.german(), "und", second.german())
            elif kind == "because":
                english = join(clause.english(), "because", second.english())
                german = join(clause.german(), ",", "weil", second.german("final"))
            else:
                clause.time_first = False
                when = "als" if second.tense == "past" else "wenn"  # "als": once in the past
                english = join("when", second.english(), ",", clause.english())
                german = join(when, second.german("final"), ",", clause.german("inverted"))
        return finish(english, "."), finish(german, ".")

    def question(self, clause: Clause) -> tuple[str, str]:
        words = {"": ""}
        if clause.place is None and clause.verb is not None:
            words["where"] = "wo"
        if clause.time is None:
            words["when"] = "wann"
        words["why"] = "warum"
        word = self.rng.choice(list(words))
        clause.time_first = False
        german = clause.german("question", question=words[word])
        return finish(clause.english(question=word), "?"), finish(german, "?")


def digest(*words: str) -> int:
    """Return a hash that is the same on every machine and in every run."""
    return int.from_bytes(sha256(" ".join(words).encode()).digest()[:4], "big")


def is_held_out(combination: tuple[str, str]) -> bool:
    """Return whether a combination of words never occurs in training, except in relative clauses (one in 25)."""
    return digest(*combination) % 25 == 0


def generate(train: int = 40_000, validation: int = 500, test: int = 1_000, seed: int = 0) -> dict[str, list]:
    """Return the splits of the corpus: distinct (English, German) pairs with 3 to 20 English words.

    About half of the validation and test sentences contain a combination of words, such as a verb and its object, that
    does not occur in training. Combinations of a verb with the head of its relative clause are exceptions. The other
    half are new sentences with known combinations. A split can have tens of thousands of pairs.
    """
    generator = SentenceGenerator(random.Random(seed))
    splits: dict[str, list] = {"train": [], "validation": [], "test": []}
    sizes = {"train": train, "validation": validation, "test": test}
    novel_counts = {name: [0, 0] for name in splits}
    seen = set()
    while any(len(splits[name]) < sizes[name] for name in splits):
        generator.combinations.clear()
        english, german = generator.sentence()
        if english in seen or not 3 <= len(english.split()) <= 20:
            continue
        seen.add(english)
        is_new_combination = any(map(is_held_out, generator.combinations))
        bucket = digest(english) % 10
        name = "train"
        if is_new_combination or bucket == 0:
            name = "validation" if digest(english, "split") % (validation + test) < validation else "test"
            if novel_counts[name][is_new_combination] * 2 >= sizes[name]:
                continue
        if len(splits[name]) < sizes[name]:
            novel_counts[name][is_new_combination] += 1
            splits[name].append((english, german))
    return splits


def main() -> None:
    parser = CommandLineParser("training.demo.corpus", __doc__)
    parser.add_argument("directory", type=Path, help="The directory to write train.en, train.de and so on to.")
    parser.add_argument("--seed", type=int, default=0, help="The random seed (default: %(default)s).")
    arguments = parser.parse_args()
    directory = arguments.directory
    with exit_on_user_error(parser.prog):
        splits = generate(seed=arguments.seed).items()
        corpus = {split.replace("validation", "val"): pairs for split, pairs in splits}  # as in recipes
        for path in (directory / f"{split}.{language}" for split in corpus for language in ("en", "de")):
            if path.exists():
                raise ValueError(f"{path} already exists. Choose another directory.")
        for split, pairs in corpus.items():
            for side, language in enumerate(("en", "de")):
                with atomic_write(directory / f"{split}.{language}") as path:
                    path.write_text("".join(pair[side] + "\n" for pair in pairs), encoding="utf-8")
            print(f"{len(pairs):6d} pairs  {directory / split}.{{en,de}}")


if __name__ == "__main__":
    main()
