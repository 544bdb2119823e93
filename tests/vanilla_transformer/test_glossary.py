"""Glossaries: all terms occur as separate words, and sentences without terms do not change."""

import math
import random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, TokenizersBackend

from vanilla_transformer import TranslationPipeline
from vanilla_transformer.generation_vanilla_transformer import beam_search
from vanilla_transformer.glossary_vanilla_transformer import GlossaryMatcher, LexicalConstraints

pytestmark = pytest.mark.usefixtures("search_mode")

CONTINUATION_MASK = torch.arange(30) >= 25  # these tokens continue an unfinished word
WORD_END_MASK = torch.arange(30) % 5 != 1  # these tokens leave a word unfinished
MASKS = torch.stack([CONTINUATION_MASK, WORD_END_MASK, WORD_END_MASK, torch.zeros(30).bool()])
NO_MASKS = torch.zeros(4, 30, dtype=torch.bool)


def term_ends(row: list[int], ids: list[int]) -> list[int]:
    """Return the positions where the ids end in a row as a separate word."""
    ends = [i + len(ids) for i in range(len(row)) if row[i : i + len(ids)] == ids]
    return [end for end in ends if end == len(row) or not (CONTINUATION_MASK[row[end]] and WORD_END_MASK[ids[-1]])]


def sample_terms(generator: random.Random) -> list[list[list[int]]]:
    """Return 0 to 3 terms with 1 or 2 variants of 1 to 3 tokens."""
    return [
        [
            [generator.randrange(4, 25), *(generator.randrange(4, 30) for _ in range(generator.randint(0, 2)))]
            for _ in range(generator.randint(1, 2))
        ]
        for _ in range(generator.randint(0, 3))
    ]  # fmt: skip


def test_every_term_occurs(make_model, source):
    for seed in range(6):
        generator = random.Random(seed)
        model = make_model(seed, vocab_size=30)
        terms = [sample_terms(generator) for _ in range(5)]
        for num_beams in (2, 5):
            found = model.generate(
                **source, num_beams=num_beams, max_new_tokens=18, custom_generate=beam_search,
                glossary=LexicalConstraints(terms, *MASKS),
            )  # fmt: skip
            for row, own in zip(found.tolist(), terms, strict=True):
                row = row[: row.index(2)] if 2 in row else row
                assert all(any(term_ends(row, variant) for variant in variants) for variants in own)


@pytest.mark.parametrize(
    ("terms", "needed"),
    [
        ([[[7, 8]], [[7, 8]]], [([[7, 8]], 2)]),
        ([[[7]], [[7]], [[7]]], [([[7]], 3)]),
        ([[[7, 8], [9]], [[9]]], [([[7, 8], [9]], 2), ([[9]], 1)]),
        ([[[7, 8], [9]], [[7, 8], [9]]], [([[7, 8], [9]], 2)]),
    ],
)
def test_terms_with_equal_translations_occur_separately(make_model, source, terms, needed):
    for seed in range(3):
        model = make_model(seed, vocab_size=30)
        for num_beams in (2, 5):
            found = model.generate(
                **source, num_beams=num_beams, max_new_tokens=18, custom_generate=beam_search,
                glossary=LexicalConstraints([terms] * 5, *MASKS),
            )  # fmt: skip
            for row in found.tolist():
                row = row[: row.index(2)] if 2 in row else row
                for variants, times in needed:
                    assert sum(len(term_ends(row, variant)) for variant in variants) >= times


def test_sentences_without_terms_do_not_change(make_model, source):
    """Another sentence of the batch has terms."""
    for seed in range(4):
        model = make_model(seed, vocab_size=30)
        options = {"num_beams": 4, "max_new_tokens": 12, "custom_generate": beam_search}
        free = model.generate(**source, **options)
        own = model.generate(**source, **options, glossary=LexicalConstraints([[], [[[7, 8]]], [], [], []], *NO_MASKS))
        for row in (0, 2, 3, 4):
            length = min(free.shape[1], own.shape[1])
            assert torch.equal(free[row, :length], own[row, :length])


