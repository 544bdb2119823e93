"""Training without a recipe: the settings are chosen, printed and saved; processes and resumed runs agree."""

import json
import shutil
import signal
from argparse import Namespace

import pytest
import yaml
from datasets import Dataset, DatasetDict

from training.inference.metrics import translate_and_score
from training.recipe import rules
from training.recipe.reading import read_recipe
from training.run import callbacks, chosen_recipe, factories, trainer, training
from training.run.checkpoints import all_checkpoints, keep_only
from training.run.chosen_recipe import read_or_choose_recipe
from training.run.distributed import exit_with_signal_status, launcher
from training.run.output_dir import write_recipe
from training.run.training import train
from training.train import train_parts

SMALL = {"max_steps": 2, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "tokenizer_vocab_size": 300}


@pytest.fixture
def data_dir(tmp_path, make_recipe):
    make_recipe(tmp_path)
    return tmp_path / "data"


def test_settings_are_chosen_printed_and_saved(data_dir, tmp_path, read_messages):
    """Reading the saved recipe gives the settings that the rules chose."""
    keys = {"data_dir": data_dir, "output_dir": tmp_path / "mine", **SMALL, "dropout": 0.25}
    result = train(**keys)
    messages = read_messages()
    assert messages.count("settings without a recipe") == 1
    assert "post-norm is only for long runs on many sentences: norm_position pre, initialization normal" in messages
    assert "dropout" not in messages.partition("settings without")[2].partition("parameters")[0]
    saved = yaml.safe_load((tmp_path / "mine" / "recipe.yaml").read_text())
    expected = {"norm_position": "pre", "dropout": 0.25, "d_model": 32, "max_steps": 2, "source_lang": "en"}
    assert {name: saved[name] for name in expected} == expected
    assert result.scores["recipe"] == "chosen"
    assert "test_bleu" in result.scores

    again = read_recipe([str(tmp_path / "mine" / "recipe.yaml")])
    chosen = read_or_choose_recipe([], keys)
    resolved = {"precision": "fp32", "attn_implementation": "sdpa", "step_mode": "eager"}
    assert again.to_dict() == chosen.to_dict() | resolved


def test_default_time_and_output_directory(data_dir, monkeypatch):
    recipe = read_or_choose_recipe(["--data-dir", str(data_dir)])
    assert (recipe.training.minutes, recipe.training.output_dir) == (30, "runs/data")
    assert "--minutes" in recipe.reasons["minutes"]
    assert read_or_choose_recipe(["--data-dir", str(data_dir), "--minutes", "3"]).training.minutes == 3


def test_learning_curve_requires_a_time_of_the_user(data_dir, tmp_path):
    arguments = ["--data-dir", str(data_dir), "--output-dir", str(tmp_path / "out")]
    with pytest.raises(ValueError, match="Set --minutes N"):
        train_parts(arguments, Namespace(quiet=True, json=False))
    assert not (tmp_path / "out").exists()


def test_file_outside_of_a_data_directory(data_dir, tmp_path):
    """The names of the files are relative to the directory of the training file."""
    english, german = ((data_dir / f"train.{language}").read_text().splitlines() for language in ("en", "de"))
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{source}\t{target}\n" for source, target in zip(english, german, strict=True)))
    options = ["--train-file", str(path), "--output-dir", str(tmp_path / "out"), "--validation-file", "null"]
    data = read_or_choose_recipe([*options, "--source-lang", "en", "--target-lang", "de"]).data
    assert (data.data_dir, data.train_file, data.validation_file) == (str(tmp_path), "pairs.tsv", None)


def test_missing_validation_and_test_data_are_split_off(data_dir):
    """With null as the file of a split, nothing is split off."""
    for path in [*data_dir.glob("val.*"), *data_dir.glob("test.*")]:
        path.unlink()
    recipe = read_or_choose_recipe(["--data-dir", str(data_dir), "--test-size", "7"])
    assert (recipe.data.validation_size, recipe.data.test_size, recipe.training.eval_strategy) == (12, 7, "steps")
    recipe = read_or_choose_recipe(["--data-dir", str(data_dir), "--validation-file", "null", "--test-file", "null"])
    assert (recipe.data.validation_size, recipe.data.test_size, recipe.training.eval_strategy) == (0, 0, "no")


