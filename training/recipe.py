"""A recipe is one YAML file with every setting of a run: data, tokenizer, model, training, decoding.

Keys are flat. Those of the model are the fields of `VanillaTransformerConfig`, those of training the fields of
`Seq2SeqTrainingArguments` and a few more. Each can be overridden on the command line (`--max_steps 500`); an unknown
one is refused.
"""

import dataclasses
import inspect
import json
import re
import sys
from argparse import SUPPRESS
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import torch
import yaml
from transformers import HfArgumentParser, Seq2SeqTrainingArguments

from vanilla_transformer import VanillaTransformerConfig


def option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class DataArguments:
    source_lang: str = option("en", "Language of the sources: the ending of text files, the column of tables.")
    target_lang: str = option("de", "Language of the targets, likewise.")
    corpus: Literal["files", "demo", "random"] = option(
        "files", "files: what the keys below name. demo: the embedded English-German corpus. random: 64 random pairs."
    )
    data_dir: str = option("data", "Folder of the files.")
    train_file: str = option(
        "train",
        "Training data: NAME for two text files NAME.<language> with a sentence a line; NAME.tsv, .jsonl or .parquet.",
    )
    validation_file: str | None = option("val", "Validation data, likewise; None: see validation_size.")
    test_file: str | None = option(None, "Test data, likewise; a .tsv may have several references. None: no scores.")
    test_references: str | None = option(
        None,
        "Table (.tsv) of which line i lists, behind its first column, every accepted target of test pair i; None: the "
        "test data's own.",
    )
    dataset_name: str | None = option(
        None, "Dataset on the Hub, or a local folder of one, for those who give no data_dir; columns or 'translation'."
    )
    dataset_config: str | None = option(None, "Configuration of that dataset, such as de-en.")
    validation_size: int = option(0, "Pairs taken out of the training data where there is no validation data.")
    bad_lines: Literal["refuse", "drop"] = option("refuse", "What to do with pairs that are blank or not UTF-8.")
    overlap: Literal["keep", "drop", "refuse"] = option(
        "keep", "What to do with training pairs whose source is also in the validation or test data."
    )
    max_length: int = option(256, "Longest training sentence, in tokens, either side; longer pairs are left out.")
    max_length_ratio: float | None = option(
        None, "Pairs are left out of which one side has more than this many times the tokens of the other."
    )
    streaming: bool = option(
        False, "Read the training data as it is needed, for corpora larger than the memory; needs max_steps."
    )
    buffer_size: int = option(100_000, "Streaming: pairs that are sorted by length and shuffled at a time.")


@dataclass
class TokenizerArguments:
    tokenizer_type: Literal["bpe", "unigram", "word", "char"] = option(
        "bpe",
        "What is trained on the training data; word: what stands between spaces. (The library does not train the same "
        "unigram tokenizer twice.)",
    )
    tokenizer_size: int = option(8000, "Tokens in a vocabulary at most, special ones included.")
    shared_vocabulary: bool = option(True, "One vocabulary for both languages (section 5.1), or one each.")
    tokenizer_path: str | None = option(
        None, "Folder or Hub repository of a tokenizer to be used instead; its special tokens need not be ours."
    )
    tokenizer_pairs: int = option(1_000_000, "Streaming: the first so many pairs train the tokenizer.")
    vocabulary_multiple: int = option(1, "The model's vocabulary is rounded up to a multiple of this (8: faster GPUs).")
    bpe_dropout: float = option(
        0.0,
        "Probability that a merge is left out while a training sentence is split (Provilkov et al. 2020). The text is "
        "then split anew each time, and a run can be resumed, but not bit for bit: the library cannot be seeded.",
    )


