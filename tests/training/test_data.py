import pytest

from training.data import ParallelText, encode, read_corpus, read_pair
from training.recipe import DataArguments
from training.tokenizer import train_tokenizer, vocabulary_sizes


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_files_are_read_line_by_line(write):
    text = read_pair(write("a.en", "one \r\ntwo\n"), write("a.de", "eins\nzwei\x0bdrei\u2028vier\n"))
    assert text.sources == ["one", "two"]
    assert text.targets == ["eins", "zwei\x0bdrei\u2028vier"]  # other separators do not end a line


def test_sides_of_different_length_are_refused(write):
    with pytest.raises(ValueError, match=r"a.en has 2 lines and .*a.de has 1"):
        read_pair(write("a.en", "one\ntwo\n"), write("a.de", "eins\n"))


def test_blank_lines_are_told_with_their_number(write):
    with pytest.raises(ValueError, match="a.de has 1 blank lines, the first at line 2"):
        read_pair(write("a.en", "one\ntwo\n"), write("a.de", "eins\n  \n"))


def test_bytes_that_are_no_text_are_told_with_their_line(write):
    with pytest.raises(ValueError, match="a.de, line 2: not UTF-8"):
        read_pair(write("a.en", "one\ntwo\n"), write("a.de", b"eins\nzw\xffei\n"))


def test_missing_files_are_told(tmp_path):
    with pytest.raises(ValueError, match="cannot read .*train.en.* --data_dir"):
        read_corpus(DataArguments(data_dir=str(tmp_path)))


def test_without_files_and_network_both_ways_out_are_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="could not be loaded from the Hub .* --data_dir"):
        read_corpus(DataArguments(dataset_name="no-such/dataset"))


def test_a_folder_that_was_given_is_never_replaced_by_the_hub(tmp_path):
    with pytest.raises(ValueError, match="cannot read .*train.en"):
        read_corpus(DataArguments(data_dir=str(tmp_path / "mine"), dataset_name="no-such/dataset"))


def test_encode_leaves_out_long_pairs_and_says_so(capsys):
    text = ParallelText(["a b c", "a"], ["x", "y y y y y y"])
    tokenizer = train_tokenizer(text.sources, text.targets, size=30, shared=True)
    data = encode(text, tokenizer, max_length=5)
    assert len(data) == 1
    assert "left out 1 of 2 pairs" in capsys.readouterr().out
    assert len(encode(text, tokenizer)) == 2
    with pytest.raises(ValueError, match="no pair has at most max_length=1"):
        encode(text, tokenizer, max_length=1)


@pytest.mark.parametrize("shared", [True, False])
def test_tokenizers_round_trip(shared):
    sources = ["The 3 dogs run, don't they?", "A man's hat."]
    targets = ["Die 3 Hunde rennen – oder?", "Ein Hut für Müller."]
    tokenizer = train_tokenizer(sources, targets, size=120, shared=shared)
    assert [tokenizer.convert_tokens_to_ids(t) for t in ("<pad>", "<s>", "</s>", "<unk>")] == [0, 1, 2, 3]
    batch = tokenizer(sources, text_target=targets)
    assert tokenizer.batch_decode(batch["labels"], skip_special_tokens=True) == targets
    assert all(ids[-1] == 2 for ids in batch["labels"] + batch["input_ids"])
    sizes = vocabulary_sizes(tokenizer)
    assert (sizes[0] == sizes[1]) == shared
    assert max(sizes) <= 120
