"""Runs of a given time: number of updates, schedule, evaluations and resuming, with a simulated clock."""

import time
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerControl, TrainerState

from training.recipe.arguments import UNKNOWN_UPDATES
from training.recipe.reading import read_recipe
from training.run.time_budget import (
    BEAM_SEARCH_RATIO,
    GREEDY_SEARCH_RATIO,
    SAVING_SECONDS,
    TimeBudget,
    estimate_test_ratio,
)


class SimulatedRun:
    """A loop like that of the Trainer, whose updates, evaluations and scoring only advance a clock."""

    def __init__(self, monkeypatch, seconds, update_seconds, eval_seconds=0.0, test_ratio=0.0, setup_seconds=0.0):
        self.now, self.update_seconds, self.eval_seconds = setup_seconds, update_seconds, eval_seconds
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        self.budget = TimeBudget(seconds, lambda: self.now, 0.1, test_ratio)
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        self.scheduler = self.budget.make_scheduler(optimizer)
        self.rates, self.evaluations, self.saves = [], [], []
        self.args = SimpleNamespace(eval_strategy="steps" if eval_seconds else "no", eval_steps=UNKNOWN_UPDATES)
        self.args.save_strategy, self.args.save_steps = "steps", UNKNOWN_UPDATES
        self.state = TrainerState(max_steps=UNKNOWN_UPDATES)

    def train(self, until: int = UNKNOWN_UPDATES) -> None:
        args, state = self.args, self.state
        self.budget.on_train_begin(args, state, TrainerControl())
        while state.global_step < min(state.max_steps, until):
            self.rates.append(self.scheduler.get_last_lr()[0])
            self.now += self.update_seconds(state.global_step)
            self.scheduler.optimizer.step()
            self.scheduler.step()
            state.global_step += 1
            control = TrainerControl(should_training_stop=state.global_step >= state.max_steps)
            control.should_evaluate = control.should_training_stop and args.eval_strategy == "steps"
            control.should_save = control.should_training_stop and args.save_strategy == "steps"
            self.budget.on_step_end(args, state, control)
            if control.should_evaluate:
                self.now += self.eval_seconds
                self.evaluations.append(state.global_step)
                self.budget.on_evaluate(args, state, control)
            if control.should_save:
                self.saves.append(state.global_step)


SPEEDS = {
    "constant": lambda update: 0.2,
    "slow first update": lambda update: 30 if update == 0 else 0.2,
    "half the speed after 500 updates": lambda update: 0.2 if update < 500 else 0.4,
    "very fast": lambda update: 0.003,
    "few updates": lambda update: 20.0,
}


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("eval_seconds", [0, 8])
def test_run_takes_the_given_time(monkeypatch, speed, eval_seconds):
    test_ratio = 2.5
    run = SimulatedRun(monkeypatch, 600, SPEEDS[speed], eval_seconds, test_ratio, setup_seconds=20)
    run.train()
    total = run.now + test_ratio * (eval_seconds or 12)
    assert 540 <= total <= 660
    assert len(run.saves) == 4
    assert run.evaluations == (run.saves if eval_seconds else [])
    assert max(run.rates) == pytest.approx(1, abs=0.25 if speed == "few updates" else 0.05)
    assert run.rates[-1] < (0.1 if speed == "few updates" else 0.02)
    peak = run.rates.index(max(run.rates))
    assert peak < 0.3 * len(run.rates)


def test_resumed_run_takes_the_rest_of_the_time(monkeypatch):
    run = SimulatedRun(monkeypatch, 300, SPEEDS["constant"], eval_seconds=5)
    run.train(until=700)
    resumed = SimulatedRun(monkeypatch, 300, SPEEDS["constant"], eval_seconds=5, setup_seconds=run.now)
    resumed.state, resumed.budget.max_updates = TrainerState(global_step=700), run.state.max_steps
    resumed.train()
    assert resumed.now == pytest.approx(300, rel=0.05)
    assert len(run.evaluations) + len(resumed.evaluations) == 4


def test_large_test_set_leaves_time_for_training(monkeypatch):
    run = SimulatedRun(monkeypatch, 600, SPEEDS["constant"], eval_seconds=1, test_ratio=50)
    run.train()
    assert run.now + 50 * 1 == pytest.approx(600, rel=0.05)


def test_slow_evaluation_is_repeated_only_at_the_end(monkeypatch):
    """An evaluation of 15 seconds would take half of 2 minutes with the test, if all four were done."""
    run = SimulatedRun(monkeypatch, 120, SPEEDS["constant"], eval_seconds=15, test_ratio=1)
    run.train()
    assert (len(run.evaluations), len(run.saves)) == (2, 4)
    assert run.evaluations[-1] == run.state.global_step
    assert run.now + 15 + SAVING_SECONDS == pytest.approx(120, rel=0.05)


