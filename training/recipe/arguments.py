"""Recipe keys: types, defaults and help texts."""

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from transformers import Seq2SeqTrainingArguments

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.shared.command_line import RENAMED_OPTIONS, option

UNKNOWN_UPDATES = 10**7  # `max_steps` with `minutes`, until the speed is measured
MAX_CPU_TOKENS = 4096  # per micro-batch on a CPU; larger micro-batches are not faster
RENAMED_VALUES = {"plain": "eager", "recorded": "compiled", "refuse": "error"}  # old values of renamed keys


@dataclass
class DataArguments:
    """Keys for the training, validation and test data."""

    source_lang: str = option("en", "The source language: extension of text files and column name of tables.")
    target_lang: str = option("de", "The target language: extension of text files and column name of tables.")
    corpus: Literal["files", "demo", "random"] = option(
        "files", "The data. `files`: see below. `demo`: built-in English-German corpus. `random`: 64 random pairs."
    )
    data_dir: str = option("data", "The directory of the data files.")
    train_file: str = option(
        "train",
        "The training data: a table (.tsv, .csv, .jsonl, .json, .parquet or .tmx), or NAME for two text files "
        "NAME.<language> with one sentence per line.",
    )
    validation_file: str | None = option("val", "The validation data, in the same formats. See also `validation_size`.")
    test_file: str | None = option(
        None, "The test data, in the same formats; .tsv and .csv may have several references. If None, no test scores."
    )
    test_references: str | None = option(
        None,
        "A .tsv file with all references: line i contains the source and the references of test pair i. If None, the "
        "targets of the test data are the references.",
    )
    dataset_name: str | None = option(
        None,
        "The dataset to load if `data_dir` is not set, or is the same: name on the Hub or path to a directory. It must "
        "have one column per language, or a column `translation`.",
    )
    dataset_config: str | None = option(None, "The configuration name of the dataset, such as de-en.")
    validation_size: int = option(
        0,
        "The number of training pairs to hold out if there is no validation data. Pairs with the same source or "
        "target, or with sources that share 60 percent of their words, are not separated.",
    )
    test_size: int = option(0, "The number of training pairs to hold out if there is no test data, in the same way.")
    train_fraction: float = option(
        1.0,
        "The fraction of the training pairs to use, chosen at random, the same in each run. Smaller parts are "
        "contained in larger ones.",
    )
    on_bad_lines: Literal["error", "drop"] = option(
        "error", "Whether to drop blank, non-UTF-8 or overlong (20,000 characters) pairs, or to raise an error."
    )
    on_eval_overlap: Literal["keep", "drop", "error"] = option(
        "keep",
        "Whether to keep, drop or reject training pairs with a source from the validation or test data. `drop` also "
        "drops pairs whose source shares 60 percent of its words with one of these sources (not with `streaming`).",
    )
    max_length: int = option(
        256,
        "The maximum number of tokens of a training source or target. Longer pairs are dropped. Validation and test "
        "pairs are never dropped: a length above both `4 * max_length` and 1,024 raises an error. No limit exceeds the "
        "number of positions of the model.",
    )
    max_length_ratio: float | None = option(
        None, "The maximum ratio of the token counts of source and target of a training pair. Other pairs are dropped."
    )
    both_directions: bool = option(
        False,
        "Whether to also train on each pair with source and target swapped. The resulting model can initialize a "
        "second, one-directional run through `base_model` (Bi-SimCut, Gao et al. 2022).",
    )
    streaming: bool = option(
        False,
        "Whether to read the training data during training, if they do not fit into memory. Requires `max_steps`. Does "
        "not support `bpe_dropout`, `both_directions`, `validation_size`, `test_size`, `train_fraction`, "
        "`on_eval_overlap=error` and `dataloader_num_workers`.",
    )
    buffer_size: int = option(
        100_000, "With `streaming`, the number of pairs to sort by length and shuffle, summed over all processes."
    )


