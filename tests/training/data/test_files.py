import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from training.data.corpora import read_corpus
from training.data.files import read_file, read_pair
from training.data.streaming import stream_pairs
from training.recipe.arguments import DataArguments


def test_reads_text_files_by_line(write):
    text = read_pair(write("a.en", "\ufeffone \r\ntwo\n"), write("a.de", "eins\nzwei\x0bdrei\u2028vier\n"))
    assert text.sources == ["one", "two"]
    assert text.targets == ["eins", "zwei\x0bdrei\u2028vier"]  # other separators do not end a line


@pytest.mark.parametrize(("source", "target"), [("one\ntwo\nthree\n", "eins\n"), ("one\n", "eins\nzwei\ndrei")])
def test_rejects_different_line_counts_even_if_invalid_pairs_are_dropped(write, source, target):
    with pytest.raises(ValueError, match=r"has 1 lines and .* has 3"):
        read_pair(write("a.en", source), write("a.de", target), "drop")


def test_rejects_or_drops_invalid_pairs_with_line_numbers(write, read_messages):
    paths = write("a.en", b"one\ntw\xffo\nthree\nfour\n"), write("a.de", "eins\nzwei\n  \nvier\n")
    with pytest.raises(ValueError, match="1 lines not UTF-8, at line 2"):
        read_pair(*paths)
    text = read_pair(*paths, "drop")
    assert (text.sources, text.targets) == (["one", "four"], ["eins", "vier"])
    assert list(text.line_numbers) == [1, 4]
    assert text.dropped == {"not UTF-8": 1, "blank": 1}
    assert "1 lines blank, at line 3" in read_messages()


def test_shortens_lists_of_line_numbers(write):
    with pytest.raises(ValueError, match="8 lines blank, at lines 1, 2, 3 and 5 more"):
        read_pair(write("a.en", "\n" * 8), write("a.de", "x\n" * 8))


def test_reports_missing_files(arguments):
    with pytest.raises(ValueError, match=r"cannot read .*train.en.* --data-dir"):
        read_corpus(arguments())


def test_other_endings_are_listed_with_the_option(write, arguments):
    write("train.en", "one\n")
    write("train.iso", "1\n")
    for read in (read_corpus, stream_pairs):
        with pytest.raises(ValueError, match=r"Found: train.en, train.iso. Use --target-lang iso\."):
            read(arguments())
        with pytest.raises(ValueError, match=r"train.fr: no such file. .* Use --source-lang en\."):
            read(arguments(source_lang="fr", target_lang="iso"))


@pytest.mark.parametrize("name", ["t.tsv", "t.csv"])
def test_header_determines_the_columns(write, arguments, read_messages, name):
    """Otherwise a table whose first column is the target would train the reverse direction."""
    separator = "," if name == "t.csv" else "\t"
    write(name, "German,id,English\neins,1,one\nzwei,2,\n".replace(",", separator))
    with pytest.raises(ValueError, match="1 lines blank, at line 3"):
        read_file(arguments(), name)
    text = read_file(arguments(on_bad_lines="drop"), name)
    assert (text.sources, text.targets, list(text.line_numbers)) == (["one"], ["eins"], [2])
    streamed = stream_pairs(arguments(train_file=name, on_bad_lines="drop"))
    assert list(streamed) == [{"source": "one", "target": "eins"}]
    assert "no header" not in read_messages()
    with pytest.raises(ValueError, match="line 1: the columns German, id, English do not include en and fr"):
        read_file(arguments(target_lang="fr"), name)


@pytest.mark.parametrize(("name", "separator"), [("t.tsv", "\t"), ("t.csv", ","), ("t.csv", ";")])
def test_blank_lines_may_precede_the_header(write, arguments, name, separator):
    write(name, f"\n \nde{separator}en\neins{separator}one\n\n")
    with pytest.raises(ValueError, match="1 lines blank, at line 5"):
        read_file(arguments(), name)
    text = read_file(arguments(on_bad_lines="drop"), name)
    assert (text.sources, text.targets, list(text.line_numbers)) == (["one"], ["eins"], [4])
    assert text.dropped == {"blank": 1}


def test_reports_the_direction_of_a_table_without_header(write, arguments, read_messages):
    write("t.tsv", "one\teins\n")
    read_file(arguments(), "t.tsv")
    expected = "column 1 is the source (en), column 2 the target (de). First pair: one -> eins"
    assert expected in read_messages()


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


