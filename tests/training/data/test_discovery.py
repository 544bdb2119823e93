"""Files, formats and languages that training finds in a user's directory."""

import json

import pytest
from datasets import Dataset, DatasetDict

from training.data.corpora import read_corpus
from training.data.discovery import discover_files
from training.recipe.arguments import DataArguments

PAIRS = [("one dog", "ein Hund"), ("two cats", "zwei Katzen"), ("three, four", "drei, vier")]
CELLS = [("en", "de"), *PAIRS]
SWAPPED = [(target, source) for source, target in CELLS]
TEXT = {"train.en": "\n".join(s for s, _ in PAIRS), "train.de": "\n".join(t for _, t in PAIRS)}


def tsv(rows) -> str:
    return "".join("\t".join(row) + "\n" for row in rows)


def csv(rows, separator=",") -> str:
    return "".join(separator.join(f'"{cell}"' for cell in row) + "\n" for row in rows)


def jsonl(rows, names) -> str:
    return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)


def tmx(pairs, languages=("en-US", "de")) -> str:
    units = "".join(
        "<tu>"
        + "".join(f'<tuv xml:lang="{lang}"><seg>{text}</seg></tuv>' for lang, text in zip(languages, pair, strict=True))
        + "</tu>"
        for pair in pairs
    )
    return f'<?xml version="1.0"?><tmx version="1.4"><header srclang="en"/><body>{units}</body></tmx>'


FORMATS = {
    "two text files": TEXT,
    "text files with BOM and CRLF": {name: "\ufeff" + text.replace("\n", "\r\n") for name, text in TEXT.items()},
    "text files with any name": {f"corpus.v1.{name[-2:]}": text for name, text in TEXT.items()},
    "source and target": {"train.src": TEXT["train.en"], "train.tgt": TEXT["train.de"]},
    "tsv": {"pairs.tsv": tsv(CELLS)},
    "tsv, target first": {"pairs.tsv": tsv(SWAPPED)},
    "tsv without header": {"train.tsv": tsv(PAIRS)},
    "tsv with BOM and CRLF": {"train.tsv": "\ufeff" + tsv(SWAPPED).replace("\n", "\r\n")},
    "tsv with names and other columns": {
        "train.tsv": tsv([("id", "German", "English"), *((str(i), t, s) for i, (s, t) in enumerate(PAIRS))])
    },
    "csv": {"train.csv": csv(CELLS)},
    "csv, target first, semicolons": {"train.csv": csv([("target", "source"), *SWAPPED[1:]], ";")},
    "csv without header": {"train.csv": csv(PAIRS)},
    "csv without header, semicolons": {"train.csv": csv(PAIRS, ";")},
    "csv without header, semicolons and no quotes": {"train.csv": csv(PAIRS, ";").replace('"', "")},
    "jsonl": {"train.jsonl": jsonl(SWAPPED[1:], ("deu", "eng"))},
    "json lines": {"train.json": "".join(json.dumps({"translation": {"en": s, "de": t}}) + "\n" for s, t in PAIRS)},
    "json array": {"train.json": json.dumps([{"source": s, "target": t, "id": 7} for s, t in PAIRS], indent=1)},
    "tmx": {"memory.tmx": tmx(PAIRS)},
    "tmx, target first": {"memory.tmx": tmx(SWAPPED[1:], ("DE-AT", "en"))},
}


@pytest.mark.parametrize("name", FORMATS)
def test_finds_and_reads_files(write, tmp_path, name):
    for path, content in FORMATS[name].items():
        write(path, content)
    keys = discover_files(tmp_path)
    corpus = read_corpus(DataArguments(**keys))
    assert list(zip(corpus["train"].sources, corpus["train"].targets, strict=True)) == PAIRS
    assert set(corpus) == {"train"}
    assert (keys["source_lang"], keys["target_lang"]) in (("en", "de"), ("src", "tgt"))


@pytest.mark.parametrize("saved", ["parquet", "splits", "no splits"])
def test_finds_datasets(tmp_path, saved):
    data = Dataset.from_list([{"id": 5, "de": t, "en": s} for s, t in PAIRS])
    if saved == "parquet":
        data.to_parquet(tmp_path / "train.parquet")
    else:
        (DatasetDict(train=data, test=data) if saved == "splits" else data).save_to_disk(tmp_path)
    corpus = read_corpus(DataArguments(**discover_files(tmp_path)))
    assert list(zip(corpus["train"].sources, corpus["train"].targets, strict=True)) == PAIRS
    assert ("test" in corpus) == (saved == "splits")