@dataclass
class TokenizerArguments:
    """Keys for the tokenizer."""

    tokenizer_type: Literal["bpe", "unigram", "word", "char"] = option(
        "bpe", "The type. `word`: tokens separated by spaces. `unigram`: training is not exactly reproducible."
    )
    tokenizer_vocab_size: int = option(8000, "The maximum vocabulary size, including special tokens.")
    shared_vocabulary: bool = option(True, "Whether both languages share one vocabulary (section 5.1).")
    lowercase: bool = option(False, "Whether to lower-case all text, including outputs. For comparison with papers.")
    moses: bool = option(
        False,
        "Whether to normalize punctuation and split words like the Moses scripts, as papers do in preprocessing. "
        "Otherwise each punctuation mark and digit is a separate token.",
    )
    tokenizer_path: str | None = option(
        None, "The directory or Hub repository of an existing tokenizer. Its special tokens may differ."
    )
    tokenizer_max_train_pairs: int = option(1_000_000, "With `streaming`, the number of pairs to train the tokenizer.")
    pad_vocab_to_multiple_of: int = option(1, "Pad the vocabulary size to a multiple of this value. 8 is fast on GPUs.")
    bpe_dropout: float = option(
        0.0,
        "The probability of skipping a merge when tokenizing a training sentence (Provilkov et al. 2020). Sentences "
        "are tokenized again in each epoch. Resuming is not bit-for-bit reproducible, because the tokenizer library "
        "accepts no seed. Does not support `dataloader_num_workers` if Python forks processes.",
    )


@dataclass
class DecodingArguments:
    """Keys for decoding and scoring."""

    metric: Literal["translation", "sequence"] = option(
        "translation",
        "Metrics. `translation`: BLEU, chrF, TER. `sequence`: exact match, token and character error rate.",
    )
    num_beams: int = option(4, "The number of beams for the test set. 1 is greedy decoding.")
    length_penalty: float = option(
        1.0, "The exponent of the length by which beam scores are divided. Not saved if `num_beams` is 1."
    )
    max_new_tokens: int = option(128, "The maximum number of tokens of an output.")
    engine: Literal["auto", "transformers"] = option(
        "auto",
        "Engine that translates the test set. `auto`: CTranslate2 on a CPU for many sentences, if it is installed and "
        "supports the model. Translations are the same.",
    )
    attention_plot_lines: list[int] = field(
        default_factory=lambda: [1],
        metadata={"help": "The test sentences (1-based) whose cross-attention is saved as attention_<number>.png."},
    )


def _model_fields() -> list[tuple[str, Any, Any]]:
    """Return the config fields of the architecture. The tokenizer determines vocabulary sizes and special token ids."""
    own = VanillaTransformerConfig.__annotations__
    excluded = {"vocab_size", "decoder_vocab_size", "share_encoder_decoder_embeddings", "use_cache"}
    excluded |= {"is_encoder_decoder", "eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id"}
    chosen = [f for f in dataclasses.fields(VanillaTransformerConfig) if f.name in own and f.name not in excluded]
    types: dict[Any, Any] = {float | int: float}  # argparse accepts a single type
    return [(f.name, types.get(f.type, f.type), option(f.default, f.metadata["help"])) for f in chosen]


ModelArguments = dataclasses.make_dataclass("ModelArguments", _model_fields())


