import pytest

from vanilla_transformer.shared.text_lines import read_lines, sanitize_tsv_cell

OTHERS = ["\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]  # at which str.splitlines splits


@pytest.mark.parametrize("end", OTHERS)
def test_only_a_newline_ends_a_line(tmp_path, end):
    path = tmp_path / "a"
    path.write_bytes(f"\ufeffone{end}two\nthree\n".encode())
    assert read_lines(path) == [f"one{end}two", "three"]


def test_an_empty_file_has_no_lines_and_a_last_one_needs_no_end(tmp_path):
    path = tmp_path / "a"
    for content, lines in {"": [], "\n": [""], "a\n\nb": ["a", "", "b"]}.items():
        path.write_text(content)
        assert read_lines(path) == lines


def test_other_encodings_are_refused_with_the_files_name(tmp_path):
    path = tmp_path / "mine.tsv"
    path.write_bytes("é".encode("latin-1"))
    with pytest.raises(ValueError, match=r"mine.tsv is not UTF-8 text \(byte 0\)"):
        read_lines(path)


def test_a_cell_stays_in_its_column():
    assert sanitize_tsv_cell("a\tb\nc\u2028d") == "a b c\u2028d"
