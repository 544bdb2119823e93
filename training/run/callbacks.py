"""Trainer callbacks: moving average of the weights, stop on a signal, progress bar, warnings."""

import logging
import math
import signal
import sys
import threading
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
from torch import nn
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerControl, TrainerState

from vanilla_transformer.shared.command_line import discard_output, logger

from .distributed import STOP_SIGNALS, exit_with_signal_status, launcher

MIN_SHUFFLED_LOSS_INCREASE = 0.1  # nats per token, compared with `eval_source_gain`


class EmaCallback(TrainerCallback):
    """Updates the exponential moving average (EMA) of the weights after every update.

    After n updates the decay is at most (1 + n) / (10 + n), so that the initial weights do not dominate a short run.
    """

    def __init__(self, ema_model: nn.Module, decay: float):
        self.ema_model, self.decay = ema_model, decay

    @torch.no_grad()
    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        decay = min(self.decay, (1 + state.global_step) / (10 + state.global_step))
        ema_weights: list[torch.Tensor] = list(self.ema_model.parameters())
        torch._foreach_lerp_(ema_weights, list(kwargs["model"].parameters()), 1 - decay)


class SkippedUpdates(TrainerCallback):
    """Counts the updates that the gradient scaler of fp16 skips, because gradients overflow.

    The scaler then lowers its scale. The comparison runs on the device, without synchronization.
    """

    def __init__(self, scaler: torch.amp.GradScaler):
        self.scaler = scaler
        self.count: torch.Tensor | int = 0  # since the last start of the run

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._scale: torch.Tensor | float = self.scaler.get_scale()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        scale = self.scaler._scale  # `get_scale()` synchronizes
        assert scale is not None
        self.count = self.count + (scale < self._scale)
        self._scale = scale.clone()


class StopOnSignal(TrainerCallback):
    """Saves a checkpoint and ends training on Ctrl-C or SIGTERM, after the current update.

    A second signal has its effect from before the training. With multiple processes, a signal to one of them stops
    all: they exchange the signals after every update. This exchange is between their CPUs, so that no process waits for
    its GPU.

    An evaluation or a checkpoint that is due at this update is done first, so that a resumed run continues like an
    uninterrupted one. At the end of an epoch, the evaluation is done before the checkpoint is saved.
    """

    signal_number = 0  # signal that was received
    is_checkpoint_temporary = False  # whether the next checkpoint only serves to resume the run
    _is_stopping = False  # whether training ends after the next checkpoint
    _is_finished = False  # whether training ends at this update even without the signal
    _is_save_due = False  # whether the checkpoint of the last update of an epoch follows its evaluation
    _is_epoch_end = False  # whether all updates of the epoch are done
    _saved_update = -1  # update of the last checkpoint

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}  # to restore

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        timeout = timedelta(seconds=args.ddp_timeout)
        self._group = torch.distributed.new_group(backend="gloo", timeout=timeout) if args.world_size > 1 else None
        launcher.on_signal = self._request_stop
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._receive) for number in STOP_SIGNALS}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal that this process received directly."""
        self.close()  # a second Ctrl-C raises KeyboardInterrupt
        self._request_stop(number)

    def close(self) -> None:
        """Restore the signal handlers from before the training."""
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python

    def _request_stop(self, number: int) -> None:
        """Handle a signal. The launcher may forward a signal that this process has also received directly."""
        if self.signal_number:
            return
        self.signal_number = number
        try:
            name = signal.Signals(number).name
            logger.warning(f"\n{name}: saving after this update. Send it again to stop at once.")
            sys.stderr.flush()  # `logging` raises no OSError
        except RuntimeError:  # the signal interrupted another output
            pass
        except OSError:  # Ctrl-C also ended the program that reads the output
            discard_output(sys.stderr)

    def _exchange_signals(self) -> int:
        """Return the number of a signal that any process received, or 0. All processes call this at the same points."""
        number = self.signal_number
        if self._group is not None:
            numbers = torch.tensor(number)
            torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MAX, self._group)
            number = int(numbers)
        self.signal_number = number or self.signal_number
        return number

    def _save_or_stop(self, state: TrainerState, control: TrainerControl) -> None:
        """After a signal, request a checkpoint. If this update is already saved, end training instead."""
        if self._is_stopping or not self._exchange_signals():
            return
        self._is_stopping = True
        if self._saved_update == state.global_step:
            control.should_training_stop = True
        else:
            self.is_checkpoint_temporary, control.should_save = not control.should_save, True

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._is_epoch_end = False
        if args.ignore_data_skip:  # streaming: transformers counts only the updates since the checkpoint
            state.epoch = state.global_step / state.max_steps
        if control.should_training_stop or float(state.epoch or 0).is_integer():  # the end of the epoch follows
            self._is_save_due, control.should_save = control.should_save, False
        else:
            self._save_or_stop(state, control)

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._is_stopping and not self._is_finished:  # stopped within the epoch
            control.should_log = control.should_evaluate = control.should_save = False
            return
        control.should_save |= self._is_save_due
        self._is_save_due, self._is_epoch_end = False, True
        self.is_checkpoint_temporary &= not control.should_save
        self._save_or_stop(state, control)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._is_epoch_end:
            self._save_or_stop(state, control)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._saved_update = state.global_step
        if self._is_stopping:  # after saving: the checkpoint must not record that training ended
            self._is_finished = control.should_training_stop
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.close()
        launcher.on_signal = exit_with_signal_status
        self._exchange_signals()


class TokenProgress(ProgressCallback):
    """Progress bar of transformers that also shows target tokens per second."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if self.training_bar is None:
            return
        self.training_bar.write(format_logs(logs), file=sys.stderr)
        self.training_bar.total = state.max_steps  # changes with `minutes`
        if "tokens_per_second" in logs:
            self.training_bar.set_postfix_str(f"{logs['tokens_per_second']:,.0f} target tokens/s")


