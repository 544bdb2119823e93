import re
from argparse import SUPPRESS
from contextlib import nullcontext
from dataclasses import fields

import pytest
import yaml

from training.recipe import resolution
from training.recipe.arguments import MACHINE_KEYS, RENAMED_VALUES, UNKNOWN_UPDATES
from training.recipe.reading import make_parser, read_recipe
from training.run.output_dir import validate_same_recipe
from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.shared.command_line import RENAMED_OPTIONS, option_name

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


def test_reads_all_types_of_keys(path):
    recipe = read_recipe([str(path)])
    assert recipe.name == "mine"
    assert recipe.data.corpus == "demo"
    assert (recipe.model.d_model, recipe.model.encoder_layers, recipe.model.norm_position) == (64, 6, "post")
    assert (recipe.training.learning_rate, recipe.training.max_steps, recipe.training.tokens_per_update) == (
        1e-3,
        7,
        2048,
    )
    assert recipe.decoding.num_beams == 2


@pytest.mark.parametrize("schedule", ["linear", "reduce_lr_on_plateau", "greedy"])
def test_default_metric_does_not_depend_on_the_schedule(path, schedule):
    """Without a metric, transformers sets the loss if the schedule follows one."""
    keys = ["--early-stopping-patience=2", "--eval-strategy=steps", f"--lr-scheduler-type={schedule}"]
    training = read_recipe([str(path), *keys]).training
    assert (training.metric_for_best_model, training.greater_is_better) == ("bleu", True)
    assert schedule == "linear" or training.lr_scheduler_kwargs["mode"] == "max"
    training = read_recipe([str(path), *keys, "--metric-for-best-model=loss"]).training
    assert (training.metric_for_best_model, training.greater_is_better) == ("loss", False)


def test_command_line_overrides_recipe(path):
    arguments = ["--max-steps", "9", "--dropout", "0.3", "--norm-position", "pre", "--corpus", "files"]
    recipe = read_recipe([str(path), *arguments])
    assert (recipe.training.max_steps, recipe.model.dropout, recipe.model.norm_position) == (9, 0.3, "pre")
    assert recipe.data.corpus == "files"


def test_written_recipe_can_be_read(path, tmp_path):
    recipe = read_recipe([str(path), "--final-norm", "true", "--lr-scheduler-type", "inverse_sqrt"])
    assert recipe.model.final_norm is True
    written = tmp_path / "recipe.yaml"
    written.write_text(recipe.to_yaml())
    again = read_recipe([str(written)])
    assert (again.data, again.tokenizer, again.decoding) == (recipe.data, recipe.tokenizer, recipe.decoding)
    assert vars(again.model) == vars(recipe.model)
    assert again.training.lr_scheduler_type == "inverse_sqrt"
    assert yaml.safe_load(again.to_yaml()) == yaml.safe_load(recipe.to_yaml())


def test_only_unknown_updates_are_omitted(path):
    """The number that marks unknown updates with `minutes` is an ordinary value of other keys."""
    recipe = read_recipe([str(path), "--minutes=1", f"--tokens-per-update={UNKNOWN_UPDATES}"])
    assert recipe.training.max_steps == UNKNOWN_UPDATES
    assert "max_steps" not in recipe.to_dict()
    assert recipe.to_dict()["tokens_per_update"] == UNKNOWN_UPDATES
    assert read_recipe([str(path), f"--max-steps={UNKNOWN_UPDATES}"]).to_dict()["max_steps"] == UNKNOWN_UPDATES


def test_windows_path(path):
    text = re.sub("output_dir: .*\n", "", path.read_text()) + "output_dir: C:\\new\\run 1\n"
    path.write_text(text)
    recipe = read_recipe([str(path)])
    assert recipe.training.output_dir == "C:\\new\\run 1"
    assert yaml.safe_load(recipe.to_yaml())["output_dir"] == "C:\\new\\run 1"


