"""Learning curve: runs on parts of the data and in half of the time, and their comparison."""

import json
import sys
from pathlib import Path

import pytest

from training.data.corpora import select_fraction
from training.data.parallel_text import ParallelText
from training.recipe.reading import read_recipe
from training.run.results.learning_curve import describe_learning_curve, run_parts

SCORES = {"out": 20.0, "quarter_of_data": 10.0, "half_of_data": 14.0, "half_of_time": 19.0}


def test_smaller_fraction_is_contained_in_larger_one():
    text = ParallelText(*(list(map(str, range(40))),) * 2)
    parts = [select_fraction(text, fraction).sources for fraction in (0.25, 0.5, 1.0, 0.001)]
    assert [len(part) for part in parts] == [10, 20, 40, 1]
    assert set(parts[0]) < set(parts[1]) < set(parts[2])
    assert parts[0] != text.sources[:10]
    assert parts[0] == select_fraction(text, 0.25).sources


@pytest.fixture
def timed_recipe(recipe, tmp_path):
    options = ["--minutes=7", "--learning-rate=0.001", f"--output-dir={tmp_path / 'out'}", "--test-file=val"]
    return read_recipe([str(recipe), *options])


def test_parts_share_the_time_and_are_compared(timed_recipe, tmp_path):
    """The command of a part only sets options. A part that fails ends the learning curve."""
    commands = []

    def run_command(options, started):
        commands.append(dict(option.removeprefix("--").split("=") for option in options))
        folder = Path(commands[-1]["output_dir"])
        folder.mkdir(parents=True, exist_ok=True)
        pairs = round(1000 * float(commands[-1]["train_fraction"]))
        results = {"train_pairs": pairs, "test_bleu": SCORES[folder.name], "test_bleu_interval_95": 0.5}
        (folder / "all_results.json").write_text(json.dumps(results))

    points = run_parts(timed_recipe, run_command)
    assert json.loads((tmp_path / "out" / "learning_curve.json").read_text()) == points
    assert [Path(command["output_dir"]).name for command in commands] == list(SCORES)
    assert [float(command["train_fraction"]) for command in commands] == [1, 0.25, 0.5, 1]
    assert [float(command["minutes"]) for command in commands] == [2, 2, 2, 1]
    assert [point["train_pairs"] for point in points] == [1000, 250, 500, 1000]
    assert (tmp_path / "out" / "learning_curve.png").stat().st_size > 10_000
    text = describe_learning_curve(points)
    assert text.endswith("Twice the data changes BLEU by +6.0, twice the time by +1.0. More data would help more.")
    for half_data, half_time, advice in ((19.6, 18, "More time would"), (19.6, 19.7, "neither would help much")):
        points[2]["score"], points[3]["score"] = half_data, half_time
        assert advice in describe_learning_curve(points)
    commands.clear()
    with pytest.raises(SystemExit, match="130"):
        run_parts(timed_recipe, lambda options, started: commands.append(options) or sys.exit(130))
    assert len(commands) == 1


@pytest.mark.parametrize(("group", "name"), [("training", "minutes"), ("data", "test_file")])
def test_requires_time_and_test_data(timed_recipe, group, name):
    setattr(getattr(timed_recipe, group), name, None)
    with pytest.raises(ValueError, match="requires --minutes and test data"):
        run_parts(timed_recipe, lambda options, started: 0)


def test_rejects_launchers_and_runs_without_test_scores(timed_recipe, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "all_results.json").write_text('{"train_pairs": 1000}')
    with pytest.raises(ValueError, match="requires --minutes and test data"):
        run_parts(timed_recipe, lambda options, started: 0)
    timed_recipe.data.streaming = True
    with pytest.raises(ValueError, match="Remove streaming"):
        run_parts(timed_recipe, lambda options, started: 0)
    timed_recipe.data.streaming = False
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ValueError, match="without torchrun"):
        run_parts(timed_recipe, lambda options, started: 0)


def test_parts_are_fractions_of_the_fraction_of_the_user(timed_recipe):
    timed_recipe.data.train_fraction = 0.5
    commands = []
    with pytest.raises(SystemExit):
        run_parts(timed_recipe, lambda options, started: commands.append(options) or sys.exit(130))
    assert "--train_fraction=0.5" in commands[0]


def test_options_of_all_parts_are_valid_and_only_the_complete_run_is_published(tmp_path):
    arguments = ["demo", "--minutes=7", f"--output-dir={tmp_path}", "--push-to-hub=true", "--hub-model-id=user/name"]
    recipes = []

    def run_command(options, started):
        recipes.append(read_recipe([*arguments, *options]))
        folder = Path(recipes[-1].training.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "all_results.json").write_text('{"train_pairs": 1000, "test_bleu": 5.0}')

    run_parts(read_recipe(arguments), run_command)
    assert [each.training.push_to_hub for each in recipes] == [True, False, False, False]
