"""A `Seq2SeqTrainer` with token batches, additional losses, averaged weights and atomic checkpoints."""

import json
import math
import shutil
import sys
import time
import warnings
from contextlib import closing, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, PreTrainedModel, Seq2SeqTrainer, TrainerControl, TrainerState
from transformers.trainer import FSDP_MODEL_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import SchedulerType, speed_metrics
from transformers.utils import SAFE_WEIGHTS_NAME

from vanilla_transformer.shared.atomic_io import FREE_SPACE_HINT, make_write_error
from vanilla_transformer.shared.command_line import logger
from vanilla_transformer.shared.loading import EMA_SUBFOLDER

from ..data.batch_shapes import ShapedPairs, choose_shapes
from ..data.batching import TokenBatchSampler
from ..data.collators import PaddingCollator, defer_stop_signals
from ..data.parallel_text import ParallelText
from ..data.streaming import TokenBatchStream
from ..data.tokenization import sequence_lengths
from ..inference.decoder_input import add_decoder_input_ids
from ..inference.metrics import translate_and_score
from ..inference.translators import GREEDY_OVERRIDES
from ..recipe.arguments import TrainingArguments
from .callbacks import EmaCallback, IgnoredSourceWarning, SkippedUpdates, StopOnSignal, replace_progress_callback
from .checkpoints import TEMPORARY, average_checkpoints, keep_only, select_checkpoints, write_manifest
from .compilation import average_gradients, log_progress, make_compiled_loss
from .distributed import fix_bucket_order
from .losses import supports_fused_loss, training_loss
from .time_budget import TimeBudget

ADAPTER = "adapter"  # subdirectory of the output directory: the LoRA weights
PROGRESS = "progress.json"  # in a checkpoint: loss, tokens, seconds and updates
NUM_DATALOADER_WORKERS = 2  # for a GPU; one worker collates 1.9 million target tokens per second
STREAM_STATE = "stream.json"  # in a checkpoint: position in the stream


