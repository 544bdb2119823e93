import json
import re
import subprocess
import sys

import pytest
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries

from hub.model_card import main
from hub.publishing.card import escape_markdown, make_card, make_eval_results
from hub.run_files import count_parameters

HASH = "ab" * 32
HUB = {"source": "hub", "dataset": "owner/pairs", "config": "de-en"}
DATA = {
    "train": HUB | {"split": "train", "pairs": 29000, "sha256": HASH},
    "validation": HUB | {"split": "validation", "pairs": 1014, "sha256": "cd" * 32},
    "test": HUB | {"split": "test_2016", "pairs": 1000, "sha256": "ef" * 32},
}
RESULTS = {
    "test_bleu": 41.234, "test_bleu_signature": "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0",
    "test_chrf": 63.456, "test_chrf_signature": "nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:2.6.0",
    "test_bleu_tokenized_lc": 42.345, "train_pairs": 28991, "train_pairs_dropped": {"blank": 9},
    "train_sha256": HASH, "updates": 9876, "train_target_tokens": 12345678, "train_runtime": 3333.0,
    "device": "AMD EPYC", "processes": 2, "threads": 1, "cpu_cores": 2, "precision": "bf16", "parameters": 2345678,
    "versions": {"torch": "2.13.0", "transformers": "5.23.0"}, "data": DATA,
}  # fmt: skip
RECIPE = """# train: 28991 pairs, sha256 abab
output_dir: /home/owner/runs/secret
data_dir: data
source_lang: en
target_lang: de
dataset_name: owner/pairs
dataset_config: de-en
test_file: test_2016
base_model: null
lora_rank: 0
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


def test_card_contains_all_results(folder):
    card = make_card(folder, "user/name", license="mit")
    text = card.content
    for value in ("41.23", "63.46", "42.34", "28,991", "blank: 9", "9,876", "12,345,678", "55.5 minutes", "AMD EPYC"):
        assert value in text, value
    for value in ("29,000", HASH, "beam size: 5", "A dog \\| cat.", "bf16"):
        assert value in text, value
    assert "/home/user" not in text
    assert "energy: unknown" in text


def test_table_rows_have_three_cells(folder):
    """In Markdown, a pipe that is not escaped ends a cell, also in code. The Hub omits further cells."""
    rows = [line for line in make_card(folder, "user/name").content.splitlines() if line.startswith("|")]
    assert {len(re.split(r"(?<!\\)\|", row)) for row in rows} == {5}
    assert "| BLEU | 41.23 | `nrefs:1\\|case:mixed\\|eff:no\\|tok:13a\\|smooth:exp\\|version:2.6.0` |" in rows


def test_card_uses_saved_results(folder):
    (folder / "all_results.json").write_text(json.dumps(RESULTS | {"test_bleu": 12.5}))
    text = make_card(folder, "user/name").content
    assert "12.50" in text
    assert "41.23" not in text


@pytest.mark.parametrize("key", ["test_token_error_rate", "test_per"])
def test_card_reads_error_rates_of_all_versions(folder, key):
    """Version 0.1 named the token error rate "per", and 100 - exact_match "wer"."""
    scores = {"test_exact_match": 60.0, key: 8.4, "test_wer": 40.0}
    (folder / "all_results.json").write_text(json.dumps(scores))
    text = make_card(folder, "user/name").content
    rows = [line.split("|")[1:3] for line in text.splitlines() if "exact match, %" in line or "error rate, %" in line]
    assert rows == [[" exact match, % ", " 60.00 "], [" token error rate, % (lower is better) ", " 8.40 "]]


def test_metadata_round_trip(folder):
    (folder / "recipe.yaml").write_text(RECIPE.replace("base_model: null", "base_model: other/model"))
    card = make_card(folder, "user/name", license="cc-by-4.0", base_model="other/model")
    again = ModelCard(card.content).data
    assert again.to_dict() == card.data.to_dict()
    assert (again.language, again.license, again.pipeline_tag) == (["en", "de"], "cc-by-4.0", "translation")
    assert again.base_model == "other/model"
    assert again.datasets == ["owner/pairs"]
    assert yaml.safe_load(card.content.split("---")[1])["library_name"] == "transformers"


def test_scores_are_evaluation_results_of_the_hub(folder):
    files = make_eval_results(folder)
    assert list(files) == [".eval_results/bleu.yaml", ".eval_results/chrf.yaml"]
    assert yaml.safe_load(files[".eval_results/bleu.yaml"]) == [
        {
            "dataset": {"id": "owner/pairs", "task_id": "de-en"},
            "value": 41.23,
            "notes": f"BLEU, test_2016, {RESULTS['test_bleu_signature']}",
        }
    ]
    (entry,) = parse_eval_result_entries(yaml.safe_load(files[".eval_results/chrf.yaml"]))
    assert entry.value == 63.46
    assert "model-index" not in make_card(folder, "user/name").content


@pytest.mark.parametrize(
    ("test", "is_multi30k"),
    [
        (HUB | {"dataset": "bentrevett/multi30k", "split": "test"}, True),
        ({"source": "files", "files": ["test_2016_flickr.en"]}, True),
        (HUB | {"split": "test_2016"}, False),
        ({"source": "files", "files": ["test.tsv"]}, False),
    ],
)
def test_names_multi30k_only_for_its_test_sets(folder, test, is_multi30k):
    (folder / "all_results.json").write_text(json.dumps(RESULTS | {"data": {"test": test}}))
    text = make_card(folder, "user/name").content
    assert ("| Multi30k BLEU | 42.34 |" in text) == is_multi30k
    assert ("as papers on Multi30k report it" in text) == is_multi30k
    assert ("| BLEU of lower-cased text | 42.34 |" in text) != is_multi30k


def test_shows_uploaded_images_and_citation(folder):
    for name in ("attention_2.png", "training_curve.png", "screenshot.png"):
        (folder / name).write_bytes(b"")
    text = make_card(folder, "user/name").content
    assert re.findall(r"^!\[.*?\]\((.*?)\)", text, re.MULTILINE) == ["training_curve.png", "attention_2.png"]
    assert "@inproceedings{vaswani2017attention," in text
    (folder / "import_report.json").write_text('{"layout": "hkproj"}')  # the images belong to another model
    assert "![" not in make_card(folder, "user/name").content


PAPER = "The encoder-decoder of [Attention Is All You Need](https://arxiv.org/abs/1706.03762)"
UNKNOWN = "unknown (not stored in the checkpoint)"
GENERAL = "Expect wrong translations for domains, text types and scripts that the training data do not contain."
GRAMMAR = "A grammar generated the training data. The model translates only sentences of that grammar."
LONGEST = "Trained on sentences of at most 256 tokens."
SEED = "Scores are from one run on one test set; another seed gives somewhat different scores."
BIASES = "The model has not been evaluated for biases in its training data."
COST = [
    "9,876 updates, 12,345,678 target tokens",
    "55.5 minutes on AMD EPYC; processes: 2, threads per process: 1 (CPU cores: 2); bf16",
    f"energy: {UNKNOWN}",
    "versions: torch 2.13.0, transformers 5.23.0",
]
COUNTS = ["trained on 28,991 pairs", "excluded: blank: 9"]
SCRATCH = f"{PAPER}, trained from scratch: from English to German."
FILES = {
    "train": {"source": "files", "files": ["train.en", "train.de"], "pairs": 29000, "sha256": HASH},
    "validation": {"source": "files", "split_off": "train", "files": ["train.en", "train.de"], "pairs": 100},
    "test": {"source": "files", "files": ["test.tsv"], "references": "test.refs.tsv", "pairs": 10},
}
TABLE = {"train": {"source": "files", "files": ["train.tsv"], "pairs": 29000, "sha256": HASH}}
LOCAL = {split: {"source": "local_dataset", "split": split, "pairs": 9} for split in ("train", "test")}
STREAM = {"train": {"source": "files", "files": ["train.en", "train.de"], "streamed": True}} | {
    "test": FILES["test"] | {"references": None}
}
OWNERS_FILES = [
    f"training: text files of the owner (train.en, train.de); 29,000 pairs; SHA-256 of the text: `{HASH}`",
    "validation: held out from the training data; 100 pairs",
    "test: text files of the owner (test.tsv); 10 pairs; additional references in test.refs.tsv",
]
ON_THE_HUB = [
    f"training: owner/pairs (de-en), train; 29,000 pairs; SHA-256 of the text: `{HASH}`",
    f"validation: owner/pairs (de-en), validation; 1,014 pairs; SHA-256 of the text: `{'cd' * 32}`",
    f"test: owner/pairs (de-en), test_2016; 1,000 pairs; SHA-256 of the text: `{'ef' * 32}`",
]
SCORED = "Test set: {}; beam size: 5; one run."
OWNERS_TEST_FILE = "text files of the owner (test.tsv)"
REPORT = {"layout": "hkproj", "parity": {"largest_difference_of_log_probabilities": 2e-6}}
ALL_LIMITS = [GENERAL, LONGEST, SEED, BIASES]
TRAINED = {"summary": SCRATCH, "training": COST, "limits": ALL_LIMITS, "datasets": None, "languages": ["en", "de"]}
NO_RUN = {
    "summary": f"{PAPER}. Its languages are {UNKNOWN}.", "data": [f"Training data: {UNKNOWN}."],
    "training": [f"Training cost: {UNKNOWN}."], "scores": f"Scores: {UNKNOWN}.", "limits": [GENERAL, BIASES],
    "datasets": None, "languages": None,
}  # fmt: skip
IMPORT = NO_RUN | {"training": [f"Imported; training cost: {UNKNOWN}."]}
DIFFERENCE = "Log-probabilities differ from those of the original code by at most 2e-06."
RUNS = {  # (recipe changes, results changes or None, import report or None, expected parts of the card)
    "text files, with a data set in the recipe": (
        {"data_dir": "my_data"}, {"data": FILES}, None,
        TRAINED | {"data": OWNERS_FILES + COUNTS, "scores": SCORED.format(OWNERS_TEST_FILE)},
    ),
    "table, no test": (
        {}, {"data": TABLE, "test_bleu": None, "test_chrf": None, "test_bleu_tokenized_lc": None}, None,
        TRAINED | {
            "data": [f"training: text files of the owner (train.tsv); 29,000 pairs; SHA-256 of the text: `{HASH}`",
                     *COUNTS],
            "scores": f"Scores: {UNKNOWN}.", "limits": [GENERAL, LONGEST, BIASES]},
    ),
    "both directions": (
        {}, {"data": {"train": TABLE["train"] | {"pairs": 58000, "both_directions": True}},
             "test_bleu": None, "test_chrf": None, "test_bleu_tokenized_lc": None}, None,
        TRAINED | {
            "data": ["training: text files of the owner (train.tsv); 29,000 pairs, each in both directions; SHA-256 of "
                     f"the text: `{HASH}`", *COUNTS],
            "scores": f"Scores: {UNKNOWN}.", "limits": [GENERAL, LONGEST, BIASES]},
    ),
    "data set of the Hub": (
        {}, {}, None,
        TRAINED | {"data": ON_THE_HUB + COUNTS, "datasets": ["owner/pairs"],
                   "scores": SCORED.format("owner/pairs (de-en), test_2016")},
    ),
    "local data set": (
        {"dataset_name": "my/folder"}, {"data": LOCAL}, None,
        TRAINED | {"data": ["training: a local data set of the owner, train; 9 pairs",
                            "test: a local data set of the owner, test; 9 pairs", *COUNTS],
                   "scores": SCORED.format("a local data set of the owner, test")},
    ),
    "streaming": (
        {}, {"data": STREAM, "train_pairs": None, "train_pairs_dropped": 7, "train_pairs_read": 4000}, None,
        TRAINED | {"data": ["training: text files of the owner (train.en, train.de)",
                            "test: text files of the owner (test.tsv); 10 pairs",
                            "read during training: 4,000 pairs", "excluded: 7 pairs"],
                   "scores": SCORED.format(OWNERS_TEST_FILE)},
    ),
    "demo": (
        {"corpus": "demo", "source_lang": "fr"}, {"data": {"train": {"source": "demo", "pairs": 20000}}}, None,
        TRAINED | {"data": ["training: the built-in English-German corpus; 20,000 pairs", *COUNTS],
                   "limits": [GENERAL, GRAMMAR, LONGEST, SEED, BIASES],
                   "scores": SCORED.format(UNKNOWN)},
    ),
    "random pairs": (
        {"corpus": "random"}, {"data": {"train": {"source": "random", "pairs": 64}}}, None,
        TRAINED | {"summary": f"{PAPER}, trained from scratch on random pairs of numbers, which it can only memorize.",
                   "data": ["training: random pairs of numbers; 64 pairs", *COUNTS], "languages": None,
                   "scores": SCORED.format(UNKNOWN)},
    ),
    "fine-tuned, from the Hub": (
        {"base_model": "owner/base"}, {"data": FILES}, None,
        TRAINED | {"summary": f"{PAPER}, fine-tuned from [owner/base](https://huggingface.co/owner/base): from "
                              "English to German.",
                   "limits": [GENERAL, "Fine-tuned on sentences of at most 256 tokens.", SEED, BIASES],
                   "data": OWNERS_FILES + COUNTS, "scores": SCORED.format(OWNERS_TEST_FILE)},
    ),
    "fine-tuned on the demo, from a folder": (
        {"base_model": "/home/owner/base"}, {"data": {"train": {"source": "demo"}}}, None,
        TRAINED | {"summary": f"{PAPER}, fine-tuned from a checkpoint that is not on the Hub: from English to German.",
                   "limits": [GENERAL, "Fine-tuned on sentences of at most 256 tokens.", SEED, BIASES],
                   "data": ["training: the built-in English-German corpus", *COUNTS],
                   "scores": SCORED.format(UNKNOWN)},
    ),
    "LoRA": (
        {"base_model": "owner/base", "lora_rank": 8}, {"data": FILES}, None,
        TRAINED | {"summary": f"{PAPER}, fine-tuned with LoRA (rank 8) from "
                              "[owner/base](https://huggingface.co/owner/base): from English to German.",
                   "limits": [GENERAL, "Fine-tuned on sentences of at most 256 tokens.", SEED, BIASES],
                   "data": OWNERS_FILES + COUNTS, "scores": SCORED.format(OWNERS_TEST_FILE)},
    ),
    "older release, which did not record the data": (
        {}, {"data": None}, None,
        TRAINED | {"data": [f"Training data: {UNKNOWN}.", COUNTS[0], f"SHA-256 of the training text: `{HASH}`",
                            COUNTS[1]],
                   "scores": SCORED.format(UNKNOWN)},
    ),
    "names that are not language codes": (
        {"source_lang": "src", "target_lang": "phon"}, {"data": FILES}, None,
        TRAINED | {"summary": f"{PAPER}, trained from scratch: from src to phon.", "languages": None,
                   "data": OWNERS_FILES + COUNTS, "scores": SCORED.format(OWNERS_TEST_FILE)},
    ),
    "unfinished: only a recipe": (
        {}, None, None,
        NO_RUN | {"summary": SCRATCH, "languages": ["en", "de"]},
    ),
    "averaged, without other files": (None, None, None, NO_RUN),
    "imported": (
        None, None, REPORT,
        IMPORT | {"summary": f"{PAPER}, imported from a checkpoint with the layout `hkproj`.",
                  "training": [*IMPORT["training"], DIFFERENCE]},
    ),
    "imported without comparison, report without layout": (
        None, None, {"used": []},
        IMPORT | {"summary": f"{PAPER}, imported from a checkpoint whose layout is {UNKNOWN}."},
    ),
    "imported into the directory of a run": (
        {}, {}, {"layout": "hkproj"},
        IMPORT | {"summary": f"{PAPER}, imported from a checkpoint with the layout `hkproj`."},
    ),
}  # fmt: skip


@pytest.fixture
def make_run(tmp_path, make_model):
    def make(recipe, results, report):
        model = make_model()
        model.save_pretrained(tmp_path)
        if recipe is not None:
            (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(yaml.safe_load(RECIPE) | recipe))
        if results is not None:
            saved = {key: value for key, value in (RESULTS | results).items() if value is not None}
            (tmp_path / "all_results.json").write_text(json.dumps(saved))
        if report is not None:
            (tmp_path / "import_report.json").write_text(json.dumps(report))
        return tmp_path, model

    return make


@pytest.mark.parametrize("kind", RUNS)
def test_card_describes_run(make_run, kind):
    """Each section of the card contains exactly the expected lines."""
    *run, expected = RUNS[kind]
    folder, model = make_run(*run)
    card = make_card(folder, "user/name")
    text = card.content.split("---\n", 2)[2]
    sections = dict(part.split("\n\n", 1) for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:])

    def lines(section):
        return [line.removeprefix("- ") for line in sections[section].splitlines() if line.strip()]

    assert text.split("\n\n")[1] == expected["summary"]
    assert lines("Data") == expected["data"]
    assert lines("Training") == expected["training"]
    assert lines("Limits") == expected["limits"]
    assert lines("Scores")[0] == expected["scores"]
    assert lines("Architecture") == [
        "2 encoder and 2 decoder layers, hidden size 32, attention heads: 4, feed-forward dimension: 48",
        "post-norm, sinusoidal positions",
        "embeddings: 60 tokens, shared by source and target",
        f"parameters: {model.num_parameters():,}",
    ]
    assert card.data.language == expected["languages"]
    assert card.data.datasets == expected["datasets"]
    assert bool(make_eval_results(folder)) == (expected["scores"] == SCORED.format("owner/pairs (de-en), test_2016"))
    if "Recipe" in sections:
        shown = yaml.safe_load(sections["Recipe"].split("```yaml\n")[1].split("```")[0])
        assert ("dataset_name" in shown) == (expected["datasets"] is not None)
        assert "data_dir" not in shown
    assert "/home/" not in text


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (DATA, {"datasets": ["other/pairs"]}, "the run used owner/pairs"),
        ({"train": {"source": "demo"}}, {"datasets": ["other/pairs"]}, "the built-in English-German corpus"),
        (DATA, {"base_model": "other/base"}, "started from random weights"),
    ],
)
def test_rejects_metadata_that_contradict_run(make_run, data, options, message):
    folder, _ = make_run({}, {"data": data}, None)
    with pytest.raises(ValueError, match=message):
        make_card(folder, "user/name", **options)


def test_marks_training_data_stated_by_owner(make_run):
    folder, _ = make_run({}, {"data": FILES}, None)
    card = make_card(folder, "user/name", datasets=["other/pairs"])
    assert str(card) == str(make_card(folder, "user/name", datasets="other/pairs"))
    assert "training data according to the owner: other/pairs" in card.content
    assert card.data.datasets == ["other/pairs"]
    assert make_eval_results(folder) == {}  # the owner specified only the training data


def test_shows_different_encoder_and_decoder_sizes(tmp_path, make_model):
    sizes = {"decoder_vocab_size": 50, "share_encoder_decoder_embeddings": False, "decoder_attention_heads": 2}
    model = make_model(**sizes, encoder_ffn_dim=64, encoder_layers=3)
    model.save_pretrained(tmp_path)
    text = make_card(tmp_path, "user/name").content
    assert "3 encoder and 2 decoder layers, hidden size 32, attention heads: 4 (encoder) and 2 (decoder)" in text
    assert "feed-forward dimension: 64 (encoder) and 48 (decoder)" in text
    assert "embeddings: 60 source and 50 target tokens" in text
    assert count_parameters(tmp_path) == model.num_parameters()


PATHS = (
    *("/srv/me/x", "D:/me/x", "D:\\me\\x", "~/x", "~me/x", "file:///x", "../../x", "/scratch/x", "/odd/path/x"),
    *("//odd/path", "\\\\server\\share\\x", "/home/me/a directory\twith spaces and a very long name " * 3),
)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("key", ["test_file", "data_dir", "dataset_name", "lr_scheduler_kwargs", "new_key"])
def test_removes_paths_from_recipe(folder, key, path):
    value = {"deep": [path]} if key == "lr_scheduler_kwargs" else path
    recipe = yaml.safe_dump({"source_lang": "en", "target_lang": "de", "num_beams": 5, key: value}, width=40)
    (folder / "recipe.yaml").write_text(recipe)
    text = make_card(folder, "user/name").content
    shown = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert shown == {"source_lang": "en", "target_lang": "de", "num_beams": 5}
    assert path.split()[0] not in text.split("## Data")[1]


def test_removes_directories_from_file_names(folder):
    """The metadata of the data also contain only names of files."""
    (folder / "recipe.yaml").write_text("train_file: customer/train\nvalidation_file: null\ntest_file: test.tsv\n")
    text = make_card(folder, "user/name").content
    shown = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert shown == {"train_file": "train", "validation_file": None, "test_file": "test.tsv"}


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\r", "\x1c"])
def test_sample_with_unicode_line_break_is_one_row(folder, separator):
    row = f"A{separator}dog.\tEin Hund.\tEin <b>Hund</b> *x*."
    (folder / "samples.tsv").write_bytes(f"source\treference\ttranslation\n{row}\n".encode())
    text = make_card(folder, "user/name").content
    assert "| A dog. | Ein Hund. | Ein \\<b\\>Hund\\</b\\> \\*x\\*. |" in text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("recipe.yaml", b"a: [1", "recipe.yaml is not valid YAML"),
        ("recipe.yaml", b"- a", "recipe.yaml contains a list"),
        ("recipe.yaml", b"num_beams: many", "recipe.yaml: num_beams is 'many'"),
        ("recipe.yaml", b"a: " + b"[" * 1000, "recipe.yaml is not valid YAML"),
        ("recipe.yaml", b"a: 2024-99-99", "recipe.yaml is not valid YAML"),
        ("recipe.yaml", b"base_model: [1]", "recipe.yaml: base_model is a list"),
        ("all_results.json", b"{", "all_results.json is not valid JSON"),
        ("all_results.json", b"\xff\xfe", "all_results.json is not valid JSON"),
        ("all_results.json", b"[" * 100_000, "all_results.json is not valid JSON"),
        ("all_results.json", b"[]", "all_results.json contains a list"),
        ("all_results.json", b'{"test_bleu": NaN}', "test_bleu is nan"),
        ("all_results.json", b'{"test_bleu": "x"}', "test_bleu is 'x'"),
        ("all_results.json", b'{"data": {"train": 3}}', "all_results.json: data: train contains 3"),
        ("all_results.json", b'{"a": "\\ud800"}', "all_results.json is not valid JSON"),
        ("import_report.json", b'{"parity": {"largest_difference_of_log_probabilities": Infinity}}', "is inf"),
        ("all_results.json", b'{"train_pairs_dropped": {"blank": "x"}}', "blank is 'x'"),
        ("samples.tsv", b"\xff", "samples.tsv is not UTF-8"),
        ("samples.tsv", b"a\tb\tc\nd\n", "samples.tsv, line 2: expected 3 columns, got 1"),
        ("config.json", b'{"d_model": "x"}', "config.json: d_model is 'x'"),
    ],
)
def test_reports_file_with_error(folder, run_main, capsys, name, content, message):
    (folder / name).write_bytes(content)
    run_main(main, folder, "user/name", status=2)
    output = capsys.readouterr().err
    assert message in output
    assert output.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--license", "not a thing!"), "'not a thing!' is not a license"),
        (("--license", "MIT"), "'MIT' is not a license"),
        (("--dataset", "not a thing!"), "'not a thing!' is not a Hub id"),
        (("--dataset", "a/b/c"), "is not a Hub id"),
        (("--base-model", "/home/me/base"), "is not a Hub id"),
    ],
)
def test_rejects_invalid_metadata(folder, run_main, capsys, options, message):
    run_main(main, folder, "user/name", *options, status=2)
    output = capsys.readouterr().err
    assert message in output
    assert output.count("\n") == 1


@pytest.mark.parametrize("name", ["cc-by-4.0", "mit", "openrail++", "bsl-1.0", "lppl-1.3c", "llama3.1", "cc0-1.0"])
def test_accepts_hub_licenses(folder, run_main, capsys, name):
    run_main(main, folder, "user/name", "--license", name)
    assert f"license: {name}" in capsys.readouterr().out


SNIPPETS = """
import sys
if sys.argv[1] == "without_package":
    sys.modules["vanilla_transformer"] = None  # cannot be imported
