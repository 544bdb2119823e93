import itertools
import random
import sys

import pytest
from transformers import GenerationConfig, T5Config, T5ForConditionalGeneration

from vanilla_transformer import TranslationPipeline

pytest.importorskip("sentencex")

from vanilla_transformer.text.documents import (  # noqa: E402
    assemble_document,
    find_cut,
    sentence_spans,
    translate_document,
    translate_documents,
)

SEPARATORS = ["\n", "\r\n", "\r", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]


def test_white_space_is_preserved(reversing):
    text = "  The dog runs.  It barks!\n\n\tMr. Smith sleeps \r\n"
    document = translate_document(reversing, text)
    assert reversing.sentences == ["The dog runs.", "It barks!", "Mr. Smith sleeps"]
    assert document.translation == "  . RUNS DOG THE  ! BARKS IT\n\n\tSLEEPS SMITH . MR \r\n"
    assert document.warnings == []
    for sentence in document.sentences:
        start, end = sentence.target
        assert document.translation[start:end] == sentence.result["translation_text"]
    assert [text[slice(*sentence.source)] for sentence in document.sentences] == reversing.sentences


def test_alignments_ignore_leading_space():
    result = {"translation_text": " DER HUND", "alignments": [((0, 3), (1, 4)), ((4, 7), (5, 9))]}
    document = assemble_document(" the dog", [(1, 8, 1)], iter([result]))
    assert document.translation == " DER HUND"
    words = [document.translation[start:end] for _, (start, end) in document.alignments]
    assert words == ["DER", "HUND"]


@pytest.mark.parametrize("separator", SEPARATORS)
def test_line_separators_end_sentences(reversing, separator):
    document = translate_document(reversing, f"one two{separator}three four")
    assert document.translation == f"TWO ONE{separator}FOUR THREE"


@pytest.mark.parametrize("text", ["", " ", "\n\n \t\u2028", "\u00a0"])
def test_text_without_words_does_not_change(reversing, text):
    assert translate_document(reversing, text).translation == text


@pytest.mark.parametrize("language", ["en", "fr", "de"])
def test_wide_white_space_before_a_full_stop(reversing, language):
    """sentencex panics for such texts."""
    text = "Vitamin B\xa0. Next one."
    spans = list(sentence_spans(text, language))
    assert spans == list(sentence_spans(text.replace("\xa0", " "), language))
    translate_document(reversing, text, language=language)
    assert reversing.sentences == [text[start:end] for start, end in spans]


LANGUAGES = [
    "en",
    "fr",
    "de",
    "es",
    "it",
    "pt",
    "nl",
    "pl",
    "ru",
    "el",
    "ar",
    "hi",
    "ja",
    "zh",
    "th",
    "am",
    "bg",
    "da",
    "fi",
    "kk",
    "mr",
    "my",
    "ta",
    "xx",
]
TEXT_PARTS = [
    *("\xa0", "\u1680", "\u2003", "\u2009", "\u202f", "\u205f", "\u3000", "\u200b", "\u2060", "\ufeff", " ", " ", "\t"),
    *(
        "\u0301",
        "\u20e3",
        "\u200d",
        "👍🏽",
        "é",
        "ß",
        "İ",
        "中",
        "。",
        "！",
        "？",
        "ह",
        "।",
        "؟",
        "۔",
        "．",
        "\x00",
        "\n",
    ),
    *("A", "B", "c", "Dr.", "z.B.", "No.", "p.", "U.S.", "e.g.", "3", "...", "www.a.com", "a@b.c", "Next", "word"),
    *(".", ".", ".", "!", "?", "…", ":", ";", "-", "«", "»", "“", "”", "„", "'", '"', "(", ")", "[", "]", "「", "」"),
]


def test_sentence_spans_cover_the_text():
    rng = random.Random(13)
    for _ in range(20_000):
        text = "".join(rng.choice(TEXT_PARTS) for _ in range(rng.randint(1, 14)))
        end = 0
        for start, stop in sentence_spans(text, rng.choice(LANGUAGES)):
            assert not text[end:start].strip()
            assert text[start:stop] == text[start:stop].strip() != ""
            end = stop
        assert not text[end:].strip()


def test_abbreviations_depend_on_language():
    assert len(list(sentence_spans("Er kommt z.B. am Montag. Ja.", "de"))) == 2


def test_paragraphs_keep_their_order(reversing):
    text = "\n\n".join(f"Paragraph number{i} starts. It ends." for i in range(300))
    paragraphs = translate_document(reversing, text).translation.split("\n\n")
    assert paragraphs == [f". STARTS NUMBER{i} PARAGRAPH . ENDS IT" for i in range(300)]