def test_interrupted_run_keeps_its_settings(data_dir, tmp_path, monkeypatch):
    """The settings do not change if the run resumes on a faster machine."""
    keys = {"data_dir": data_dir, "output_dir": tmp_path / "out"}
    first = read_or_choose_recipe([], keys)
    (tmp_path / "out" / "checkpoint-1").mkdir(parents=True)
    write_recipe(first, tmp_path / "out")
    monkeypatch.setattr(chosen_recipe, "find_devices", lambda use_cpu: ("cuda", 8))
    resumed = read_or_choose_recipe([], keys)
    assert resumed.to_dict() == first.to_dict()
    assert read_or_choose_recipe([], keys | {"output_dir": tmp_path / "new"}).to_dict() != first.to_dict()


def test_run_of_an_earlier_version_has_the_defaults_of_new_keys(data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(rules, "REGULARIZATION", {(float("inf"), float("inf")): (0.1, 2.0)})
    keys = {"data_dir": data_dir, "output_dir": tmp_path / "out", "minutes": 30}
    recipe = read_or_choose_recipe([], keys)
    assert recipe.training.rdrop_alpha == 2
    (tmp_path / "out" / "checkpoint-1").mkdir(parents=True)
    saved = {name: value for name, value in recipe.to_dict().items() if name != "rdrop_alpha"}
    (tmp_path / "out" / "recipe.yaml").write_text(yaml.safe_dump(saved))
    assert read_or_choose_recipe([], keys).training.rdrop_alpha == 0


def test_failed_start_finds_the_data_again(data_dir, tmp_path):
    """Files that were removed after an error are not expected."""
    options = ["--data-dir", str(data_dir), "--output-dir", str(tmp_path / "out")]
    (tmp_path / "out").mkdir()
    write_recipe(read_or_choose_recipe(options), tmp_path / "out")
    for path in data_dir.glob("val.*"):
        path.unlink()
    assert read_or_choose_recipe(options).data.validation_file is None


def test_default_output_directory_of_other_data_is_rejected(data_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "data" / "checkpoint-1"
    folder.mkdir(parents=True)
    write_recipe(read_or_choose_recipe(["--data-dir", str(data_dir)]), folder.parent)
    other = shutil.copytree(data_dir, tmp_path / "other" / "data")
    with pytest.raises(ValueError, match="runs/data contains a run on the data in .*data. Set another --output-dir"):
        read_or_choose_recipe(["--data-dir", str(other)])
    assert read_or_choose_recipe(["--data-dir", str(data_dir)]).data.data_dir == str(data_dir)


def test_output_directory_must_differ_from_the_data(data_dir):
    with pytest.raises(ValueError, match="is also data_dir. Set another --output-dir"):
        read_or_choose_recipe(["--data-dir", str(data_dir), "--output-dir", str(data_dir)])


def test_none_means_the_choice_of_the_rules(data_dir):
    for key in ("minutes", "dropout", "d_model"):
        expected = read_or_choose_recipe([], {"data_dir": data_dir}).to_dict()
        assert read_or_choose_recipe([], {"data_dir": data_dir, key: None}).to_dict() == expected
        assert read_or_choose_recipe(["--data-dir", str(data_dir), f"--{key}", "null"]).to_dict() == expected
    with pytest.raises(ValueError, match="dropout has a value and null"):
        read_or_choose_recipe(["--data-dir", str(data_dir), "--dropout", "0.3", "--dropout", "null"])
    with pytest.raises(ValueError, match="d_model"):
        read_or_choose_recipe(["--data-dir", str(data_dir), "--d-model", "0"])


def test_empty_training_file(tmp_path):
    (tmp_path / "train.tsv").write_text("en\tde\n")
    with pytest.raises(ValueError, match="the train set has no pairs"):
        read_or_choose_recipe(["--data-dir", str(tmp_path)])


def test_missing_splits_of_a_saved_dataset_are_split_off(tmp_path):
    rows = Dataset.from_list([{"en": f"a{i} b{i}", "de": f"c{i} d{i}"} for i in range(100)])
    DatasetDict(train=rows, test=rows.select([1])).save_to_disk(tmp_path / "data")
    for option in ("--data-dir", "--dataset-name"):
        recipe = read_or_choose_recipe([option, str(tmp_path / "data")])
        assert (recipe.data.validation_size, recipe.data.test_size) == (10, 0)


def test_files_replace_a_dataset(data_dir):
    found = [
        read_or_choose_recipe(["--data-dir", str(data_dir), *options]).to_dict()
        for options in ([], ["--dataset-name", "user/name"])
    ]
    assert found[1] == found[0] | {"dataset_name": "user/name"}


def test_neither_recipe_nor_data(data_dir):
    with pytest.raises(ValueError, match="--data-dir"):
        read_or_choose_recipe(["--minutes", "3"])
    with pytest.raises(ValueError, match="unrecognized arguments: demo. A recipe must be the first argument"):
        read_or_choose_recipe(["--data-dir", str(data_dir), "demo"])
    with pytest.raises(ValueError, match="streaming requires a recipe"):
        read_or_choose_recipe(["--data-dir", "data", "--streaming", "true"])


# with these settings, rules choose post-norm, and every model seems to ignore the source
IGNORES_SOURCE = """
import math
from training.recipe import rules
from training.run import callbacks
rules.SIZES = {(math.inf, math.inf): (128, 1, 2, 32, "post")}
rules.MIN_POST_NORM_UPDATES = rules.SHORT_NUM_UPDATES = 0
callbacks.MIN_SHUFFLED_LOSS_INCREASE = math.inf
"""
RESTARTED = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "save_total_limit": 1}


@pytest.fixture
def ignore_source(monkeypatch):
    for name in ("SIZES", "MIN_POST_NORM_UPDATES", "SHORT_NUM_UPDATES"):
        monkeypatch.setattr(rules, name, getattr(rules, name))
    monkeypatch.setattr(callbacks, "MIN_SHUFFLED_LOSS_INCREASE", callbacks.MIN_SHUFFLED_LOSS_INCREASE)
    exec(IGNORES_SOURCE, {})


def test_post_norm_run_that_ignores_the_source_starts_again(
    ignore_source, data_dir, tmp_path, read_messages, monkeypatch
):
    """The new run is the same as one with pre-norm from the start, and the command can be repeated."""
    keys = {"data_dir": data_dir, "output_dir": tmp_path / "out", **RESTARTED}
    assert read_or_choose_recipe([], keys).model.norm_position == "post"
    with monkeypatch.context() as patch:  # a second timing could choose another precision
        timings = iter([("fp32", "sdpa", {})])
        patch.setattr(factories, "choose_precision_and_attention", lambda *arguments: next(timings))
        result = train(**keys)
    messages = read_messages()
    assert messages.count("after update 2 the model ignores the source. Training starts again, with pre-norm") == 1
    saved = read_recipe([str(tmp_path / "out" / "recipe.yaml")])
    assert (saved.model.norm_position, saved.training.save_total_limit) == ("pre", 1)
    assert (saved.training.learning_rate, saved.training.warmup_steps) == rules.NORMS["pre"]
    assert [path.name for path in all_checkpoints(tmp_path / "out")] == ["checkpoint-6"]

    same = {"precision": "fp32", "attn_implementation": "sdpa"}
    other = train(**keys | same | {"output_dir": tmp_path / "pre", "norm_position": "pre"})
    assert "Training starts again" not in read_messages()
    assert result.scores["updates"] == other.scores["updates"] == 6
    weights = result.model.state_dict(), other.model.state_dict()
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[1])
    train(**keys)
    assert "contains the finished run" in read_messages()