@dataclass
class DecodingArguments:
    metric: Literal["translation", "sequence"] = option(
        "translation", "translation: BLEU, chrF, TER. sequence: exact match, PER and WER of tokens between spaces."
    )
    num_beams: int = option(4, "Beam size of the final outputs; 1: greedy.")
    length_penalty: float = option(1.0, "Scores are divided by length ** this.")
    max_new_tokens: int = option(128, "Longest output, in tokens.")
    attention_lines: list[int] = field(
        default_factory=lambda: [1],
        metadata={"help": "Test sentences, from 1, whose cross-attention is drawn into attention_<line>.png."},
    )


def _model_fields() -> list[tuple[str, Any, Any]]:
    """The architecture's fields of the configuration; vocabularies and special ids come from the tokenizer."""
    own = VanillaTransformerConfig.__annotations__
    left_out = {"vocab_size", "decoder_vocab_size", "share_encoder_decoder_embeddings", "use_cache"}
    left_out |= {"is_encoder_decoder", "eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id"}
    chosen = [f for f in dataclasses.fields(VanillaTransformerConfig) if f.name in own and f.name not in left_out]
    types: dict[Any, Any] = {float | int: float}  # argparse reads one type
    comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(VanillaTransformerConfig), re.MULTILINE))
    return [
        (f.name, types.get(f.type, f.type), option(f.default, f"Model: {comments.get(f.name, f.name)}."))
        for f in chosen
    ]


ModelArguments = dataclasses.make_dataclass("ModelArguments", _model_fields())


@dataclass
class TrainingArguments(Seq2SeqTrainingArguments):
    """Those of transformers, with the paper's optimizer (section 5.3) as default, and what it has no name for."""

    base_model: str | None = option(
        None,
        "Checkpoint to go on from, a folder or a repository on the Hub, such as one of ours or a MarianMTModel: its "
        "architecture, weights and tokenizer are taken, and of their keys the dropouts alone may be given. None: fresh "
        "weights.",
    )
    lora_rank: int = option(
        0,
        "With base_model: rank of the low-rank updates of every linear map (LoRA, Hu et al. 2021), which alone are "
        "trained; the checkpoint holds them merged into the weights, its folder 'adapter' them alone. 0: all weights.",
    )
    hub_strategy: str = option("end", "With push_to_hub, when to upload: end, when the run is done and scored.")
    learning_rate: float | None = option(
        None, "Peak learning rate. None: the paper's, d_model**-0.5 * warmup_steps**-0.5 (section 5.3)."
    )
    lr_scheduler_type: str = option(
        "inverse_sqrt", "inverse_sqrt (the paper's), linear, cosine, reduce_lr_on_plateau, or another of transformers."
    )
    warmup_steps: float = option(4000, "Updates of linear warm-up; below 1: share of all updates.")
    adam_beta2: float = option(0.98, "Adam's beta2 (section 5.3).")
    adam_epsilon: float = option(1e-9, "Adam's epsilon (section 5.3).")
    label_smoothing_factor: float = option(0.1, "Label smoothing (section 5.4), spread over the whole vocabulary.")
    max_tokens: int = option(
        2048,
        "Tokens a batch in each process, padding included, of the side that has more. An update sees "
        "gradient_accumulation_steps * processes of them.",
    )
    precision: Literal["auto", "fp32", "bf16"] = option(
        "auto", "auto: on a CPU what is faster for this model, by measurement; on a GPU bf16 where it can."
    )
    attention: str = option(
        "auto", "eager, sdpa, flash_attention_2, flex_attention; auto: on a CPU the faster by measurement, else sdpa."
    )
    processes: int = option(
        1,
        "Processes that this program starts for itself, where no launcher has started it: on a CPU, several with one "
        "thread each train a small model faster than one with several threads.",
    )
    rdrop_alpha: float = option(
        0.0, "R-Drop (Wu et al. 2021): weight of the divergence between two passes with different dropout."
    )
    ema_decay: float = option(
        0.0,
        "Decay a step of an exponential moving average of the weights, which is then what is evaluated and kept; after "
        "n updates (1 + n) / (10 + n) at most.",
    )
    average_checkpoints: int = option(1, "Checkpoints whose mean is the final model (section 6.1); 1: no averaging.")
    average_by: Literal["last", "best"] = option("last", "The last ones, or those with the best metric_for_best_model.")
    early_stopping_patience: int | None = option(
        None, "Evaluations without a better metric_for_best_model after which training ends; None: never."
    )
    predict_with_generate: bool = option(True, "Evaluate by decoding, too, not by the loss alone.")
    generation_num_beams: int | None = option(1, "Beam size in evaluation; 1: greedy.")
    per_device_eval_batch_size: int = option(64, "Sentences in a batch of evaluation.")
    save_total_limit: int | None = option(2, "Newest checkpoints that are kept, besides those to be averaged.")
    dataloader_pin_memory: bool = option(False, "Copy batches through page-locked memory, for GPUs.")
    fsdp: bool = option(  # type: ignore[assignment]  # there also a string of old, which "true" would be taken for
        False, "Share weights, gradients and optimizer state out over the GPUs (FSDP), for models too large for one."
    )
    ddp_find_unused_parameters: bool | None = option(False, "Look for parameters without gradient: the model has none.")
    optim: str = option("adamw_torch_fused", "Optimizer, one of transformers; Adam with weight_decay 0 by default.")
    logging_nan_inf_filter: bool = option(False, "Hide losses that are not finite; off: the run ends with a message.")
    restore_callback_states_from_checkpoint: bool = option(True, "A resumed run goes on counting where it stopped.")