@pytest.mark.parametrize(
    ("keys", "is_valid"),
    [
        ("train_file: train", False),
        ("train_file: train.jsonl", False),
        ("train_file: train.tsv", True),
        ("train_file: train.tsv\ndataset_name: user/name", False),
    ],
)
def test_source_and_target_need_two_files_or_columns(tmp_path, monkeypatch, keys, is_valid):
    """Columns of a .tsv file have no names. Without the file, the dataset is loaded."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        f"output_dir: out\nsource_lang: en\ntarget_lang: en\n{keys}\nvalidation_file: null\n"
    )
    with nullcontext() if is_valid else pytest.raises(ValueError, match="source_lang=en is also target_lang"):
        read_recipe([str(tmp_path / "mine.yaml")])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("max_stepz: 3", "unknown key 'max_stepz'; did you mean 'max_steps'?"),
        ("num_beams: [", "is not valid YAML"),
        ('output_dir: "C:\\data"', "escape character 'd'. Remove the quotes of paths with backslashes."),
        ("adam_beta1: fast", "invalid float value"),
        ("norm_position: middle", "invalid choice"),
        ("lr_scheduler_type: fast", "fast is not a valid SchedulerType"),
        ("encoder_attention_heads: 7", "d_model"),
        ("dropout: 1.0", "dropout=1.0 is invalid: it must be at least 0"),
        ("max_tokens: 0", "max_tokens=0 is invalid: it must be at least 1"),
        ("tokens_per_update: 0", "tokens_per_update=0 is invalid: it must be at least 1"),
        ("tokenizer_vocab_size: 3", "tokenizer_vocab_size=3 must be at least 5"),
        ("tokenizer_type: word\nbpe_dropout: 0.1", "bpe_dropout requires tokenizer_type=bpe"),
        ("tokenizer_type: word\nmoses: true", "moses requires tokenizer_type=bpe or unigram"),
        ("average_checkpoints: 3\nsave_strategy: no", "average_checkpoints requires save_strategy"),
        ("average_by: best", "average_by=best requires eval_strategy"),
        ("early_stopping_patience: 2", "early_stopping_patience requires eval_strategy"),
        ("length_penalty: 101", "length_penalty=101.0 must be from -100 to 100"),
        ("max_length_ratio: 0.5", "max_length_ratio=0.5 is invalid: it must be at least 1"),
        ("rdrop_alpha: 1\nsimcut_alpha: 3", "rdrop_alpha and simcut_alpha cannot be combined"),
        ("max_steps: 8", "line 8: duplicate key 'max_steps'"),
        ("eval_steps: .nan", "invalid float value: '.nan'"),
        ("eval_steps: nan", "nan is not a finite number"),
        ("max_grad_norm: inf", "inf is not a finite number"),
        ("length_penalty: 1e999", "1e999 is not a finite number"),
        ("max_grad_norm: -1", "max_grad_norm=-1.0 is invalid: it must be at least 0"),
        ("max_length: [1]", "line 8: max_length must be a single value"),
        ("max_length: {a: 1}", "line 8: max_length must be a single value"),
        ("max_length: 12345678901234567890123", "is not between"),
        ("encoder_layers: 1000000000", "do not fit into memory"),
        ("encoder_attention_heads: 0", "encoder_attention_heads=0"),
        ("save_steps: 0", "save_steps=0.0 is invalid: it must be greater than 0"),
        ("init_std: -1", "init_std=-1.0 is invalid: it must be at least 0"),
        ("generation_num_beams: 0", "generation_num_beams=0"),
        ("average_tokens_across_devices: false", "average_tokens_across_devices=False is not supported"),
        ("attention_plot_lines: [0]", "1-based"),
        ("a: &a [*a]", "anchors and deep nesting are not supported"),
        ("a: " + "[" * 5000, "line 8: anchors and deep nesting"),
        ('run_name: "a\\0b"', "contains a NUL or surrogate character"),
        ("activation_function: rleu", "activation_function=rleu is unknown. Did you mean relu?"),
        ("attn_implementation: flex_attention", "attn_implementation=flex_attention requires a GPU"),
        ("attn_implementation: magic", "attn_implementation=magic cannot be used"),
        ("metric_for_best_model: blue", "Available: loss, bleu, chrf, ter, bleu_tokenized_lc"),
        ("metric: sequence\nmetric_for_best_model: per", "`per` was renamed to `token_error_rate`"),
        ("optim: adamw_bnb_8bit", "need to install `bitsandbytes`"),
        ("weight_decay: -1", "Invalid weight_decay value"),
        ("lr_scheduler_kwargs: {speed: 3}", "unexpected keyword argument 'speed'"),
        ("lr_scheduler_kwargs: fast", "lr_scheduler_kwargs=fast"),
        ("lr_scheduler_kwargs: {speed: 2020-01-01}", "cannot be used"),
        ("report_to: trackio", "report_to=trackio: TrackioCallback requires trackio"),
        ("report_to: [nothing]", "report_to=nothing"),
        ("use_liger_kernel: true", "Liger has no kernels"),
        ("seed: -1", "seed=-1 is invalid: it must be at least 0"),
        ("early_stopping_patience: 0", "early_stopping_patience=0"),
        ("streaming: true", "streaming does not support corpus=demo"),
        ("data_dir: mine", "corpus=demo does not use data_dir=mine. Set corpus=files"),
        ("source_lang: de\ntarget_lang: en", "corpus=demo does not use source_lang=de"),
        ("both_directions: true", "corpus=demo does not use both_directions=True"),
        ("streaming: true\ndataloader_num_workers: 2", "dataloader_num_workers=2"),
        ("streaming: true\nvalidation_size: 5\non_eval_overlap: error", "on_eval_overlap=error, validation_size=5"),
        ("streaming: true\ntest_size: 5", "test_size=5"),
        ("streaming: true\nboth_directions: true\nbpe_dropout: 0.1", "both_directions=True, bpe_dropout=0.1"),
    ],
)
def test_invalid_values_are_reported_in_one_line(path, change, message):
    path.write_text(path.read_text() + change)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_recipe([str(path)])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_bpe_dropout_rejects_forked_workers(path, monkeypatch, method):
    """They inherit the state of the tokenizer library's random numbers."""
    monkeypatch.setattr(resolution, "get_start_method", lambda allow_none: method)
    arguments = [str(path), "--bpe-dropout", "0.1", "--dataloader-num-workers", "1"]
    if method == "fork":
        with pytest.raises(ValueError, match="bpe_dropout does not support dataloader_num_workers here"):
            read_recipe(arguments)
    else:
        assert read_recipe(arguments).training.dataloader_num_workers == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the path to a recipe must be the first argument."),
        (["no/such.yaml"], "cannot read the recipe no/such.yaml"),
        (["--max-steps", "3", "RECIPE"], "the path to a recipe must be the first argument, before --max-steps"),
        (["RECIPE", "--max-stepz", "4"], "max-stepz 4; did you mean --max-steps"),
        (["RECIPE", "--max-steps", "many"], "invalid int value: 'many'"),
        (["RECIPE", "--max-steps", "0"], "max_steps=0 is invalid: it must be at least 1, or -1 for epochs"),
        (["RECIPE", "--max-steps", "-2"], "max_steps=-2 is invalid: it must be at least 1, or -1 for epochs"),
        (["RECIPE", "--corpus", "random", "--eval-strategy", "steps"], "eval_strategy requires validation data"),
        (["RECIPE", "--corpus", "files", "--streaming", "true", "--max-steps", "-1"], "streaming requires max_steps"),
        (
            ["RECIPE", "--corpus", "files", "--both-directions", "true", "--shared-vocabulary", "false"],
            "both_directions requires shared_vocabulary",
        ),
        (["RECIPE", "--learning-rate", "null", "--lr-scheduler-type", "linear"], "learning_rate is required"),
        (["RECIPE", "--num-train-epochs", "2"], "num_train_epochs has no effect with max_steps=7. Add --max-steps -1."),
        (
            ["RECIPE", "--corpus", "files", "--dataset-name", "user/name", "--test-file", "mine"],
            "To use files, set data_dir",
        ),
        (
            ["RECIPE", "--lowercase", "true", "--tokenizer-path", "DIR"],
            "lowercase has no effect with tokenizer_path=DIR",
        ),
        (["RECIPE", "--save-steps", "9"], "save_steps has no effect with save_strategy=no"),
        (["RECIPE", "--eval-steps", "9"], "eval_steps has no effect with eval_strategy=no. Add --eval-strategy steps"),
    ],
)
def test_rejects_wrong_arguments(path, monkeypatch, arguments, message):
    monkeypatch.chdir(path.parent)  # without a directory `data`
    path.write_text(path.read_text() + "save_strategy: no\n")
    with pytest.raises(ValueError, match=re.escape(message)):
        read_recipe([str(path) if word == "RECIPE" else word for word in arguments])


