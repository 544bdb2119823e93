import errno
import json
import shutil

import pytest
from datasets import Dataset, are_progress_bars_disabled
from transformers import AutoTokenizer, M2M100Tokenizer, NllbTokenizerFast

from training.data.parallel_text import ParallelText
from training.data.tokenization import sequence_lengths, tokenize_corpus, tokenize_rows, validate_eval_lengths
from training.data.tokenizer import train_tokenizer
from training.recipe.arguments import DataArguments, TokenizerArguments


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("training.data.tokenization.HF_DATASETS_CACHE", str(tmp_path))
    return tmp_path / "vanilla_transformer"


def test_drops_pairs_and_reports_them(tokenizer, read_messages):
    text = ParallelText(["w1 w2 w3", "w1", "w1 w2"], ["w1", "w2 w2 w2 w2 w2 w2", "w3 w3"])
    data = tokenize_corpus(text, tokenizer, DataArguments(max_length=5))
    assert len(data) == 2
    assert "dropped 1 of 3 pairs: a side has more than max_length=5 tokens" in read_messages()
    data = tokenize_corpus(text, tokenizer, DataArguments(max_length=5, max_length_ratio=1.5))
    assert [len(row["labels"]) for row in data] == [3]
    assert "1 of 3 pairs: one side has more than max_length_ratio=1.5" in read_messages()
    assert sum(text.dropped.values()) == 3  # of both calls
    assert len(tokenize_corpus(text, tokenizer)) == 3
    with pytest.raises(ValueError, match=r"no training pairs are left: a side has more .*\. Increase max_length=1\."):
        tokenize_corpus(text, tokenizer, DataArguments(max_length=1))
    unequal = ParallelText(["w1"], ["w1 w2 w3 w4 w5"])
    with pytest.raises(ValueError, match="one side has more than .* Increase max_length=256 or max_length_ratio=1.5"):
        tokenize_corpus(unequal, tokenizer, DataArguments(max_length_ratio=1.5))


def test_sequence_lengths(tokenizer):
    data = tokenize_corpus(ParallelText(["w1 w2", "w1", "w3"], ["w1", "w2 w3 w4", "w5"]), tokenizer)
    assert sequence_lengths(data).tolist() == [[3, 2], [2, 4], [2, 2]]
    assert sequence_lengths(data.select([2, 1])).tolist() == [[2, 2], [2, 4]]


@pytest.mark.parametrize("is_disabled", [False, True])
def test_progress_bars_are_hidden_without_a_terminal(tokenizer, monkeypatch, capsys, is_disabled):
    monkeypatch.setitem(are_progress_bars_disabled.__globals__, "_hf_datasets_progress_bars_disabled", is_disabled)
    tokenize_corpus(ParallelText(["w1"], ["w2"]), tokenizer)
    assert capsys.readouterr().err == ""
    assert are_progress_bars_disabled() is is_disabled


def test_caches_by_content(tokenizer, cache):
    text = ParallelText(["w1 w2"], ["w3"])
    first = tokenize_corpus(text, tokenizer)
    (file,) = cache.glob("*.arrow")
    stamp = file.stat().st_mtime_ns
    assert tokenize_corpus(ParallelText(["w1 w2"], ["w3"]), tokenizer)[0] == first[0]
    assert file.stat().st_mtime_ns == stamp
    assert tokenize_corpus(ParallelText(["w1 w2"], ["w4"]), tokenizer)[0] != first[0]
    assert len(list(cache.glob("*.arrow"))) == 2


def test_cache_depends_on_all_files_of_a_slow_tokenizer(marian_files, tmp_path):
    """Files of other content at the same path, as in a corrected run, give another result."""
    text = ParallelText(["der Hund schläft"], ["the dog sleeps"])
    folder = shutil.copytree(marian_files, tmp_path / "files")
    tokenize_corpus(text, AutoTokenizer.from_pretrained(folder))
    tokens = list(json.loads((folder / "target_vocab.json").read_text()))
    reversed_ids = {token: i for i, token in enumerate([*tokens[:3], *reversed(tokens[3:])])}
    (folder / "target_vocab.json").write_text(json.dumps(reversed_ids))
    assert_equals_tokenizer(text, AutoTokenizer.from_pretrained(folder))
    for side, other in (("source", "target"), ("target", "source")):
        shutil.copy(marian_files / f"{other}.spm", folder / f"{side}.spm")
    assert_equals_tokenizer(text, AutoTokenizer.from_pretrained(folder))


def test_cache_depends_on_the_languages_of_a_slow_tokenizer(sentencepiece_models, tmp_path):
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "▁the", "▁dog"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (tmp_path / "model.spm").write_bytes(sentencepiece_models["en"])
    files = str(tmp_path / "vocab.json"), str(tmp_path / "model.spm")
    text, folder = ParallelText(["the dog"], ["dog"]), tmp_path / "saved"
    for source, target in (("en", "de"), ("de", "en")):
        M2M100Tokenizer(*files, src_lang=source, tgt_lang=target).save_pretrained(folder)
        assert_equals_tokenizer(text, AutoTokenizer.from_pretrained(folder))