def test_codes_of_tmx_are_not_text(write, arguments):
    code = "&lt;img alt='<sub>a <ph>b</ph> cat</sub>'/&gt;"
    variants = "".join(f"<tuv lang='{lang}'><seg>{lang} <ph>{code}</ph>end</seg></tuv>" for lang in ("en", "de"))
    write("t.tmx", f"<tmx><body><tu>{variants}</tu></body></tmx>")
    assert read_file(arguments(), "t.tmx").sources == ["en end"]


def test_tmx_with_namespace(write, arguments):
    variants = "".join(f"<tuv xml:lang='{lang}'><seg>{lang} <ph>x</ph>end</seg></tuv>" for lang in ("en", "de"))
    write("t.tmx", f"<tmx xmlns='http://www.lisa.org/tmx14'><body><tu>{variants}</tu></body></tmx>")
    text = read_file(arguments(), "t.tmx")
    assert (text.sources, text.targets) == (["en end"], ["de end"])


@pytest.mark.parametrize(
    ("content", "pairs"),
    [
        ('Yes;"Ja, genau"\nNo;"Nein, nicht"\n', [("Yes", "Ja, genau"), ("No", "Nein, nicht")]),
        ('Yes;"Ja, genau"\nHello;Hallo\n', [("Yes", "Ja, genau"), ("Hello", "Hallo")]),
        ('"Hello, you";"Hallo, du"\nGood;Gut\n', [("Hello, you", "Hallo, du"), ("Good", "Gut")]),
        ('"a; b"\t"c; d"\nx\ty\n', [("a; b", "c; d"), ("x", "y")]),
        ('"a, b\nb";"c\nd"\nx;y\n', [("a, b\nb", "c\nd"), ("x", "y")]),
        ('\n"a ""b""", c\n"d; e",f\n', [('a "b"', "c"), ("d; e", "f")]),
        ("Hello; you,Hallo du\nWell; then,Nun also\n", [("Hello; you", "Hallo du"), ("Well; then", "Nun also")]),
        ("Hello; you,Hallo du\nWell; then,Nun,Also\n", [("Hello; you", "Hallo du"), ("Well; then", "Nun")]),
        ("one,eins\n" * 30 + '"two,zwei\n', None),
    ],
)
def test_separator_of_csv_without_header(write, arguments, content, pairs):
    write("t.csv", content)
    if pairs is None:
        with pytest.raises(ValueError, match="line 31: not valid CSV"):
            read_file(arguments(), "t.csv")
    else:
        text = read_file(arguments(on_bad_lines="drop"), "t.csv")
        assert list(zip(text.sources, text.targets, strict=True)) == pairs


def test_header_with_spaces_after_commas(write, arguments):
    write("t.csv", '"de", "en"\n"eins, zwei", "one, two"\n')
    text = read_file(arguments(), "t.csv")
    assert (text.sources, text.targets) == (["one, two"], ["eins, zwei"])


def test_rejects_languages_that_the_training_data_do_not_name(write, arguments):
    write("test.tsv", "de\ten\nhallo\thello\n")
    with pytest.raises(
        ValueError, match="the header de, en names languages, but those of the source and the target are unknown"
    ):
        read_file(arguments(source_lang="src", target_lang="tgt"), "test.tsv")


def test_target_column_can_be_named_translation(write, arguments):
    write("t.jsonl", "".join(json.dumps({"text": s, "translation": t}) + "\n" for s, t in PAIRS))
    named = arguments(train_file="t.jsonl", source_lang="text", target_lang="translation")
    assert read_file(named, "t.jsonl").targets == ["eins", "zwei"]
    assert [row["target"] for row in stream_pairs(named)] == ["eins", "zwei"]


