"""Lower case and Moses' tokens inside the tokenizer, beside sacremoses."""

import os
from collections import Counter
from pathlib import Path

import pytest
from sacremoses import MosesPunctNormalizer, MosesTokenizer
from transformers import AutoTokenizer

from training.arguments import TokenizerArguments
from training.data.tokenizer import train_tokenizer

TEXTS = {
    "en": [
        "He said: \"I don't know the dogs' owner, Mr. Smith.\"",
        "The U.S. team -- it's No. 5 of 1,000 (or 3.5%) -- won... a well-known dog.",
        "the boys' dog\u2019s ball \u2013 rock \u2018n\u2019 roll; A/B & c@d_e #1 \u2026 end!?",
        "At 5 p.m. he left.  Two   spaces",
    ],
    "de": [
        "\u201eDas ist z.B. die Nr. 7\u201c, sagte Dr. M\u00fcller usw. am 3. Mai.",
        "Ein Mann, der 1.000,50 Euro hat.",
    ],
    "fr": ["L'homme d'aujourd'hui qu'on voit, c'est \u00ab M. Dupont \u00bb.", "Jusqu'\u00e0 10 h. environ"],
}


def make(**keys) -> TokenizerArguments:
    texts = [text for each in TEXTS.values() for text in each]
    return train_tokenizer(texts, texts, TokenizerArguments(tokenizer_vocab_size=300, **keys))


def tokens(tokenizer, text: str) -> list[str]:
    """Words and marks before they are split further, without the mark of a space."""
    backend = tokenizer.backend_tokenizer
    pieces = backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(text))
    return [piece.strip("\u2581") for piece, _ in pieces if piece.strip("\u2581")]


def by_sacremoses(text: str, language: str, lowercase: bool) -> list[str]:
    text = MosesPunctNormalizer(lang=language).normalize(text)
    return MosesTokenizer(lang=language).tokenize(text.lower() if lowercase else text, escape=False)


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("language", TEXTS)
def test_words_are_split_as_moses_does(language, lowercase):
    tokenizer = make(moses=True, lowercase=lowercase)
    for text in TEXTS[language]:
        assert tokens(tokenizer, text) == by_sacremoses(text, language, lowercase)


@pytest.mark.skipif("VT_DATA" not in os.environ, reason="needs Multi30k")
@pytest.mark.parametrize("language", TEXTS)
def test_multi30k_is_split_as_moses_does_but_for_few_tokens(language):
    """A sample; of the whole 0.022 % of the English, 0.018 % of the German, 0.022 % of the French tokens differ."""
    tokenizer, wrong, total = make(moses=True), Counter(), 0
    for line in Path(os.environ["VT_DATA"], "multi30k", f"train.{language}").read_text().splitlines()[::20]:
        expected, found = (Counter(each) for each in (by_sacremoses(line, language, False), tokens(tokenizer, line)))
        total += expected.total()
        wrong += (expected - found) | (found - expected)
    assert total > 15_000
    assert wrong.total() < 0.001 * total, wrong.most_common(9)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("shared", [True, False])
def test_raw_text_goes_in_and_comes_out(kind, shared, tmp_path):
    """With spaces where they were, from a saved tokenizer without our code; case and the kinds of quotes are lost."""
    make(tokenizer_type=kind, shared_vocabulary=shared, moses=True, lowercase=True).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(text_target=TEXTS["en"] + TEXTS["de"])["input_ids"]
    expected = [
        "he said: \"i don't know the dogs' owner, mr. smith.\"",
        "the u.s. team -- it's no. 5 of 1,000 (or 3.5%) -- won... a well-known dog.",
        "the boys' dog's ball - rock 'n' roll; a/b & c@d_e #1 ... end!?",
        "at 5 p.m. he left. two spaces",
        '"das ist z.b. die nr. 7", sagte dr. m\u00fcller usw. am 3. mai.',
        "ein mann, der 1.000,50 euro hat.",
    ]
    assert tokenizer.batch_decode(ids, skip_special_tokens=True) == expected


def test_lower_case_alone_changes_nothing_else():
    plain, lower = make(), make(lowercase=True)
    text = "A Dog, isn't it? \u201eJa\u201c"
    assert lower.decode(lower(text)["input_ids"], skip_special_tokens=True) == text.lower()
    assert tokens(lower, text) == [token.lower() for token in tokens(plain, text)]
