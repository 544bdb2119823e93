"""What happens between the steps of a training: the moving average, a stop on Ctrl-C, the progress on the screen."""

import signal
import threading
from types import FrameType
from typing import Any

import torch
from transformers import PreTrainedModel, ProgressCallback, TrainerCallback, TrainerControl, TrainerState

from training.data.batching import TokenBatchSampler
from vanilla_transformer.shared.command_line import discard_stdout

MIN_SOURCE_GAIN = 0.1  # nats per token


class SamplerEpochCallback(TrainerCallback):
    """Accelerate does not reach the sampler of a resumed run behind all of its wrappers."""

    def __init__(self, sampler: TokenBatchSampler):
        self.sampler = sampler

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.sampler.set_epoch(int(state.epoch or 0))


class EmaCallback(TrainerCallback):
    """Draws the moving average after the weights at every update.

    After n updates its decay is (1 + n) / (10 + n) at most: a short run has an average of its last tenth or so, not one
    in which the weights that it began with still count.
    """

    def __init__(self, average: PreTrainedModel, decay: float):
        self.average, self.decay = average, decay

    @torch.no_grad()
    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        decay = min(self.decay, (1 + state.global_step) / (10 + state.global_step))
        averaged: list[torch.Tensor] = list(self.average.parameters())
        torch._foreach_lerp_(averaged, list(kwargs["model"].parameters()), 1 - decay)


class StopOnSignal(TrainerCallback):
    """Ctrl-C or SIGTERM: the update in progress is finished and saved, and training ends. A second signal kills.

    What is due at this update is done first: an evaluation, and at the end of an epoch all that the strategies ask for
    there. A resumed run then continues as an uninterrupted one. For the same reason a checkpoint that is due at the
    last update of an epoch is written at the end of the epoch, after its evaluation.

    With several processes the signal ends them at once, and what was done since the last checkpoint is lost: they would
    have to ask each other at every update.

    Attributes:
        received: The signal, or None.
        temporary: No strategy asks for the checkpoint that is written next: it only serves to resume the run.
    """

    received: int | None = None
    temporary = False
    _stops = False  # the checkpoint that is written next is the last
    _is_over = False  # training ends without a signal
    _is_due = False  # a checkpoint at the end of this epoch
    _at_epoch_end = False
    _saved_update = -1

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if args.world_size == 1 and threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()
        try:
            print(f"\n{signal.Signals(number).name}: saving after this update; once more to stop at once", flush=True)
        except OSError:  # Ctrl-C has also ended the program that reads the output
            discard_stdout()

    def _restore(self) -> None:
        for number, handler in self.__dict__.pop("_before", {}).items():
            signal.signal(number, handler)

    def _stop(self, state: TrainerState, control: TrainerControl) -> None:
        if self.received is None or self._stops:
            return
        self._stops = True
        if self._saved_update == state.global_step:
            control.should_training_stop = True
        else:
            self.temporary, control.should_save = not control.should_save, True

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._at_epoch_end = False

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if args.ignore_data_skip:  # a stream, of which transformers counts only the updates since the checkpoint
            state.epoch = state.global_step / state.max_steps
        if control.should_training_stop or float(state.epoch or 0).is_integer():  # the end of the epoch follows
            self._is_due, control.should_save = control.should_save, False
        else:
            self._stop(state, control)

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._stops and not self._is_over:  # within an epoch, which is not at its end
            control.should_log = control.should_evaluate = control.should_save = False
            return
        control.should_save |= self._is_due
        self._is_due, self._at_epoch_end = False, True
        self.temporary &= not control.should_save
        self._stop(state, control)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._at_epoch_end:
            self._stop(state, control)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._saved_update = state.global_step
        if self._stops:  # not before: in a checkpoint it would say that the run is over
            self._is_over = control.should_training_stop
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._restore()


class TokenProgress(ProgressCallback):
    """The bars of transformers, with target tokens a second."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        super().on_log(args, state, control, logs, **kwargs)
        if state.is_world_process_zero and self.training_bar is not None and "tokens_per_second" in logs:
            self.training_bar.set_postfix_str(f"{logs['tokens_per_second']:,.0f} target tokens/s")


class SourceGainWarning(TrainerCallback):
    """Prints one warning if the model ignores its source after a third of the updates."""

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        late = [entry for entry in state.log_history if 0 < state.max_steps <= 3 * entry["step"]]
        found = [entry for entry in late if entry.get("eval_source_gain", MIN_SOURCE_GAIN) < MIN_SOURCE_GAIN]
        if len(found) == 1 and found[0] is late[-1]:
            print(
                f"warning: after {state.global_step} of {state.max_steps} updates the model ignores its source: "
                f"exchanging the sources of the validation data raises the loss by only "
                f"{found[0]['eval_source_gain']:.3f} nats per token. Set norm_position: pre, a lower learning_rate, "
                f"a longer warmup_steps, or a lower dropout."
            )