@pytest.mark.parametrize("value", ["MT", None])
@pytest.mark.parametrize("names", [("en", "de"), ("source", "target")])
def test_ignores_another_column_named_translation(write, arguments, names, value):
    rows = [{**dict(zip(names, pair, strict=True)), "EN" if "en" in names else "note": "x"} for pair in PAIRS]
    rows = [{**row, "translation": value} for row in rows]
    write("t.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert read_file(arguments(), "t.jsonl").targets == ["eins", "zwei"]
    assert [row["target"] for row in stream_pairs(arguments(train_file="t.jsonl"))] == ["eins", "zwei"]


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


def test_ignores_times_in_parquet(tmp_path, arguments):
    """Python cannot represent all of them."""
    year_300000 = pa.array([9_404_000_000_000] * 2, pa.timestamp("s"))
    columns = {"en": ["one", "two"], "when": year_300000, "de": ["eins", "zwei"]}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    assert read_file(arguments(), "t.parquet").targets == ["eins", "zwei"]


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
        ("t.jsonl", '{"en": "a", "de": "b"}\n{"en":\n', "line 2: expected a JSON object"),
        ("t.jsonl", '{"en": "a", "fr": "b"}\n', r"no column 'de' \(found: en, fr\).*--target-lang"),
        ("t.jsonl", "[1, 2]\n", r"line 1: expected a text for each of .*, got \[1, 2\]"),
        ("t.jsonl", '{"translation": null}\n', "1 lines blank, at line 1"),
        ("t.jsonl", '{"translation": ["a", "b"]}\n', r"got \['a', 'b'\]"),
        ("t.jsonl", '{"translation": "a"}\n', "expected a text for each of .*, got 'a'"),
        ("t.jsonl", '{"en": "a", "de": 5}\n', "'de' must be a text, got 5"),
        ("t.jsonl", "[" * 100_000 + "\n", "line 1: expected a JSON object"),
        ("t.jsonl", "9" * 5000 + "\n", "line 1: expected a JSON object"),
        ("t.jsonl", '{"en": "a", "de": null}\n', "1 lines blank, at line 1"),
        ("t.jsonl", '{"en": "a", "de": "\\ud800"}\n', "surrogate characters"),
        ("t.jsonl", "\n", "blank"),
        ("t.tsv", "one\t\n", "blank"),
        ("t.tsv", "a\tb\n\n", "1 lines blank, at line 2"),
        ("t.tsv", "one\t" + "x" * 20_001, "1 lines of more than 20,000 characters, at line 1"),
        ("t.tsv", "en\tde\none\n", "line 2: 1 columns, but the header has 2"),
        ("t.tsv", b"one\teins\nf\xfcnf\tf\xfcnf\n", "1 lines not UTF-8, at line 2. Convert .* probably Latin-1"),
        ("t.csv", b"one,eins\nf\xfcnf,f\xfcnf\n", "1 lines not UTF-8, at line 2. Convert .* probably Latin-1"),
        ("t.csv", "en,de\nOne, my friend,eins\n", "line 2: 3 columns, but the header has 2"),
        ("t.csv", "one eins\n", "line 1: no comma"),
        ("t.csv", 'one,eins\n"two,zwei\n', "line 2: not valid CSV .* must be doubled"),
        ("t.tmx", "<tmx><body><tu>", "t.tmx is not valid TMX: no element found"),
        ("t.tmx", "<tmx><tu><tuv lang='en'><seg>a</seg></tuv></tu></tmx>", r"no unit has both en and de \(found: en\)"),
        ("t.tmx", "<?xml version='1.0' encoding='x'?><tmx/>", "t.tmx is not valid TMX: unknown encoding: x"),
        ("t.tmx", "<?xml version='1.0' encoding='shift_jis'?><tmx/>", "t.tmx is not valid TMX: multi-byte .* to UTF-8"),
        ("t.parquet", "no such thing", "not a parquet file"),
    ],
)
def test_rejects_malformed_tables(write, arguments, name, content, message):
    write(name, content)
    with pytest.raises(ValueError, match=message):
        read_file(arguments(), name)


def test_null_structs_are_blank_in_parquet(tmp_path, arguments):
    Dataset.from_list([{"translation": {"en": "a", "de": "b"}}, {"translation": None}]).to_parquet(
        tmp_path / "t.parquet"
    )
    with pytest.raises(ValueError, match="1 lines blank, at line 2"):
        read_file(arguments(), "t.parquet")
    assert read_file(arguments(on_bad_lines="drop"), "t.parquet").dropped == {"blank": 1}


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_rejects_utf_16(write, encoding):
    paths = write("a.en", "one\ntwo\n".encode(encoding)), write("a.de", "eins\nzwei\n".encode(encoding))
    for on_bad_lines in (None, "error", "drop"):
        with pytest.raises(ValueError, match="a.en is in UTF-16 or UTF-32. Convert it to UTF-8"):
            read_pair(*paths, on_bad_lines)


@pytest.mark.parametrize("name", ["train.tsv", "train.csv", "train.jsonl", "train.json"])
def test_rejects_tables_in_utf_16(tmp_path, name, arguments):
    pairs = [{"en": "one", "de": "eins"}, {"en": "two", "de": "zwei"}]
    separator = "," if name == "train.csv" else "\t"
    text = "\n".join(separator.join(row) for row in [["en", "de"], *(pair.values() for pair in pairs)]) + "\n"
    if "json" in name:
        text = json.dumps(pairs) if name == "train.json" else "\n".join(map(json.dumps, pairs))
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):
        (tmp_path / name).write_bytes(text.encode(encoding))
        with pytest.raises(ValueError, match=f"{name} is in UTF-16"):
            read_file(arguments(), name)