def test_options_of_a_dataset_in_files_have_an_effect(path):
    arguments = ["--corpus", "files", "--dataset-name", "user/name", "--data-dir", "mine", "--test-file", "mine"]
    recipe = read_recipe([str(path), *arguments, "--num-train-epochs", "2", "--max-steps", "-1"])
    assert (recipe.data.test_file, recipe.training.num_train_epochs) == ("mine", 2)


@pytest.mark.parametrize("words", [["--test-file", "null"], ["--test_file=null"]])
def test_null_on_the_command_line_is_none(path, words):
    path.write_text(path.read_text().replace("corpus: demo", "corpus: files") + "test_file: mine\n")
    assert read_recipe([str(path), *words]).data.test_file is None
    with pytest.raises(ValueError, match="seed must not be null"):
        read_recipe([str(path), "--seed", "null"])
    with pytest.raises(ValueError, match="--test-file has a value and null"):
        read_recipe([str(path), "--test-file", "mine", *words])


def test_settings_of_none_have_the_defaults_of_other_keys(path):
    keys = {"metric_for_best_model": None, "greater_is_better": None}
    words = ["--early-stopping-patience=2", "--eval-strategy=steps"]
    nulls = [f"{option_name(key)}=null" for key in keys]
    for recipe in (read_recipe([str(path), *words], keys), read_recipe([str(path), *words, *nulls])):
        assert (recipe.training.metric_for_best_model, recipe.training.greater_is_better) == ("bleu", True)
        assert not recipe.explicit_keys & keys.keys()


