"""Checks of the demo corpus against rules of German grammar that are implemented independently."""

import random
import re

import pytest

from training.demo import lexicon
from training.demo.corpus import NOUNS, VERBS, SentenceGenerator, generate, is_held_out
from training.demo.grammar import Clause, NounPhrase, Pronoun, finish, first_person

NOUN = {row[0][0]: row for row in NOUNS}
VERB = {row[0][0]: row for row in VERBS}
ICH, HE, SHE, WE, THEY = (
    Pronoun(row)
    for row in (
        ("I", "me", "ich", "mich", "mir", 0),
        ("he", "him", "er", "ihn", "ihm", 1),
        ("she", "her", "sie", "sie", "ihr", 1),
        ("we", "us", "wir", "uns", "uns", 2),
        ("they", "them", "sie", "sie", "ihnen", 2),
    )
)


@pytest.fixture(scope="module")
def corpus():
    return generate(train=3000, validation=100, test=200)


def adjective(english):
    return next(row for row in lexicon.ADJECTIVES if row[0][0] == english)


def time(english):
    return next(row for row in lexicon.TIMES if row[0][0] == english)


def noun(english, determiner="the", plural=False, adj=None):
    return NounPhrase(determiner, NOUN[english], plural, adjective(adj) if adj else None)


def clause(subject, verb, **kwargs):
    return Clause(subject, subject.number, verb=VERB[verb], **kwargs)


MAN, DOG = noun("man"), noun("dog")


@pytest.mark.parametrize(
    ("tree", "english", "german"),
    [
        (clause(noun("dog", "a", adj="old"), "sleep"), "an old dog sleeps", "ein alter Hund schläft"),
        (clause(MAN, "see", accusative=noun("boy", "a", adj="small")),
         "the man sees a small boy", "der Mann sieht einen kleinen Jungen"),
        (clause(noun("woman", "my"), "see", accusative=noun("child", "the", True, "young")),
         "my woman sees the young children", "meine Frau sieht die jungen Kinder"),
        (clause(MAN, "help", dative=noun("child", "two", True, "sick")),
         "the man helps two sick children", "der Mann hilft zwei kranken Kindern"),
        (clause(SHE, "give", dative=noun("boy"), accusative=noun("book", "a")),
         "she gives the boy a book", "sie gibt dem Jungen ein Buch"),
        (clause(ICH, "open", accusative=noun("door")), "I open the door", "ich mache die Tür auf"),
        (clause(ICH, "open", accusative=noun("door"), tense="past"),
         "I opened the door", "ich habe die Tür aufgemacht"),
        (clause(HE, "get up", tense="past"), "he got up", "er ist aufgestanden"),
        (clause(HE, "get up", tense="future", negated=True), "he will not get up", "er wird nicht aufstehen"),
        (clause(HE, "buy", accusative=noun("apple", "a"), negated=True),
         "he does not buy an apple", "er kauft keinen Apfel"),
        (clause(HE, "buy", accusative=noun("apple", "a", True), negated=True),
         "he does not buy apples", "er kauft keine Äpfel"),
        (clause(HE, "buy", accusative=noun("apple"), negated=True),
         "he does not buy the apple", "er kauft den Apfel nicht"),
        (clause(DOG, "sleep", time=time("today"), time_first=True),
         "today the dog sleeps", "heute schläft der Hund"),
        (clause(WE, "see", accusative=HE, time=time("yesterday"), tense="past"),
         "we saw him yesterday", "wir haben ihn gestern gesehen"),
        (clause(ICH, "smile"), "I smile", "ich lächle"),
        (clause(DOG, "run", place=("into the house", "in das Haus"), manner=[["quickly"], ["schnell"]],
                time=time("now")),
         "the dog runs quickly into the house now", "der Hund rennt jetzt schnell in das Haus"),
    ],
)  # fmt: skip
def test_translations(tree, english, german):
    assert tree.english() == english
    assert tree.german() == german


@pytest.mark.parametrize(
    ("tree", "english", "german"),
    [
        (clause(HE, "open", accusative=noun("door")), "Does he open the door?", "Macht er die Tür auf?"),
        (clause(HE, "see", accusative=DOG, tense="past", negated=True),
         "Did he not see the dog?", "Hat er den Hund nicht gesehen?"),
        (clause(THEY, "sleep", tense="future", negated=True),
         "Will they not sleep?", "Werden sie nicht schlafen?"),
    ],
)  # fmt: skip
def test_questions(tree, english, german):
    assert finish(tree.english(question=""), "?") == english
    assert finish(tree.german("question"), "?") == german


def test_verb_is_last_in_subordinate_clauses():
    opened = clause(HE, "open", accusative=noun("door"))
    assert opened.german("final") == "er die Tür aufmacht"
    opened.tense = "past"
    assert opened.german("final") == "er die Tür aufgemacht hat"
    modal = clause(HE, "open", accusative=noun("door"), modal=[["can", "can"], ["können", "kann"]])
    assert modal.german("final") == "er die Tür aufmachen kann"
    assert modal.german("inverted") == "kann er die Tür aufmachen"


