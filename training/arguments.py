"""The keys of a recipe: their types, defaults and meanings.

Those of the model are the fields of `VanillaTransformerConfig`, those of training the fields of
`Seq2SeqTrainingArguments` and a few more.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import Seq2SeqTrainingArguments

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.shared.command_line import RENAMED_OPTIONS

RENAMED_VALUES = {"plain": "eager", "recorded": "cuda_graph", "refuse": "error"}  # of renamed keys


def option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class DataArguments:
    source_lang: str = option("en", "Language of the sources: the ending of text files, the column of tables.")
    target_lang: str = option("de", "Language of the targets: also the ending of text files and the column of tables.")
    corpus: Literal["files", "demo", "random"] = option(
        "files", "files: what the keys below name. demo: the embedded English-German corpus. random: 64 random pairs."
    )
    data_dir: str = option("data", "Folder of the files.")
    train_file: str = option(
        "train",
        "Training data: NAME for two text files NAME.<language> with a sentence a line; NAME.tsv, .jsonl or .parquet.",
    )
    validation_file: str | None = option("val", "Validation data, named in the same way. None: see validation_size.")
    test_file: str | None = option(
        None, "Test data, named in the same way; a .tsv may have several references. None: no scores."
    )
    test_references: str | None = option(
        None,
        "Table (.tsv) with all accepted translations: line i has them for test pair i, after its first column. None: "
        "the targets in the test data.",
    )
    dataset_name: str | None = option(
        None,
        "Dataset on the Hub, or a local folder of one, used where no data_dir is given. It has a column for each "
        "language, or one column 'translation'.",
    )
    dataset_config: str | None = option(None, "Configuration of that dataset, such as de-en.")
    validation_size: int = option(
        0, "How many training pairs to set aside for validation, where there is no validation data."
    )
    on_bad_lines: Literal["error", "drop"] = option(
        "error", "What to do with pairs that are blank, not UTF-8 or longer than 20,000 characters."
    )
    on_eval_overlap: Literal["keep", "drop", "error"] = option(
        "keep", "What to do with training pairs whose source is also in the validation or test data."
    )
    max_length: int = option(
        256,
        "Longest training sentence in tokens. A pair with a longer source or target is left out. Of validation and "
        "test data none is; a sentence of more than four times this (and more than 1,024) tokens is refused. A limited "
        "number of positions in the model applies to all of them.",
    )
    max_length_ratio: float | None = option(
        None, "A training pair is left out if one side has more than this many times the tokens of the other."
    )
    both_directions: bool = option(
        False,
        "Train on every pair also with its sides exchanged: a start for base_model of a second run in one direction "
        "(Gao et al. 2022: Bi-SimCut).",
    )
    streaming: bool = option(
        False,
        "Read the training data as it is needed, for corpora larger than the memory; needs max_steps. Not supported: "
        "bpe_dropout, both_directions, validation_size, on_eval_overlap=error and dataloader_num_workers.",
    )
    buffer_size: int = option(100_000, "With streaming: how many pairs are sorted by length and shuffled together.")


@dataclass
class TokenizerArguments:
    tokenizer_type: Literal["bpe", "unigram", "word", "char"] = option(
        "bpe",
        "Kind of tokenizer that is trained on the training data. word: a token is what stands between spaces. unigram: "
        "the library does not train exactly the same one twice.",
    )
    tokenizer_vocab_size: int = option(8000, "Largest size of a vocabulary in tokens, special tokens included.")
    shared_vocabulary: bool = option(True, "One vocabulary for both languages (section 5.1), or one each.")
    lowercase: bool = option(False, "Lower-case all text, and so what the model writes. For comparison with papers.")
    moses: bool = option(
        False,
        "Normalise punctuation and split words as Moses does, which papers do beforehand. Otherwise each punctuation "
        "mark and digit is split off.",
    )
    tokenizer_path: str | None = option(
        None,
        "Folder or Hub repository of a tokenizer to use instead of training one. Its special tokens may be others.",
    )
    tokenizer_max_train_pairs: int = option(
        1_000_000, "With streaming: how many pairs, from the first on, train the tokenizer."
    )
    pad_vocab_to_multiple_of: int = option(
        1, "The model's vocabulary is rounded up to a multiple of this (8: faster GPUs)."
    )
    bpe_dropout: float = option(
        0.0,
        "Probability that a merge is left out while a training sentence is split (Provilkov et al. 2020). The text is "
        "then split anew in each epoch. A run can be resumed, but not bit for bit, because the library takes no seed.",
    )


@dataclass
class DecodingArguments:
    metric: Literal["translation", "sequence"] = option(
        "translation", "translation: BLEU, chrF, TER. sequence: exact match, PER and WER of tokens between spaces."
    )
    num_beams: int = option(4, "Beam size of the final outputs; 1: greedy.")
    length_penalty: float = option(1.0, "Scores are divided by length ** this.")
    max_new_tokens: int = option(128, "Longest output, in tokens.")
    attention_plot_lines: list[int] = field(
        default_factory=lambda: [1],
        metadata={
            "help": "Test sentences, counted from 1, whose cross-attention is drawn into attention_<number>.png."
        },
    )


def _model_fields() -> list[tuple[str, Any, Any]]:
    """The architecture's fields of the configuration; vocabularies and special ids come from the tokenizer."""
    own = VanillaTransformerConfig.__annotations__
    left_out = {"vocab_size", "decoder_vocab_size", "share_encoder_decoder_embeddings", "use_cache"}
    left_out |= {"is_encoder_decoder", "eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id"}
    chosen = [f for f in dataclasses.fields(VanillaTransformerConfig) if f.name in own and f.name not in left_out]
    types: dict[Any, Any] = {float | int: float}  # argparse reads one type
    return [(f.name, types.get(f.type, f.type), option(f.default, f.metadata["help"])) for f in chosen]


