"""A recipe is one YAML file with every setting of a run: data, tokenizer, model, training, decoding.

Keys are flat. Those of the model are the fields of `VanillaTransformerConfig`, those of training the fields of
`Seq2SeqTrainingArguments`. Each can be overridden on the command line (`--max_steps 500`); an unknown one is refused.
"""

import dataclasses
import json
import sys
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser, Seq2SeqTrainingArguments

from vanilla_transformer import VanillaTransformerConfig


@dataclass
class DataArguments:
    source_lang: str = field(default="en", metadata={"help": "Language of the sources; the ending of text files."})
    target_lang: str = field(default="de", metadata={"help": "Language of the targets; the ending of text files."})
    demo_corpus: bool = field(default=False, metadata={"help": "Use the embedded corpus instead of files."})
    data_dir: str = field(default="data", metadata={"help": "Folder of the text files."})
    train_file: str = field(default="train", metadata={"help": "Training files: <name>.<language>, a sentence a line."})
    validation_file: str = field(default="val", metadata={"help": "Validation files, likewise."})
    test_file: str | None = field(default=None, metadata={"help": "Test files, likewise; None: no final score."})
    dataset_name: str | None = field(
        default=None, metadata={"help": "Dataset on the Hub, for those who have no files and give no data_dir."}
    )
    max_length: int = field(default=256, metadata={"help": "Longest training sentence, in tokens, either side."})


@dataclass
class TokenizerArguments:
    tokenizer_size: int = field(default=8000, metadata={"help": "Tokens in a vocabulary, special ones included."})
    shared_vocabulary: bool = field(
        default=True, metadata={"help": "One vocabulary for both languages (section 5.1), or one each."}
    )


@dataclass
class DecodingArguments:
    num_beams: int = field(default=4, metadata={"help": "Beam size of the final translations; 1: greedy."})
    length_penalty: float = field(default=1.0, metadata={"help": "Scores are divided by length ** this."})
    max_new_tokens: int = field(default=128, metadata={"help": "Longest translation, in tokens."})


def _model_fields() -> list[tuple[str, Any, Any]]:
    """The architecture's fields of the configuration; vocabularies and special ids come from the tokenizer."""
    own = VanillaTransformerConfig.__annotations__
    left_out = {"vocab_size", "decoder_vocab_size", "share_encoder_decoder_embeddings", "use_cache"}
    left_out |= {"is_encoder_decoder", "eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id"}
    chosen = [f for f in dataclasses.fields(VanillaTransformerConfig) if f.name in own and f.name not in left_out]
    types: dict[Any, Any] = {float | int: float}  # argparse reads one type
    return [
        (f.name, types.get(f.type, f.type), field(default=f.default, metadata={"help": f"Model: {f.name}."}))
        for f in chosen
    ]


ModelArguments = dataclasses.make_dataclass("ModelArguments", _model_fields())


@dataclass
class TrainingArguments(Seq2SeqTrainingArguments):
    max_tokens: int = field(
        default=2048, metadata={"help": "Tokens a batch on each device, padding included: the larger of both sides."}
    )


@dataclass
class Recipe:
    name: str
    data: DataArguments
    tokenizer: TokenizerArguments
    model: Any
    training: TrainingArguments
    decoding: DecodingArguments

    def to_yaml(self) -> str:
        """Every setting, in the form of a recipe; of the Trainer's many those that differ from their defaults."""
        values = {name: value for part in (self.data, self.tokenizer, self.model) for name, value in vars(part).items()}
        defaults = TrainingArguments(output_dir="").to_dict()
        machine = {"logging_dir", "run_name", "hub_token", "local_rank", "use_cpu"}  # where, not what
        for name, value in self.training.to_dict().items():
            if value != defaults.get(name) and name not in machine:
                values[name] = value
        return yaml.safe_dump(values | vars(self.decoding), sort_keys=False, allow_unicode=True)


def read_recipe(arguments: list[str] | None = None) -> Recipe:
    """Reads `RECIPE.yaml [--key value ...]` from the command line. A mistake ends the program with a message, status 2.

    Args:
        arguments: instead of `sys.argv[1:]`.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = HfArgumentParser(
        (DataArguments, TokenizerArguments, ModelArguments, TrainingArguments, DecodingArguments),
        description="Trains a Transformer as a recipe says. Any key of the recipe can be given as --key value.",
    )
    parser.add_argument("recipe", help="path of the recipe, such as training/recipes/demo.yaml")
    if arguments and not arguments[0].startswith("-"):
        keys = _as_arguments(_read_yaml(arguments[0], parser))
        arguments = [arguments[0], *keys, *arguments[1:]]  # the last of two wins
    try:
        *parts, positional = parser.parse_args_into_dataclasses(arguments, look_for_args_file=False)
    except ValueError as error:
        parser.error(str(error))
    data, tokenizer, model, training, decoding = parts
    return Recipe(Path(positional.recipe).stem, data, tokenizer, model, training, decoding)


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
    except yaml.YAMLError as error:
        parser.error(f"{path} is not YAML: {error}")
    if not isinstance(values, dict):
        parser.error(f"{path} holds no keys: a recipe has lines such as 'max_steps: 500'.")
    known = [name for part in parser.dataclass_types for name in (f.name for f in dataclasses.fields(part))]
    for name in values:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            parser.error(f"{path}: unknown key {name!r}" + (f"; did you mean {close[0]!r}?" if close else "."))
    return values
