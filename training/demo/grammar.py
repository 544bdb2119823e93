"""The grammar of the built-in English-German corpus.

A sentence is a tree of clauses and noun phrases. Each node generates its text in both languages, so that translations
are correct by construction. `corpus` samples the trees.
"""

from dataclasses import dataclass
from typing import Any

from .lexicon import Row

# Endings by case, in the order masculine, feminine, neuter, plural
DER = {"nom": "der die das die", "acc": "den die das die", "dat": "dem der dem den"}
DIESER = {"nom": "er e es e", "acc": "en e es e", "dat": "em er em en"}
EIN = {"nom": "- e - e", "acc": "en e - e", "dat": "em er em en"}
WEAK = {"nom": "e e e en", "acc": "en e e en", "dat": "en en en en"}  # adjectives after der, dieser, jeder
MIXED = {"nom": "er e es en", "acc": "en e es en", "dat": "en en en en"}  # after ein, kein, mein
STRONG = {"nom": "er e es e", "acc": "en e es e", "dat": "em er em en"}  # after a number or without a determiner

# English singular, plural | German stem | its endings | the adjective's
DETERMINERS: dict[str, tuple[Any, ...]] = {
    "the": ("the", "the", "", DER, WEAK),
    "this": ("this", "these", "dies", DIESER, WEAK),
    "every": ("every", None, "jed", DIESER, WEAK),
    "a": ("a", "", "ein", EIN, MIXED),
    "my": ("my", "my", "mein", EIN, MIXED),
    "his": ("his", "his", "sein", EIN, MIXED),
    "her": ("her", "her", "ihr", EIN, MIXED),
    "our": ("our", "our", "unser", EIN, MIXED),
    "two": (None, "two", "zwei", None, STRONG),
    "three": (None, "three", "drei", None, STRONG),
    "some": (None, "some", "einig", DIESER, STRONG),
    "many": (None, "many", "viel", DIESER, STRONG),
}
# English subject, object | German nominative, accusative, dative | number (0: first singular, 1: third, 2: plural)
PRONOUNS = [
    ("I", "me", "ich", "mich", "mir", 0),
    ("he", "him", "er", "ihn", "ihm", 1),
    ("she", "her", "sie", "sie", "ihr", 1),
    ("we", "us", "wir", "uns", "uns", 2),
    ("they", "them", "sie", "sie", "ihnen", 2),
]
HABEN, SEIN = ("habe", "hat", "haben"), ("bin", "ist", "sind")
WAR, WERDEN = ("war", "war", "waren"), ("werde", "wird", "werden")
CONTRACTIONS = {"in dem": "im", "in das": "ins", "auf das": "aufs"}


@dataclass
class Pronoun:
    row: tuple
    noun = None

    @property
    def number(self) -> int:
        return self.row[5]

    def english(self, is_object: bool = True) -> str:
        return self.row[int(is_object)]

    def german(self, case: str) -> str:
        return self.row[{"nom": 2, "acc": 3, "dat": 4}[case]]


