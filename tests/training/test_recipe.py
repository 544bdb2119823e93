from argparse import SUPPRESS
from dataclasses import fields

import pytest
import yaml

from training.recipe import make_parser, read_recipe
from vanilla_transformer import VanillaTransformerConfig

RECIPE = """
output_dir: OUT
corpus: demo
d_model: 64
learning_rate: 1e-3
max_steps: 7
num_beams: 2
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE.replace("OUT", str(tmp_path / "out")))
    return path


def test_keys_of_every_kind(path):
    recipe = read_recipe([str(path)])
    assert recipe.name == "mine"
    assert recipe.data.corpus == "demo"
    assert (recipe.model.d_model, recipe.model.encoder_layers, recipe.model.norm_position) == (64, 6, "post")
    assert (recipe.training.learning_rate, recipe.training.max_steps, recipe.training.max_tokens) == (1e-3, 7, 2048)
    assert recipe.decoding.num_beams == 2


def test_the_command_line_wins(path):
    arguments = ["--max_steps", "9", "--dropout", "0.3", "--norm_position", "pre", "--corpus", "files"]
    recipe = read_recipe([str(path), *arguments])
    assert (recipe.training.max_steps, recipe.model.dropout, recipe.model.norm_position) == (9, 0.3, "pre")
    assert recipe.data.corpus == "files"


def test_a_written_recipe_reads_back(path, tmp_path):
    recipe = read_recipe([str(path), "--final_norm", "true", "--lr_scheduler_type", "inverse_sqrt"])
    assert recipe.model.final_norm is True
    written = tmp_path / "recipe.yaml"
    written.write_text(recipe.to_yaml())
    again = read_recipe([str(written)])
    assert (again.data, again.tokenizer, again.decoding) == (recipe.data, recipe.tokenizer, recipe.decoding)
    assert vars(again.model) == vars(recipe.model)
    assert again.training.lr_scheduler_type == "inverse_sqrt"
    assert yaml.safe_load(again.to_yaml()) == yaml.safe_load(recipe.to_yaml())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("max_stepz: 3", "unknown key 'max_stepz'; did you mean 'max_steps'?"),
        ("num_beams: [", "is not YAML"),
        ("adam_beta1: fast", "invalid float value"),
        ("norm_position: middle", "invalid choice"),
    ],
)
def test_mistakes_end_with_one_message_and_status_2(path, capsys, change, message):
    path.write_text(path.read_text() + change)
    with pytest.raises(SystemExit) as exit_:
        read_recipe([str(path)])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such.yaml"], "cannot read the recipe no/such.yaml"),
        ([], "the following arguments are required: recipe"),
    ],
)
def test_mistakes_on_the_command_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_:
        read_recipe(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_an_unknown_argument_is_refused(path, capsys):
    with pytest.raises(SystemExit) as exit_:
        read_recipe([str(path), "--max_stepz", "4"])
    assert exit_.value.code == 2
    assert "max_stepz" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("max_steps: 8", "line 8: max_steps stands there a second time"),
        ("eval_steps: .nan", "invalid float value: '.nan'"),
        ("eval_steps: nan", "nan is not a finite number"),
        ("max_grad_norm: inf", "inf is not a finite number"),
        ("length_penalty: 1e999", "1e999 is not a finite number"),
        ("max_grad_norm: -1", "max_grad_norm=-1.0: give a number of at least 0"),
        ("max_length: [1]", "line 8: max_length needs one value"),
        ("max_length: {a: 1}", "line 8: max_length needs one value"),
        ("max_length: 12345678901234567890123", "is not between"),
        ("encoder_layers: 1000000000", "more than a machine holds"),
        ("encoder_attention_heads: 0", "encoder_attention_heads=0"),
        ("save_steps: 0", "save_steps=0.0: give a number above 0"),
        ("init_std: -1", "init_std=-1.0: give a number of at least 0"),
        ("generation_num_beams: 0", "generation_num_beams=0"),
        ("average_tokens_across_devices: false", "average_tokens_across_devices=False is not supported"),
        ("attention_plot_lines: [0]", "counted from 1"),
        ("a: &a [*a]", "a recipe has keys and values, no more"),
        ("a: " + "[" * 5000, "line 8: a recipe has keys and values"),
        ('run_name: "a\\0b"', "holds a character that no name can have"),
        ("activation_function: rleu", "activation_function=rleu is not known: did you mean relu?"),
        ("attn_implementation: flex_attention", "attn_implementation=flex_attention needs a GPU"),
        ("attn_implementation: magic", "attn_implementation=magic cannot be used"),
        ("metric_for_best_model: blue", "an evaluation tells loss, bleu, chrf, ter, bleu_tokenized_lc"),
        ("optim: adamw_bnb_8bit", "need to install `bitsandbytes`"),
        ("weight_decay: -1", "Invalid weight_decay value"),
        ("lr_scheduler_kwargs: {speed: 3}", "unexpected keyword argument 'speed'"),
        ("lr_scheduler_kwargs: fast", "lr_scheduler_kwargs=fast"),
        ("lr_scheduler_kwargs: {speed: 2020-01-01}", "cannot be used"),
        ("report_to: trackio", "report_to=trackio: TrackioCallback requires trackio"),
        ("report_to: [nothing]", "report_to=nothing"),
        ("use_liger_kernel: true", "Liger has no kernels"),
        ("seed: -1", "seed=-1: give a number of at least 0"),
        ("early_stopping_patience: 0", "early_stopping_patience=0"),
        ("streaming: true", "streaming does not support corpus=demo"),
        ("streaming: true\ndataloader_num_workers: 2", "dataloader_num_workers=2"),
        ("streaming: true\nvalidation_size: 5\non_eval_overlap: error", "on_eval_overlap=error, validation_size=5"),
        ("streaming: true\nboth_directions: true\nbpe_dropout: 0.1", "both_directions=True, bpe_dropout=0.1"),
    ],
)
def test_what_no_run_could_use_is_told_in_one_line_before_any_work(path, capsys, change, message):
    path.write_text(path.read_text() + change)
    with pytest.raises(SystemExit) as exit_:
        read_recipe([str(path)])
    assert exit_.value.code == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_random_pairs_have_no_validation_data(path, capsys):
    path.write_text(path.read_text().replace("corpus: demo", "corpus: random") + "eval_strategy: steps\n")
    with pytest.raises(SystemExit):
        read_recipe([str(path)])
    assert "eval_strategy needs validation data" in capsys.readouterr().err


def test_values_are_what_is_written(path):
    """YAML would take Norwegian for False, a folder for a number and another for a date."""
    keys = "source_lang: no\ndata_dir: 1.10\ntokenizer_path: 2020-01-01\neval_strategy: no\nsave_strategy: 'no'\n"
    path.write_text(
        path.read_text() + keys + "test_file: ~\nvalidation_file: 'null'\nlr_scheduler_kwargs: {timescale: 9}"
    )
    recipe = read_recipe([str(path)])
    data = recipe.data
    assert (data.source_lang, data.data_dir, recipe.tokenizer.tokenizer_path) == ("no", "1.10", "2020-01-01")
    assert (recipe.training.eval_strategy, recipe.training.save_strategy) == ("no", "no")
    assert (data.test_file, data.validation_file) == (None, "null")
    assert recipe.training.lr_scheduler_kwargs == {"timescale": 9}
    path.write_text(recipe.to_yaml())
    again = read_recipe([str(path)])
    assert (again.data, again.tokenizer, again.values()) == (recipe.data, recipe.tokenizer, recipe.values())


def test_a_recipe_behind_options_is_not_passed_over(path, capsys):
    with pytest.raises(SystemExit) as exit_:
        read_recipe(["--max_steps", "3", str(path)])
    assert exit_.value.code == 2
    assert "give the path of a recipe first, and --max_steps behind it" in capsys.readouterr().err


def test_every_key_explains_itself():
    """In a sentence or more of its own, which begins with a capital or with one of the values."""
    parser = make_parser()
    for action in parser._actions:
        if action.help is SUPPRESS:
            continue
        text = (action.help or "").strip()
        assert len(text.split()) >= 3, f"{action.dest}: {text!r}"
        if action.dest in ("help", "recipe"):
            continue
        assert text.endswith((".", "...")), f"{action.dest}: {text!r}"
        assert text[0].isupper() or text.split(":")[0] in (action.choices or ()), f"{action.dest}: {text!r}"
        assert "Model:" not in text


def test_every_field_of_the_configuration_explains_itself():
    for field in fields(VanillaTransformerConfig):
        if field.name in VanillaTransformerConfig.__annotations__ and field.name != "transformers_version":
            assert field.metadata["help"].endswith((".", "...")), field.name