def test_several_texts(reversing):
    first, second, third = translate_documents(reversing, ["One two. Three.", "", "d\ne"])
    assert [first.translation, second.translation, third.translation] == [". TWO ONE . THREE", "", "D\nE"]
    assert len(reversing.sentences) == 4


def test_alignments_are_document_spans(reversing):
    text = " One two.\nThree."
    document = translate_document(reversing, text, return_alignments=True)
    found = [(text[a:b], document.translation[c:d]) for (a, b), (c, d) in document.alignments]
    assert found == [(word, word.upper()) for word in (".", "two", "One", ".", "Three")]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("the dog runs and sleeps, a cat sings in the house", ["the dog runs and sleeps,", "a cat sings in the house"]),
        ("the old man reads a book in the house", ["the old man reads", "a book in the house"]),
    ],
)
def test_long_sentence_is_split_at_mark_or_space(reversing, text, parts):
    tokens = max(len(reversing.preprocess(part)["input_ids"]) for part in parts)
    document = translate_document(reversing, text, max_sentence_tokens=tokens)
    assert reversing.sentences == parts
    assert document.warnings == ["translated in 2 parts, at character 1: the sentence is too long."]
    assert len(document.translation.split()) == len(text.replace(",", " ,").split())


def test_long_sentence_is_not_split_inside_of_numbers(reversing):
    """A mark inside of a number or a URL is not the end of a clause."""
    words = ["the", "dog", "runs", "a", "cat", "sings", "the", "house"]
    for word, i in itertools.product(("1,234", "10:45", "3–5", "5;6", "a://b:1"), range(len(words))):
        text = " ".join([*words[:i], word, *words[i:]])
        translate_document(reversing, text, max_sentence_tokens=len(reversing.preprocess(word)["input_ids"]) + 1)
        assert len(reversing.sentences) > 1
        assert word in " ".join(reversing.sentences).split()


@pytest.mark.parametrize(
    "word", ["1,234", "10：45", "https://a.b", "12345", "１２３", "3.14", "www.a.b", "me@a.b", "B12"]
)
def test_numbers_between_letters_are_not_split(reversing, word):
    for i in range(8, 33):
        text = "字" * i + word + "字" * (40 - i)
        translate_document(reversing, text, max_sentence_tokens=(len(text) + 3) // 2)
        assert "".join(reversing.sentences) == text
        assert len(reversing.sentences) > 1
        assert any(word in part for part in reversing.sentences)


def test_space_near_the_end_is_found():
    assert find_cut("1,234 ,", 0, 7) == (5, 6)


def test_list_of_numbers_is_split_at_marks(reversing):
    text = ",".join(["12"] * 40)
    translate_document(reversing, text, max_sentence_tokens=20)
    assert "".join(reversing.sentences) == text
    assert {part[-1] for part in reversing.sentences[:-1]} == {","}


def test_long_sentence_without_spaces_is_split_at_marks(reversing):
    text = "the:dog,the:cat,the:house"
    translate_document(reversing, text, max_sentence_tokens=len(reversing.preprocess("the:house")["input_ids"]))
    assert "".join(reversing.sentences) == text
    assert {part[-1] for part in reversing.sentences[:-1]} <= {":", ","}


def test_parts_of_a_long_sentence_have_no_surrounding_space(reversing):
    """The translation of a part has none, so the space would be missing in the document."""
    for i in range(16):
        text = "   ".join(["the"] * i + ["dog,"] + ["the"] * (15 - i))
        translate_document(reversing, text, max_sentence_tokens=4)
        assert "".join(reversing.sentences).replace(" ", "") == text.replace(" ", "")
        assert reversing.sentences == [each.strip() for each in reversing.sentences]


def test_long_word_is_split_anywhere(reversing):
    text = "dog" * 1000
    translate_document(reversing, text, max_sentence_tokens=20)
    assert "".join(reversing.sentences) == text
    assert max(len(reversing.preprocess(part)["input_ids"]) for part in reversing.sentences) <= 20


def test_models_without_positions(make_tokenizer):
    tokenizer, sizes = make_tokenizer(True)
    config = T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=1, **sizes)
    translator = TranslationPipeline(model=T5ForConditionalGeneration(config), tokenizer=tokenizer)
    document = translate_document(translator, "the dog runs. " * 2, max_new_tokens=3)
    assert [sentence.source for sentence in document.sentences] == [(0, 13), (14, 27)]


def test_learned_positions_are_never_exceeded(make_model, make_tokenizer):
    tokenizer, sizes = make_tokenizer(True)
    model = make_model(**sizes, position_embedding_type="learned", max_position_embeddings=12)
    document = translate_document(TranslationPipeline(model=model, tokenizer=tokenizer), "the dog runs " * 20)
    assert len(document.sentences) > 5
    assert not any("error" in sentence.result for sentence in document.sentences)