class TokenBatchTrainer(Seq2SeqTrainer):
    """Trainer with updates of at most `args.tokens_per_update` tokens.

    The training loss is the label-smoothed cross-entropy (section 5.4) per target token of the complete update. It does
    not depend on the number of processes or accumulation steps. The evaluation loss is unsmoothed.
    `train_dataset` has the columns `input_ids` and `labels`, with BPE-dropout also `lengths`, or is a
    `TokenBatchStream`. `eval_dataset` is a `ParallelText`. `compute_metrics` is the method `compute` of a metric.
    `minutes` counts from `started`; `test_ratio` is the time to translate the test set, relative to an evaluation.

    Raises:
        FloatingPointError: if the loss is not finite.
        OSError: if a checkpoint cannot be written. The incomplete one is deleted.
    """

    control: TrainerControl
    lr_scheduler: Any

    def __init__(self, *, args: TrainingArguments, test_ratio: float = 0.0, started: float = 0.0, **kwargs: Any):
        if args.device.type == "cuda":  # otherwise each copy of a tensor to the GPU would block
            args.dataloader_pin_memory = args.accelerator_config.non_blocking = True
        # Other classes may have unused parameters: LED's global attention, and the layers that layerdrop skips.
        args.ddp_find_unused_parameters = not supports_fused_loss(kwargs["model"])
        args.ddp_broadcast_buffers = False  # they are constants; tables of M2M100 can differ in size
        # PyTorch 2.13 has a new name for it, which Transformers and Accelerate do not pass
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        super().__init__(args=args, **kwargs)
        # Transformers would delete checkpoints that are averaged later. `keep_only` deletes checkpoints instead.
        self.save_total_limit, args.save_total_limit = args.save_total_limit, None
        if isinstance(self.train_dataset, TokenBatchStream):
            self.args.ignore_data_skip = True  # the stream resumes from its own state
        self.stop = StopOnSignal()
        # before the run was resumed: time of training, and time of the run, including the start of the program
        self.previous_seconds = self.previous_elapsed = 0.0
        self.budget: TimeBudget | None = None
        if args.minutes is not None:
            times = 60 * args.minutes, lambda: self.previous_elapsed + time.time() - started
            self.budget = TimeBudget(*times, float(args.warmup_steps), test_ratio)
        for callback in filter(None, (self.budget, self.stop, IgnoredSourceWarning)):
            self.add_callback(callback)
        replace_progress_callback(self)
        if self.args.fsdp and not self.is_fsdp_enabled:
            raise ValueError("fsdp requires multiple GPUs and one process per GPU. Use torchrun, or remove fsdp.")
        self._model_class = type(self.unwrapped_model)
        if self.is_fsdp_enabled:
            if self.args.ema_decay or isinstance(self.model, PeftModel):
                raise ValueError("ema_decay and lora_rank require unsharded weights: remove them, or remove fsdp.")
            # Encoder and decoder get the same embedding module, because FSDP does not support weights in two modules.
            self.model.set_input_embeddings(self.model.get_input_embeddings())
        self.ema_model: PreTrainedModel | None = None
        if self.args.ema_decay:
            self.ema_model = deepcopy(self.model)
            self.add_callback(EmaCallback(self.ema_model, self.args.ema_decay))
        self.skipped_updates: SkippedUpdates | None = None
        if self.accelerator.scaler is not None:
            self.skipped_updates = SkippedUpdates(self.accelerator.scaler)
            self.add_callback(self.skipped_updates)
        self.compiled_loss = make_compiled_loss(self.model, self.args, self.train_dataset)
        self.sampler: TokenBatchSampler | None = None
        self._target_tokens, self._uncounted_tokens = 0, list[Any]()
        # of the resumed checkpoint: loss up to its last log entry, loss after this entry, and update of this entry
        self._saved_loss: tuple[float, float, int] | None = None
        self._start = self._last_log = time.perf_counter()
        self._tokens_at_last_log = 0

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._start = self._last_log = time.perf_counter()
        with closing(self.stop):
            return super().train(*args, **kwargs)

    @property
    def unwrapped_model(self) -> PreTrainedModel:
        """The model without the PEFT wrapper."""
        return self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model

    @property
    def seconds(self) -> float:
        """Wall time of training and evaluation, including the resumed runs."""
        return self.previous_seconds + time.perf_counter() - self._start

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        if self.budget is not None and self.lr_scheduler is None:
            self.lr_scheduler = self.budget.make_scheduler(optimizer or self.optimizer)
            self._created_lr_scheduler = True
        warmup = self.args.get_warmup_steps(num_training_steps)
        is_polynomial = self.args.lr_scheduler_type == SchedulerType.POLYNOMIAL
        if is_polynomial and warmup == num_training_steps:  # it would divide by zero
            message = f"lr_scheduler_type=polynomial does not support warmup_steps={warmup}"
            raise ValueError(f"{message}, the number of updates. Change one of them.")
        return super().create_scheduler(num_training_steps, optimizer)

    def _restore_losses(self) -> None:
        """Restore the running mean of the loss, which transformers restarts at the checkpoint."""
        if self._saved_loss is not None:
            self._total_loss_scalar, loss, self._globalstep_last_logged = self._saved_loss
            self._tr_loss += loss
            self._saved_loss, self._initial_global_step = None, 0

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Override that reports the mean loss of all processes, not that of the main process."""
        self._restore_losses()  # if resumed after the last epoch, `_run_epoch` was not called
        self._tr_loss = self._mean_loss()
        return super()._finalize_training(*args, **kwargs)

    def _mean_loss(self) -> torch.Tensor:
        """Return the loss since the last log entry, averaged over processes."""
        return self.accelerator.gather(self._tr_loss).mean()

    def _run_epoch(self, model: nn.Module, epoch: int, **kwargs: Any) -> None:
        """Override that ends training at once if it had ended before the checkpoint was resumed."""
        self._restore_losses()
        fix_bucket_order(model)
        if self.sampler is not None:  # in a resumed run with multiple processes, it is wrapped twice
            self.sampler.set_epoch(epoch)
        callbacks = [each for each in self.callback_handler.callbacks if isinstance(each, EarlyStoppingCallback)]
        has_stopped = any(each.early_stopping_patience_counter >= each.early_stopping_patience for each in callbacks)
        if has_stopped or self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(model=model, epoch=epoch, **kwargs)

    @property
    def target_tokens(self) -> int:
        """Number of target tokens of all processes so far, without padding and including resumed runs."""
        self._target_tokens += int(sum(self._uncounted_tokens))  # one synchronization with a GPU
        self._uncounted_tokens.clear()
        return self._target_tokens

    def get_train_dataloader(self) -> DataLoader:
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        loading = {
            "num_workers": self.args.dataloader_num_workers,
            "pin_memory": self.args.dataloader_pin_memory,
            "collate_fn": self.data_collator,
            "worker_init_fn": defer_stop_signals,
        }
        dataset: Any = self.train_dataset
        is_stream = isinstance(dataset, TokenBatchStream)  # already split across processes
        micro_batches = self.args.gradient_accumulation_steps * (1 if is_stream else self.args.world_size)
        shapes, tokens = None, self.args.tokens_per_update
        if self.compiled_loss:
            shapes = dataset.choose_shapes() if is_stream else choose_shapes(sequence_lengths(dataset), tokens)
        if shapes:
            micro_batches_per_group = micro_batches // (dataset.groups if is_stream else 1)
            micro_batch_shapes = [shape.split(micro_batches_per_group).without_ones() for shape in shapes]
            loading["collate_fn"] = PaddingCollator(self.data_collator.pad_id, micro_batch_shapes)
        if is_stream:
            generator = torch.Generator()  # separate: sampling a seed from the global one would break resuming
            return DataLoader(dataset, batch_size=None, generator=generator, **loading)
        self.sampler = TokenBatchSampler(sequence_lengths(dataset), tokens, seed, micro_batches, shapes)
        if shapes and self.args.device.type == "cuda" and not loading["num_workers"]:  # faster for small models
            # The workers are kept between epochs, because without fork, they take seconds to start.
            loading |= {"num_workers": NUM_DATALOADER_WORKERS, "persistent_workers": True}
        if shapes:
            logger.info(f"batches of {len(shapes)} shapes, with {100 * self.sampler.padding:.1f} % padding")
            dataset = ShapedPairs(dataset)
        return self.accelerator.prepare(DataLoader(dataset, batch_sampler=self.sampler, **loading))

    def get_batch_samples(self, *args: Any) -> tuple[list, torch.Tensor | int | None]:
        batches, num_items = super().get_batch_samples(*args)
        if num_items is not None:
            self._uncounted_tokens.append(num_items)  # adding here would synchronize with a GPU
        return batches, num_items

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Override that computes the decoder input on the device."""
        return add_decoder_input_ids(self.unwrapped_model, super()._prepare_inputs(inputs))

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Override that verifies the compiled step at each new batch shape, and averages its gradients."""
        if self.compiled_loss is not None and self.compiled_loss.is_new_shape(inputs):
            is_first = len(self.compiled_loss.shapes) == 1
            settings = self.args.label_smoothing_factor, self.args.rdrop_alpha, self.compute_loss_context_manager
            with log_progress("compiling the training step") if is_first else nullcontext():
                error = self.compiled_loss.find_error(self.model, self._prepare_inputs(inputs), *settings)
            if reason := next(filter(None, gather_object([error])), None):  # in any process
                logger.warning(f"the compiled training step failed, training continues with eager steps: {reason}")
                self.compiled_loss = None
                torch.compiler.reset()  # frees the compiled code
        loss = super().training_step(model, inputs, *args, **kwargs)
        if self.compiled_loss is not None and self.args.world_size > 1 and self.accelerator.sync_gradients:
            average_gradients(self.model)
        if self.args.device.type == "cpu" and self.accelerator.sync_gradients:  # on a GPU, `log` checks the loss
            gradient = next(weights.grad for weights in self.model.parameters() if weights.grad is not None)
            if not gradient.sum().isfinite():  # in all processes, because the gradients are averaged
                self.raise_nonfinite_loss(self.state.global_step + 1)
        return loss

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the summed loss of a micro-batch, divided by the number of target tokens of the complete update."""
        labels, smoothing = inputs["labels"], self.args.label_smoothing_factor
        items = num_items_in_batch if num_items_in_batch is not None else (labels != -100).sum()
        outputs = None
        if self.compiled_loss is not None and not return_outputs:
            loss = self.compiled_loss(self.model, inputs, smoothing, self.args.rdrop_alpha)
        else:
            # the fused loss needs the weights of the LM head
            is_fused = supports_fused_loss(self.unwrapped_model) and not self.is_fsdp_enabled
            settings = self.args.rdrop_alpha, is_fused, self.args.simcut_alpha
            loss, outputs = training_loss(model, inputs, smoothing, *settings)
        loss = loss / items
        loss = loss * self.args.world_size  # DDP takes the mean over processes
        return (loss, outputs) if return_outputs else loss

    def raise_nonfinite_loss(self, update: int) -> None:
        raise FloatingPointError(
            f"the loss is not finite at update {update}. Lower learning_rate, increase warmup_steps, or clip gradients "
            f"(max_grad_norm). Nothing was saved since the last checkpoint."
        )

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """Translate and score `eval_dataset` like the test set, but with `generation_num_beams`."""
        text: ParallelText = self.eval_dataset if eval_dataset is None else eval_dataset
        start, beams = time.time(), self.args.generation_num_beams
        decoding = {} if beams is None else {"num_beams": beams} | (GREEDY_OVERRIDES if beams == 1 else {})
        model, attention = self.full_model(), self.args.attn_implementation
        if "flash" in attention or "/" in attention:  # these kernels do not support float32
            model.set_attn_implementation("sdpa")
        values, _ = translate_and_score(model, self.processing_class, text, self.compute_metrics, self.args, **decoding)
        scores = {f"{metric_key_prefix}_{name}": each for name, each in values.items() if not isinstance(each, str)}
        batches = math.ceil(len(text) / (self.args.eval_batch_size * self.args.world_size))
        scores |= speed_metrics(metric_key_prefix, start, num_samples=len(text), num_steps=batches)
        self.log(scores)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, scores)
        return scores

    def full_model(self) -> PreTrainedModel:
        """Return the moving average of the model, or an unsharded copy with merged adapters."""
        if self.ema_model is not None:
            return self.ema_model
        if self.is_fsdp_enabled:
            weights = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))
            model = self._model_class.from_pretrained(None, config=self.model.config, state_dict=weights)
            model.generation_config = deepcopy(self.model.generation_config)
            return model.to(self.args.device)
        model = deepcopy(self.model)
        for name in ("forward", "_original_forward"):  # set by Accelerate for mixed precision
            model.__dict__.pop(name, None)
        return model.merge_and_unload() if isinstance(model, PeftModel) else model

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Override that logs target tokens, not samples, per second: transformers counts batches as samples."""
        logs.pop("train_samples_per_second", None)
        if not math.isfinite(logs.get("loss", 0.0)):  # the mean of all processes
            self.raise_nonfinite_loss(self.state.global_step)
        if "loss" in logs:
            now, tokens = time.perf_counter(), self.target_tokens - self._tokens_at_last_log
            speed = round(tokens / (now - self._last_log), 1)
            logs |= {"target_tokens": self.target_tokens, "tokens_per_second": speed}
            self._last_log, self._tokens_at_last_log = now, self.target_tokens
            if self.skipped_updates is not None:
                logs["skipped_updates"] = int(self.skipped_updates.count)
        if "train_runtime" in logs:
            logs["train_steps_per_second"] = round(self.state.global_step / self.seconds, 3)
        super().log(logs, *args, **kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Override that also saves the moving average, the state of the stream, and last the manifest."""
        run = Path(self.args.output_dir)
        folder = run / f"checkpoint-{self.state.global_step}"
        try:
            super()._save_checkpoint(model, trial)
            if self.ema_model is not None and self.args.should_save:
                self.ema_model.save_pretrained(folder / EMA_SUBFOLDER)
            if isinstance(self.train_dataset, TokenBatchStream) and self.args.should_save:
                state = self.train_dataset.state_dict_at(self.state.global_step)
                (folder / STREAM_STATE).write_text(json.dumps(state), encoding="utf-8")
            loss = float(self._mean_loss())
            if self.args.should_save:
                if self.stop.is_checkpoint_temporary:
                    (folder / TEMPORARY).touch()
                else:  # the checkpoint of a stopped run is saved again
                    (folder / TEMPORARY).unlink(missing_ok=True)
                progress = {
                    "loss": [self._total_loss_scalar, loss, self._globalstep_last_logged],
                    "target_tokens": self.target_tokens,
                    "seconds": self.seconds,
                    "updates": self.state.global_step,
                }
                if self.budget is not None:
                    progress["elapsed"] = self.budget.elapsed()
                (folder / PROGRESS).write_text(json.dumps(progress), encoding="utf-8")
                for name in ("training_args.bin", f"{FSDP_MODEL_NAME}.bin"):  # pickled copies of recipe and weights
                    (folder / name).unlink(missing_ok=True)
                write_manifest(folder)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch.save and safetensors raise their own types
            shutil.rmtree(folder, ignore_errors=True)
            advice = "Earlier checkpoints are unchanged: free disk space, and run the same command to resume."
            raise make_write_error(folder, error, f"{FREE_SPACE_HINT}. {advice}") from error
        if self.args.should_save:
            keep_only(run, [folder, *self.checkpoints_to_keep()])

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Override that removes tied weights, which FSDP gathers several times."""
        if state_dict is not None:
            tied = self.unwrapped_model.all_tied_weights_keys
            state_dict = {name: tensor for name, tensor in state_dict.items() if name not in tied}
        super()._save(output_dir, state_dict)

    def checkpoints_to_keep(self) -> list[Path]:
        last = select_checkpoints(Path(self.args.output_dir), self.save_total_limit or sys.maxsize, "last")
        return last + self.checkpoints_to_average()

    def checkpoints_to_average(self) -> list[Path]:
        """Return the checkpoints to average into the final model: the last ones if none has the metric."""
        args, run = self.args, Path(self.args.output_dir)
        metric = args.metric_for_best_model, bool(args.greater_is_better)
        chosen = select_checkpoints(run, args.average_checkpoints, args.average_by, *metric)
        return chosen or select_checkpoints(run, args.average_checkpoints, "last")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        if self.is_fsdp_enabled:  # transformers would read a pickle, without tied weights
            state = load_file(folder / SAFE_WEIGHTS_NAME) if self.args.process_index == 0 else {}
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
            set_model_state_dict(self.model, dict[str, Any](state), options=options)
        else:  # without a warning about tied weights, which the file contains once
            tied = getattr(self.model, "all_tied_weights_keys", ())
            self.model._keys_to_ignore_on_save = {*(self.model._keys_to_ignore_on_save or ()), *tied}
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        progress = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
        self._target_tokens = self._tokens_at_last_log = progress["target_tokens"]
        self.previous_seconds = progress["seconds"]
        self.previous_elapsed = progress.get("elapsed", self.previous_seconds)
        self._saved_loss = progress.get("loss")
        if self.budget is not None:
            self.budget.max_updates = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME)).max_steps
        if self.ema_model is not None:
            self.ema_model.load_state_dict(type(self.model).from_pretrained(folder / EMA_SUBFOLDER).state_dict())
        if isinstance(self.train_dataset, TokenBatchStream):
            self.train_dataset.load_state_dict(json.loads((folder / STREAM_STATE).read_text(encoding="utf-8")))

    def save_final(self) -> None:
        """Save the final model: the last weights, their moving average, or the mean of checkpoints."""
        args, run = self.args, Path(self.args.output_dir)
        averages = args.should_save and (args.average_checkpoints > 1 or args.average_by == "best")
        chosen = gather_object([self.checkpoints_to_average() if averages else []])[0]
        if not chosen:  # also if early stopping ends the run before its first checkpoint
            model = self.full_model()  # in all processes: FSDP gathers the weights
        elif args.should_save:
            logger.info(f"the final model is the mean of {', '.join(folder.name for folder in chosen)}")
            model = average_checkpoints(chosen)
        if args.should_save:
            if isinstance(self.model, PeftModel):
                self.model.save_pretrained(run / ADAPTER)
            model.save_pretrained(run)
            self.processing_class.save_pretrained(run)
        self.accelerator.wait_for_everyone()