@dataclass
class Recipe:
    name: str
    data: DataArguments
    tokenizer: TokenizerArguments
    model: Any
    training: TrainingArguments
    decoding: DecodingArguments
    given: frozenset[str] = frozenset()  # the keys that recipe or command line name

    def values(self) -> dict[str, Any]:
        """Every setting by its key; of the Trainer's many those that differ from their defaults."""
        values = {name: value for part in (self.data, self.tokenizer, self.model) for name, value in vars(part).items()}
        if self.training.base_model is not None:  # which has its own
            values = {name: value for name, value in values.items() if name in self.given or name in vars(self.data)}
        defaults = {f.name: f.default for f in dataclasses.fields(TrainingArguments)}  # made ones would reset devices
        own = set(TrainingArguments.__annotations__)
        machine = {"logging_dir", "run_name", "hub_token", "local_rank", "use_cpu", "accelerator_config"}  # not what
        for name, value in self.training.to_dict().items():
            if (name in own or value not in (defaults.get(name), [], None)) and name not in machine:
                values[name] = value
        return values | vars(self.decoding)

    def to_yaml(self) -> str:
        """The settings in the form of a recipe."""
        return yaml.safe_dump(self.values(), sort_keys=False, allow_unicode=True)


class Parser(HfArgumentParser):
    """Tells the nearest right name of an unknown argument."""

    def error(self, message: str) -> Any:
        names = [action.dest for action in self._actions]
        for word in (name.replace("-", "_") for name in re.findall(r"--([\w-]+)", message)):
            close = get_close_matches(word, names, n=1)
            if close and word not in names:
                message += f"; did you mean --{close[0]}?"
                break
        self.exit(2, f"{self.prog}: {message}\n")


def make_parser() -> Parser:
    parser = Parser(
        (DataArguments, TokenizerArguments, ModelArguments, TrainingArguments, DecodingArguments),
        description="Trains a Transformer as a recipe says. Any key of the recipe can be given as --key value.",
        epilog="Besides these, every other field of transformers.Seq2SeqTrainingArguments is a key.",
        allow_abbrev=False,
        prog="training.train",
    )
    parser.add_argument("recipe", help="path of the recipe, such as training/recipes/demo.yaml")
    shown = set(TrainingArguments.__annotations__) | {
        *("output_dir", "max_steps", "num_train_epochs", "gradient_accumulation_steps", "max_grad_norm", "seed"),
        *("weight_decay", "lr_scheduler_kwargs", "eval_strategy", "eval_steps", "save_strategy", "save_steps"),
        *("logging_steps", "report_to", "metric_for_best_model", "use_cpu", "torch_compile", "adam_beta1"),
    }
    theirs = {f.name for f in dataclasses.fields(Seq2SeqTrainingArguments)}
    for action in parser._actions:
        if action.dest in theirs - shown or action.dest.startswith("no_"):
            action.help = SUPPRESS  # a hundred fields that hardly anybody needs would bury the rest
    return parser