def test_too_small_limit_drops_terms(make_model, source):
    model = make_model(vocab_size=30)
    glossary = LexicalConstraints([[[[7, 8, 9, 10]]]] * 5, *NO_MASKS)
    options = {"num_beams": 3, "custom_generate": beam_search, "glossary": glossary}
    assert model.generate(**source, **options, max_new_tokens=2).shape == (5, 3)
    complete = model.generate(**source, **options, max_new_tokens=5)
    assert all(term_ends(row, [7, 8, 9, 10]) for row in complete.tolist())


def test_scores_of_translations_with_missing_terms(make_model, source):
    """They equal the log-probabilities of the tokens. Results with all terms come first."""
    variant = [7, 8, 9]
    for seed, num_beams, limit, options in (
        (0, 4, 1, {}), (1, 4, 2, {"length_penalty": -1.0}), (2, 3, 3, {"early_stopping": "never"}),
        (3, 4, 4, {"early_stopping": True}), (0, 3, 2, {"forced_eos_token_id": 2}),
    ):  # fmt: skip
        model = make_model(seed, vocab_size=30)
        found = model.generate(
            **source, num_beams=num_beams, num_return_sequences=3, max_new_tokens=limit, custom_generate=beam_search,
            glossary=LexicalConstraints([[[variant]]] * 5, *MASKS), return_dict_in_generate=True, **options,
        )  # fmt: skip
        rows = found.sequences
        inputs = {name: value.repeat_interleave(3, 0) for name, value in source.items()}
        with torch.no_grad():
            log_probs = model(**inputs, decoder_input_ids=rows[:, :-1]).logits.log_softmax(-1)
        values = log_probs.gather(-1, rows[:, 1:, None])[..., 0]
        if "forced_eos_token_id" in options:
            values[:, limit - 1] = 0.0  # a forced token has the probability 1
        lacks = []
        for row, own, score in zip(rows.tolist(), values, found.sequences_scores.tolist(), strict=True):
            length = row.index(2) if 2 in row else limit
            expected = own[:length].sum() / length ** options.get("length_penalty", 1.0)
            assert score == pytest.approx(float(expected), abs=1e-4)
            lacks.append(not term_ends(row[: length + 1], variant))
        assert any(lacks) or limit > len(variant)
        order = [list(zip(lacks[i : i + 3], -found.sequences_scores[i : i + 3], strict=True)) for i in range(0, 15, 3)]
        assert all(each == sorted(each) for each in order)


def test_complete_term_is_not_continued(make_model, source):
    model = make_model(vocab_size=30, lm_head_bias=True)
    with torch.no_grad():
        model.lm_head.bias[25:] = 20.0  # these tokens continue a word
    for terms in ([[[7, 8]]], [[[7, 8]], [[9]]]):
        for num_beams in (2, 4):
            found = model.generate(
                **source, num_beams=num_beams, max_new_tokens=8, custom_generate=beam_search,
                glossary=LexicalConstraints([terms] * 5, *MASKS),
            )  # fmt: skip
            assert all(term_ends(row, ids) for row in found.tolist() for [ids] in terms)


@pytest.mark.parametrize("num_terms", [2, 3])
def test_terms_with_the_same_first_token(make_model, source, num_terms):
    """After it, only one of the terms is begun."""
    terms = [[[5, 4, 6]], [[5, 7, 8]], [[5, 9, 10]]][:num_terms]
    for seed, num_beams in ((0, 2), (1, 4), (2, 5)):
        model = make_model(seed, vocab_size=30, lm_head_bias=True)
        with torch.no_grad():
            model.lm_head.bias[[5, 11]] = torch.tensor([2.0, 4.0])
        found = model.generate(
            **source, num_beams=num_beams, max_new_tokens=30, custom_generate=beam_search,
            glossary=LexicalConstraints([terms] * 5, *MASKS),
        )  # fmt: skip
        assert all(term_ends(row, ids) for row in found.tolist() for [ids] in terms)


