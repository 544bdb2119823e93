"""The command `training.diversify`."""

import shutil

import pytest

pytestmark = pytest.mark.slow


def test_adds_translations_of_both_models(programs, finished, test_files, tmp_path):
    output = tmp_path / "new" / "diverse.tsv"
    # Outside its run, the checkpoint has no recipe that names the languages.
    backward = shutil.copytree(finished / "checkpoint-4", tmp_path / "backward")
    arguments = ("--source", test_files[0], "--target", test_files[1], "--output", output)
    programs.run("training.diversify", finished, backward, *arguments)
    pairs = [tuple(line.split("\t")) for line in output.read_text().splitlines()]
    expected = []
    originals = list(zip(*(path.read_text().splitlines() for path in test_files), strict=True))
    for pair in originals:
        expected += [pair, pair]
    for side, folder, count in ((0, finished, "2"), (1, backward, "3")):
        process = programs.run("training.translate", folder, "--input", test_files[side], "--nbest", count)
        for number, _, text in (line.split("\t") for line in process.stdout.splitlines()):
            pair = (originals[int(number) - 1][side], text)
            expected += [pair if side == 0 else pair[::-1]] if text else []
    assert pairs == expected
    assert list(output.parent.iterdir()) == [output]


def test_rejects_models_of_the_wrong_direction(programs, finished, test_files, tmp_path):
    arguments = ("--source", test_files[0], "--target", test_files[1], "--output", tmp_path / "diverse.tsv")
    process = programs.run("training.diversify", finished, finished, *arguments, status=2)
    assert f"{finished} translates from en to de, but --source is {test_files[1]}" in process.stderr
    assert not list(tmp_path.glob("diverse*"))
