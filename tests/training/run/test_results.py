import json

import pytest

from training.loading import read_settings
from training.run.results import show
from vanilla_transformer.shared.lines import as_cell


@pytest.mark.parametrize("mark", ["\n", "\r", "\x0b", "\x0c", "\x85", "\u2028", "\u2029", "\t"])
def test_a_finished_run_is_shown_whatever_separators_its_sentences_hold(tmp_path, capsys, mark):
    row = "\t".join(map(as_cell, [f"one{mark}two", "eins", f"zwei{mark}"]))
    (tmp_path / "samples.tsv").write_bytes(f"source\treference\ttranslation\n{row}\n".encode())
    (tmp_path / "all_results.json").write_text(json.dumps({"train_runtime": 60, "train_target_tokens": 7}))
    show(tmp_path)
    assert f"source: {as_cell(f'one{mark}two')}\n" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"[", b"5", b"\xff", b"a: b: c", b"[" * 5000])
def test_a_damaged_recipe_is_told_with_its_name(tmp_path, content):
    assert read_settings(tmp_path) == {}
    (tmp_path / "recipe.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=r"recipe\.yaml (cannot be read|holds no settings)"):
        read_settings(tmp_path)