def assert_equals_tokenizer(text, tokenizer) -> None:
    (row,) = tokenize_corpus(text, tokenizer)
    assert row["input_ids"] == tokenizer(text.sources)["input_ids"][0]
    assert row["labels"] == tokenizer(text_target=text.targets)["input_ids"][0]


def test_errors_of_the_tokenizer_are_no_disk_errors(tokenizer):
    tokenizer.backend_tokenizer.model.unk_token = "<missing>"
    with pytest.raises(Exception, match="WordLevel error: Missing") as raised:
        tokenize_corpus(ParallelText(["unknown"], ["w2"]), tokenizer)
    assert not isinstance(raised.value, OSError)


def test_reports_full_disk_with_the_path_of_the_cache(tokenizer, cache, monkeypatch):
    def fail(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Dataset, "map", fail)
    with pytest.raises(OSError, match=f"{cache} could not be written: No space left.* HF_DATASETS_CACHE"):
        tokenize_corpus(ParallelText(["w1"], ["w2"]), tokenizer)


def test_bpe_dropout_tokenizes_at_each_access():
    sentences = ["the quick brown fox", "jumps over the lazy dog"]
    tokenizer = train_tokenizer(sentences, sentences, TokenizerArguments(tokenizer_vocab_size=100))
    data = tokenize_corpus(ParallelText(sentences, sentences), tokenizer, DataArguments(), dropout=0.5)
    assert len({str(data[[0, 1]]["input_ids"]) for _ in range(6)}) > 1
    fixed = tokenize_corpus(ParallelText(sentences, sentences), tokenizer)
    assert (sequence_lengths(data) == sequence_lengths(fixed)).all()
    assert set(data[0]) == {"input_ids", "labels"}


def test_bpe_dropout_respects_max_length():
    """Longer sentences would exceed the learned positions of a model."""
    sentences = ["the quick brown fox", "jumps over the lazy dog", "fox"]
    tokenizer = train_tokenizer(sentences, sentences, TokenizerArguments(tokenizer_vocab_size=100))
    limit = int(sequence_lengths(tokenize_corpus(ParallelText(sentences, sentences), tokenizer)).max())
    data = tokenize_corpus(ParallelText(sentences, sentences), tokenizer, DataArguments(max_length=limit), dropout=0.5)
    seen = [row for _ in range(20) for row in data[[0, 1, 2]]["labels"]]
    assert max(map(len, seen)) <= limit
    assert len({str(row) for row in seen}) > 3


def test_rejects_overlong_evaluation_sentences(tokenizer):
    """Evaluation data are not filtered, and attention over a million tokens would need terabytes."""
    corpus = {name: ParallelText(["w1", "w1 " * 1100], ["w2", "w2"]) for name in ("train", "test")}
    with pytest.raises(
        ValueError, match="the test set has sentences of more than 1024 tokens, at line 2: .*max_length"
    ):
        validate_eval_lengths(corpus, tokenizer, DataArguments())
    validate_eval_lengths(corpus, tokenizer, DataArguments(max_length=300))
    with pytest.raises(ValueError, match="more than 500 tokens, at line 2: .* than max_position_embeddings=500"):
        validate_eval_lengths(corpus, tokenizer, DataArguments(max_length=300), positions=500)


def test_fast_path_replaces_ids_that_the_model_lacks():
    """Tokenizers of imported models can have more tokens than the model."""
    arguments = TokenizerArguments(tokenizer_type="word", shared_vocabulary=False)
    tokenizer = train_tokenizer(["a b c d"], ["e f g h"], arguments)
    tokenizer.known = [6, 7]
    text = ParallelText(["a b c d"], ["e f g h"])
    (row,) = tokenize_corpus(text, tokenizer)
    assert row["input_ids"] == tokenizer(text.sources[0])["input_ids"]
    assert row["labels"] == tokenizer(text_target=text.targets[0])["input_ids"]
    assert (row["input_ids"].count(3), row["labels"].count(3)) == (2, 1)


def test_labels_have_the_language_token_of_the_target():
    """A fast NLLB tokenizer has one backend, whose language token changes between source and target."""
    vocab = {token: i for i, token in enumerate(("<s>", "<pad>", "</s>", "<unk>", "▁", "a", "b", "▁a", "▁b"))}
    tokenizer = NllbTokenizerFast(
        vocab=vocab, merges=[("▁", "a"), ("▁", "b")], src_lang="eng_Latn", tgt_lang="deu_Latn"
    )
    sources, targets = ["a b", "b"] * 3000, ["b", "a a"] * 3000
    expected = {"input_ids": tokenizer(sources)["input_ids"], "labels": tokenizer(text_target=targets)["input_ids"]}
    assert expected["input_ids"][0][0] != expected["labels"][0][0]
    assert tokenize_rows(tokenizer, sources, targets) == expected
    assert tokenizer("b")["input_ids"] == expected["input_ids"][1]
    first = tokenize_corpus(ParallelText(["a"], ["b"]), tokenizer)[0]
    tokenizer.tgt_lang = "fra_Latn"
    assert tokenize_corpus(ParallelText(["a"], ["b"]), tokenizer)[0] != first  # cached per language