def test_first_checkpoint_follows_the_highest_learning_rate(monkeypatch):
    """A run that diverges starts again only before its first checkpoint."""
    run = SimulatedRun(monkeypatch, 600, SPEEDS["constant"], eval_seconds=1)
    run.budget.warmup_ratio = 0.3
    run.train()
    assert (len(run.evaluations), len(run.saves)) == (4, 3)
    assert run.rates.index(max(run.rates)) < run.saves[0] == run.evaluations[1]


def test_logs_contain_the_remaining_time(monkeypatch):
    run = SimulatedRun(monkeypatch, 600, SPEEDS["constant"], setup_seconds=30)
    logs, scores = {"loss": 1.0}, {"eval_loss": 1.0}
    for each in (logs, scores):
        run.budget.on_log(run.args, run.state, TrainerControl(), each)
    assert logs == {"loss": 1.0, "minutes_left": 9.5}
    assert scores == {"eval_loss": 1.0}


def test_no_checkpoint_is_saved_with_save_strategy_no(monkeypatch):
    run = SimulatedRun(monkeypatch, 300, SPEEDS["constant"], eval_seconds=5)
    run.args.save_strategy = "no"
    run.train()
    assert (len(run.evaluations), run.saves) == (4, [])


def test_resumed_run_follows_the_plan_of_its_checkpoint(make_trainer, monkeypatch, tmp_path):
    """From update 4, the learning rates are those of the uninterrupted run. A finished run is not trained again."""
    keys = {"minutes": 9, "max_steps": UNKNOWN_UPDATES, "warmup_steps": 0.5, "logging_steps": 1}
    keys |= {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 99}
    monkeypatch.setattr("training.run.time_budget.FIRST_PLAN", 3)
    monkeypatch.setattr("training.run.time_budget.gather_object", lambda plan: [(6, 99)])
    histories = []
    for checkpoint in (None, 4, 6):
        trainer = make_trainer(layers=1, **keys)
        trainer.train(resume_from_checkpoint=checkpoint and f"{tmp_path}/out/checkpoint-{checkpoint}")
        history = trainer.state.log_history
        histories.append({each["step"]: each["learning_rate"] for each in history if "learning_rate" in each})
    assert len(histories[0]) == 6
    assert histories == [histories[0]] * 3


def test_resumed_run_counts_the_start_of_the_program(make_trainer, monkeypatch, tmp_path):
    """The time for reading and tokenizing data, before the training, is part of the given time."""
    keys = {"minutes": 9, "max_steps": UNKNOWN_UPDATES, "save_strategy": "steps", "save_steps": 1}
    monkeypatch.setattr("training.run.time_budget.gather_object", lambda plan: [(6, 99)])
    make_trainer(layers=1, started=time.time() - 1000, **keys).train()
    resumed = make_trainer(layers=1, started=time.time() - 500, **keys)
    resumed.train(resume_from_checkpoint=f"{tmp_path}/out/checkpoint-6")
    assert 1500 < resumed.budget.elapsed() < 1900
    assert resumed.seconds < 400


def test_printed_logs_contain_the_remaining_time(make_trainer, read_messages, monkeypatch):
    trainer = make_trainer(layers=1, minutes=9, max_steps=UNKNOWN_UPDATES, logging_steps=1)
    monkeypatch.setattr("training.run.time_budget.gather_object", lambda plan: [(6, 99)])
    trainer.budget.elapsed = lambda: 30.0
    trainer.train()
    assert "'minutes_left': '8.5'" in read_messages()


def test_ratio_of_test_and_evaluation():
    corpus = {"validation": range(200), "test": range(500)}
    assert estimate_test_ratio(corpus, 1, predict_with_generate=True) == 2.5
    assert estimate_test_ratio(corpus, 4, predict_with_generate=True) == 2.5 * BEAM_SEARCH_RATIO
    assert estimate_test_ratio(corpus, 1, predict_with_generate=False) == 2.5 * GREEDY_SEARCH_RATIO
    assert estimate_test_ratio({"validation": range(200)}, 4, predict_with_generate=True) == 0
    assert estimate_test_ratio({"test": range(500)}, 1, predict_with_generate=True) == 1


def test_late_start_ends_after_the_first_plan(monkeypatch):
    run = SimulatedRun(monkeypatch, 60, SPEEDS["constant"], setup_seconds=100)
    run.train()
    assert run.state.global_step <= 6


def test_all_processes_use_the_plan_of_the_main_process(monkeypatch):
    run = SimulatedRun(monkeypatch, 600, SPEEDS["constant"])
    monkeypatch.setattr("training.run.time_budget.gather_object", lambda plan: [(40, 1000)])
    run.train()
    assert run.state.global_step == 40


def test_all_processes_use_the_evaluation_time_of_the_main_process(monkeypatch):
    """With 3 seconds, more than 2 % of the time, this process would omit evaluations that the main process does."""
    run = SimulatedRun(monkeypatch, 120, SPEEDS["constant"], eval_seconds=3)
    gather = "training.run.time_budget.gather_object"
    monkeypatch.setattr(gather, lambda values: [2.0] if isinstance(values[0], float) else values)
    run.train()
    assert len(run.evaluations) == 4


