from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, models
from transformers import AutoTokenizer, NllbTokenizerFast, PreTrainedTokenizerFast

from training.data.tokenization import tokenize_rows
from training.data.tokenizer import add_bpe_dropout, load_training_tokenizer, train_tokenizer, vocabulary_sizes
from training.recipe.arguments import TokenizerArguments

SOURCES = ["The 3 dogs run, don't they?", "A man's hat."]
TARGETS = ["Die 3 Hunde rennen – oder?", "Ein Hut für Müller."]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", ["bpe", "unigram", "word", "char"])
def test_tokenizers_round_trip(kind, shared, tmp_path):
    arguments = TokenizerArguments(tokenizer_type=kind, tokenizer_vocab_size=120, shared_vocabulary=shared)
    train_tokenizer(SOURCES, TARGETS, arguments).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert [tokenizer.convert_tokens_to_ids(t) for t in ("<pad>", "<s>", "</s>", "<unk>")] == [0, 1, 2, 3]
    batch = tokenizer(SOURCES, text_target=TARGETS)
    assert tokenizer.batch_decode(batch["labels"], skip_special_tokens=True) == TARGETS
    assert all(ids[-1] == 2 for ids in batch["labels"] + batch["input_ids"])
    sizes = vocabulary_sizes(tokenizer)
    assert (getattr(tokenizer, "target_tokenizer", None) is None) == shared
    assert max(sizes) <= 120


@pytest.mark.parametrize("kind", ["bpe", "unigram", "char", "word"])
def test_white_space_is_one_space(kind):
    """Text from web pages and PDF files contains tabs and no-break spaces, which training data may lack."""
    arguments = TokenizerArguments(tokenizer_type=kind, tokenizer_vocab_size=40)
    tokenizer = train_tokenizer(["a dog sees the cat"] * 9, ["ein Hund"], arguments)
    expected = tokenizer("a dog sees")["input_ids"]
    for space in ("\t", "\xa0", "  ", "\u3000", " \n", "\u202f"):
        assert tokenizer(f"a{space}dog{space}sees")["input_ids"] == expected
    assert tokenizer.unk_token_id not in expected
    assert tokenizer("  a dog sees")["input_ids"] == expected


@pytest.mark.parametrize("kind", ["bpe", "unigram", "char"])
def test_spaces_around_added_tokens(kind):
    """The normalizer is applied to the text before, between and after them."""
    arguments = TokenizerArguments(tokenizer_type=kind, tokenizer_vocab_size=40)
    tokenizer = train_tokenizer(["are men and dogs"] * 9, ["sind"], arguments)
    tokenizer.add_tokens([AddedToken("<num>", normalized=False)])
    text = "are <num> men and <num> dogs"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_word_and_char_tokens():
    tokens = {}
    for kind in ("word", "char"):
        tokenizer = train_tokenizer(["ab c."], ["x"], TokenizerArguments(tokenizer_type=kind, shared_vocabulary=False))
        tokens[kind] = tokenizer.convert_ids_to_tokens(tokenizer("ab c.")["input_ids"])
    assert tokens == {"word": ["ab", "c.", "</s>"], "char": ["▁", "a", "b", "▁", "c", ".", "</s>"]}


@pytest.mark.parametrize("kind", ["bpe", "unigram", "word", "char"])
def test_special_tokens_in_the_text_get_no_second_id(kind):
    arguments = TokenizerArguments(tokenizer_type=kind, tokenizer_vocab_size=60, lowercase=True)
    tokenizer = train_tokenizer(["a <unk> b <pad>", "<UNK> c"], ["d </s> <s> e"], arguments)
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<s>", "</s>", "<unk>"]) == [0, 1, 2, 3]
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))
    assert tokenizer("a <unk> c")["input_ids"][-1] == tokenizer.eos_token_id
    if kind == "word":
        assert len(tokenizer) == 9
        assert tokenizer("<UNK> a")["input_ids"] == [3, tokenizer.convert_tokens_to_ids("a"), 2]