def test_run_that_is_stopped_during_the_evaluation_starts_again(ignore_source, data_dir, tmp_path, monkeypatch):
    def stop_and_score(*arguments, **options):
        signal.raise_signal(signal.SIGINT)
        return translate_and_score(*arguments, **options)

    keys = {"data_dir": data_dir, "output_dir": tmp_path / "out", **RESTARTED, "eval_steps": 4}
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "translate_and_score", stop_and_score)
        assert not train(**keys).finished
    assert [path.name for path in all_checkpoints(tmp_path / "out")] == ["checkpoint-4"]
    result = train(**keys)
    assert (result.scores["updates"], result.model.config.norm_position) == (6, "pre")


@pytest.mark.slow
@pytest.mark.parametrize("has_diverged", [False, True])
def test_processes_start_again_together(run_ranks, data_dir, tmp_path, has_diverged):
    options = ["--data-dir", data_dir, "--output-dir", tmp_path / "out"]
    options += [f"--{name}={value}" for name, value in RESTARTED.items()]
    run_ranks(*options, setup_code=DIVERGES if has_diverged else IGNORES_SOURCE)
    scores = json.loads((tmp_path / "out" / "all_results.json").read_text())
    assert (scores["processes"], scores["updates"]) == (2, 6)
    saved = read_recipe([str(tmp_path / "out" / "recipe.yaml")])
    assert saved.model.norm_position == "pre"
    assert saved.training.learning_rate == (rules.SHORT_SCHEDULE[0] / 2 if has_diverged else rules.NORMS["pre"][0])


# the loss of one process is not finite at its second micro-batch
DIVERGES = """
import itertools, math, os
from training.run import trainer
FACTOR = 1.0 if os.environ.get("RANK") == "0" else math.nan
def diverge_once(*arguments, training_loss=trainer.training_loss, factor=FACTOR, numbers=itertools.count(1)):
    loss, outputs = training_loss(*arguments)
    return loss * (factor if next(numbers) == 2 else 1.0), outputs
trainer.training_loss = diverge_once
"""


