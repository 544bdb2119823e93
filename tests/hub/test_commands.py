"""Common behavior of all commands of hub."""

import importlib
import re

import pytest

COMMANDS = ("import_checkpoint", "export", "push", "model_card", "space.__main__")


@pytest.mark.parametrize("command", COMMANDS)
def test_reports_unknown_option_in_one_line(command, run_main, capsys):
    main = importlib.import_module(f"hub.{command}").main
    run_main(main, "one", "two", "--unknown-option", status=2)
    output = capsys.readouterr().err
    assert output.startswith(f"hub.{command.removesuffix('.__main__')}: ")
    assert output.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_options_use_hyphens(command, run_main, capsys):
    main = importlib.import_module(f"hub.{command}").main
    with pytest.raises(SystemExit):
        run_main(main, "--help")
    options = re.findall(r"--[\w-]+", capsys.readouterr().out)
    assert len(options) > 1
    assert not [option for option in options if "_" in option]