def test_relative_pronouns_agree():
    head = noun("boy")
    head.relative = Clause(MAN, 1, verb=VERB["see"])
    assert finish(clause(head, "sleep").german(), ".") == "Der Junge, den der Mann sieht, schläft."
    head.relative = Clause(None, 1, verb=VERB["see"], accusative=noun("cat", "a"))
    assert finish(clause(ICH, "know", accusative=head).german(), ".") == "Ich kenne den Jungen, der eine Katze sieht."


# Articles by gender: nominative, accusative and dative
ARTICLES = {
    "m": {"der", "den", "dem", "ein", "einen", "einem"},
    "f": {"die", "der", "eine", "einer"},
    "n": {"das", "dem", "ein", "einem"},
    "pl": {"die", "den"},
}


def test_articles_agree_with_their_nouns(corpus):
    """The gender and number of each noun allow its article."""
    forms: dict[str, set[str]] = {}
    for row in NOUNS:
        (singular, plural), gender = row[1], row[2][0]
        forms.setdefault(singular, set()).update(ARTICLES[gender[0]])
        dative = plural + ("" if plural[-1] in "ns" else "n")
        for form in (plural, dative):
            forms.setdefault(form, set()).update(ARTICLES["pl"])
        if gender.endswith("w"):
            forms[plural].update({"den", "dem", "einen", "einem"})
    pattern = re.compile(
        r"(?<!, )\b([Dd]er|[Dd]ie|[Dd]as|[Dd]en|[Dd]em|[Ee]in(?:e|en|em|er)?) (?:[a-zäöüß]+ )?([A-ZÄÖÜ]\w+)"
    )
    checked = 0
    for _, german in corpus["train"]:
        for article, word in pattern.findall(german):
            if word in forms:
                assert article.lower() in forms[word], german
                checked += 1
    assert checked > 2000


def test_adjective_endings_after_articles(corpus):
    rules = {
        "dem": {"en"},
        "den": {"en"},
        "das": {"e"},
        "ein": {"er", "es"},
        "einen": {"en"},
        "einem": {"en"},
        "eine": {"e"},
    }
    stems = {row[1][-1].removesuffix("e") for row in lexicon.ADJECTIVES}
    checked = 0
    for _, german in corpus["train"]:
        for article, word in re.findall(r"(?<!, )\b(dem|den|das|ein|einen|einem|eine) ([a-zäöüß]+) [A-ZÄÖÜ]", german):
            stem = next((s for s in sorted(stems, key=len, reverse=True) if word.startswith(s)), None)
            if stem is not None:
                assert word[len(stem) :] in rules[article], german
                checked += 1
    assert checked > 300


def test_subordinate_clauses_end_with_their_finite_verb(corpus):
    finite = {"ist", "sind", "bin", "war", "waren", "hat", "habe", "haben", "wird", "werde", "werden"}
    finite |= {form for row in lexicon.MODALS for form in row[1]}
    for row in VERBS:
        prefix, _, infinitive = row[1][0].rpartition("+")
        finite |= {prefix + form for form in (infinitive, row[1][1], first_person(row))}
    checked = 0
    for _, german in corpus["train"]:
        match = re.search(r", weil ([^,]+)\.$", german)
        if match:
            assert match[1].split()[-1] in finite, german
            checked += 1
    assert checked > 80


def test_lexicon_is_large_enough():
    names = ("NOUNS", "VERBS", "MODALS", "CLAUSE_VERBS", "ADJECTIVES", "TIMES", "MANNERS", "PLACES", "PREPOSITIONS")
    tables = [getattr(lexicon, name) for name in names]
    assert sum(map(len, tables)) > 300
    english = [row[0][0] for row in tables[0]]
    assert len(set(english)) == len(english)


def test_splits_are_disjoint(corpus):
    sizes = {name: len(pairs) for name, pairs in corpus.items()}
    assert sizes == {"train": 3000, "validation": 100, "test": 200}
    english = [pair[0] for pairs in corpus.values() for pair in pairs]
    assert len(set(english)) == len(english)
    assert all(3 <= len(sentence.split()) <= 20 for sentence in english)


def test_held_out_combinations_never_occur_in_training(monkeypatch):
    """Half of the test sentences have a combination that does not occur in training."""
    combinations = {}
    sentence = SentenceGenerator.sentence

    def record(self):
        pair = sentence(self)
        combinations.setdefault(pair[0], set(self.combinations))
        return pair

    monkeypatch.setattr(SentenceGenerator, "sentence", record)
    corpus = generate(train=2000, validation=50, test=100)
    new = {name: [any(map(is_held_out, combinations[en])) for en, _ in pairs] for name, pairs in corpus.items()}
    assert not any(new["train"])
    assert sum(new["test"]) == 50
    shown = set().union(*(combinations[en] for en, _ in corpus["train"]))
    held_out = {c for en, _ in corpus["test"] for c in combinations[en] if is_held_out(c)}
    assert held_out
    assert not held_out & shown


def test_seed_determines_corpus(corpus):
    assert generate(train=3000, validation=100, test=200) == corpus
    other = generate(train=300, validation=10, test=20, seed=1)
    assert other["train"] != corpus["train"][:300]


def test_grammar_generates_distinct_sentences():
    generator = SentenceGenerator(random.Random(0))
    sentences = {generator.sentence()[0] for _ in range(20_000)}
    assert len(sentences) > 19_000
