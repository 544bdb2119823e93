"""What all verbs have in common."""

import importlib
import re

import pytest

VERBS = ("import_checkpoint", "export", "push", "model_card", "decoding", "space.__main__")


@pytest.mark.parametrize("verb", VERBS)
def test_an_unknown_option_ends_a_verb_with_one_line(verb, run_main, capsys):
    main = importlib.import_module(f"hub.{verb}").main
    run_main(main, "one", "two", "--nothing_known", status=2)
    told = capsys.readouterr().err
    assert told.startswith(f"hub.{verb.removesuffix('.__main__')}: ")
    assert told.count("\n") == 1


@pytest.mark.parametrize("verb", VERBS)
def test_options_have_underscores(verb, run_main, capsys):
    main = importlib.import_module(f"hub.{verb}").main
    with pytest.raises(SystemExit):
        run_main(main, "--help")
    options = re.findall(r"--[\w-]+", capsys.readouterr().out)
    assert len(options) > 1
    assert not [option for option in options if "-" in option[2:]]