@pytest.mark.parametrize("value", [{1, 2}, float("nan")])
def test_mappings_have_values_of_json(path, value):
    with pytest.raises(ValueError, match="the value of lr_scheduler_kwargs cannot be used"):
        read_recipe([str(path)], {"lr_scheduler_kwargs": {"timescale": value}})


def test_scalars_stay_text(path):
    """YAML would convert Norwegian to False, and directory names to a number and a date."""
    keys = "source_lang: no\ndata_dir: 1.10\ntokenizer_path: 2020-01-01\neval_strategy: no\nsave_strategy: 'no'\n"
    text = path.read_text().replace("corpus: demo", "corpus: files")
    path.write_text(text + keys + "test_file: ~\nvalidation_file: 'null'\nlr_scheduler_kwargs: {timescale: 9}")
    recipe = read_recipe([str(path)])
    data = recipe.data
    assert (data.source_lang, data.data_dir, recipe.tokenizer.tokenizer_path) == ("no", "1.10", "2020-01-01")
    assert (recipe.training.eval_strategy, recipe.training.save_strategy) == ("no", "no")
    assert (data.test_file, data.validation_file) == (None, "null")
    assert recipe.training.lr_scheduler_kwargs == {"timescale": 9}
    path.write_text(recipe.to_yaml())
    again = read_recipe([str(path)])
    assert (again.data, again.tokenizer, again.to_dict()) == (recipe.data, recipe.tokenizer, recipe.to_dict())


def test_every_key_has_a_help_text():
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


def test_every_config_field_has_a_help_text():
    for field in fields(VanillaTransformerConfig):
        if field.name in VanillaTransformerConfig.__annotations__ and field.name != "transformers_version":
            assert field.metadata["help"].endswith((".", "...")), field.name


OLD_KEYS = {
    "attention": "eager",
    "attention_lines": "[2, 3]",
    "bad_lines": "refuse",
    "overlap": "refuse",
    "processes": "2",
    "step": "plain",
    "tokenizer_pairs": "500",
    "tokenizer_size": "300",
    "vocabulary_multiple": "8",
}