@pytest.mark.parametrize("base", ["parts/train", "../train"])
def test_text_files_in_another_directory(write, tmp_path, base):
    (tmp_path / "data" / "parts").mkdir(parents=True)
    for name, text in TEXT.items():
        write(f"data/{base}.{name[-2:]}", text)
    keys = discover_files(tmp_path / "data", train_file=base)
    assert (keys["train_file"], keys["source_lang"], keys["target_lang"]) == (base, "en", "de")
    assert read_corpus(DataArguments(**keys))["train"].targets == [target for _, target in PAIRS]


@pytest.mark.parametrize(
    ("files", "keys", "expected"),
    [
        (["train.en", "train.de", "valid.en", "valid.de", "test.de", "test.en"], {}, ("train", "valid", "test")),
        (["training.en", "training.de", "dev.tsv"], {}, ("training", "dev.tsv", None)),
        (["train.tsv", "test.tsv", "test.refs.tsv"], {}, ("train.tsv", None, "test.tsv")),
        (["a.tsv", "b.tsv", "dev.tsv"], {"train_file": "b.tsv"}, ("b.tsv", "dev.tsv", None)),
        (["train.en", "train.de", "test_2016.en", "test_2016.de", "SOURCE.md"], {}, ("train", None, "test_2016")),
        (
            ["train.en", "train.de", "test1.en", "test1.de", "test_2.en", "test_2.de"],
            {"test_file": "test1"},
            ("train", None, "test1"),
        ),
        (["train.en", "train.de", "train.fr"], {"target_lang": "fr", "source_lang": "de"}, ("train", None, None)),
        (["train.en", "train.de", "val.en", "val.fr"], {}, ("train", None, None)),
        (["dev.tsv"], {"train_file": "dev.tsv"}, ("dev.tsv", None, None)),
    ],
)
def test_finds_splits(write, tmp_path, read_messages, files, keys, expected):
    for name in files:
        write(name, "en\tde\na\tb\n" if name.endswith(".tsv") else "a\n")
    found = discover_files(tmp_path, **keys)
    assert tuple(found[f"{split}_file"] for split in ("train", "validation", "test")) == expected
    assert found == discover_files(tmp_path, **keys)
    assert read_messages().count(f"training: {expected[0]}, validation: {expected[1] or 'none'}") == 2


@pytest.mark.parametrize(
    ("files", "keys", "message"),
    [
        (
            ["train.en", "train.iso"],
            {"target_lang": "de"},
            "found train.en, train.iso, but not de. Use .*--target-lang iso",
        ),
        (
            ["train.en", "train.iso"],
            {"source_lang": "en", "target_lang": "de"},
            r"but not de. Use --target-lang iso\.$",
        ),
        (["train.cmd", "train.act"], {}, "unknown direction. Use --source-lang act or --source-lang cmd"),
        (["train.en", "train.de", "train.fr"], {}, "several languages. Use two of them, for example --source-lang de"),
        (["train.en", "train.de", "train.fr"], {"source_lang": "en"}, "Use --target-lang de or --target-lang fr"),
        (["train.en", "notes.txt"], {}, "no training data in .*: found notes.txt, train.en. Expected two text files"),
        (["train.tsv", "train.csv"], {}, "Use --train-file train.csv or --train-file train.tsv"),
        (["a.tsv", "b.tsv"], {}, "several possibilities for the train data .* Use --train-file a.tsv or"),
        (["train.tsv", "val.tsv", "dev.tsv"], {}, "Use --validation-file dev.tsv or --validation-file val.tsv"),
        (["train.tsv"], {"train_file": "tran.tsv"}, "cannot find --train-file tran.tsv .* Found: train.tsv"),
        ([], {}, "no training data in .*: found no files"),
        (["train.tsv"], {"data_dir": "train.tsv"}, "train.tsv is a file. Use --train-file"),
        (["train.tsv"], {"data_dir": "nowhere"}, "cannot read the directory .*nowhere: No such file"),
    ],
)
def test_lists_possibilities(write, tmp_path, files, keys, message):
    for name in files:
        write(name, "en\tde\n" if name.endswith(".tsv") else "a\n")
    folder = tmp_path / keys.get("data_dir", "")
    with pytest.raises(ValueError, match=message):
        discover_files(**keys | {"data_dir": folder})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.tsv", "en\tfr\na\tb\n", "found the columns en, fr in train.tsv, but not de. Use --target-lang fr"),
        ("train.jsonl", '{"en": "a"}\n', "found the columns en in train.jsonl, but not de. Use files of two languages"),
        ("train.jsonl", "\n", "train.jsonl contains no pairs"),
        ("train.tmx", tmx(PAIRS, ("en", "fr")), "found the columns en, fr in train.tmx, but not de"),
    ],
)
def test_rejects_tables_without_the_language(write, tmp_path, name, content, message):
    write(name, content)
    with pytest.raises(ValueError, match=message):
        discover_files(tmp_path, source_lang="en", target_lang="de")