@pytest.fixture
def read(tmp_path):
    def read(text: str, *options: str):
        (tmp_path / "recipe.yaml").write_text(f"output_dir: {tmp_path}/out\n{text}")
        return read_recipe([str(tmp_path / "recipe.yaml"), *options])

    return read


def test_minutes_replaces_the_updates_of_a_recipe(read):
    recipe = read("max_steps: 1000\nwarmup_steps: 200\nlearning_rate: 0.1\neval_steps: 50\n", "--minutes", "3")
    training = recipe.training
    assert (training.minutes, training.max_steps, training.warmup_steps) == (3, UNKNOWN_UPDATES, 0.2)
    assert (training.lr_scheduler_type, training.eval_strategy) == ("linear", "steps")
    assert not {"max_steps", "eval_steps", "save_steps"} & recipe.to_dict().keys()
    again = read(recipe.to_yaml().replace("output_dir", "run_name"))
    assert again.training.warmup_steps == 0.2
    assert again.training.eval_steps == UNKNOWN_UPDATES


@pytest.mark.parametrize("options", [(), ("--minutes", "5")])
def test_recipe_of_a_run_whose_time_replaced_epochs_is_valid(read, options):
    recipe = read("num_train_epochs: 1\nlearning_rate: 0.1\n", "--minutes", "3")
    again = read(recipe.to_yaml().replace("output_dir", "run_name"), *options)
    assert again.training.minutes == (5 if options else 3)


@pytest.mark.parametrize("options", [(), ("--minutes", "5")])
def test_recipe_with_minutes_keeps_its_evaluations(read, options):
    training = read("minutes: 3\nlearning_rate: 0.1\neval_steps: 50\nsave_steps: 100\n", *options).training
    assert (training.eval_steps, training.save_steps) == (50, 100)


@pytest.mark.parametrize("names", [[], ["eval"], ["save"], ["eval", "save"]])
def test_minutes_replaces_evaluation_after_each_epoch(read, names):
    """The time for an evaluation after each epoch would not be planned. An option for one of them keeps both."""
    text = "eval_strategy: epoch\nsave_strategy: epoch\naverage_by: best\nlearning_rate: 0.1\n"
    training = read(text, "--minutes=3", *(f"--{name}-strategy=epoch" for name in names)).training
    assert training.eval_strategy == training.save_strategy == ("epoch" if names else "steps")


@pytest.mark.parametrize("strategy", ["epoch", "steps"])
@pytest.mark.parametrize("average_by", ["last", "best"])
def test_save_steps_without_eval_steps(read, strategy, average_by):
    """The model is evaluated at each quarter, or if checkpoints are selected by it, whenever one is saved."""
    text = f"eval_strategy: {strategy}\nsave_strategy: {strategy}\naverage_by: {average_by}\nlearning_rate: 0.1\n"
    training = read(text, "--minutes=3", "--save-steps=60").training
    assert (training.save_steps, training.eval_strategy) == (60, "steps")
    assert training.eval_steps == (60 if average_by == "best" else UNKNOWN_UPDATES)


def test_corpus_without_validation_data_is_not_evaluated(read):
    training = read("corpus: random\nlearning_rate: 0.1\nminutes: 1\n").training
    assert training.eval_strategy == "no"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("minutes: 3\nmax_steps: 10\nlearning_rate: 0.1\n", "max_steps=10 contradicts minutes=3"),
        ("minutes: 3\nlr_scheduler_type: cosine\nlearning_rate: 0.1\n", "requires lr_scheduler_type=linear"),
        ("minutes: 3\n", "minutes requires learning_rate"),
        ("minutes: 3\nlearning_rate: 0.1\nwarmup_steps: 100\n", "requires a ratio as warmup_steps"),
        ("minutes: 3\nlearning_rate: 0.1\neval_steps: 0.2\n", "eval_steps=0.2 must be an integer"),
        ("minutes: 3\nlearning_rate: 0.1\nsave_steps: 0.2\n", "save_steps=0.2 must be an integer"),
        ("minutes: 3\nlearning_rate: 0.1\nlogging_steps: 0.1\n", "logging_steps=0.1 must be an integer"),
        ("minutes: 3\nlearning_rate: 0.1\neval_delay: 50\n", "eval_delay=50 requires eval_steps"),
        ("minutes: 0\nlearning_rate: 0.1\n", "minutes=0.0 is invalid"),
        ("minutes: 1.0e+300\nlearning_rate: 0.1\n", "minutes=1e.300 is invalid: it must be at most 527040 .a year"),
    ],
)
def test_contradicting_keys_are_rejected(read, text, message):
    with pytest.raises(ValueError, match=message):
        read(text)
