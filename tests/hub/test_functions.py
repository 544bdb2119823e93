"""The Python functions of the commands, and their results as JSON."""

import json
import sys

import pytest

from hub import export, import_checkpoint, push
from hub.exporting import exporter
from hub.importing import importer
from hub.publishing import upload
from vanilla_transformer.shared.command_line import start_of_command


@pytest.fixture
def tutorial_file(make_reference, save_as, tmp_path):
    _, state, _, _, _ = make_reference("notebook")
    return save_as("bare", state, tmp_path)


def test_import_returns_its_report(tutorial_file, run_main, tmp_path, capsys):
    result = importer.import_checkpoint(tutorial_file, str(tmp_path / "one"), num_heads=4)
    assert result.folder == tmp_path / "one"
    assert result.report == json.loads((result.folder / "import_report.json").read_text())
    assert capsys.readouterr().out == ""
    run_main(import_checkpoint.main, tutorial_file, tmp_path / "two", "--num-heads", 4, "--json", "--quiet")
    printed, errors = capsys.readouterr()
    assert json.loads(printed) == {"folder": str(tmp_path / "two")} | result.report
    assert errors == ""


def test_import_lists_the_layouts(tutorial_file, tmp_path):
    with pytest.raises(ValueError, match="layout=other does not exist. Use one of aladdin_persson, "):
        importer.import_checkpoint(tutorial_file, tmp_path / "out", num_heads=4, layout="other")


def test_export_returns_the_folder(save_checkpoint, run_main, tmp_path, capsys):
    _, _, folder = save_checkpoint()
    assert exporter.export(str(folder), str(tmp_path / "one"), to="transformers") == tmp_path / "one"
    assert capsys.readouterr().out == ""
    run_main(export.main, folder, tmp_path / "two", "--to", "transformers", "--json")
    assert json.loads(capsys.readouterr().out) == {"folder": str(tmp_path / "two"), "to": "transformers"}
    assert {path.name for path in tmp_path.glob("two/*")} == {path.name for path in tmp_path.glob("one/*")}
    with pytest.raises(ValueError, match="to=marian is not supported. Use one of transformers, ctranslate2"):
        exporter.export(folder, tmp_path / "three", to="marian")


def test_dry_run_returns_the_files(save_checkpoint, run_main, tmp_path, capsys, monkeypatch):
    """The test of the files in a new process is replaced: other tests run it."""
    monkeypatch.setattr(upload, "smoke_test_upload", lambda files, source: source.upper())
    _, _, folder = save_checkpoint()
    result = upload.push(folder, "user/name", dry_run=True, license="mit")
    assert result.url is None
    assert result.example == ("A sentence.", "A SENTENCE.")
    assert result.files["model.safetensors"] == (folder / "model.safetensors").stat().st_size
    assert "license: mit" in result.card
    assert capsys.readouterr().out == ""
    run_main(push.main, folder, "user/name", "--dry-run", "--license", "mit", "--json")
    printed = json.loads(capsys.readouterr().out)
    assert printed == vars(result) | {"example": list(result.example)}


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("/usr/bin/vanilla-transformer", "vanilla-transformer import"),
        ("/clone/hub/push.py", "python -m hub.import_checkpoint"),
        ("-c", "vanilla-transformer import"),
    ],
)
def test_messages_name_the_command_that_users_type(monkeypatch, script, expected):
    monkeypatch.setattr(sys, "argv", [script, "arguments"])
    assert start_of_command("hub.import_checkpoint") == expected
    assert start_of_command("hub.push") == expected.replace("import_checkpoint", "push").replace("import", "push")