class LogMessages(TrainerCallback):
    """Sends the logs to the logger, without a progress bar."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            logger.info(format_logs(logs))


def format_logs(logs: dict[str, Any]) -> str:
    """Return the logs of transformers as a text, with at least four significant digits."""
    values = {name: value for name, value in logs.items() if name != "total_flos"}
    numbers = {name: value for name, value in values.items() if isinstance(value, float)}
    texts = {name: f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}" for name, value in numbers.items()}
    return str(values | texts)


def replace_progress_callback(trainer: Any) -> None:
    """Replace callbacks that print to stdout, and remove them if messages are disabled. Those of notebooks are kept.

    If stderr is not a terminal, messages replace the progress bar.
    """
    progress = TokenProgress if sys.stderr.isatty() else LogMessages
    for printing, replacement in ((ProgressCallback, progress), (PrinterCallback, LogMessages)):
        if trainer.pop_callback(printing) is not None and logger.isEnabledFor(logging.WARNING):
            trainer.add_callback(replacement())


class IgnoredSourceWarning(TrainerCallback):
    """Prints one warning if the model still ignores the source after a third of the updates."""

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        late = [entry for entry in state.log_history if 0 < state.max_steps <= 3 * entry["step"]]
        low = [entry for entry in late if entry.get("eval_source_gain", math.inf) < MIN_SHUFFLED_LOSS_INCREASE]
        if len(low) == 1 and low[0] is late[-1]:
            logger.warning(
                f"warning: after {state.global_step} of {state.max_steps} updates the model ignores the source. "
                f"Shuffling the sources of the validation data raises the loss by only "
                f"{low[0]['eval_source_gain']:.3f} nats per token. Set norm_position: pre, a lower learning_rate, "
                f"a longer warmup_steps, or a lower dropout."
            )


class StopOnIgnoredSource(TrainerCallback):
    """Ends training if the last evaluation shows that the model ignores the source after warm-up."""

    has_stopped = False

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        warmup = args.get_warmup_steps(state.max_steps)
        entries = [each for each in state.log_history if "eval_source_gain" in each and each["step"] >= warmup]
        is_ignored = bool(entries) and entries[-1]["eval_source_gain"] < MIN_SHUFFLED_LOSS_INCREASE
        if is_ignored and state.global_step < state.max_steps:
            self.has_stopped = control.should_training_stop = True

    on_train_begin = on_evaluate  # a signal during the evaluation may have interrupted the run