@pytest.mark.parametrize(
    ("terms", "hypothesis", "expected"),
    [
        ([[[5, 4, 6]], [[5, 7, 8]], [[5, 9, 10]]], [11, 5], 8),
        ([[[5, 4, 6]], [[5, 7, 8]], [[5, 9, 10]]], [11, 5, 7], 7),
        ([[[7, 8]], [[7, 8], [5, 6]]], [11], 4),
        ([[[7, 8]], [[7, 8], [5, 6]]], [5, 6, 11, 7], 2),  # the same tokens complete both terms
        ([[[7, 8]], [[7, 8], [5, 6]]], [5, 6, 7, 8], 0),
        ([[[6, 7, 4]], [[7, 4]]], [6, 7, 4], 0),
    ],
)
def test_missing_tokens(terms, hypothesis, expected):
    constraints = LexicalConstraints([terms], *NO_MASKS)
    active = torch.tensor([0])
    counts, suffixes = constraints.match_state(torch.tensor([[hypothesis]]), active)
    progress = (suffixes * torch.arange(suffixes.shape[-1])).amax(-1)
    assert constraints.count_missing_tokens(counts, progress, active).tolist() == [[expected]]


@pytest.mark.parametrize(("options", "what"), [({"num_beams": 1}, "single beam"), ({"do_sample": True}, "do_sample")])
def test_rejects_incompatible_options(make_model, source, options, what):
    options = {"num_beams": 2, "max_new_tokens": 4, "glossary": LexicalConstraints([[]] * 5, *NO_MASKS)} | options
    with pytest.raises(ValueError, match=f"a glossary with .*{what}"):
        make_model(vocab_size=30).generate(**source, custom_generate=beam_search, **options)


