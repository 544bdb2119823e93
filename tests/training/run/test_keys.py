"""Each field of `Seq2SeqTrainingArguments` is a key with a tested effect, or it is rejected."""

import dataclasses
import logging
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from accelerate.utils import DynamoBackend
from httpx2 import ConnectError
from transformers import Seq2SeqTrainingArguments

from training import train
from training.recipe.arguments import SUPPORTED, UNSUPPORTED, UNSUPPORTED_ADVICE, TrainingArguments
from training.recipe.reading import make_parser, read_recipe, validate_supported_keys
from training.run import chosen_recipe
from training.run.results.evaluation import push
from vanilla_transformer.shared.command_line import logger

FIELDS = {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}
EFFECTS = {  # key: its value, and the settings of both runs that are compared
    "output_dir": ("OUT", {"save_strategy": "steps"}),
    "max_steps": (2, {}),
    "num_train_epochs": (1, {"max_steps": -1}),
    "seed": (1, {"dropout": 0.1}),
    "data_seed": (1, {"tokens_per_update": 16}),
    "learning_rate": (0.02, {}),
    "lr_scheduler_type": ("linear", {"warmup_steps": 1}),
    "lr_scheduler_kwargs": ({"timescale": 2}, {"warmup_steps": 1}),
    "warmup_steps": (1, {}),
    "optim": ("sgd", {}),
    "weight_decay": (0.5, {"warmup_steps": 1}),
    "adam_beta1": (0.5, {"warmup_steps": 1}),
    "adam_beta2": (0.5, {"warmup_steps": 1}),
    "adam_epsilon": (0.1, {"warmup_steps": 1}),
    "max_grad_norm": (0.01, {"warmup_steps": 1, "optim": "sgd"}),
    "gradient_accumulation_steps": (4, {"tokens_per_update": 16, "warmup_steps": 1}),
    "label_smoothing_factor": (0.0, {"warmup_steps": 1}),
    "eval_strategy": ("epoch", {}),
    "eval_steps": (2, {"eval_strategy": "steps", "logging_steps": 1}),
    "eval_delay": (2, EVALUATED),
    "per_device_eval_batch_size": (2, EVALUATED),
    "predict_with_generate": (True, EVALUATED),
    "save_strategy": ("epoch", {}),
    "save_steps": (2, {"save_strategy": "steps"}),
    "save_total_limit": (1, {"save_strategy": "steps", "save_steps": 1}),
    "logging_strategy": ("epoch", {"logging_steps": 1}),
    "logging_steps": (1, {}),
    "logging_first_step": (True, {}),
    "log_level": ("error", {}),
    "report_to": ("tensorboard", {}),
    "disable_tqdm": (False, {}),
    "dataloader_num_workers": (1, {}),
    "activation_checkpointing": (True, {}),
}


@pytest.fixture
def observe(make_trainer, tmp_path, monkeypatch):
    """Return the observable results of a training of three updates, without its settings."""

    def run(**keys) -> dict:
        trainer = make_trainer(**keys)
        batches = []
        evaluate = "training.run.trainer.translate_and_score"

        def score(model, tokenizer, text, compute, args, **decoding):
            batches.append((args.eval_batch_size, args.predict_with_generate, decoding))
            return {"loss": 1.0}, []

        monkeypatch.setattr(evaluate, score)
        trainer.train()
        loader = trainer.get_train_dataloader()
        steps = [(entry["step"], sorted(entry)) for entry in trainer.state.log_history[:-1]]
        return {
            "weights": [float(each.detach().double().abs().sum()) for each in trainer.model.parameters()],
            "updates": trainer.state.global_step,
            "steps": steps,
            "checkpoints": sorted(str(path) for path in tmp_path.rglob("checkpoint-*")),
            "evaluations": batches,
            "loader": (len(loader), loader.num_workers, loader.pin_memory),
            "callbacks": sorted(type(each).__name__ for each in trainer.callback_handler.callbacks),
            "log_level": transformers.logging.get_verbosity(),
            "recomputed": trainer.model.is_activation_checkpointing,
        }

    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)  # for `disable_tqdm`
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()  # TRANSFORMERS_VERBOSITY may differ
    yield run
    transformers.logging.set_verbosity(before)


