import pytest
import yaml

from training.recipe import read_recipe

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
        ("learning_rate: fast", "invalid float value"),
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
