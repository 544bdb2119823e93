"""A model of one of transformers' own classes, from a folder or the Hub, as a model of ours."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import is_sentencepiece_available

from hub.hub_errors import hub_error_message
from hub.importing.checkpoint_file import unpickle
from hub.importing.conversion import ImportResult
from hub.importing.parity import BATCHES, TOLERANCE, max_log_prob_difference
from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.shared.loading import load_model, load_tokenizer, wrap_load_errors
from vanilla_transformer.shared.transformers_conversion import (
    SIDES,
    NativeArchitecture,
    from_transformers,
    native_architecture_of,
    native_parameter_name,
)

SMALL = ("*.json", "*.txt", "*.model", "*.spm", "*.bpe", "*.codes")  # settings, tokenizers
SAFETENSORS, PICKLES = "model*.safetensors", "pytorch_model*.bin"
TOKENIZER = ("tokenizer_config.json", "tokenizer.json", "vocab.json", "*.spm", "*.model", "vocab.txt", "spiece.model")
POSITIONS = "positions are computed, by the same formula"
OF_NO_USE = ("version", "embed_positions.weights", "embed_positions._float_tensor", "model.shared.weight")  # endings


@dataclass
class LoadedModel:
    """A folder of a model of transformers, read.

    Args:
        folder: where it lies on this machine.
        model: of transformers' class, in float32.
        stock: that class, as we know it.
        names: of the tensors in its files.
        tokenizer: None: there is none.
    """

    folder: Path
    model: PreTrainedModel
    stock: NativeArchitecture
    names: set[str]
    tokenizer: PreTrainedTokenizerBase | None


def is_transformers_model(place: Path) -> bool:
    """Whether it is a folder of a model, or the name of a repository on the Hub, and no file of somebody's training."""
    is_name = len(place.parts) == 2 and not place.is_absolute() and place.suffix.lower() not in (".pt", ".pth")
    return place.is_dir() or (is_name and not place.exists() and not place.parent.exists())


def import_transformers_model(place: Path) -> tuple[ImportResult, PreTrainedTokenizerBase | None, dict[str, Any]]:
    """The model of ours, its tokenizer where there is one, and the report; the model is compared with its original.

    Raises:
        ValueError: there is no such model, or ours cannot be equal to it.
    """
    read = read_stock(place)
    evidence = f"config.json says {read.model.config.model_type}"
    print(f"is a {type(read.model).__name__}: {evidence}")
    imported = convert_stock(read)
    report = {"file": place.name, "layout": read.stock.model_type, "evidence": evidence, "settings": {}}
    return imported, read.tokenizer, report | imported.report() | {"parity": compare_with_stock(read, imported)}