def test_reads_line_with_text_end_of_file(write):
    assert len(read_pair(write("a.en", "one\ntwo\n"), write("a.de", "eins\nend of file\n"))) == 2
    with pytest.raises(ValueError, match="1 lines with NUL"):
        read_pair(write("a.en", "one\ntwo\n"), write("a.de", "eins\n\0end of file\n"))


def test_rejects_or_drops_invalid_rows_of_streamed_datasets(tmp_path):
    rows = [{"en": "one", "de": "eins"}, {"en": "two", "de": " "}]
    Dataset.from_list(rows).to_parquet(tmp_path / "set" / "train.parquet")
    keys = {"dataset_name": str(tmp_path / "set"), "streaming": True}
    with pytest.raises(ValueError, match="blank"):
        list(stream_pairs(DataArguments(**keys)))
    assert [row["source"] for row in stream_pairs(DataArguments(**keys, on_bad_lines="drop"))] == ["one"]


def test_rejects_test_pairs_without_reference(tmp_path):
    for name, text in {"train.en": "x\n", "train.de": "y\n", "test.en": "a\nb\n", "test.de": "A\nB\n"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "refs.tsv").write_text("a\tA\nb\t\n")
    keys = {"validation_file": None, "test_file": "test", "test_references": "refs.tsv"}
    with pytest.raises(ValueError, match="refs.tsv has no reference for line 2 of the test data"):
        read_corpus(DataArguments(data_dir=str(tmp_path), **keys))


def test_references_match_lines_of_the_test_file(tmp_path):
    """The line numbers of the references stay correct if a line of the test file is dropped."""
    for name, text in {"train.en": "x\n", "train.de": "y\n", "test.en": "a b\n\nc\n", "test.de": "A\nB\nC\n"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "refs.tsv").write_text("ab\tA\tAA\n\tB\nc\tC\tCC\tCCC\n")
    arguments = DataArguments(
        data_dir=str(tmp_path), validation_file=None, test_file="test", test_references="refs.tsv", on_bad_lines="drop"
    )
    test = read_corpus(arguments)["test"]
    assert test.sources == ["a b", "c"]
    assert test.references == [["A", "AA"], ["C", "CC", "CCC"]]


def test_references_of_a_table_with_header(tmp_path):
    (tmp_path / "test.tsv").write_text("\nde\ten\nA\ta\n\nB\tb\n")
    keys = {"train_file": "test.tsv", "test_file": "test.tsv", "test_references": "refs.tsv", "on_bad_lines": "drop"}
    arguments = DataArguments(data_dir=str(tmp_path), validation_file=None, **keys)
    for header in ("", "en\tde\tde\n", "\nsource\treference\treference\n"):
        (tmp_path / "refs.tsv").write_text(header + "a\tA\tAA\n\t\nb\tB\tBB\n")
        assert read_corpus(arguments)["test"].references == [["A", "AA"], ["B", "BB"]]
    (tmp_path / "refs.tsv").write_text("b\tB\tBB\n\t\na\tA\tAA\n")
    with pytest.raises(ValueError, match="the source differs from that of lines 3, 5 of the test data"):
        read_corpus(arguments)


def test_inline_codes_are_not_text(write, arguments):
    text = '<seg>a <bpt i="1">&lt;b&gt;</bpt>b<ept i="1">&lt;/b&gt;</ept> <hi>c</hi></seg>'
    units = "".join(f'<tu><tuv xml:lang="{lang}">{text}</tuv></tu>' for lang in ("en", "de"))
    both = f'<tu><tuv xml:lang="en">{text}</tuv><tuv xml:lang="de_DE"><seg>x</seg></tuv></tu>'
    write("t.tmx", f"<tmx><body>{both}{units}</body></tmx>")
    with pytest.raises(ValueError, match="2 lines blank, at lines 2, 3"):
        read_file(arguments(), "t.tmx")
    assert read_file(arguments(on_bad_lines="drop"), "t.tmx").sources == ["a b c"]


def test_references_need_test_data(tmp_path):
    for name, text in {"train.en": "x\n", "train.de": "y\n", "refs.tsv": "x\ty\n"}.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=r"test_references=refs\.tsv needs test data: set test_file"):
        read_corpus(DataArguments(data_dir=str(tmp_path), validation_file=None, test_references="refs.tsv"))
