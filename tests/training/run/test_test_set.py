import json
from types import SimpleNamespace

import pytest

from training.arguments import DataArguments, DecodingArguments
from training.data.parallel_text import ParallelText
from training.run.evaluation import save_alignment_heads, score_test_set, show
from training.translators import read_run_recipe
from vanilla_transformer.shared.text_lines import sanitize_tsv_cell


@pytest.mark.parametrize("mark", ["\n", "\r", "\x0b", "\x0c", "\x85", "\u2028", "\u2029", "\t"])
def test_a_finished_run_is_shown_whatever_separators_its_sentences_hold(tmp_path, capsys, mark):
    row = "\t".join(map(sanitize_tsv_cell, [f"one{mark}two", "eins", f"zwei{mark}"]))
    (tmp_path / "samples.tsv").write_bytes(f"source\treference\ttranslation\n{row}\n".encode())
    (tmp_path / "all_results.json").write_text(json.dumps({"train_runtime": 60, "train_target_tokens": 7}))
    show(tmp_path)
    assert f"source: {sanitize_tsv_cell(f'one{mark}two')}\n" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"[", b"5", b"\xff", b"a: b: c", b"[" * 5000])
def test_a_damaged_recipe_is_told_with_its_name(tmp_path, content):
    assert read_run_recipe(tmp_path) == {}
    (tmp_path / "recipe.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=r"recipe\.yaml (cannot be read|holds no settings)"):
        read_run_recipe(tmp_path)


@pytest.fixture
def short_run(make_model, make_tokenizer, tmp_path):
    """The folder of a model with eight positions."""
    tokenizer, sizes = make_tokenizer(shared=True)
    make_model(position_embedding_type="learned", max_position_embeddings=8, **sizes).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_alignment_heads_are_chosen_by_pairs_that_have_positions(short_run):
    """Without validation data the pairs are those of the training data, of which longer ones were left out."""
    text = ParallelText(["the dog runs " * 5, "the dog", "a"], ["der Hund", "der Hund", "eine " * 20])
    save_alignment_heads(short_run, text, "cpu")
    assert json.loads((short_run / "generation_config.json").read_text())["alignment_heads"]


def test_no_picture_of_a_translation_that_has_no_positions(short_run, monkeypatch):
    """A translation may have more tokens if it is tokenized again."""
    text = ParallelText(["the dog", "the dog"], ["der Hund", "der Hund"])
    outputs = {"exact_match": 0.0}, ["der Hund " * 5, "der Hund"]
    monkeypatch.setattr("training.run.evaluation.translate_and_score", lambda *args: outputs)
    decoding = DecodingArguments(metric="sequence", attention_plot_lines=[1, 2])
    recipe = SimpleNamespace(decoding=decoding, data=DataArguments())
    trainer = SimpleNamespace(args=SimpleNamespace(device="cpu", process_index=0))
    score_test_set(recipe, short_run, text, trainer)
    assert [path.name for path in short_run.glob("*.png")] == ["attention_2.png"]
