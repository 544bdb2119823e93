import pytest

from vanilla_transformer.shared.text_lines import read_lines, sanitize_tsv_cell

OTHER_SEPARATORS = [
    "\r",
    "\x0b",
    "\x0c",
    "\x1c",
    "\x1d",
    "\x1e",
    "\x85",
    "\u2028",
    "\u2029",
]  # str.splitlines splits at these


@pytest.mark.parametrize("end", OTHER_SEPARATORS)
def test_splits_only_at_newlines(tmp_path, end):
    path = tmp_path / "a"
    path.write_bytes(f"\ufeffone{end}two\nthree\n".encode())
    assert read_lines(path) == [f"one{end}two", "three"]


def test_empty_file_and_missing_final_newline(tmp_path):
    path = tmp_path / "a"
    for content, lines in {"": [], "\n": [""], "a\n\nb": ["a", "", "b"]}.items():
        path.write_text(content)
        assert read_lines(path) == lines


def test_rejects_other_encodings(tmp_path):
    path = tmp_path / "mine.tsv"
    path.write_bytes("é".encode("latin-1"))
    with pytest.raises(ValueError, match=r"mine.tsv is not UTF-8 text \(byte 0\)"):
        read_lines(path)
    path.write_bytes("ab".encode("utf-16-be"))
    with pytest.raises(ValueError, match=r"mine.tsv is in UTF-16 or UTF-32"):
        read_lines(path)


def test_sanitizes_tsv_cell():
    assert sanitize_tsv_cell("a\tb\nc\u2028d") == "a b c\u2028d"