def with_keys(path, values: dict[str, str]):
    text = path.read_text().replace("corpus: demo", "corpus: files")
    path.write_text(text + "".join(f"{key}: {value}\n" for key, value in values.items()))
    return path


def test_reads_renamed_keys(path, tmp_path, caplog):
    recipe_keys = {action.dest for action in make_parser()._actions}
    assert set(OLD_KEYS) == {old for old, new in RENAMED_OPTIONS.items() if new in recipe_keys}
    current = tmp_path / "current.yaml"
    current.write_text(with_keys(path, {"tokens_per_update": "4096"}).read_text())
    expected = read_recipe(
        [
            str(
                with_keys(
                    current,
                    {RENAMED_OPTIONS[key]: RENAMED_VALUES.get(OLD_KEYS[key], OLD_KEYS[key]) for key in OLD_KEYS},
                )
            )
        ]
    )
    assert not caplog.messages
    recipe = read_recipe([str(with_keys(path, OLD_KEYS))])
    assert recipe.to_dict() == expected.to_dict()
    assert recipe.explicit_keys == expected.explicit_keys
    messages = caplog.messages
    assert len(messages) == len(OLD_KEYS)
    for key, message in zip(OLD_KEYS, messages, strict=True):
        assert message.endswith(f"{key} was renamed to {RENAMED_OPTIONS[key]}")


@pytest.mark.parametrize("old", RENAMED_VALUES)
def test_reads_renamed_values(path, old):
    key = "step" if RENAMED_VALUES[old] in ("eager", "compiled") else "bad_lines"
    settings = read_recipe([str(with_keys(path, {key: old}))]).to_dict()
    assert settings[RENAMED_OPTIONS[key]] == RENAMED_VALUES[old]


def test_run_with_renamed_keys_can_be_resumed(path, tmp_path):
    """The `recipe.yaml` of earlier versions contains the old names."""
    recipe = read_recipe([str(with_keys(path, OLD_KEYS | {"tokens_per_update": "4096"}))])
    current = {RENAMED_OPTIONS[key]: key for key in OLD_KEYS}
    settings = {current.get(key, key): value for key, value in recipe.to_dict().items()}
    settings |= {"bad_lines": "refuse", "overlap": "refuse", "step": "plain", "processes": 2}
    del settings["tokens_per_update"]
    assert set(OLD_KEYS) <= set(settings)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    validate_same_recipe(recipe, tmp_path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings | {"step": "recorded"}))
    with pytest.raises(ValueError, match="step_mode was compiled, now it is eager"):
        validate_same_recipe(recipe, tmp_path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"max_tokens": "512", "processes": "2"}, "max_tokens=512, num_processes=2 requires tokens_per_update"),
        ({"max_tokens": "512", "processes": "2"}, "set tokens_per_update: 1024."),
        ({"max_tokens": "100", "gradient_accumulation_steps": "3"}, "set tokens_per_update: 300."),
        ({"num_processes": "4"}, "set tokens_per_update: 8192."),
    ],
)
def test_recipe_of_an_earlier_version_needs_tokens_per_update(path, keys, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_recipe([str(with_keys(path, keys))])


def test_one_process_needs_no_other_key(path):
    assert read_recipe([str(with_keys(path, {"num_processes": "1"}))]).training.tokens_per_update == 2048


def test_keys_of_the_machine_are_no_part_of_the_run(path):
    keys = {"tokens_per_update": "1000", "max_tokens": "300", "num_processes": "auto"}
    recipe = read_recipe([str(with_keys(path, keys))])
    assert recipe.training.gradient_accumulation_steps == 4
    assert recipe.to_dict()["tokens_per_update"] == 1000
    assert not set(MACHINE_KEYS) & set(recipe.to_dict())


@pytest.mark.parametrize("option", ["step", "processes"])
def test_error_shows_new_name_of_renamed_option(path, option):
    new = RENAMED_OPTIONS[option]
    with pytest.raises(ValueError, match=re.escape(f"--{option} 2; it was renamed to {option_name(new)}")):
        read_recipe([str(path), f"--{option}", "2"])
    with pytest.raises(ValueError, match=f"unknown key '{option}'; it was renamed to '{new}'"):
        read_recipe([str(path), f"--{option}", "null"])