ModelArguments = dataclasses.make_dataclass("ModelArguments", _model_fields())


SUPPORTED = {  # fields of Seq2SeqTrainingArguments that are keys, besides those below
    *("output_dir", "max_steps", "num_train_epochs", "seed", "data_seed", "use_cpu", "bf16"),
    "activation_checkpointing",
    *("weight_decay", "adam_beta1", "max_grad_norm", "lr_scheduler_kwargs"),
    *("eval_strategy", "eval_steps", "eval_delay", "greater_is_better", "save_strategy", "save_steps"),
    *("logging_strategy", "logging_steps", "logging_first_step", "log_level", "report_to", "run_name", "disable_tqdm"),
    *("push_to_hub", "hub_model_id", "hub_private_repo", "hub_revision", "hub_token"),
    *("dataloader_num_workers", "ddp_timeout", "fsdp_config"),
}
FIXED = {  # fields below whose defaults are required
    *("hub_strategy", "logging_nan_inf_filter", "restore_callback_states_from_checkpoint"),
    "ddp_find_unused_parameters",
}
INSTEAD = {  # what to know about a field that is not supported
    **dict.fromkeys(("per_device_train_batch_size", "auto_find_batch_size"), "give max_tokens"),
    **dict.fromkeys(
        ("group_by_length", "train_sampling_strategy", "length_column_name", "sortish_sampler"),
        "batches are always grouped by length",
    ),
    "load_best_model_at_end": "give average_by: best; with average_checkpoints: 1 the result is the best checkpoint",
    "save_only_model": "a run could not be resumed from such a checkpoint",
    **dict.fromkeys(("fp16", "tf32"), "give precision: bf16"),
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval"), "an evaluation computes in float32"),
    **dict.fromkeys(("gradient_checkpointing", "gradient_checkpointing_kwargs"), "give activation_checkpointing"),
    **dict.fromkeys(("torch_compile_backend", "torch_compile_mode"), "give step_mode: compiled"),
    "use_liger_kernel": "Liger has no kernels for this architecture",
    "average_tokens_across_devices": "the loss is always a mean over all tokens",
    "logging_nan_inf_filter": "a loss that is not finite ends the run",
    "include_num_input_tokens_seen": "target_tokens is always logged",
    "prediction_loss_only": "give predict_with_generate: false",
    "generation_max_length": "give max_new_tokens",
    "generation_config": "give num_beams, length_penalty and max_new_tokens",
    "resume_from_checkpoint": "the same command resumes from the last checkpoint in output_dir",
    "hub_strategy": "this program uploads at the end",
    **dict.fromkeys(("deepspeed", "parallelism_config"), "give fsdp"),
}