def read_stock(place: Path) -> LoadedModel:
    """The model of a folder, or of a repository on the Hub, of which only the files that are needed are downloaded.

    Raises:
        ValueError: there is no such model, it is of a class that we cannot express, or its files cannot be used.
    """
    folder = place if place.is_dir() else download(place.as_posix())
    if not (folder / "config.json").exists():
        raise ValueError(f"{place} has no config.json: give the folder of a model, or the file that has the weights.")
    with wrap_load_errors(str(place), "config.json"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if config.model_type == VanillaTransformerConfig.model_type:
        raise ValueError(f"{place} is a model of ours already: it needs no import.")
    try:
        stock = native_architecture_of(config)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    names = tensor_names(folder)
    theirs = load_model(folder, str(place), dtype="float32")  # their positions are computed in the dtype of loading
    return LoadedModel(folder, theirs, stock, names, read_tokenizer(folder, str(place)))


def download(repo_id: str) -> Path:
    """Of a repository on the Hub the files that are needed, into the cache of huggingface_hub."""
    try:
        folder = Path(snapshot_download(repo_id, allow_patterns=[*SMALL, SAFETENSORS]))
        if not list(folder.glob(SAFETENSORS)):
            folder = Path(snapshot_download(repo_id, allow_patterns=[*SMALL, PICKLES]))
    except Exception as error:  # of the client, of the network, and for what is in no cache while offline
        if constants.is_offline_mode():
            raise ValueError(
                f"{repo_id} is no folder here, and HF_HUB_OFFLINE is set: unset it to download."
            ) from error
        raise ValueError(f"{repo_id} is no folder here, and on the Hub: {hub_error_message(error, repo_id)}") from error
    return folder


def tensor_names(folder: Path) -> set[str]:
    """Of the weights in a folder. Raises ValueError for a file that would run code when it is unpickled."""
    names: set[str] = set()
    for path in folder.glob(SAFETENSORS):
        with wrap_load_errors(str(path), "the weights"), safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    if not names:
        for path in folder.glob(PICKLES):
            names |= set(unpickle(path))
    if not names:
        raise ValueError(f"{folder} has no {SAFETENSORS} and no {PICKLES}: it holds no weights that are read here.")
    return names


def read_tokenizer(folder: Path, name: str) -> PreTrainedTokenizerBase | None:
    if not any(list(folder.glob(pattern)) for pattern in TOKENIZER):
        return None
    if not is_sentencepiece_available() and (list(folder.glob("*.spm")) or list(folder.glob("*.model"))):
        raise ValueError(f"the tokenizer of {name} needs sentencepiece: pip install '.[hub]'")
    return load_tokenizer(folder, name)


def convert_stock(read: LoadedModel) -> ImportResult:
    """The equal model of ours, every tensor of the file accounted for.

    Raises:
        ValueError: a tensor that their class does not know.
    """
    model = from_transformers(read.model)
    config: Any = model.config
    used: dict[str, list[str]] = {}
    for ours in model.state_dict():
        used.setdefault(native_parameter_name(ours), []).append(ours)
    if config.share_encoder_decoder_embeddings:
        used["model.shared.weight"] = [f"model.{side}.embed_tokens.weight" for side in SIDES]
    left_out = {}
    for name in read.names - used.keys():
        if "embed_positions" in name:
            left_out[name] = POSITIONS
        elif name == "final_logits_bias":
            left_out[name] = "a bias of zeros"
        elif name.endswith(OF_NO_USE):
            left_out[name] = f"{type(read.model).__name__} does not use it"
        else:
            raise ValueError(f"{name} has no place in a {type(read.model).__name__}: the file is of another model.")
    folds = {}
    if read.stock.positions == "computed":
        folds["the residual stream: sines and cosines of positions alternate, which stood in halves"] = "exact"
    if read.stock.positions == "tensor2tensor_sinusoids":
        folds[f"positions are other sinusoids: a table of {config.max_position_embeddings} of them"] = "exact"
    if read.stock.position_offset:
        folds[
            f"the first {read.stock.position_offset} rows of its tables of positions, which nothing reads, are gone"
        ] = "exact"
    shapes = {name: getattr(config, name) for name in SHAPES}
    used = {name: targets for name, targets in used.items() if name in read.names}
    return ImportResult(model, shapes, folds, left_out, check(read), used)


SHAPES = (
    *("vocab_size", "decoder_vocab_size", "d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads"),
    *("decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim", "activation_function", "norm_position"),
    *("position_embedding_type", "embedding_norm", "scale_embedding", "lm_head_bias", "tie_word_embeddings"),
    *("share_encoder_decoder_embeddings", "max_position_embeddings"),
)


def check(read: LoadedModel) -> list[str]:
    """What the user must look at, as lines of a report."""
    config, lines = read.model.config, []
    if any(getattr(config, f"{side}_layerdrop", 0) for side in SIDES):
        lines.append("Its training left out whole layers at random (layerdrop): ours does not.")
    if config.decoder_start_token_id is None and read.model.generation_config.decoder_start_token_id is None:
        lines.append("It has no decoder_start_token_id: give generate() one, such as the target's language.")
    if read.tokenizer is None:
        lines.append("There is no tokenizer beside it.")
    return lines


def compare_with_stock(read: LoadedModel, imported: ImportResult) -> dict[str, Any]:
    """Largest difference of log-probabilities between their class and ours, for the report.

    Raises:
        ValueError: it is above `parity.TOLERANCE`.
    """
    name = type(read.model).__name__
    difference = max_log_prob_difference(
        lambda theirs, source, source_mask, target, target_mask: (
            theirs(input_ids=source, attention_mask=source_mask[:, 0, 0].long(), decoder_input_ids=target).logits
        ),
        read.model,
        imported.model,
    )
    if not difference <= TOLERANCE:
        raise ValueError(
            f"the log-probabilities of {name} and of the imported model differ by {difference:.2g}: does it "
            f"hold positions of its own? Nothing was written."
        )
    return {"with": f"transformers' {name}", "largest_difference_of_log_probabilities": difference, "batches": BATCHES}
