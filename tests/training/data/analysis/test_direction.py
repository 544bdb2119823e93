"""A warning if source and target of the training data are swapped."""

import pytest

from training.data.analysis.languages import find_columns
from training.data.corpora import read_corpus
from training.recipe.arguments import DataArguments

ENGLISH = ["the dog is with the man", "this is for you and the cat", "was that the house of the king"]
GERMAN = ["der Hund ist mit dem Mann", "das ist für dich und die Katze", "ist das nicht ein Haus"]
DIGITS, LETTERS = ["1 2 3", "4 5 6", "7 8 9"], ["a b c", "d e f", "g h i"]


@pytest.mark.parametrize(
    ("train", "validation", "languages", "name"),
    [
        ((ENGLISH, GERMAN), (ENGLISH, GERMAN), ("en", "de"), None),
        ((GERMAN, ENGLISH), None, ("en", "de"), "the languages"),
        ((GERMAN, ENGLISH), None, ("German", "eng"), None),
        ((DIGITS, LETTERS), (LETTERS, DIGITS), ("src", "tgt"), "the validation data"),
        ((DIGITS, LETTERS), (DIGITS, LETTERS), ("src", "tgt"), None),
        ((DIGITS, DIGITS), (DIGITS, DIGITS), ("en", "de"), None),
    ],
)
def test_warns_if_sides_are_swapped(tmp_path, read_messages, train, validation, languages, name):
    for split, sides in (("train", train), ("val", validation or ())):
        for language, side in zip(languages, sides, strict=False):
            (tmp_path / f"{split}.{language}").write_text("\n".join(side))
    keys = {"source_lang": languages[0], "target_lang": languages[1], "validation_file": validation and "val"}
    read_corpus(DataArguments(data_dir=str(tmp_path), **keys))
    messages = read_messages()
    assert (f"seem to be swapped, compared with {name}" in messages) == (name is not None)
    assert messages.count("swapped") == (name is not None)


def test_sentences_are_not_names_of_languages():
    rows = [["Spanish wine is good.", "En España hay vino."], ["It is a dog.", "Es un perro."]]
    assert [find_columns(row, ("en", "es")) for row in rows] == [None, None]
    assert find_columns(["es_MX", "en-US"], ("en", "es")) == (1, [0])


@pytest.mark.parametrize(
    ("names", "languages", "expected"),
    [
        (["source_lang", "target_lang", "source", "target"], ("en", "de"), (2, [3])),
        (["source_id", "source", "target"], ("src", "tgt"), (1, [2])),
        (["en_id", "de_id", "en_text", "de_text"], ("en", "de"), (2, [3])),
        (["en_text", "English", "de_1", "de_2"], ("en", "de"), (1, [2, 3])),
        (["source_a", "source_b", "target"], ("source_a", "de"), (0, [2])),
        (["en-GB", "en-US", "de"], ("en", "de"), (0, [2])),
        (["source_id", "target"], ("en", "de"), None),
        (["src", "mt", "ref"], ("en", "de"), (0, [2])),
        (["source", "reference1", "reference_2", "ref"], ("src", "tgt"), (0, [1, 2, 3])),
        (["de", "en", "de_2"], ("en", "de"), (1, [0, 2])),
        (["id", "source", "target"], ("en", "id"), (1, [2])),
        (["en", "id"], ("en", "id"), (0, [1])),
        (["source", "target_de", "target_fr"], ("en", "de"), (0, [1])),
        (["en_text", "en", "de"], ("en_text", "de"), (0, [2])),
        (["a", "en", "en"], ("en", "en"), None),
    ],
)
def test_complete_names_precede_beginnings_of_names(names, languages, expected):
    """Before, the ids or the codes of the languages were trained on."""
    assert find_columns(names, languages) == expected


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["source_a", "source_b", "target"], "source_a, source_b can all be the source. Set --source-lang"),
        (["en_1", "en_2", "de"], "en_1, en_2 can all be the source"),
        (["source", "target_text", "target_domain"], "target_text, target_domain can all be the target. Set --target"),
    ],
)
def test_ambiguous_columns_are_an_error(names, found):
    with pytest.raises(ValueError, match=f"the columns {found}"):
        find_columns(names, ("en", "de"))
