"""Training for a given time: number of updates and learning rate follow from the measured speed."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sized
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerControl, TrainerState

from ..recipe.arguments import UNKNOWN_UPDATES

NUM_EVALUATIONS = 4  # and checkpoints, at equal fractions of the updates
MAX_EVALUATION_FRACTION = 0.02  # of the budget, for one evaluation; if it takes longer, only the last one follows
EVALUATION_FRACTION = 0.02  # of the budget, for one evaluation before the first is measured
TEST_FRACTION = 0.05  # of the budget, at most, for the test before the first evaluation is measured
BEAM_SEARCH_RATIO = 1.5  # time of beam search, compared with greedy decoding; on a CPU 1.4, with CTranslate2 1.05
GREEDY_SEARCH_RATIO = 2.0  # time of an evaluation with greedy decoding, compared with only the losses; 1.4 on a CPU
SAVING_SECONDS = 9.0  # of a CPU core: 5 for the final checkpoint, alignment heads and plots, 4 for confidence intervals
NUM_TIMED_UPDATES = 300  # the latest ones, because the speed of a shared machine changes
FIRST_PLAN = 5  # update of the first estimate
PLAN_SECONDS = 2.0  # between estimates


class TimeBudget(TrainerCallback):
    """Ends training so that the run takes a given time, including evaluations and the translation of the test set.

    The number of remaining updates is estimated again every few seconds, by the main process for all. The learning rate
    is a function of the fraction of the updates that are done: linear warm-up, then linear decay to 0.

    Args:
        seconds: The time for the complete run.
        elapsed: Function that returns the seconds since the start of the run, including those of resumed runs.
        warmup_ratio: Fraction of the updates for warm-up.
        test_ratio: Time to translate the test set, compared with that of an evaluation. 0 without test set.
    """

    def __init__(self, seconds: float, elapsed: Callable[[], float], warmup_ratio: float, test_ratio: float):
        self.seconds, self.elapsed = seconds, elapsed
        self.warmup_ratio, self.test_ratio = warmup_ratio, test_ratio
        self.max_updates = UNKNOWN_UPDATES  # until the first estimate
        self._evaluation_seconds = min(EVALUATION_FRACTION, TEST_FRACTION / max(1.0, test_ratio)) * seconds
        self._update_seconds: deque[float] = deque(maxlen=NUM_TIMED_UPDATES)

    def make_scheduler(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        """Return the schedule of the learning rate. Before the first estimate, warm-up makes hardly any progress."""

        def factor(update: int) -> float:
            done = min(1.0, (update + 1) / self.max_updates)
            rising = done / self.warmup_ratio if self.warmup_ratio else 1.0
            return min(rising, (1 - done) / (1 - self.warmup_ratio), 1.0)

        return LambdaLR(optimizer, factor)

    def remaining_seconds(self) -> float:
        """Return the time for further updates: without the remaining evaluations, the test, and saving."""
        evaluations = NUM_EVALUATIONS - self._num_due if self._evaluates else 0
        evaluations = min(evaluations, 1) if self._is_evaluation_slow() else evaluations
        reserved = (evaluations + self.test_ratio) * self._evaluation_seconds + SAVING_SECONDS
        return self.seconds - self.elapsed() - reserved

    def _is_evaluation_slow(self) -> bool:
        return self._evaluation_seconds > MAX_EVALUATION_FRACTION * self.seconds

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        state.max_steps = self.max_updates  # in a resumed run, those of the checkpoint
        self._first_update = state.global_step + 1
        self._next_plan = state.global_step + FIRST_PLAN
        self._num_due = NUM_EVALUATIONS * state.global_step // state.max_steps
        self._evaluates = args.eval_strategy == "steps" and args.eval_steps == UNKNOWN_UPDATES
        self._saves = args.save_strategy == "steps" and args.save_steps == UNKNOWN_UPDATES
        self._last = time.perf_counter()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        now = time.perf_counter()
        if state.global_step > self._first_update:  # which is slower than the others
            self._update_seconds.append(now - self._last)
        self._last = now
        update = state.global_step
        if update >= self._next_plan and not control.should_training_stop:
            mean = sum(self._update_seconds) / len(self._update_seconds)
            remaining = max(1, int(self.remaining_seconds() / mean))
            plan = update + remaining, update + max(1, min(int(PLAN_SECONDS / mean), remaining // 20))
            self.max_updates, self._next_plan = gather_object([plan])[0]
            state.max_steps = self.max_updates
        if self._num_due < (num_due := NUM_EVALUATIONS * update // self.max_updates) < NUM_EVALUATIONS:
            self._num_due = num_due
            control.should_evaluate |= self._evaluates and not self._is_evaluation_slow()
            # only after the warm-up, because a run that diverges starts again only without a checkpoint
            control.should_save |= self._saves and update >= self.warmup_ratio * self.max_updates

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        seconds = time.perf_counter() - self._last
        self._evaluation_seconds = gather_object([seconds])[0]  # it decides on the next ones
        self._last = time.perf_counter()

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:  # before the callbacks that print the logs
            logs["minutes_left"] = max(0.0, self.seconds - self.elapsed()) / 60

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._last = time.perf_counter()


def estimate_test_ratio(corpus: Mapping[str, Sized], num_beams: int, predict_with_generate: bool) -> float:
    """Return the time to translate the test set, compared with that of an evaluation, greedy or without decoding."""
    if "test" not in corpus:
        return 0.0
    sizes = len(corpus["test"]), len(corpus.get("validation", corpus["test"]))
    ratio = 1.0 if predict_with_generate else GREEDY_SEARCH_RATIO
    return sizes[0] / sizes[1] * ratio * (BEAM_SEARCH_RATIO if num_beams > 1 else 1.0)