@dataclass
class TrainingArguments(Seq2SeqTrainingArguments):
    """Those of transformers, with the paper's optimizer (section 5.3) as default, and what it has no name for."""

    base_model: str | None = option(
        None,
        "Checkpoint to fine-tune, a folder or a repository on the Hub, such as one of ours or a MarianMTModel. Its "
        "architecture, weights and tokenizer are used; of the keys for these, only the dropouts may be given. None: "
        "start from fresh weights.",
    )
    lora_rank: int = option(
        0,
        "With base_model: train low-rank updates of this rank for every linear map, and nothing else (LoRA, Hu et al. "
        "2021). The checkpoint holds them merged into the weights, its folder 'adapter' holds them alone. 0: train all "
        "weights.",
    )
    hub_strategy: str = option("end", "With push_to_hub, when to upload: end, when the run is done and scored.")
    learning_rate: float | None = option(
        None, "Peak learning rate. None: the paper's, d_model**-0.5 * warmup_steps**-0.5 (section 5.3)."
    )
    lr_scheduler_type: str = option(
        "inverse_sqrt",
        "Course of the learning rate: inverse_sqrt (the paper's), linear, cosine, reduce_lr_on_plateau, or another of "
        "transformers.",
    )
    warmup_steps: float = option(4000, "Updates of linear warm-up; below 1: share of all updates.")
    adam_beta2: float = option(0.98, "Adam's beta2 (section 5.3).")
    adam_epsilon: float = option(1e-9, "Adam's epsilon (section 5.3).")
    label_smoothing_factor: float = option(0.1, "Label smoothing (section 5.4), spread over the whole vocabulary.")
    max_tokens: int = option(
        2048,
        "Size of a batch in each process: tokens of its source or its target side, whichever has more, with padding. "
        "An update uses gradient_accumulation_steps * num_processes such batches.",
    )
    gradient_accumulation_steps: int = option(1, "Batches of each process whose gradients make one update.")
    precision: Literal["auto", "fp32", "bf16"] = option(
        "auto",
        "auto: on a CPU what is faster for this model, by measurement if the run is long; on a GPU bf16 where it can.",
    )
    attn_implementation: str = option(
        "auto",
        "Implementation: eager, sdpa; on a GPU flash_attention_2, flex_attention, too. auto: on a CPU the faster by "
        "measurement, else sdpa.",
    )
    step_mode: Literal["auto", "eager", "compiled", "cuda_graph"] = option(
        "auto",
        "How a training step is run. compiled: batches of at most 12 shapes, and one program from torch.compile, kept "
        "in the folder that TORCHINDUCTOR_CACHE_DIR names. recorded: on a GPU, the program is also recorded as a CUDA "
        "graph for each shape, for models that are too small to keep the GPU busy. auto: on a GPU recorded for models "
        "of less than 30 million parameters, else compiled; plain on a CPU.",
    )
    torch_compile: bool = option(False, "Compile the model by transformers' own switch; `step` is ours.")
    num_processes: int = option(
        1,
        "How many processes this program starts, where no launcher such as torchrun has started it. On a CPU, several "
        "processes with one thread each train a small model faster than one process with several threads.",
    )
    rdrop_alpha: float = option(
        0.0, "R-Drop (Wu et al. 2021): weight of the divergence between two passes with different dropout."
    )
    simcut_alpha: float = option(
        0.0,
        "SimCut (Gao et al. 2022; there 3): weight of the divergence between two passes, the second with one token of "
        "twenty cut off.",
    )
    ema_decay: float = option(
        0.0,
        "Decay of an exponential moving average of the weights at each update. The average is then what is evaluated "
        "and kept. After n updates the decay is at most (1 + n) / (10 + n). 0: no average.",
    )
    average_checkpoints: int = option(1, "Checkpoints whose mean is the final model (section 6.1); 1: no averaging.")
    average_by: Literal["last", "best"] = option("last", "The last ones, or those with the best metric_for_best_model.")
    metric_for_best_model: str | None = option(
        None,
        "What average_by=best and early_stopping_patience compare, such as loss or chrf. None: bleu; for sequences "
        "exact_match; loss without predict_with_generate.",
    )
    early_stopping_patience: int | None = option(
        None, "Training ends after this many evaluations in a row without a better metric_for_best_model. None: never."
    )
    predict_with_generate: bool = option(True, "Evaluate by decoding, too, not by the loss alone.")
    generation_num_beams: int | None = option(1, "Beam size in evaluation; 1: greedy.")
    per_device_eval_batch_size: int = option(64, "Sentences in a batch of evaluation.")
    save_total_limit: int | None = option(2, "Newest checkpoints that are kept, besides those to be averaged.")
    dataloader_pin_memory: bool = option(False, "Copy batches through page-locked memory, for GPUs.")
    fsdp: bool = option(  # type: ignore[assignment]  # there also a string of old, which "true" would be taken for
        False,
        "Distribute weights, gradients and optimizer state over the GPUs (FSDP), for models too large for one GPU.",
    )
    ddp_find_unused_parameters: bool | None = option(False, "Look for parameters without gradient: the model has none.")
    optim: str = option("adamw_torch_fused", "Optimizer, one of transformers; Adam with weight_decay 0 by default.")
    logging_nan_inf_filter: bool = option(False, "Hide losses that are not finite; off: the run ends with a message.")
    restore_callback_states_from_checkpoint: bool = option(True, "A resumed run goes on counting where it stopped.")


SUPPORTED |= set(TrainingArguments.__annotations__) - FIXED
UNSUPPORTED = {f.name for f in dataclasses.fields(TrainingArguments)} - SUPPORTED


def rename_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Return the keys and values of a recipe, those of earlier versions under their present names."""
    present = {}
    for key, value in values.items():
        is_renamed = isinstance(value, str) and key in RENAMED_OPTIONS
        present[RENAMED_OPTIONS.get(key, key)] = RENAMED_VALUES.get(value, value) if is_renamed else value
    return present
