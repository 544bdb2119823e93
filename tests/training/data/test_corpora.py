from types import SimpleNamespace

import pytest
from datasets import Dataset, DatasetDict
from transformers import NllbTokenizerFast

from training.data import hub_datasets
from training.data.corpora import describe_corpus, read_corpus
from training.recipe.arguments import DataArguments
from training.run.factories import make_train_set


def test_reports_overlap_with_line_numbers(write, arguments, read_messages):
    for name, lines in {
        "train.en": "a\nb\nc\nd\n",
        "train.de": "1\n2\n3\n4\n",
        "val.en": "c\n",
        "val.de": "9\n",
    }.items():
        write(name, lines)
    assert len(read_corpus(arguments())["train"]) == 4
    assert "validation set: 1 of 1 sources are also in the training data, 0 have" in read_messages()
    corpus = read_corpus(arguments(on_eval_overlap="drop"))
    assert corpus["train"].targets == ["1", "2", "4"]
    assert corpus["train"].dropped["source held out"] == 1
    with pytest.raises(ValueError, match="at line 3"):
        read_corpus(arguments(on_eval_overlap="error"))


def test_splits_validation_from_training_data(write, arguments):
    write("train.en", "".join(f"{i}\n" for i in range(50)))
    write("train.de", "".join(f"{i}\n" for i in range(50)))
    keys = {"validation_file": None, "validation_size": 10}
    corpus, other = read_corpus(arguments(**keys)), read_corpus(arguments(**keys))
    assert sorted(corpus["train"].sources + corpus["validation"].sources) == sorted(map(str, range(50)))
    assert corpus["validation"].sources == corpus["validation"].targets == other["validation"].sources
    with pytest.raises(ValueError, match="must be less than the number of training pairs, 50"):
        read_corpus(arguments(validation_file=None, validation_size=50))


def test_missing_dataset_error_contains_remedies(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="could not be loaded .* --data-dir"):
        read_corpus(DataArguments(dataset_name="no-such/dataset"))


def test_files_have_priority_over_the_dataset(write, tmp_path, monkeypatch, read_messages):
    """The output states which data are used, because a directory `data` may exist by chance."""
    (tmp_path / "data").mkdir()
    for name in ("train.en", "train.de", "val.en", "val.de"):
        write(f"data/{name}", f"{name}\n")
    monkeypatch.chdir(tmp_path)
    assert read_corpus(DataArguments())["train"].sources == ["train.en"]
    assert read_messages() == ""
    assert read_corpus(DataArguments(dataset_name="user/name"))["train"].sources == ["train.en"]
    assert read_messages() == "reading the files in data, not the dataset user/name\n"


def test_explicit_data_dir_is_never_replaced_by_the_dataset(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .*train.en"):
        read_corpus(DataArguments(data_dir=str(tmp_path / "mine"), dataset_name="no-such/dataset"))


ROWS = {split: Dataset.from_list([{"en": f"{split} {i}", "de": "x"} for i in range(3)]) for split in ("train", "test")}


def read_metadata(keys: DataArguments) -> dict:
    """Return the metadata of each split without its hash."""
    splits = describe_corpus(read_corpus(keys), keys)
    assert all(split.pop("streamed", False) or len(split.pop("sha256")) == 64 for split in splits.values())
    return splits


def test_metadata_describes_files(write, arguments):
    for name in ("train.en", "train.de", "val.en", "val.de"):
        write(name, "1\n2\n3\n")
    write("test.tsv", "a\tb\n")
    write("more.tsv", "a\tb\tc\n")
    keys = {"test_file": "test.tsv", "test_references": "more.tsv", "dataset_name": "user/another"}
    assert read_metadata(arguments(**keys)) == {
        "train": {"source": "files", "files": ["train.en", "train.de"], "pairs": 3},
        "validation": {"source": "files", "files": ["val.en", "val.de"], "pairs": 3},
        "test": {"source": "files", "files": ["test.tsv"], "references": "more.tsv", "pairs": 1},
    }
    split_off = read_metadata(arguments(validation_file=None, validation_size=1))["validation"]
    assert split_off == {"source": "files", "files": ["train.en", "train.de"], "split_off": "train", "pairs": 1}
    streamed = read_metadata(arguments(streaming=True))
    assert streamed["train"] == {"source": "files", "files": ["train.en", "train.de"]}


def test_metadata_contains_only_names_of_hub_datasets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    DatasetDict(ROWS).save_to_disk("mine")
    local = read_metadata(DataArguments(dataset_name="mine"))
    assert local["train"] == {"source": "local_dataset", "split": "train", "pairs": 3}
    monkeypatch.setattr(hub_datasets, "load_dataset", lambda *args, **kwargs: DatasetDict(ROWS))
    splits = read_metadata(DataArguments(dataset_name="user/name", dataset_config="de-en"))
    hub = {"source": "hub", "dataset": "user/name", "config": "de-en"}
    assert splits == {split: hub | {"split": split, "pairs": 3} for split in ("train", "test")}


def test_metadata_of_generated_corpora():
    assert read_metadata(DataArguments(corpus="demo"))["train"]["source"] == "demo"
    assert read_metadata(DataArguments(corpus="random"))["train"] == {"source": "random", "pairs": 64}


def test_both_directions_apply_only_to_training(write, arguments, make_tokenizer):
    for name, lines in {"train.en": "a\nb\n", "train.de": "1\n2\n", "val.en": "a\n", "val.de": "9\n"}.items():
        write(name, lines)
    corpus = read_corpus(arguments(both_directions=True, on_eval_overlap="drop"))
    assert list(zip(corpus["train"].sources, corpus["train"].targets, strict=True)) == [("b", "2"), ("2", "b")]
    assert corpus["validation"].sources == ["a"]
    assert describe_corpus(corpus, arguments())["train"]["both_directions"]
    tokenizer_keys = SimpleNamespace(bpe_dropout=0)
    recipe = SimpleNamespace(data=arguments(both_directions=True), training=None, tokenizer=tokenizer_keys)
    vocab = {token: i for i, token in enumerate(("<s>", "<pad>", "</s>", "<unk>", "▁", "b"))}
    nllb = NllbTokenizerFast(vocab=vocab, merges=[], src_lang="eng_Latn", tgt_lang="deu_Latn")
    for tokenizer in (make_tokenizer(False)[0], nllb):
        with pytest.raises(ValueError, match="Remove both_directions: this tokenizer has different tokens for source"):
            make_train_set(recipe, corpus, tokenizer)
    assert len(make_train_set(recipe, corpus, make_tokenizer(True)[0])) == 2
    assert corpus["train"].dropped["source held out"] == 1
