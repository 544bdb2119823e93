import json
import sys

import pytest
import yaml
from huggingface_hub import ModelCard

from hub.model_card import main, make_card

RESULTS = {
    "test_bleu": 41.234, "test_bleu_signature": "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0",
    "test_chrf": 63.456, "test_chrf_signature": "nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:2.6.0",
    "test_bleu_tokenized_lc": 42.345, "train_pairs": 28991, "train_pairs_dropped": {"blank": 9},
    "train_sha256": "ab" * 32, "updates": 9876, "train_target_tokens": 12345678, "train_runtime": 3333.0,
    "device": "AMD EPYC", "processes": 2, "threads": 1, "cpu_cores": 2, "precision": "bf16", "parameters": 2345678,
    "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
}  # fmt: skip
RECIPE = """# train: 28991 pairs, sha256 abab
output_dir: /home/somebody/runs/secret
data_dir: /home/somebody/data
source_lang: en
target_lang: de
dataset_name: somebody/pairs
test_file: test_2016
num_beams: 5
max_length: 256
"""


@pytest.fixture
def folder(tmp_path, make_config):
    make_config().save_pretrained(tmp_path)
    (tmp_path / "all_results.json").write_text(json.dumps(RESULTS))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "samples.tsv").write_text("source\treference\ttranslation\nA dog | cat.\tEin Hund.\tEin Hündchen.\n")
    return tmp_path


def test_every_figure_stands_in_the_card(folder):
    card = make_card(folder, "user/name", license="mit")
    text = card.content
    for wanted in ("41.23", "63.46", "42.34", "28,991", "blank: 9", "9,876", "12,345,678", "55.5 minutes", "AMD EPYC"):
        assert wanted in text, wanted
    for wanted in ("2,345,678", "ab" * 32, RESULTS["test_bleu_signature"], "beam size 5", "A dog \\| cat.", "bf16"):
        assert wanted in text, wanted
    assert "/home/somebody" not in text
    assert "energy: not known" in text


def test_other_results_make_another_card(folder):
    (folder / "all_results.json").write_text(json.dumps(RESULTS | {"test_bleu": 12.5}))
    text = make_card(folder, "user/name").content
    assert "12.50" in text
    assert "41.23" not in text


def test_metadata_round_trips(folder):
    card = make_card(folder, "user/name", license="cc-by-4.0", base_model="other/model")
    again = ModelCard(card.content).data
    assert again.to_dict() == card.data.to_dict()
    assert (again.language, again.license, again.pipeline_tag) == (["en", "de"], "cc-by-4.0", "translation")
    assert again.base_model == "other/model"
    scores = {result.metric_type: result for result in again.eval_results}
    assert scores["bleu"].metric_value == 41.23
    assert RESULTS["test_bleu_signature"] in scores["bleu"].metric_name
    assert (scores["chrf"].dataset_name, scores["chrf"].dataset_split) == ("somebody/pairs", "test_2016")
    assert yaml.safe_load(card.content.split("---")[1])["library_name"] == "transformers"


@pytest.mark.parametrize(
    ("base", "said", "told"),
    [
        ("somebody/base", "[somebody/base](https://huggingface.co/somebody/base)", True),
        ("/home/somebody/runs/base", "fine-tuned from a checkpoint that is not on the Hub", False),
    ],
)
def test_a_tuned_model_names_its_base_where_that_is_public(folder, base, said, told):
    (folder / "recipe.yaml").write_text(f"{RECIPE}base_model: {base}\n")
    card = make_card(folder, "user/name")
    assert said in card.content
    assert card.data.base_model == (base if told else None)
    assert "/home/somebody" not in card.content


def test_what_nobody_tells_is_unknown(tmp_path, make_config):
    make_config().save_pretrained(tmp_path)
    text = make_card(tmp_path, "user/name").content
    assert "Training data: not known" in text
    assert "Scores: not known" in text
    assert "license" not in text.split("---")[1]


def test_an_import_says_where_it_comes_from(tmp_path, make_config):
    make_config().save_pretrained(tmp_path)
    report = {"layout": "hkproj", "parity": {"largest_difference_of_log_probabilities": 2e-6}}
    (tmp_path / "import_report.json").write_text(json.dumps(report))
    text = make_card(tmp_path, "user/name").content
    assert "layout `hkproj`" in text
    assert "within 2e-06" in text


def test_the_command(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["model_card", str(folder), "user/name", "--license", "mit"])
    main()
    assert "license: mit" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["model_card", str(folder / "nothing"), "user/name"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert "has no config.json" in capsys.readouterr().err