def test_column_of_the_user_is_kept(write, tmp_path):
    """A column that the user specifies is used, even if another column has the same language."""
    write("train.csv", "en_id,en_text,de\nx1,Hello,Hallo\n")
    keys = discover_files(tmp_path, source_lang="en_text", target_lang="de")
    assert read_corpus(DataArguments(**keys))["train"].sources == ["Hello"]


@pytest.mark.parametrize("name", ["train.jsonl", "train.json", "train.parquet", "saved"])
def test_first_row_may_be_incomplete(write, tmp_path, name):
    rows = [{"en": "a", "de": None}, {"en": "b", "de": "c"}]
    if name == "saved":
        Dataset.from_list(rows).save_to_disk(tmp_path)
    elif name == "train.parquet":
        Dataset.from_list(rows).to_parquet(tmp_path / name)
    else:
        write(name, json.dumps(rows) if name == "train.json" else "".join(json.dumps(row) + "\n" for row in rows))
    keys = discover_files(tmp_path)
    assert read_corpus(DataArguments(**keys, on_bad_lines="drop"))["train"].targets == ["c"]


def test_column_that_begins_later_is_not_used(write, tmp_path):
    write("train.jsonl", '{"en": "a", "x": "b", "no": null}\n{"en": "a", "x": "b", "no": "7"}\n')
    assert discover_files(tmp_path)["target_lang"] == "x"


@pytest.mark.parametrize("saved", [True, False])
def test_columns_named_source_and_target_can_have_any_languages(write, tmp_path, saved):
    if saved:
        Dataset.from_list([{"source": "a", "target": "b"}]).save_to_disk(tmp_path)
    else:
        write("train.csv", "source,target\na,b\n")
    keys = discover_files(tmp_path, source_lang="en", target_lang="de")
    assert (keys["source_lang"], keys["target_lang"]) == ("en", "de")
    text = read_corpus(DataArguments(**keys))["train"]
    assert (text.sources, text.targets) == (["a"], ["b"])


def test_train_file_determines_the_directory(write, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    write("mine/pairs.tsv", tsv(CELLS))
    write("mine/val.tsv", tsv(CELLS))
    monkeypatch.chdir(tmp_path)
    keys = discover_files(train_file="mine/pairs.tsv")
    assert (keys["data_dir"], keys["train_file"], keys["validation_file"]) == ("mine", "pairs.tsv", "val.tsv")
    with pytest.raises(ValueError, match="Use --data-dir DIRECTORY or --train-file FILE"):
        discover_files()


def test_files_of_other_languages_are_named(write, tmp_path, read_messages):
    for name in ("test.eng", "test.deu"):
        write(name, "a\n")
    write("train.tsv", "English\tGerman\na\tb\n")
    assert discover_files(tmp_path)["test_file"] is None
    assert "test.deu, test.eng: not used. Test data must be named test.en and test.de" in read_messages()


def test_only_the_main_process_logs(write, tmp_path, monkeypatch, read_messages):
    write("train.tsv", tsv(CELLS))
    for name, value in (("RANK", "1"), ("VANILLA_TRANSFORMER_LAUNCHED", "0")):
        with monkeypatch.context() as context:
            context.setenv(name, value)
            discover_files(tmp_path)
    assert read_messages() == ""