@pytest.fixture
def diverge(monkeypatch):
    def diverge(update: int) -> None:
        monkeypatch.setattr(trainer, "training_loss", trainer.training_loss)
        exec(DIVERGES.replace("== 2", f"== {2 * update}"), {})  # each update has 2 micro-batches

    return diverge


def test_run_that_diverges_starts_again_with_a_lower_learning_rate(diverge, data_dir, tmp_path, read_messages):
    """The new run is the same as one with this learning rate from the start."""
    keys = {"data_dir": data_dir, "output_dir": tmp_path / "out", **RESTARTED}
    diverge(update=2)
    result = train(**keys)
    message = "after update 1 the loss is not finite. Training starts again, with learning_rate 0.00225"
    assert read_messages().count(message) == 1
    rate = read_recipe([str(tmp_path / "out" / "recipe.yaml")]).training.learning_rate
    assert rate == rules.SHORT_SCHEDULE[0] / 2
    schedule = {"learning_rate": rate, "warmup_steps": rules.SHORT_SCHEDULE[1]}
    other = train(**keys | {"output_dir": tmp_path / "other", **schedule})
    assert result.scores["updates"] == other.scores["updates"] == 6
    weights = result.model.state_dict(), other.model.state_dict()
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[1])


def test_signal_to_the_launcher_during_the_new_start_ends_the_run(diverge, data_dir, tmp_path, monkeypatch):
    """The callback that ends training after an update is not called any more."""
    handlers = []

    def record_and_keep(*arguments):
        handlers.append(launcher.on_signal)
        keep_only(*arguments)

    monkeypatch.setattr(training, "keep_only", record_and_keep)  # called between the runs
    diverge(update=2)
    train(data_dir=data_dir, output_dir=tmp_path / "out", **RESTARTED)
    assert handlers[0] is exit_with_signal_status


def test_checkpoint_of_a_stopped_run_does_not_prevent_the_new_start(diverge, data_dir, tmp_path, read_messages):
    def stop_and_compute(*arguments, training_loss=trainer.training_loss):
        signal.raise_signal(signal.SIGINT)
        return training_loss(*arguments)

    keys = {"data_dir": data_dir, "output_dir": tmp_path / "out", **RESTARTED, "save_steps": 6}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "training_loss", stop_and_compute)
        patch.setattr(callbacks.StopOnSignal, "_receive", lambda self, number, frame: self._request_stop(number))
        assert not train(**keys).finished
    assert [path.name for path in all_checkpoints(tmp_path / "out")] == ["checkpoint-1"]
    diverge(update=1)  # the first one of the resumed run
    assert train(**keys).scores["updates"] == 6
    assert "after update 1 the loss is not finite. Training starts again" in read_messages()


@pytest.mark.parametrize(
    ("update", "options", "checkpoints"),
    [(4, {}, ["checkpoint-2"]), (2, {"learning_rate": 0.001}, [])],
)
def test_checkpoints_and_given_learning_rates_are_kept(diverge, data_dir, tmp_path, update, options, checkpoints):
    diverge(update)
    with pytest.raises(FloatingPointError, match=f"not finite at update {update}"):
        train(data_dir=data_dir, output_dir=tmp_path / "out", **RESTARTED, **options)
    assert [path.name for path in all_checkpoints(tmp_path / "out")] == checkpoints


def test_run_starts_again_only_once(data_dir, tmp_path, monkeypatch, read_messages):
    monkeypatch.setattr(rules, "SHORT_SCHEDULE", (1e30, 0.1))
    with pytest.raises(FloatingPointError, match="not finite at update"):
        train(data_dir=data_dir, output_dir=tmp_path / "out", max_steps=6, max_grad_norm=0)
    assert read_messages().count("Training starts again") == 1


@pytest.mark.slow
def test_processes_choose_the_same_settings(programs, data_dir, tmp_path):
    """The command prints the choice once. A finished run is not repeated, and other settings are an error."""
    options = ["--data-dir", data_dir, "--output-dir", tmp_path / "out", "--num-processes", "2"]
    options += [f"--{name}={value}" for name, value in SMALL.items()]
    process = programs.run("training.train", *options)
    assert process.stderr.count("settings without a recipe") == 1
    assert "Warning" not in process.stderr
    assert json.loads((tmp_path / "out" / "all_results.json").read_text())["processes"] == 2
    assert "source gain" in process.stdout
    again = programs.run("training.train", *options)
    assert "contains the finished run" in again.stderr
    other = programs.run("training.train", *options, "--dropout", "0.05", status=2)
    assert "dropout was" in other.stderr