else:
    import vanilla_transformer
for snippet in sys.argv[2:]:
    exec(snippet)
"""


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_snippets_run_without_prompt(save_checkpoint, repository, tmp_path, shared):
    """Run both without the package, and the second with the package and without trust_remote_code."""
    _, _, folder = save_checkpoint(shared)
    content = make_card(folder, str(folder)).content
    snippets = re.findall(r"^```python\n(.*?)^```", content, re.MULTILINE | re.DOTALL)
    assert len(snippets) == 2
    without_trust = snippets[1].replace(", trust_remote_code=True", "")
    assert "trust_remote_code" not in without_trust
    for how, code in (("without_package", snippets), ("with_package", [without_trust])):
        process = subprocess.run(
            [sys.executable, "-c", SNIPPETS, how, *code], capture_output=True, text=True, check=False,
            cwd=tmp_path, stdin=subprocess.DEVNULL,
            env={"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin",
                 "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert process.returncode == 0, process.stderr[-3000:]
        assert "[y/N]" not in process.stdout + process.stderr
        assert ("translation_text" in process.stdout) == (how == "without_package")


def test_command_prints_card(folder, run_main, capsys):
    run_main(main, folder, "user/name", "--license", "mit")
    assert "license: mit" in capsys.readouterr().out
    run_main(main, folder / "nothing", "user/name", status=2)
    assert "nothing does not exist" in capsys.readouterr().err


def test_escapes_entities_and_formulas():
    assert escape_markdown("AT&amp;T wants $5$") == r"AT\&amp;T wants \$5\$"