def test_positions_of_all_models_of_an_ensemble_are_respected(make_model, make_tokenizer):
    tokenizer, sizes = make_tokenizer(True)
    model, other = (make_model(**sizes, position_embedding_type="learned", max_position_embeddings=n) for n in (64, 12))
    text, translator = "the dog runs " * 20, TranslationPipeline(model=model, tokenizer=tokenizer)
    for document in (
        translate_document(translator, text, ensemble=[other]),
        translate_document(TranslationPipeline(model=model, tokenizer=tokenizer, ensemble=[other]), text),
    ):
        assert len(document.sentences) > 5
        assert not any("error" in sentence.result for sentence in document.sentences)


def test_untranslatable_sentence_is_copied_with_warning(random_translator):
    document = translate_document(random_translator, "the dog\na \ud800 b\nthe cat")
    assert document.translation.split("\n")[1] == "a \ud800 b"
    (warning,) = [each for each in document.warnings if "surrogate" in each]
    assert warning.startswith("not translated, at character 9: ")


@pytest.mark.parametrize(
    ("default_limit", "options", "expected"),
    [
        (3, {}, 3),
        (3, {"max_new_tokens": 5}, 5),
        (3, {"generation_config": GenerationConfig(max_new_tokens=7, eos_token_id=-1)}, 7),
        (None, {}, 0),
    ],
)
def test_max_new_tokens(random_translator, default_limit, options, expected):
    """The limit is that of the call, of the model, or 50 tokens more than the sentence has."""
    model, tokenizer = random_translator.model, random_translator.tokenizer
    model.generation_config.update(max_new_tokens=default_limit, max_length=None, num_beams=2, num_return_sequences=2)
    model.generation_config.eos_token_id = -1
    translator = TranslationPipeline(model=model, tokenizer=tokenizer, eos_token_id=-1)
    document = translate_document(translator, "the dog", max_sentence_tokens=10, return_token_scores=True, **options)
    expected = expected or len(tokenizer("the dog")["input_ids"]) + 50
    assert len(document.sentences[0].result["tokens"]) == expected


def test_rejects_several_translations(reversing):
    with pytest.raises(ValueError, match="num_return_sequences must be 1"):
        translate_document(reversing, "a", num_return_sequences=2)


def test_missing_sentencex(reversing, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencex", None)
    with pytest.raises(ImportError, match="pip install sentencex"):
        translate_document(reversing, "a")


ALPHABET = [
    *("the", "dog", " ", "  ", "\t", ".", "!", "?", ",", ";", '"', "a", "B", "é", "ß", "0", "\x00", "\x07", "\x1b"),
    *SEPARATORS,
    *("👍", "👩\u200d👩\u200d👧", "\U000e0001", "\u200b", "\u200f", "\u202e", "\ufeff", "\ufffd", "\uffff"),
    *("\ud800", "\udfff", "שלום", "مرحبا", "؟", "我", "。", "हि", "a\u0300\u0301\u0302", "\U0010ffff"),
    *("\u00a0", "\u3000", "&", "<b>", "</s>"),
]


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice(ALPHABET) for _ in range(rng.choice([0, 1, 2, 5, 20, 60])))


def assert_complete(text: str, document) -> None:
    """Assert that every sentence has a translation or an error, and that white space is preserved."""
    end = target_end = 0
    for sentence in document.sentences:
        between = text[end : sentence.source[0]]
        assert not between.strip()
        assert document.translation[target_end : sentence.target[0]] == between
        translation = document.translation[slice(*sentence.target)]
        assert translation == (sentence.result["translation_text"].strip() or text[slice(*sentence.source)])
        assert bool(sentence.result["translation_text"].strip()) != ("error" in sentence.result)
        end, target_end = sentence.source[1], sentence.target[1]
    assert document.translation[target_end:] == text[end:]
    assert not text[end:].strip()
    assert all("\n" not in warning for warning in document.warnings)


def check_random_texts(translator, n: int) -> None:
    rng = random.Random(7)
    for _ in range(0, n, 50):
        texts = [random_text(rng) for _ in range(50)]
        for text, document in zip(texts, translate_documents(translator, texts, max_sentence_tokens=30), strict=True):
            assert_complete(text, document)


def test_random_texts(random_translator):
    check_random_texts(random_translator, 50)


@pytest.mark.slow
def test_many_random_texts(random_translator):
    check_random_texts(random_translator, 10_000)


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["x", "the dog runs. "])
def test_line_of_a_megabyte(reversing, unit):
    text = unit * (2**20 // len(unit))
    assert_complete(text, translate_document(reversing, text, max_sentence_tokens=500))