@pytest.fixture
def tokenizer(train_bpe, sentences, special_tokens):
    texts = sentences["en"] + sentences["de"] + ["abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
    return TokenizersBackend(tokenizer_object=train_bpe(texts, 130), **special_tokens)


def test_terms_match_words_ignoring_case(tokenizer):
    words = {"man": "Mann", "old man": "Greis", "US": "USA", "us": "uns", "dog": ["Hund", "Hunde"]}
    matcher = GlossaryMatcher(words, tokenizer)
    assert matcher.find("The Old Man sees a dog.") == {"Old Man": ["Greis"], "dog": ["Hund", "Hunde"]}
    assert matcher.find("A man, a Man and a womanly manner") == {"man": ["Mann"]}
    assert matcher.find("The US and us") == {"US": ["USA"], "us": ["uns"]}
    assert matcher.find("dogs") == {}
    assert GlossaryMatcher({}, tokenizer).find("anything") == {}


@pytest.mark.parametrize("text", ["an old\xa0man", "an old  man", "an Old\n\tman", "an old\u202fman"])
def test_terms_match_any_white_space(tokenizer, text):
    """Tokenizers read it as one space."""
    matcher = GlossaryMatcher({"old  man": "Mann"}, tokenizer)
    assert [term.lower() for term in matcher.find(text)] == ["old man"]
    assert list(matcher.find("an oldman")) == []


def test_terms_match_decomposed_characters(tokenizer):
    assert list(GlossaryMatcher({"café": "Haus"}, tokenizer).find("the cafe\u0301")) == ["café"]


def test_terms_with_equal_translations_are_reported_separately(tokenizer):
    words = {"dog": "Hund", "man": ["Mann", "Hund"], "Dog": "Hund", "old": "Hund"}
    matcher = GlossaryMatcher(words, tokenizer)
    sentence = "a dog, an old Dog and a man"
    assert list(matcher.find(sentence)) == ["dog", "old", "man"]
    reports = [[each["target"] for each in matcher.report_terms(sentence, text)] for text in (
        "ein Hund", "Hund und Hund", "Mann Hund Hunde Hund", "Hund Hund Hund"
    )]  # fmt: skip
    assert reports == [["Hund", None, None], ["Hund", "Hund", None], ["Hund", "Hund", "Mann"], ["Hund"] * 3]
    matcher = GlossaryMatcher({"dog": ["Hund", "Hunde"], "man": ["Hund", "Mann"]}, tokenizer)
    report = matcher.report_terms("a dog and a man", "Hund und Hunde")
    assert [each["target"] for each in report] == ["Hunde", "Hund"]


@pytest.mark.parametrize("shared", [True, False])
def test_pipeline_repeats_equal_translations(make_model, make_tokenizer, shared):
    tokenizer, fields = make_tokenizer(shared)
    translator = TranslationPipeline(model=make_model(**fields), tokenizer=tokenizer, max_new_tokens=25)
    for each in translator(["the dog and the cat"] * 2, glossary={"dog": "Hund", "cat": "Hund"}):
        assert [term["target"] for term in each["terms"]] == ["Hund", "Hund"]
        assert each["translation_text"].split().count("Hund") >= 2


def test_pipeline_returns_several_translations_with_default_beams(make_model, make_tokenizer):
    tokenizer, fields = make_tokenizer(True)
    translator = TranslationPipeline(model=make_model(**fields), tokenizer=tokenizer, max_new_tokens=25)
    first, second = translator("the dog", glossary={"dog": "Hund"}, num_return_sequences=2)[0:2]
    assert first["translation_text"] != second["translation_text"]


def test_byte_level_tokenizers(make_model):
    """Without a prefix space, the first word of a text has different tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *alphabet])}
    rust = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = TokenizersBackend(tokenizer_object=rust, **names)
    first, following = GlossaryMatcher({"dog": "Hund"}, tokenizer).ids["Hund"]
    assert tokenizer.convert_ids_to_tokens(first) == list("Hund")
    assert tokenizer.convert_ids_to_tokens(following) == list("ĠHund")
    for seed in range(4):
        model = make_model(seed, vocab_size=len(tokenizer))
        translator = TranslationPipeline(model=model, tokenizer=tokenizer, max_new_tokens=16)
        for each in translator(["the dog", "dog"], glossary={"dog": "Hund"}):
            assert each["terms"] == [{"source": "dog", "target": "Hund"}]


def test_sentence_does_not_depend_on_its_batch(make_model, make_tokenizer):
    tokenizer, fields = make_tokenizer(True)
    texts = ["the dog runs", "a cat sleeps in the house", "two birds sing", "the old man reads a book"]
    for seed in range(4):
        translator = TranslationPipeline(model=make_model(seed, **fields), tokenizer=tokenizer, max_new_tokens=12)
        batched = [each["translation_text"] for each in translator(texts, glossary={"dog": "Hund"})]
        assert batched == [translator(text, glossary={"dog": "Hund"})[0]["translation_text"] for text in texts]


def test_model_vocabulary_larger_than_tokenizer(make_model, make_tokenizer):
    tokenizer, fields = make_tokenizer(True)
    for seed in range(4):
        model = make_model(seed, vocab_size=fields["vocab_size"] + 30)
        translator = TranslationPipeline(model=model, tokenizer=tokenizer, max_new_tokens=12)
        (found,) = translator("the dog runs", glossary={"dog": "Hund"})
        assert found["terms"] == [{"source": "dog", "target": "Hund"}]


def test_normalized_terms_are_reported(make_model, make_tokenizer):
    tokenizer, fields = make_tokenizer(True)
    rust = tokenizer.backend_tokenizer
    rust.normalizer = normalizers.Lowercase()
    translator = TranslationPipeline(model=make_model(**fields), tokenizer=tokenizer, max_new_tokens=12)
    (found,) = translator("the dog runs", glossary={"dog": "Hund"})
    assert "hund" in found["translation_text"].split()
    assert found["terms"] == [{"source": "dog", "target": "Hund"}]


@pytest.mark.parametrize(
    ("term", "sentence"), [("istanbul", "İstanbul runs"), ("İstanbul", "istanbul runs"), ("ſun", "the Sun")]
)
def test_special_case_folding(tokenizer, term, sentence):
    assert list(GlossaryMatcher({term: "Hund"}, tokenizer).find(sentence).values()) == [["Hund"]]


def test_combining_marks_belong_to_words(train_bpe, special_tokens):
    texts = ["पानी कम है", "पानी की कमी है", "the cafe", "the cafe\u0301"]
    tokenizer = TokenizersBackend(tokenizer_object=train_bpe(texts, 80), **special_tokens)
    matcher = GlossaryMatcher({"कम": "the", "cafe": "the", "the": "कम"}, tokenizer)
    assert [list(matcher.find(text)) for text in texts] == [["कम"], [], ["the", "cafe"], ["the"]]
    assert matcher.report_terms("the", "पानी की कमी है") == [{"source": "the", "target": None}]
    assert matcher.masks[0][tokenizer.convert_tokens_to_ids("ी")]
    assert list(matcher.find("10² the²")) == []
    symbols = ["\u2764\ufe0fthe", "the\ufe0f", "1\ufe0f\u20e3the", "葛\U000e0100the"]  # variants of symbols
    assert [list(matcher.find(text)) for text in symbols] == [["the"]] * 4


def test_ids_without_a_token(make_model):
    """Imported tokenizers can have such ids, because the model has a row for each id."""
    ids = dict(zip(["<s>", "<pad>", "</s>", "<unk>", "w8", "w9", "w10"], [0, 1, 2, 3, 8, 9, 10], strict=True))
    backend = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = TokenizersBackend(tokenizer_object=backend, **special)
    model = make_model(vocab_size=11, pad_token_id=1, eos_token_id=2, decoder_start_token_id=0)
    translator = TranslationPipeline(model=model, tokenizer=tokenizer, max_new_tokens=6)
    (found,) = translator("w8 w9", glossary={"w8": "w10"})
    assert found["terms"] == [{"source": "w8", "target": "w10"}]


def test_forced_eos_without_a_limit(make_model, make_tokenizer):
    """Sentences of such a batch must have equal lengths, but those with terms precede the others."""
    tokenizer, fields = make_tokenizer(True)
    model = make_model(**fields)
    model.generation_config.forced_eos_token_id = tokenizer.eos_token_id
    translator = TranslationPipeline(model=model, tokenizer=tokenizer, num_beams=2)
    texts = ["dog Hund", "dog", "cat Hund"]
    expected = [translator(text, glossary={"dog": "Hund"})[0] for text in texts]
    assert translator(texts, glossary={"dog": "Hund"}) == expected


def test_marian_tokenizer_with_two_vocabularies(make_model, marian_files):
    tokenizer = AutoTokenizer.from_pretrained(marian_files)
    sizes = {"vocab_size": 37, "decoder_vocab_size": 29, "share_encoder_decoder_embeddings": False}
    model = make_model(**sizes, pad_token_id=2, eos_token_id=0, decoder_start_token_id=2)
    translator = TranslationPipeline(model=model, tokenizer=tokenizer, max_new_tokens=12)
    (found,) = translator("der Hund", glossary={"Hund": "dog"})
    assert found["terms"] == [{"source": "Hund", "target": "dog"}]
    tokens = {i: token for token, i in tokenizer.target_encoder.items()}
    special = {*tokenizer.all_special_ids}
    expected = [i in special or tokens[i][0].isalpha() for i in range(29)]
    assert GlossaryMatcher({"Hund": "dog"}, tokenizer).masks[0].tolist() == expected
    with pytest.raises(ValueError, match="stop_strings does not support a MarianTokenizer with two"):
        translator("der Hund", stop_strings=["dog"])


def test_scripts_without_spaces(make_model, train_bpe, special_tokens):
    texts = ["我的猫睡在家里", "老狗在跑", "the dog runs", "a cat sleeps"]
    tokenizer = TokenizersBackend(tokenizer_object=train_bpe(texts, 80), **special_tokens)
    matcher = GlossaryMatcher({"猫": "cat", "dog": "狗"}, tokenizer)
    assert matcher.find("我的猫睡在家里") == {"猫": ["cat"]}
    assert matcher.find("the dogs") == {}
    assert matcher.report_terms("the dog", "老狗在跑") == [{"source": "dog", "target": "狗"}]
    assert not matcher.masks[0][tokenizer.convert_tokens_to_ids("狗")]
    translator = TranslationPipeline(model=make_model(vocab_size=len(tokenizer)), tokenizer=tokenizer)
    (found,) = translator("the dog runs", glossary={"dog": "狗"}, max_new_tokens=8)
    assert found["terms"] == [{"source": "dog", "target": "狗"}]


@pytest.mark.parametrize(
    ("term", "text", "is_found"),
    [
        ("网络", "我使用5G网络。", True),
        ("手机", "iPhone手机很贵", True),
        ("年", "2024年", True),
        ("5G网络", "The 5G网络", True),
        ("5G网络", "The 15G网络", False),
        ("%", "50% now", True),
        ("°C", "20°C", True),
        ("(TM)", "Foo(TM)s", True),
        ("C++", "C++11", True),
        ("U.S.", "the U.S. and", True),
        ("U.S.", "the U.S.A. and", False),
        (".NET", "ASP.NET", False),
        ("dog", "dog's", True),
        ("dog", "5dog", False),
    ],
)
def test_terms_next_to_other_kinds_of_characters(train_bpe, special_tokens, term, text, is_found):
    """A term is not a part of a word, whether it is found in the source or in the translation."""
    tokenizer = TokenizersBackend(tokenizer_object=train_bpe([term, text, "a dog"] * 3, 80), **special_tokens)
    assert list(GlossaryMatcher({term: "dog"}, tokenizer).find(text)) == [term] * is_found
    (report,) = GlossaryMatcher({"dog": term}, tokenizer).report_terms("a dog", text)
    assert report["target"] == (term if is_found else None)


@pytest.mark.parametrize(
    "glossary", [{"dog": ""}, {"": "Hund"}, {"dog": []}, {"dog": ["Hund", 3]}, {"dog": 3}, {"dog": None}]
)
def test_rejects_invalid_entries(tokenizer, glossary):
    with pytest.raises(ValueError, match="must be a term and its translation"):
        GlossaryMatcher(glossary, tokenizer)


def test_rejects_unknown_characters(tokenizer):
    with pytest.raises(ValueError, match="does not know all characters of '☃'"):
        GlossaryMatcher({"dog": "☃"}, tokenizer)


def test_continuation_mask(tokenizer):
    texts = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    mask = GlossaryMatcher({}, tokenizer).masks[0]
    assert {text for text, continues in zip(texts, mask, strict=True) if not continues} == {
        text for text in texts if text.startswith("▁")
    }


def make_byte_tokenizer(special_tokens: dict[str, str]) -> TokenizersBackend:
    """Return a tokenizer whose tokens are bytes."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=0, special_tokens=[*special_tokens.values()], initial_alphabet=alphabet)
    backend.train_from_iterator([], trainer)
    return TokenizersBackend(tokenizer_object=backend, **special_tokens)


@pytest.mark.parametrize(
    ("term", "favorite", "is_byte_level"),
    [("U.S.", "A", False), ("U.S.", "A", True), ("vor-", "s", False), ("café", "s", True), ("Hund", "s", False)],
)
def test_term_is_not_the_start_of_a_word(make_model, train_bpe, special_tokens, term, favorite, is_byte_level):
    """The model prefers to continue the last word."""
    if is_byte_level:  # "é" has two tokens
        tokenizer = make_byte_tokenizer(special_tokens)
    else:
        backend = train_bpe([f"a dog {term} x{favorite}"] * 3, 60)
        tokenizer = TokenizersBackend(tokenizer_object=backend, **special_tokens)
    for seed in range(4):
        model = make_model(seed, vocab_size=len(tokenizer), lm_head_bias=True)
        model.generation_config.update(suppress_tokens=[0, 1, 3])
        with torch.no_grad():
            model.lm_head.bias[tokenizer.convert_tokens_to_ids(favorite)] = 4
        translator = TranslationPipeline(model=model, tokenizer=tokenizer)
        (found,) = translator("a dog", glossary={"dog": term}, num_beams=2, max_new_tokens=24)
        assert found["terms"] == [{"source": "dog", "target": term}], found["translation_text"]


@pytest.mark.parametrize("is_byt5", [False, True])
@pytest.mark.parametrize(
    ("before", "term", "after", "is_found"),
    [
        ("", "Hund", "ä", False),
        ("ä", "Hund", "", False),
        ("Д", "дом", "", False),
        ("a ", "дом", "ы", False),
        ("", "Übung", "한", False),
        ("„", "Hund", "“", True),
        ("é ", "Übung", " é", True),
        ("A", "猫", "A", True),
        ("我", "Hund", "我", True),
        ("5", "°C", "", True),
    ],
)
def test_terms_next_to_characters_of_multiple_tokens(special_tokens, is_byt5, before, term, after, is_found):
    """The first byte of a character shows whether it is a letter."""
    tokenizer = ByT5Tokenizer() if is_byt5 else make_byte_tokenizer(special_tokens)
    matcher = GlossaryMatcher({"dog": term}, tokenizer)
    assert matcher.report_terms("dog", before + term + after) == [
        {"source": "dog", "target": term if is_found else None}
    ]
    constraints = LexicalConstraints([[matcher.ids[term]]], *matcher.masks)
    ids = tokenizer(f"!{before}{term}{after}", add_special_tokens=False)["input_ids"]
    end = tokenizer(" ", add_special_tokens=False)["input_ids"]
    counts, _ = constraints.match_state(torch.tensor([[ids + end]]), torch.tensor([0]))
    assert counts.tolist() == [[[int(is_found)]]]


def test_the_token_of_an_unknown_byte_is_not_part_of_a_character(train_bpe, special_tokens):
    """A vocabulary may contain U+FFFD itself."""
    tokenizer = TokenizersBackend(tokenizer_object=train_bpe([*["a Hund dog"] * 3, "\ufffd"], 60), **special_tokens)
    matcher = GlossaryMatcher({"dog": "Hund"}, tokenizer)
    constraints = LexicalConstraints([[matcher.ids["Hund"]]], *matcher.masks)
    ids = tokenizer("a Hund\ufffd a", add_special_tokens=False)["input_ids"]
    assert "\ufffd" in tokenizer.convert_ids_to_tokens(ids)
    counts, _ = constraints.match_state(torch.tensor([[ids]]), torch.tensor([0]))
    assert counts.tolist() == [[[1]]]


@pytest.fixture
def end_of_word_tokenizer(special_tokens):
    """Tokens of BPE codes: "Mann</w>" ends a word, "Haus" does not. Words are separated when they end."""
    vocabulary = ["<pad>", "<s>", "</s>", "<unk>", "M", "a", "n", "n</w>", "H", "u", "s", "s</w>", "x</w>", "a</w>"]
    merges = [("M", "a"), ("n", "n</w>"), ("Ma", "nn</w>"), ("H", "a"), ("u", "s"), ("Ha", "us"), ("u", "s</w>")]
    merges.append(("Ha", "us</w>"))
    vocabulary += ["".join(merge) for merge in merges]
    ids = {token: id for id, token in enumerate(vocabulary)}
    backend = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.WhitespaceSplit(), decoders.BPEDecoder()
    return TokenizersBackend(tokenizer_object=backend, **special_tokens)


def test_masks_of_end_of_word_tokens(end_of_word_tokenizer):
    matcher = GlossaryMatcher({}, end_of_word_tokenizer)
    tokens = end_of_word_tokenizer.convert_ids_to_tokens(list(range(matcher.masks.shape[1])))
    assert matcher.masks[0].all()  # after an unfinished word
    unfinished = {token for token, is_set in zip(tokens, matcher.masks[1], strict=True) if is_set}
    assert unfinished == {token for token in tokens if not token.endswith(("</w>", ">"))}


def test_terms_are_not_parts_of_words_of_end_of_word_tokens(make_model, end_of_word_tokenizer):
    favorite = end_of_word_tokenizer.convert_tokens_to_ids("Haus")
    for seed in range(8):
        model = make_model(seed, vocab_size=len(end_of_word_tokenizer), lm_head_bias=True)
        model.generation_config.update(suppress_tokens=[0, 1, 3])
        with torch.no_grad():
            model.lm_head.bias[favorite] = 4
        translator = TranslationPipeline(model=model, tokenizer=end_of_word_tokenizer)
        for num_beams in (2, 4):
            (found,) = translator("Haus x", glossary={"x": "Mann"}, num_beams=num_beams, max_new_tokens=20)
            assert "Mann" in found["translation_text"].split()
            assert found["terms"] == [{"source": "x", "target": "Mann"}]


@pytest.mark.parametrize("shared", [True, False])
def test_pipeline_uses_terms(make_model, make_tokenizer, shared):
    tokenizer, fields = make_tokenizer(shared)
    model = make_model(**fields)
    translator = TranslationPipeline(model=model, tokenizer=tokenizer, max_new_tokens=25)
    glossary = {"dog": ["Hund", "Hundes"], "old man": "alte Mann"}
    texts = ["the dog runs", "two birds sing", "the old man reads a book to the Dog"]
    found = translator(texts, glossary=glossary)
    assert [[term["source"] for term in each["terms"]] for each in found] == [["dog"], [], ["old man", "Dog"]]
    assert all(term["target"] for each in found for term in each["terms"])
    assert found[1]["translation_text"] == translator(texts, num_beams=4)[1]["translation_text"]
    several = translator(texts, glossary=glossary, num_beams=3, num_return_sequences=2, return_scores=True)
    assert all(term["target"] for each in several for one in each[:1] for term in one["terms"])
    with pytest.raises(ValueError, match="a glossary with a single beam"):
        translator(texts, glossary=glossary, num_beams=1)
    with pytest.raises(ValueError, match="a glossary requires `beam_search`"):
        translator(texts, glossary=glossary, guidance_scale=2.0)


def test_ranks_candidates_that_are_too_late_by_score():
    """If no continuation can complete its terms, their order is that of their scores, in any order of input."""
    constraints = LexicalConstraints([[[[7, 8, 9]]]], *NO_MASKS[:, :12])
    values = torch.tensor([[[-1.2, -1.0, -1.1], [-1.3, -0.9, -1.4]]])
    selected, ids, parents, is_complete = constraints.select_candidates(
        values,
        torch.tensor([[[3, 4, 5], [3, 4, 5]]]),
        torch.full((1, 2, 12), -math.inf),
        torch.zeros(1, 2),
        torch.zeros(1, 2, 1, dtype=torch.long),
        torch.tensor([0]),
        torch.tensor([2]),
        torch.tensor([0]),
        4,
    )
    torch.testing.assert_close(selected, torch.tensor([[-0.9, -1.0, -1.1, -1.2]]))
    assert ids.tolist() == [[4, 4, 5, 3]]
    assert parents.tolist() == [[1, 0, 0, 0]]
    assert not is_complete.any()