def read_recipe(arguments: list[str] | None = None) -> Recipe:
    """Reads `RECIPE.yaml [--key value ...]` from the command line. A mistake ends the program with a message, status 2.

    Args:
        arguments: instead of `sys.argv[1:]`.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = make_parser()
    nulls: list[str] = []
    given = {word.lstrip("-").partition("=")[0].replace("-", "_") for word in arguments if word.startswith("--")}
    if arguments and not arguments[0].startswith("-"):
        values = _read_yaml(arguments[0], parser)
        nulls = [name for name, value in values.items() if value is None and name not in given]
        given |= values.keys()
        device = [] if torch.accelerator.is_available() else ["--use_cpu=true"]  # else processes do not meet
        arguments = [arguments[0], *device, *_as_arguments(values), *arguments[1:]]  # the last of two wins
    try:
        *parts, positional = parser.parse_args_into_dataclasses(arguments, look_for_args_file=False)
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    data, tokenizer, model, training, decoding = parts
    recipe = Recipe(Path(positional.recipe).stem, data, tokenizer, model, training, decoding, frozenset(given))
    for part in parts:
        for f in dataclasses.fields(part):
            if f.name in nulls and f.default is not None:  # others have been None all along
                if type(None) not in get_args(get_type_hints(type(part))[f.name]):
                    parser.error(f"{positional.recipe}: {f.name} is null, but needs a value.")
                setattr(part, f.name, None)
    try:
        check(recipe)
    except ValueError as error:
        parser.error(str(error))
    return recipe


def check(recipe: Recipe) -> None:
    """Resolves what depends on other keys. Raises ValueError for values that cannot be or contradict each other."""
    data, tokenizer, training, decoding = recipe.data, recipe.tokenizer, recipe.training, recipe.decoding
    positive = {
        "max_tokens": training.max_tokens,
        "max_length": data.max_length,
        "buffer_size": data.buffer_size,
        "tokenizer_pairs": tokenizer.tokenizer_pairs,
        "vocabulary_multiple": tokenizer.vocabulary_multiple,
        "processes": training.processes,
        "average_checkpoints": training.average_checkpoints,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "num_beams": decoding.num_beams,
        "max_new_tokens": decoding.max_new_tokens,
    }
    for name, value in positive.items():
        if value < 1:
            raise ValueError(f"{name}={value}: give a number of at least 1.")
    shares = {"bpe_dropout": tokenizer.bpe_dropout, "ema_decay": training.ema_decay}
    shares |= {"label_smoothing_factor": training.label_smoothing_factor}
    shares |= {name: value for name, value in vars(recipe.model).items() if name.endswith("dropout")}
    for name, value in shares.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value}: give a number from 0 up to, not including, 1.")
    if training.rdrop_alpha < 0:
        raise ValueError(f"rdrop_alpha={training.rdrop_alpha}: give 0 or more.")
    if tokenizer.tokenizer_size < 5 and tokenizer.tokenizer_path is None:
        raise ValueError(f"tokenizer_size={tokenizer.tokenizer_size}: four are special tokens, so give more.")
    if tokenizer.bpe_dropout and (tokenizer.tokenizer_type != "bpe" or data.streaming):
        raise ValueError("bpe_dropout needs tokenizer_type=bpe, and no streaming.")
    if data.max_length_ratio is not None and data.max_length_ratio < 1:
        raise ValueError(f"max_length_ratio={data.max_length_ratio}: give a number of at least 1.")
    if data.streaming and training.max_steps < 1:
        raise ValueError("streaming needs max_steps: how many updates there are in an epoch is not known.")
    evaluates = training.eval_strategy != "no"
    has_validation = data.corpus == "demo" or data.validation_file or data.dataset_name or data.validation_size
    if evaluates and not has_validation:
        raise ValueError("eval_strategy needs validation data: give validation_file or validation_size.")
    by_metric = training.average_by == "best" or training.early_stopping_patience is not None
    if by_metric and (not evaluates or (training.average_by == "best" and training.save_strategy == "no")):
        raise ValueError(
            "average_by=best and early_stopping_patience need eval_strategy; the former save_strategy, too."
        )
    if training.average_checkpoints > 1 and training.save_strategy == "no":
        raise ValueError("average_checkpoints needs save_strategy: steps or epoch.")
    if by_metric and training.metric_for_best_model is None:
        name = {"translation": "bleu", "sequence": "exact_match"}[decoding.metric]
        training.metric_for_best_model = name if training.predict_with_generate else "loss"
    if training.metric_for_best_model is not None:
        training.greater_is_better = training.metric_for_best_model.removeprefix("eval_") not in (
            "loss",
            "per",
            "wer",
            "ter",
        )
    check_start(recipe)
    if training.learning_rate is None:
        if training.lr_scheduler_type != "inverse_sqrt" or training.warmup_steps < 1:
            raise ValueError("learning_rate is needed: the paper's peak goes with inverse_sqrt and warmup_steps alone.")
        training.learning_rate = (recipe.model.d_model * training.warmup_steps) ** -0.5
    if training.bf16 and training.precision == "auto":
        training.precision = "bf16"


def check_start(recipe: Recipe) -> None:
    """Raises ValueError for keys that contradict the model to begin with, or where its result is to go."""
    training = recipe.training
    if training.base_model is not None:
        own = {*vars(recipe.model), *vars(recipe.tokenizer)} & recipe.given
        if wrong := sorted(name for name in own if not name.endswith("dropout")):
            raise ValueError(f"{wrong[0]} is settled by base_model={training.base_model}: leave it out.")
        if training.learning_rate is None:
            raise ValueError("base_model needs a learning_rate: the paper's is for fresh weights.")
        if training.base_model.startswith(".") or Path(training.base_model).exists():  # a folder, no repository
            training.base_model = str(Path(training.base_model).resolve())
    if training.lora_rank < 0:
        raise ValueError(f"lora_rank={training.lora_rank}: give 0 or more.")
    if training.lora_rank and training.base_model is None:
        raise ValueError("lora_rank needs a base_model: fresh weights have to be trained as a whole.")
    averaged = training.ema_decay or training.average_checkpoints > 1 or training.average_by == "best"
    if training.lora_rank and averaged:
        raise ValueError(
            "lora_rank goes with neither ema_decay nor average_checkpoints and average_by: leave these out."
        )
    if training.push_to_hub and training.hub_strategy != "end":
        raise ValueError(f"hub_strategy={training.hub_strategy}: this program uploads at the end; leave it out.")


def _as_arguments(values: dict[str, Any]) -> list[str]:
    """Keys of a recipe as they would stand on the command line, so that both are checked alike."""
    arguments = []
    for name, value in values.items():
        if isinstance(value, list):
            arguments += [f"--{name}", *map(str, value)]
        elif value is not None:
            arguments.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
    return arguments


def _read_yaml(path: str, parser: HfArgumentParser) -> dict[str, Any]:
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        parser.error(f"cannot read the recipe {path}: {error.strerror}.")
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        parser.error(f"{path} is not YAML: {error}")
    if not isinstance(values, dict):
        parser.error(f"{path} holds no keys: a recipe has lines such as 'max_steps: 500'.")
    known = [name for part in parser.dataclass_types for name in (f.name for f in dataclasses.fields(part))]
    for name in values:
        if name not in known:
            close = get_close_matches(str(name), known, n=1)
            parser.error(f"{path}: unknown key {name!r}" + (f"; did you mean {close[0]!r}?" if close else "."))
    return values