SUPPORTED = {  # inherited fields of Seq2SeqTrainingArguments that are keys
    *("output_dir", "max_steps", "num_train_epochs", "seed", "data_seed", "use_cpu", "bf16"),
    *("activation_checkpointing", "weight_decay", "adam_beta1", "max_grad_norm", "lr_scheduler_kwargs"),
    *("eval_strategy", "eval_steps", "eval_delay", "greater_is_better", "save_strategy", "save_steps"),
    *("logging_strategy", "logging_steps", "logging_first_step", "log_level", "report_to", "run_name", "disable_tqdm"),
    *("push_to_hub", "hub_model_id", "hub_private_repo", "hub_revision", "hub_token"),
    *("dataloader_num_workers", "ddp_timeout", "fsdp_config"),
}
FORMER_DEFAULTS = {"max_tokens": 2048, "num_processes": 1, "gradient_accumulation_steps": 1}
# How an update is computed. In earlier versions, the product of these keys was the number of tokens of an update
MACHINE_KEYS = FORMER_DEFAULTS.keys()
FIXED = {"hub_strategy", "logging_nan_inf_filter", "restore_callback_states_from_checkpoint"}  # cannot be changed
UNSUPPORTED_ADVICE = {  # advice for unsupported fields
    **dict.fromkeys(("per_device_train_batch_size", "auto_find_batch_size"), "set tokens_per_update"),
    **dict.fromkeys(
        ("group_by_length", "train_sampling_strategy", "length_column_name", "sortish_sampler"),
        "batches are always grouped by length",
    ),
    "load_best_model_at_end": "set average_by: best, which selects the best checkpoint if average_checkpoints is 1",
    "save_only_model": "a run cannot be resumed from such a checkpoint",
    "fp16": "set precision: fp16",
    "tf32": "set precision: bf16",
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval"), "evaluations use float32"),
    **dict.fromkeys(("gradient_checkpointing", "gradient_checkpointing_kwargs"), "set activation_checkpointing"),
    **dict.fromkeys(("torch_compile_backend", "torch_compile_mode"), "set step_mode: compiled"),
    "use_liger_kernel": "Liger has no kernels for this architecture",
    "average_tokens_across_devices": "the loss is always averaged over all tokens",
    "logging_nan_inf_filter": "a non-finite loss ends the run",
    "include_num_input_tokens_seen": "target_tokens is always logged",
    "prediction_loss_only": "set predict_with_generate: false",
    "generation_max_length": "set max_new_tokens",
    "generation_config": "set num_beams, length_penalty and max_new_tokens",
    "resume_from_checkpoint": "the same command resumes from the last checkpoint in output_dir",
    "hub_strategy": "the model is uploaded at the end",
    **dict.fromkeys(("deepspeed", "parallelism_config"), "set fsdp"),
}


