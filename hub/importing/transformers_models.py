"""Import of native Transformers models, from a directory or the Hub."""

from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import is_sentencepiece_available

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.shared.loading import load_model, load_tokenizer, wrap_load_errors
from vanilla_transformer.shared.transformers_conversion import (
    SIDES,
    NativeArchitecture,
    from_transformers,
    native_architecture_of,
    native_parameter_name,
)

from ..hub_errors import INSTALL_HUB, hub_error_message
from .checkpoint_file import prefix_errors_with, unpickle
from .conversion import ImportResult
from .parity import BATCHES, TOLERANCE, max_log_prob_difference

CONFIGS = ("*.json", "*.txt", "*.model", "*.spm", "*.bpe", "*.codes")  # configs and tokenizers
SAFETENSORS, PICKLES = "model*.safetensors", "pytorch_model*.bin"
TOKENIZERS = ("tokenizer_config.json", "tokenizer.json", "vocab.json", "*.spm", "*.model", "vocab.txt", "spiece.model")
RECOMPUTED = "positions are computed with the same formula"
UNUSED = ("version", "embed_positions.weights", "embed_positions._float_tensor", "model.shared.weight")


def is_transformers_model(location: Path) -> bool:
    """Return whether `location` is a directory or a Hub repository instead of a file."""
    is_name = len(location.parts) == 2 and not location.is_absolute() and location.suffix.lower() not in (".pt", ".pth")
    return location.is_dir() or (is_name and not location.exists() and not location.parent.exists())