@dataclass
class NounPhrase:
    """A noun with a determiner and optional modifiers, for example "the old man that sees the dog"."""

    determiner: str
    noun: Row
    plural: bool = False
    adjective: Row | None = None
    relative: "Clause | None" = None  # the noun phrase is its object if it has a subject, else its subject

    @property
    def number(self) -> int:
        return 2 if self.plural else 1

    @property
    def gender(self) -> int:
        """Index into the rows of the ending tables."""
        return 3 if self.plural else "mfn".index(self.noun[2][0][0])

    def english(self, is_object: bool = True) -> str:
        words = [self.adjective[0][0]] if self.adjective else []
        words.append(self.noun[0][int(self.plural)])
        determiner = DETERMINERS[self.determiner][int(self.plural)]
        if determiner == "a" and words[0][0] in "aeiou":
            determiner = "an"
        if self.relative:
            words += ["that", self.relative.english(as_relative=True)]
        return join(determiner, *words)

    def german(self, case: str, negated: bool = False) -> str:
        """Return the German text. If negated, "ein" becomes "kein", and a plural without article gets "keine"."""
        _, _, stem, endings, adjective_endings = DETERMINERS[self.determiner]
        if self.determiner == "a":
            stem, endings, adjective_endings = (
                ("k" + stem, EIN, MIXED) if negated else (stem, EIN, MIXED) if not self.plural else ("", None, STRONG)
            )
        determiner = stem + (self._ending(endings, case) if endings else "")
        words = [determiner]
        if self.adjective:
            words.append(self.adjective[1][-1].removesuffix("e") + self._ending(adjective_endings, case))
        words.append(self._noun(case))
        if self.relative:
            pronoun = DER["nom" if self.relative.subject is None else "acc"].split()[self.gender]
            words += [",", pronoun, self.relative.german("relative"), ","]
        return join(*words)

    def _ending(self, table: dict[str, str], case: str) -> str:
        return table[case].split()[self.gender].replace("-", "")

    def _noun(self, case: str) -> str:
        singular, plural = self.noun[1]
        if self.plural:
            return plural + "n" if case == "dat" and plural[-1] not in "ns" else plural
        is_weak = self.noun[2][0].endswith("w")
        return plural if is_weak and case != "nom" else singular


