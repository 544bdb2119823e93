import json

import pytest
from datasets import Dataset, DatasetDict

from training.data import read_corpus, read_file, read_pair, stream_pairs
from training.recipe import DataArguments


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.fixture
def arguments(tmp_path):
    return lambda **keys: DataArguments(data_dir=str(tmp_path), **keys)


def test_files_are_read_line_by_line(write):
    text = read_pair(write("a.en", "\ufeffone \r\ntwo\n"), write("a.de", "eins\nzwei\x0bdrei\u2028vier\n"))
    assert text.sources == ["one", "two"]
    assert text.targets == ["eins", "zwei\x0bdrei\u2028vier"]  # other separators do not end a line


@pytest.mark.parametrize(("source", "target"), [("one\ntwo\nthree\n", "eins\n"), ("one\n", "eins\nzwei\ndrei")])
def test_sides_of_different_length_are_refused_even_where_lines_are_dropped(write, source, target):
    with pytest.raises(ValueError, match=r"has 1 lines and .* has 3"):
        read_pair(write("a.en", source), write("a.de", target), "drop")


def test_bad_lines_are_refused_or_dropped_with_their_numbers(write, capsys):
    paths = write("a.en", b"one\ntw\xffo\nthree\nfour\n"), write("a.de", "eins\nzwei\n  \nvier\n")
    with pytest.raises(ValueError, match="1 lines not UTF-8, at line 2"):
        read_pair(*paths)
    text = read_pair(*paths, "drop")
    assert (text.sources, text.targets) == (["one", "four"], ["eins", "vier"])
    assert list(text.numbers) == [1, 4]
    assert text.dropped == {"not UTF-8": 1, "blank": 1}
    assert "1 lines blank, at line 3" in capsys.readouterr().out


def test_many_numbers_are_shortened(write):
    with pytest.raises(ValueError, match="8 lines blank, at lines 1, 2, 3 and 5 more"):
        read_pair(write("a.en", "\n" * 8), write("a.de", "x\n" * 8))


def test_missing_files_are_told(arguments):
    with pytest.raises(ValueError, match=r"cannot read .*train.en.* --data_dir"):
        read_corpus(arguments())


PAIRS = [("one", "eins"), ("two", "zwei")]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.tsv", "one\teins\ntwo\tzwei\n"),
        ("t.jsonl", "".join(json.dumps({"en": s, "de": t, "id": 1}) + "\n" for s, t in PAIRS)),
        ("t.json", "".join(json.dumps({"translation": {"en": s, "de": t}}) + "\n" for s, t in PAIRS)),
    ],
)
def test_tables(write, arguments, name, content):
    write(name, content)
    text = read_file(arguments(), name)
    assert list(zip(text.sources, text.targets, strict=True)) == PAIRS
    assert [row["target"] for row in stream_pairs(arguments(train_file=name))] == ["eins", "zwei"]


@pytest.mark.parametrize("nested", [True, False])
def test_parquet_and_saved_datasets(tmp_path, arguments, nested):
    rows = [{"en": s, "de": t} for s, t in PAIRS]
    data = Dataset.from_list([{"translation": row} for row in rows] if nested else rows)
    data.to_parquet(tmp_path / "t.parquet")
    text = read_file(arguments(), "t.parquet")
    assert list(zip(text.sources, text.targets, strict=True)) == PAIRS
    DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "saved")
    corpus = read_corpus(DataArguments(dataset_name=str(tmp_path / "saved")))
    assert corpus["train"].sources == ["one", "two"]
    assert set(corpus) == {"train", "test"}


def test_several_references(write, arguments):
    write("t.tsv", "one\teins\tein\ntwo\tzwei\n")
    text = read_file(arguments(), "t.tsv")
    assert text.references == [["eins", "ein"], ["zwei"]]
    assert text.targets == ["eins", "zwei"]
    with pytest.raises(ValueError, match="more than two columns"):
        read_corpus(arguments(train_file="t.tsv", validation_file=None))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.tsv", "one eins\n", "line 1: no tab"),
        ("t.jsonl", '{"en": "a", "de": "b"}\n{"en":\n', "line 2: not a JSON object"),
        ("t.jsonl", '{"en": "a", "fr": "b"}\n', r"no text named 'de' \(there is: en, fr\).*--target_lang"),
        ("t.jsonl", "[1, 2]\n", "no text named 'en'"),
        ("t.parquet", "no such thing", "not a parquet file"),
    ],
)
def test_tables_that_are_not_what_their_name_says(write, arguments, name, content, message):
    write(name, content)
    with pytest.raises(ValueError, match=message):
        read_file(arguments(), name)


def test_overlap_is_told_with_line_numbers(write, arguments, capsys):
    for name, lines in {
        "train.en": "a\nb\nc\nd\n",
        "train.de": "1\n2\n3\n4\n",
        "val.en": "c\n",
        "val.de": "9\n",
    }.items():
        write(name, lines)
    assert len(read_corpus(arguments())["train"]) == 4
    assert "1 training pairs have a source of the validation set, at line 3: kept" in capsys.readouterr().out
    corpus = read_corpus(arguments(overlap="drop"))
    assert corpus["train"].targets == ["1", "2", "4"]
    assert corpus["train"].dropped["source held out"] == 1
    with pytest.raises(ValueError, match="at line 3"):
        read_corpus(arguments(overlap="refuse"))


def test_validation_out_of_the_training_data(write, arguments):
    write("train.en", "".join(f"{i}\n" for i in range(50)))
    write("train.de", "".join(f"{i}\n" for i in range(50)))
    keys = {"validation_file": None, "validation_size": 10}
    corpus, again = read_corpus(arguments(**keys)), read_corpus(arguments(**keys))
    assert sorted(corpus["train"].sources + corpus["validation"].sources) == sorted(map(str, range(50)))
    assert corpus["validation"].sources == corpus["validation"].targets == again["validation"].sources
    with pytest.raises(ValueError, match="there are only 50"):
        read_corpus(arguments(validation_file=None, validation_size=50))


def test_without_files_and_network_both_ways_out_are_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="could not be loaded .* --data_dir"):
        read_corpus(DataArguments(dataset_name="no-such/dataset"))


def test_a_folder_that_was_given_is_never_replaced_by_the_hub(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .*train.en"):
        read_corpus(DataArguments(data_dir=str(tmp_path / "mine"), dataset_name="no-such/dataset"))


def test_streams_refuse_or_drop_bad_lines_too(write, arguments):
    write("train.en", b"one\n\nth\xffree\nfour\n")
    write("train.de", "eins\nzwei\ndrei\nvier\n")
    assert [row["source"] for row in stream_pairs(arguments(bad_lines="drop"))] == ["one", "four"]
    with pytest.raises(ValueError, match="line 2: blank"):
        list(stream_pairs(arguments()))


def test_references_belong_to_the_lines_of_the_test_file(tmp_path):
    """Also where a line of the test file is left out."""
    for name, text in {"train.en": "x\n", "train.de": "y\n", "test.en": "a b\n\nc\n", "test.de": "A\nB\nC\n"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "refs.tsv").write_text("ab\tA\tAA\nb\tB\nc\tC\tCC\tCCC\n")
    arguments = DataArguments(
        data_dir=str(tmp_path), validation_file=None, test_file="test", test_references="refs.tsv", bad_lines="drop"
    )
    test = read_corpus(arguments)["test"]
    assert test.sources == ["a b", "c"]
    assert test.references == [["A", "AA"], ["C", "CC", "CCC"]]