@pytest.mark.parametrize("key", sorted(EFFECTS))
def test_key_has_an_effect(observe, tmp_path, key):
    value, settings = EFFECTS[key]
    expected = observe(**settings)
    before = set(tmp_path.rglob("checkpoint-*"))
    found = observe(**settings, **{key: str(tmp_path / value) if value == "OUT" else value})
    assert found != expected
    assert key != "output_dir" or {path.parent.name for path in set(tmp_path.rglob("checkpoint-*")) - before} == {"OUT"}


# --- Keys whose effect is on a recipe, on the machine, or on the Hub ---


@pytest.fixture
def read(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(f"output_dir: {tmp_path / 'out'}\ncorpus: demo\nlearning_rate: 0.01\nuse_cpu: true\n")
    return lambda *arguments: read_recipe([str(path), *arguments])


def test_bf16_sets_precision(read):
    assert read().training.precision == "auto"
    assert read("--bf16", "true").training.precision == "bf16"


@pytest.mark.parametrize("keys", [{"metric_for_best_model": "ter"}, {"greater_is_better": False}])
def test_plateau_schedule_follows_greater_is_better(read, keys):
    """Greater BLEU is better."""
    plateau = ("--eval-strategy=steps", "--metric-for-best-model=bleu", "--lr-scheduler-type=reduce_lr_on_plateau")
    training = read(*plateau).training
    assert (training.metric_for_best_model, training.lr_scheduler_kwargs) == ("bleu", {"mode": "max"})
    training = read(*plateau, *(f"--{key}={value}" for key, value in keys.items())).training
    assert training.lr_scheduler_kwargs is None  # "min" is the default
    training = read(*plateau, '--lr-scheduler-kwargs={"mode": "min", "patience": 3}').training
    assert training.lr_scheduler_kwargs == {"mode": "min", "patience": 3}


def test_generation_num_beams(observe):
    keys = EVALUATED | {"predict_with_generate": True}
    assert [found[2]["num_beams"] for found in observe(**keys, generation_num_beams=3)["evaluations"]] == [3, 3, 3]


def test_keys_of_the_hardware(tmp_path, make_trainer):
    arguments = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    assert make_trainer().accelerator.state.dynamo_plugin.backend == DynamoBackend.NO
    trainer = make_trainer(torch_compile=True)
    assert trainer.accelerator.state.dynamo_plugin.backend == DynamoBackend.INDUCTOR
    trainer = make_trainer()
    for pins in (False, True):  # transformers turns it off without a GPU
        trainer.args.dataloader_pin_memory = pins
        assert trainer.get_train_dataloader().pin_memory == pins
    args = TrainingArguments(
        **arguments, ddp_timeout=9, run_name="mine", fsdp=True, fsdp_config={"reshard_after_forward": False}
    )
    assert (args.ddp_timeout_delta.total_seconds(), args.run_name, args.device.type) == (9, "mine", "cpu")
    assert args.fsdp_plugin_args["reshard_after_forward"] is False
    with pytest.raises(ValueError, match="fsdp"):
        make_trainer(fsdp=True)


def test_keys_of_the_hub(read, monkeypatch, caplog):
    calls = []

    def call(command, env, **options):
        calls.append([*command[2:], env.get("HF_TOKEN")])
        return SimpleNamespace(returncode=0, stdout="")

    monkeypatch.setattr(subprocess, "run", call)
    keys = {"push_to_hub": True, "hub_model_id": "me/mine", "hub_private_repo": True, "hub_revision": "v1"}
    recipe = read(*(f"--{key}={value}" for key, value in keys.items()), "--hub-token=secret")
    assert recipe.training.push_to_hub
    options = ["hub.push", str(Path("out").resolve()), "me/mine", "--private", "--revision", "v1"]
    for level, quiet in ((logging.INFO, []), (logging.ERROR, ["--quiet"])):
        caplog.set_level(level, logger.name)
        push(recipe, Path("out"))
        assert calls.pop() == [*options, *quiet, "secret"]


def test_reports_a_hub_that_cannot_be_reached(monkeypatch, capsys):
    """With `push_to_hub`, transformers creates the repository before training."""

    def fail(*arguments):
        raise ConnectError("no route to host")

    monkeypatch.setattr(chosen_recipe, "read_or_choose_recipe", fail)
    monkeypatch.setattr("sys.argv", ["training.train", "demo"])
    with pytest.raises(SystemExit) as exit_:
        train.main()
    assert exit_.value.code == 2
    message = "The Hub cannot be reached (no route to host). Check your network, or remove push_to_hub."
    assert capsys.readouterr().err == f"training.train: {message}\n"


TESTED_ABOVE = {
    *("bf16", "greater_is_better", "metric_for_best_model", "generation_num_beams", "use_cpu", "torch_compile"),
    "dataloader_pin_memory",
    *("ddp_timeout", "run_name", "fsdp", "fsdp_config"),
    *("push_to_hub", "hub_model_id", "hub_private_repo", "hub_revision", "hub_token"),
}


def test_every_field_is_supported_and_tested_or_rejected(tmp_path):
    assert set(EFFECTS) | TESTED_ABOVE == FIELDS - UNSUPPORTED
    assert FIELDS & SUPPORTED == FIELDS - UNSUPPORTED
    assert set(UNSUPPORTED_ADVICE) - FIELDS == {"group_by_length"}
    parser = make_parser()
    actions = {action.dest: action for action in parser._actions}
    defaults = vars(parser.parse_known_args(["mine.yaml"])[0])
    for name in sorted(UNSUPPORTED):
        action, default = actions[name], defaults[name]
        values = [*(action.choices or []), "true", "false", "7", "text", "underflow_overflow"]
        for value in values:
            try:
                parsed = vars(parser.parse_known_args(["mine.yaml", f"--{name}={value}"])[0])[name]
            except ValueError:
                continue
            arguments = ["mine.yaml", f"--{name}={value}"]
            if parsed == default or not (parsed or default):  # no effect
                validate_supported_keys(parser, arguments)
            else:
                message = f"{name}=.* is not supported: {UNSUPPORTED_ADVICE.get(name, 'remove it')}"
                with pytest.raises(ValueError, match=message):
                    validate_supported_keys(parser, arguments)
                break
        else:
            assert name in ("liger_kernel_config", "parallelism_config")  # argparse cannot read them


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--load-best-model-at-end", "true"], "set average_by: best"),
        (["--save-only-model", "true"], "cannot be resumed"),
        (["--per-device-train-batch-size", "16"], "set tokens_per_update"),
        (["--save-strategy", "best", "--eval-strategy", "steps"], "Use steps or epoch, and average_by: best"),
        (["--lr-scheduler-type", "reduce_lr_on_plateau"], "requires an eval strategy"),
        (
            ["--average-by=best", "--eval-strategy=steps", "--eval-steps=3", "--save-steps=2"],
            "be a multiple of the other",
        ),
        (["--average-by=best", "--eval-strategy=epoch", "--save-steps=2"], "requires the same eval_strategy"),
        (
            ["--average-by=best", "--eval-strategy=steps", "--eval-steps=0.3", "--save-steps=0.2", "--max-steps=100"],
            "must be a multiple",
        ),
        (
            ["--average-by=best", "--eval-strategy=steps", "--eval-steps=0.1", "--max-steps=-1"],
            "Set max_steps",
        ),
        (["--bf16", "true", "--precision", "fp32"], "contradicts precision=fp32"),
    ],
)
def test_rejects_settings_without_an_effect(read, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read(*arguments)


def test_accepts_unsupported_fields_with_default_values(read, tmp_path):
    """The recipe.yaml of earlier versions contains them."""
    read("--load-best-model-at-end", "false", "--per-device-train-batch-size", "8", "--hub-strategy", "end")
    best = ("--average-by=best", "--eval-strategy=steps")
    for evaluations, saves in ((4, 2), (2, 4), (0.1, 0.2), (3, 3)):
        read(*best, f"--eval-steps={evaluations}", f"--save-steps={saves}", "--max-steps=100")