@pytest.mark.parametrize("shared", [True, False])
def test_bpe_dropout_returns_a_random_copy(shared):
    arguments = TokenizerArguments(tokenizer_vocab_size=200, shared_vocabulary=shared)
    tokenizer = train_tokenizer(SOURCES * 3, TARGETS * 3, arguments)
    before = tokenizer(SOURCES, text_target=TARGETS)
    noisy = add_bpe_dropout(tokenizer, 0.5)
    seen = {str(noisy(SOURCES, text_target=TARGETS)) for _ in range(5)}
    assert len(seen) > 1
    assert tokenizer(SOURCES, text_target=TARGETS) == before
    ids = noisy(text_target=TARGETS)["input_ids"]
    assert tokenizer.batch_decode(ids, skip_special_tokens=True) == TARGETS


@pytest.mark.parametrize("kind", ["unigram", "word", None])
def test_bpe_dropout_requires_bpe(kind):
    arguments = TokenizerArguments(tokenizer_type=kind, tokenizer_vocab_size=120, shared_vocabulary=False)
    tokenizer = train_tokenizer(SOURCES, TARGETS, arguments) if kind else SimpleNamespace()  # a slow tokenizer
    with pytest.raises(ValueError, match=r"bpe_dropout=0\.1 requires a fast BPE tokenizer"):
        add_bpe_dropout(tokenizer, 0.1)


def test_loads_tokenizer_path(tmp_path):
    trained = train_tokenizer(SOURCES, TARGETS, TokenizerArguments(tokenizer_vocab_size=90))
    trained.save_pretrained(tmp_path / "good")
    arguments = TokenizerArguments(tokenizer_path=str(tmp_path / "good"))
    assert train_tokenizer([], [], arguments).get_vocab() == trained.get_vocab()

    add_bpe_dropout(trained, 0.5).save_pretrained(tmp_path / "good")  # would also tokenize evaluation data at random
    assert train_tokenizer([], [], arguments)(SOURCES) == trained(SOURCES)

    no_eos = PreTrainedTokenizerFast(tokenizer_object=trained.backend_tokenizer, pad_token="<pad>")
    no_eos.save_pretrained(tmp_path / "no_eos")
    with pytest.raises(ValueError, match="has no eos_token"):
        train_tokenizer([], [], TokenizerArguments(tokenizer_path=str(tmp_path / "no_eos")))
    with pytest.raises(ValueError, match="cannot be loaded"):
        train_tokenizer([], [], TokenizerArguments(tokenizer_path=str(tmp_path / "nothing")))
    words = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "a": 2}, unk_token="<unk>"))
    no_unknown = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")
    no_unknown.save_pretrained(tmp_path / "words")
    with pytest.raises(ValueError, match="the vocabulary lacks '<unk>', for unknown words"):
        load_training_tokenizer(str(tmp_path / "words"), "tokenizer_path")


def test_rejects_tokenizer_without_target_language(tmp_path):
    """Its class would mark targets with the source language."""
    vocab = {token: i for i, token in enumerate(("<s>", "<pad>", "</s>", "<unk>", "▁", "b"))}
    languages = {"src_lang": "eng_Latn", "tgt_lang": "deu_Latn"}
    NllbTokenizerFast(vocab=vocab, merges=[], src_lang="eng_Latn").save_pretrained(tmp_path / "one")
    with pytest.raises(ValueError, match=r"base_model=.*one: the tokenizer has no tgt_lang"):
        load_training_tokenizer(str(tmp_path / "one"), "base_model")
    AutoTokenizer.from_pretrained(tmp_path / "one", **languages).save_pretrained(tmp_path / "both")
    tokenizer = load_training_tokenizer(str(tmp_path / "both"), "base_model")
    tokens = [
        tokenizer.convert_ids_to_tokens(tokenize_rows(tokenizer, ["b"], ["b"])[side][0][0])
        for side in ("input_ids", "labels")
    ]
    assert tokens == list(languages.values())


def test_limits_vocabulary_size():
    tokenizer = train_tokenizer(SOURCES, TARGETS, TokenizerArguments(tokenizer_vocab_size=10))
    assert vocabulary_sizes(tokenizer) == (10, 10)


@pytest.mark.parametrize("text", ["The 3 dogs run", "abc abc abc"])  # the library raises or hangs
def test_rejects_too_small_unigram_vocabulary(text):
    arguments = TokenizerArguments(tokenizer_type="unigram", tokenizer_vocab_size=5)
    with pytest.raises(
        ValueError, match=r"tokenizer_vocab_size=5 is too small for unigram: .* \d+ characters plus 4 special"
    ):
        train_tokenizer([text], [text], arguments)
