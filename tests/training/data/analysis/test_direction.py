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
        (["a", "en", "en"], ("en", "en"), None),
    ],
)
def test_complete_names_precede_beginnings_of_names(names, languages, expected):
    """Before, the ids or the codes of the languages were trained on."""
    assert find_columns(names, languages) == expected


def test_several_source_columns_are_an_error():
    with pytest.raises(ValueError, match="columns source_a and source_b can both be the source. Set --source-lang"):
        find_columns(["source_a", "source_b", "target"], ("en", "de"))