@dataclass
class Clause:
    """A finite clause. `subject` is None in a relative clause whose head is the subject."""

    subject: NounPhrase | Pronoun | None
    number: int  # of the subject: 0 first person singular, 1 third, 2 plural
    tense: str = "present"  # or "past", "future"
    verb: Row | None = None  # if None, "to be" with `predicate`
    predicate: Row | None = None  # an adjective
    modal: Row | None = None
    negated: bool = False
    dative: NounPhrase | Pronoun | None = None
    accusative: NounPhrase | Pronoun | None = None
    manner: Row | None = None
    place: tuple[str, str] | None = None  # (English, German); a location or a direction
    time: Row | None = None
    time_first: bool = False
    complement: "Clause | None" = None  # after "that", for verbs such as "think"

    # English: subject, verb, objects, manner, place, time ------------------------------------------------------------

    def english(self, as_relative: bool = False, question: str | None = None) -> str:
        """Return the English statement, or the question with the given question word ("" for yes-no questions)."""
        auxiliary, verb = self._english_verb(inverted=question is not None)
        subject = self.subject.english(is_object=False) if self.subject else ""
        order = [question, auxiliary, subject, verb] if question is not None else [subject, auxiliary, verb]
        time = self.time[0][0] if self.time else ""
        objects = [phrase.english() for phrase in (self.dative, self.accusative) if phrase]
        rest = [self.predicate[0][0] if self.predicate else "", *objects, self.manner[0][0] if self.manner else ""]
        rest.append(self.place[0] if self.place else "")
        complement = join("that", self.complement.english()) if self.complement else ""
        if self.time_first and question is None and not as_relative:
            return join(time, *order, *rest, complement)
        return join(*order, *rest, time, complement)

    def _english_verb(self, inverted: bool) -> tuple[str, str]:
        """Return the auxiliary and the main verb. Negations and questions use "do" if there is no other auxiliary."""
        negation = "not" if self.negated else ""
        form = 0 if self.number == 1 else 1
        if self.tense == "future":
            be_or_do = self.verb[0][0] if self.verb else "be"
            return ("will", join(negation, be_or_do)) if inverted else (join("will", negation), be_or_do)
        if self.verb is None:
            forms = ("was", "was", "were") if self.tense == "past" else ("am", "is", "are")
            return (forms[self.number], negation) if inverted else ("", join(forms[self.number], negation))
        base, third_person, past = self.verb[0]
        if self.modal and self.modal[0][0] != "wants to":
            modal = self.modal[0][0]
            if inverted:
                return modal, join(negation, base)
            return ("cannot" if modal == "can" and self.negated else join(modal, negation)), base
        if self.modal:
            base, third_person = f"want to {base}", f"wants to {base}"
        if self.negated or inverted:
            do = "did" if self.tense == "past" else ("does", "do")[form]
            return (do, join(negation, base)) if inverted else (join(do, negation), base)
        return "", past if self.tense == "past" else (third_person, base)[form]

    # German: the finite verb second or last; pronouns, time, objects, "nicht", manner, place between -----------------

    def german(self, order: str = "statement", question: str = "") -> str:
        """Return the German text.

        The finite verb is last if `order` is "final" or "relative", and second in a "statement". It is first in a
        "question" (unless there is a question word), and in an "inverted" clause, which follows a subordinate clause.
        """
        subject = self.subject.german("nom") if self.subject else ""
        finite, verbs = self._german_verb(order in ("final", "relative"))
        time = self.time[1][0] if self.time else ""
        complement = join(",", "dass", self.complement.german("final")) if self.complement else ""
        if order in ("final", "relative"):
            return join(subject, *self._middle(time), *verbs, finite, complement)
        if order == "statement" and self.time_first and time:
            return join(time, finite, subject, *self._middle(""), *verbs, complement)
        if order == "statement":
            return join(subject, finite, *self._middle(time), *verbs, complement)
        return join(question, finite, subject, *self._middle(time), *verbs, complement)

    def _middle(self, time: str) -> list[str]:
        objects = [(self.dative, "dat"), (self.accusative, "acc")]
        pronouns = [phrase.german(case) for phrase, case in objects if isinstance(phrase, Pronoun)]
        takes_kein = self.negated and isinstance(self.accusative, NounPhrase) and self.accusative.determiner == "a"
        phrases = [(phrase, case) for phrase, case in objects if isinstance(phrase, NounPhrase)]
        nouns = [phrase.german(case, negated=takes_kein and phrase is self.accusative) for phrase, case in phrases]
        negation = "nicht" if self.negated and not takes_kein else ""
        manner = self.manner[1][0] if self.manner else ""
        predicate = self.predicate[1][0] if self.predicate else ""
        return [*pronouns, time, *nouns, negation, manner, self.place[1] if self.place else "", predicate]

    def _german_verb(self, last: bool) -> tuple[str, list[str]]:
        """Return the finite verb, and the prefix, participle or infinitive at the end of the clause."""
        if self.verb is None:
            if self.tense == "future":
                return WERDEN[self.number], ["sein"]
            return (WAR if self.tense == "past" else SEIN)[self.number], []
        prefix, _, infinitive = self.verb[1][0].rpartition("+")
        if self.tense == "past":
            auxiliary = SEIN if ["s"] in self.verb[2:3] else HABEN
            return auxiliary[self.number], [self.verb[1][-1]]
        if self.tense == "future" or self.modal:
            finite = WERDEN[self.number] if not self.modal else self.modal[1][0 if self.number == 2 else 1]
            return finite, [prefix + infinitive]
        finite = (first_person(self.verb), self.verb[1][-2], infinitive)[self.number]
        return (prefix + finite, []) if last else (finite, [prefix])


def first_person(verb: Row) -> str:
    if len(verb[1]) == 4:
        return verb[1][1]
    infinitive = verb[1][0].rpartition("+")[2]
    if infinitive.endswith("eln"):
        return infinitive[:-3] + "le"  # ich lächle
    return infinitive[: -2 if infinitive.endswith("en") else -1] + "e"  # ich kenne, ich flüstere


def join(*parts: str) -> str:
    """Join the nonempty parts with spaces. `finish` corrects the commas."""
    return " ".join(part for part in parts if part)


def finish(text: str, mark: str) -> str:
    """Return a sentence with an initial capital, contractions, correct commas and the final punctuation mark."""
    for long, short in CONTRACTIONS.items():
        text = f" {text} ".replace(f" {long} ", f" {short} ").strip()
    while " , ," in text:
        text = text.replace(" , ,", " ,")
    text = text.removesuffix(" ,").replace(" ,", ",")
    return text[0].upper() + text[1:] + mark