@dataclass
class TrainingArguments(Seq2SeqTrainingArguments):
    """`Seq2SeqTrainingArguments` with the paper's optimizer (section 5.3) as default, and with additional options."""

    base_model: str | None = option(
        None,
        "The directory or Hub repository of a model to fine-tune, such as a MarianMTModel. It determines "
        "architecture and tokenizer: keys for these cannot be set, except dropout rates. If None, train a new model.",
    )
    lora_rank: int = option(
        0,
        "If greater than 0, only train low-rank updates of all linear layers (LoRA, Hu et al. 2021). They are "
        "merged into the final model, and also saved in its subdirectory `adapter`. Requires `base_model`.",
    )
    hub_strategy: str = option("end", "When to upload with `push_to_hub`. `end`: after training and scoring.")
    learning_rate: float | None = option(
        None, "The peak learning rate. Defaults to d_model**-0.5 * warmup_steps**-0.5 (section 5.3)."
    )
    lr_scheduler_type: str = option(
        "inverse_sqrt", "The learning-rate schedule: inverse_sqrt (section 5.3), linear, cosine, or another one."
    )
    warmup_steps: float = option(4000, "The number of warm-up updates, or their ratio if smaller than 1.")
    adam_beta2: float = option(0.98, "The beta2 of Adam (section 5.3).")
    adam_epsilon: float = option(1e-9, "The epsilon of Adam (section 5.3).")
    label_smoothing_factor: float = option(0.1, "The label smoothing factor (section 5.4).")
    minutes: float | None = option(
        None,
        "The wall time of the run, from the start to the scores, instead of a number of updates. The learning rate "
        "follows the remaining time: `lr_scheduler_type` must be linear. With the default of `warmup_steps`, the first "
        "tenth is warm-up. Unless `eval_steps` is set, the model is evaluated at each quarter, and saved at those "
        "after the warm-up.",
    )
    tokens_per_update: int = option(
        2048,
        "The maximum size of an update in tokens, including padding: number of pairs times longest sequence. An update "
        "has two groups of pairs with similar length, each of at most half of this size. They are the same on every "
        "machine. A longer pair forms a separate group, which exceeds the limit. Each group is split into an equal "
        "number of micro-batches, `num_processes * gradient_accumulation_steps` in total.",
    )
    max_tokens: int | str = option(
        "auto",
        "The maximum number of source or target tokens per micro-batch; the last pair may exceed it. `auto`: on a CPU "
        "4,096, else no limit.",
    )
    gradient_accumulation_steps: int = option(  # an integer after `__post_init__`
        "auto",
        "The minimum number of micro-batches per process and update. There are more if `max_tokens` requires it, or if "
        "their total over all processes would be odd: an update has two groups of pairs, and a micro-batch has pairs "
        "of only one.",
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = option(
        "auto",
        "The precision. `fp16`: with a gradient scaler, only on a GPU. `auto`: on NVIDIA GPUs bf16 if they support it "
        "natively, else fp16; on CPUs the faster one of fp32 and bf16 (short runs: fp32).",
    )
    attn_implementation: str = option(
        "auto",
        "The attention implementation: eager or sdpa, on a GPU also flash_attention_2 or flex_attention. `auto`: on a "
        "CPU the faster one by timing, else sdpa.",
    )
    step_mode: Literal["auto", "eager", "compiled"] = option(
        "auto",
        "How to run a training step. `compiled`: use at most 12 batch shapes and compile the step with "
        "`torch.compile`; compiled code is cached in TORCHINDUCTOR_CACHE_DIR. This has not run on a real GPU yet. "
        "`auto`: `compiled` on a GPU for at least 5,000 updates or 10 minutes (see `minutes`), else `eager`.",
    )
    torch_compile: bool = option(False, "Whether to use the Trainer's `torch_compile`. See also `step_mode`.")
    num_processes: int | str = option(
        "auto",
        "The number of processes to start, unless a launcher such as torchrun has started them. `auto`: one per GPU; "
        "on a CPU one per core, at most 8, if each has at least 500 tokens of an update; on Windows and on MPS one.",
    )
    rdrop_alpha: float = option(0.0, "The weight of the divergence between two passes (R-Drop, Wu et al. 2021).")
    simcut_alpha: float = option(
        0.0, "The weight of the divergence from a pass with 5 percent of tokens masked (SimCut, Gao et al. 2022)."
    )
    ema_decay: float = option(
        0.0,
        "The decay of the averaged weights to evaluate and save; at most (1 + n) / (10 + n) after n updates. 0: off.",
    )
    average_checkpoints: int = option(1, "The number of checkpoints to average into the final model (section 6.1).")
    average_by: Literal["last", "best"] = option(
        "last", "Whether to average the last checkpoints or those with the best `metric_for_best_model`."
    )
    metric_for_best_model: str | None = option(
        None,
        "The metric for `average_by=best` and `early_stopping_patience`. Defaults to bleu, to exact_match with "
        "`metric=sequence`, and to loss without `predict_with_generate`.",
    )
    early_stopping_patience: int | None = option(
        None, "The number of evaluations without a better `metric_for_best_model` after which training ends."
    )
    predict_with_generate: bool = option(True, "Whether to decode in evaluations, in addition to the loss.")
    generation_num_beams: int | None = option(1, "The number of beams in evaluations. 1 is greedy decoding.")
    per_device_eval_batch_size: int = option(64, "The number of sentences per batch in evaluations.")
    save_total_limit: int | None = option(2, "The number of newest checkpoints to keep, in addition to averaged ones.")
    dataloader_pin_memory: bool = option(False, "Whether to pin memory in data loaders, for GPUs.")
    fsdp: bool = option(  # type: ignore[assignment]  # transformers also accepts a string, which would match "true"
        False, "Whether to shard weights, gradients and optimizer state over the GPUs (FSDP), for large models."
    )
    optim: str = option("adamw_torch_fused", "The optimizer. The default is Adam, as `weight_decay` is 0.")
    logging_nan_inf_filter: bool = option(False, "Whether to hide non-finite losses. They end the run.")
    restore_callback_states_from_checkpoint: bool = option(True, "Whether to restore the early-stopping counter.")

    def __post_init__(self) -> None:
        """Set up the device, and resolve `gradient_accumulation_steps`."""
        requested = self.requested_accumulation_steps = self.gradient_accumulation_steps
        self.gradient_accumulation_steps = 1  # until the device is known
        super().__post_init__()
        self._n_gpu = min(1, self.n_gpu)  # a process with several would use `nn.DataParallel`
        limit: Any = self.max_tokens
        if limit == "auto":
            limit = MAX_CPU_TOKENS if self.device.type == "cpu" and requested == "auto" else self.tokens_per_update
        needed = max(1, math.ceil(self.tokens_per_update / self.world_size / max(1, limit)))
        steps = needed if requested == "auto" else max(requested, needed)
        is_odd = steps * self.world_size % 2 == 1  # an update has two groups of pairs, and a micro-batch only one
        self.gradient_accumulation_steps = steps + is_odd


SUPPORTED |= set(TrainingArguments.__annotations__) - FIXED
UNSUPPORTED = {f.name for f in dataclasses.fields(TrainingArguments)} - SUPPORTED
PARTS: Any = (DataArguments, TokenizerArguments, ModelArguments, TrainingArguments, DecodingArguments)


@dataclass
class Recipe:
    """All settings of a run."""

    name: str  # file name without `.yaml`
    data: DataArguments
    tokenizer: TokenizerArguments
    model: Any
    training: TrainingArguments
    decoding: DecodingArguments
    explicit_keys: frozenset[str] = frozenset()  # set in the recipe or on the command line
    reasons: dict[str, str] = field(default_factory=dict)  # of the keys that rules have chosen, without a recipe

    def to_dict(self) -> dict[str, Any]:
        """Return all settings, except fields of `Seq2SeqTrainingArguments` that have their default value."""
        values = {name: value for part in (self.data, self.tokenizer, self.model) for name, value in vars(part).items()}
        if self.training.base_model is not None:  # the rest comes from the checkpoint
            kept = self.explicit_keys | vars(self.data).keys()
            values = {name: value for name, value in values.items() if name in kept}
        # from the fields, because creating an instance would reset the device state of Accelerate
        defaults = {f.name: f.default for f in dataclasses.fields(TrainingArguments)}
        own = set(TrainingArguments.__annotations__)
        unset = UNKNOWN_UPDATES if self.training.minutes is not None else None
        for name, value in self.training.to_dict().items():
            if name in UNSUPPORTED | MACHINE_KEYS | {"run_name", "hub_token", "use_cpu"}:  # depend on the machine
                continue
            if name in own or value not in (defaults.get(name), [], None, unset):
                values[name] = str(value) if isinstance(value, Path) else value
        return values | vars(self.decoding)

    def defaults(self) -> dict[str, Any]:
        """Return the default of each key, without those that `base_model` determines."""
        parts: list[Any] = [self.data, self.training, self.decoding]
        if self.training.base_model is None:
            parts += [self.tokenizer, self.model]
        return {each.name: each.default for part in parts for each in dataclasses.fields(part)}

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)


def use_dataset(arguments: DataArguments) -> bool:
    """Return whether to load the recipe's dataset: it is in `data_dir`, or this is the default without the files."""
    if arguments.dataset_name == arguments.data_dir:
        return True
    if arguments.dataset_name is None or arguments.data_dir != DataArguments.data_dir:  # a wrong path must fail
        return False
    folder, name = Path(arguments.data_dir), arguments.train_file
    return not (folder / name).exists() and not (folder / f"{name}.{arguments.source_lang}").exists()


def former_tokens_per_update(values: dict[str, Any]) -> int:
    """Return the tokens per update of a recipe of an earlier version, which had no key `tokens_per_update`."""
    return math.prod(int(values.get(name, default)) for name, default in FORMER_DEFAULTS.items())


def rename_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe with the current names of renamed keys and values."""
    renamed = {}
    for key, value in values.items():
        is_renamed = isinstance(value, str) and key in RENAMED_OPTIONS
        renamed[RENAMED_OPTIONS.get(key, key)] = RENAMED_VALUES.get(value, value) if is_renamed else value
    return renamed