def import_transformers_model(location: Path) -> tuple[ImportResult, PreTrainedTokenizerBase | None, dict[str, Any]]:
    """Convert a model and compare it with the original. Return it with its tokenizer, if any, and the report."""
    folder = location if location.is_dir() else download(location.as_posix())
    if not (folder / "config.json").exists():
        raise ValueError(f"{location} has no config.json. Pass a model directory or a file with weights.")
    with wrap_load_errors(str(location), "config.json"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if config.model_type == VanillaTransformerConfig.model_type:
        raise ValueError(f"{location} is already a vanilla_transformer model. It can be loaded directly.")
    with prefix_errors_with(f"{location}: "):
        architecture = native_architecture_of(config)
    names = read_tensor_names(folder)
    model = load_model(folder, str(location), dtype="float32")  # computes positions in this dtype
    tokenizer = read_tokenizer(folder, str(location))
    imported = convert_transformers_model(model, architecture, names)
    imported.user_notes = collect_user_notes(model, tokenizer)
    evidence = f"model_type={config.model_type} in config.json"
    report = {"file": location.name, "layout": architecture.model_type, "evidence": evidence, "settings": {}}
    return imported, tokenizer, report | imported.report() | {"parity": compare_with_original(model, imported)}


def download(repo_id: str) -> Path:
    """Download the required files of a Hub repository into the cache and return its directory."""
    try:
        folder = Path(snapshot_download(repo_id, allow_patterns=[*CONFIGS, SAFETENSORS]))
        if not list(folder.glob(SAFETENSORS)):
            folder = Path(snapshot_download(repo_id, allow_patterns=[*CONFIGS, PICKLES]))
    except Exception as error:  # errors of the client, the network, or a missing cache entry when offline
        missing = f"{repo_id} is not a local directory"
        if constants.is_offline_mode():
            raise ValueError(f"{missing}, and HF_HUB_OFFLINE is set. Unset it to download the model.") from error
        raise ValueError(f"{missing}. Download from the Hub: {hub_error_message(error, repo_id)}") from error
    return folder


def read_tensor_names(folder: Path) -> set[str]:
    """Return the tensor names in a directory. Raise ValueError for a pickle that would execute code."""
    names: set[str] = set()
    for path in folder.glob(SAFETENSORS):
        with wrap_load_errors(str(path), "the weights"), safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    if not names:
        for path in folder.glob(PICKLES):
            names |= set(unpickle(path))
    if not names:
        raise ValueError(f"{folder} contains no weights: expected {SAFETENSORS} or {PICKLES}.")
    return names


def read_tokenizer(folder: Path, name: str) -> PreTrainedTokenizerBase | None:
    if not any(list(folder.glob(pattern)) for pattern in TOKENIZERS):
        return None
    if not is_sentencepiece_available() and (list(folder.glob("*.spm")) or list(folder.glob("*.model"))):
        raise ValueError(f"the tokenizer of {name} requires sentencepiece. Run: {INSTALL_HUB}")
    return load_tokenizer(folder, name)


def convert_transformers_model(
    original: PreTrainedModel, architecture: NativeArchitecture, names: set[str]
) -> ImportResult:
    """Convert the model. Raise ValueError if one of `names`, the tensors in its files, does not exist in its class."""
    model = from_transformers(original)
    config: Any = model.config
    used: dict[str, list[str]] = {}
    for name in model.state_dict():
        used.setdefault(native_parameter_name(name), []).append(name)
    if config.share_encoder_decoder_embeddings:
        used["model.shared.weight"] = [f"model.{side}.embed_tokens.weight" for side in SIDES]
    dropped = {}
    for name in names - used.keys():
        if "embed_positions" in name:
            dropped[name] = RECOMPUTED
        elif name == "final_logits_bias":
            dropped[name] = "a bias of zeros"
        elif name.endswith(UNUSED):
            dropped[name] = f"{type(original).__name__} does not use it"
        else:
            raise ValueError(
                f"{name} does not exist in a {type(original).__name__}. Check the weights and config.json."
            )
    folds = {}
    if architecture.positions == "sinusoidal":
        folds["hidden dimensions permuted: sines and cosines of positions alternate instead of two halves"] = "exact"
    if architecture.positions == "tensor2tensor_sinusoids":
        folds[f"sinusoids of tensor2tensor as a table of {config.max_position_embeddings} positions"] = "exact"
    if offset := architecture.position_offset:
        folds[f"the first {offset} rows of the position tables, which are never used, are dropped"] = "exact"
    shapes = {name: getattr(config, name) for name in SHAPES}
    used = {name: targets for name, targets in used.items() if name in names}
    return ImportResult(model, shapes, folds, dropped, [], used)


SHAPES = (
    *("vocab_size", "decoder_vocab_size", "d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads"),
    *("decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim", "activation_function", "norm_position"),
    *("position_embedding_type", "embedding_norm", "scale_embedding", "lm_head_bias", "tie_word_embeddings"),
    *("share_encoder_decoder_embeddings", "max_position_embeddings"),
)


def collect_user_notes(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> list[str]:
    """Return report lines on properties that the user must check."""
    config, lines = model.config, []
    if any(getattr(config, f"{side}_layerdrop", 0) for side in SIDES):
        lines.append(
            "The original training dropped complete layers at random (layerdrop). This model does not support it."
        )
    if config.decoder_start_token_id is None and model.generation_config.decoder_start_token_id is None:
        lines.append(
            "The config has no decoder_start_token_id. Pass it to generate(), for example the target language id."
        )
    if tokenizer is None:
        lines.append("The directory contains no tokenizer.")
    return lines


def compare_with_original(original: PreTrainedModel, imported: ImportResult) -> dict[str, Any]:
    """Return the entry of the report. Raise ValueError if log-probabilities differ by more than `parity.TOLERANCE`."""
    name = type(original).__name__
    difference = max_log_prob_difference(
        lambda model, source, source_mask, target, target_mask: (
            model(input_ids=source, attention_mask=source_mask[:, 0, 0].long(), decoder_input_ids=target).logits
        ),
        original,
        imported.model,
    )
    if not difference <= TOLERANCE:
        message = f"the log-probabilities of {name} and of the imported model differ by {difference:.2g}"
        raise ValueError(f"{message}. Check its position tables. Nothing was written.")
    return {"with": f"transformers' {name}", "largest_difference_of_log_probabilities": difference, "batches": BATCHES}
