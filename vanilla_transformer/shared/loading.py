"""Loading of vanilla_transformer and native Transformers checkpoints, with one-line error messages.

    model = load_model("runs/mine")
    tokenizer = load_tokenizer("runs/mine")

For truncated weights, settings of the wrong type and unrelated files, the libraries raise about 20 exception types,
often with several lines. Here each becomes a `ValueError` that names the checkpoint, the file and the error.
"""

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from vanilla_transformer import VanillaTransformerConfig  # registers the model as well

from .vocabularies import add_target_mode, backend_tokenizers, disable_bpe_dropout

STDERR_LOCK = threading.RLock()  # two threads would restore each other's temporary file
EMA_SUBFOLDER = "ema"  # in a checkpoint of a run: moving average of the weights, in the format of save_pretrained
MAX_OUTPUT_TOKENS = 100_000  # a larger limit is probably a typo, and beam search allocates memory for it
MAX_LAYERS = 1000  # all layers are built before the weights are read, so a typo would exhaust the memory


def load_model(checkpoint: str | Path, error_prefix: str = "", **options: Any) -> Any:
    """Load a sequence-to-sequence model of any class on the CPU, in evaluation mode.

    `checkpoint` is a directory, or a repository on the Hub. If it contains a moving average of the weights
    (`ema_decay`), this average is loaded. `error_prefix` begins error messages. It defaults to `checkpoint`. `options`
    override config fields. Raises ValueError if it is not a checkpoint, or if one of its files cannot be used.
    """
    folder, error_prefix = Path(checkpoint), error_prefix or str(checkpoint)
    if folder.exists() and not (folder / "config.json").exists():
        hint = "Pass a directory written by `save_pretrained`."
        if (folder / "adapter_config.json").exists():
            hint = (
                "It is a LoRA adapter (adapter_config.json). Pass the output directory of the run, with merged weights."
            )
        raise ValueError(f"{error_prefix} is not a checkpoint directory: config.json is missing. {hint}")
    if (folder / EMA_SUBFOLDER / "config.json").exists():
        checkpoint = folder = folder / EMA_SUBFOLDER
    with wrap_load_errors(error_prefix, "config.json"):
        config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=False, **options)
        for key in ("encoder_layers", "decoder_layers", "num_hidden_layers"):
            if (layers := getattr(config, key, 0) or 0) > MAX_LAYERS:
                raise ValueError(f"{key}={layers} must be at most {MAX_LAYERS}")
    if (folder / "generation_config.json").exists():  # transformers ignores an unreadable file
        with wrap_load_errors(error_prefix, "generation_config.json"):
            settings = GenerationConfig.from_pretrained(checkpoint)
            for key in ("max_length", "max_new_tokens"):
                if (tokens := getattr(settings, key) or 0) > MAX_OUTPUT_TOKENS:
                    raise ValueError(f"{key}={tokens} must be at most {MAX_OUTPUT_TOKENS}")
    with wrap_load_errors(error_prefix, "the weights"):
        model, loading_info = AutoModelForSeq2SeqLM.from_pretrained(
            checkpoint, config=config, trust_remote_code=False, output_loading_info=True, ignore_mismatched_sizes=True
        )
        validate_weights(model, loading_info)
    return model.eval()


def validate_weights(model: Any, loading_info: dict[str, Any]) -> None:
    """Raise ValueError for missing, unexpected or mismatched weights, and for values that are not finite."""
    for name, stored_shape, expected_shape in loading_info["mismatched_keys"]:
        raise ValueError(f"{name} is {tuple(stored_shape)}, but config.json requires {tuple(expected_shape)}")
    parameters, computed = dict(model.named_parameters()), sinusoid_tables(model)
    missing = [name for name in loading_info["missing_keys"] if name in parameters and name not in computed]
    is_vanilla = model.config.model_type == VanillaTransformerConfig.model_type
    unexpected = loading_info["unexpected_keys"] if is_vanilla else []
    for names, problem in ((missing, "missing weights:"), (unexpected, "unexpected weights:")):
        if names:
            raise ValueError(f"{problem} {min(names)}" + f" and {len(names) - 1} more" * (len(names) > 1))
    for name, parameter in parameters.items():
        if not parameter.isfinite().all():
            raise ValueError(f"{name} contains values that are not finite")


def sinusoid_tables(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the sinusoidal position tables that are parameters: those of Marian, Pegasus and FSMT.

    The classes compute them, so a checkpoint may lack them. `from_pretrained` makes them trainable by mistake.
    """
    return {
        f"{name}.weight": module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and "Sinusoidal" in type(module).__name__
    }


def load_tokenizer(checkpoint: str | Path, error_prefix: str = "") -> Any:
    """Load the tokenizer of a checkpoint, without BPE-dropout. Raises ValueError if it is missing or cannot be used."""
    with wrap_load_errors(error_prefix or str(checkpoint), "the tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
        add_target_mode(tokenizer)
        tokenizer("a")  # some errors are raised only at the first use
        disable_bpe_dropout(backend_tokenizers(tokenizer))
        return tokenizer


@contextmanager
def wrap_load_errors(error_prefix: str, part: str) -> Iterator[None]:
    """Context manager that converts any library error into a one-line `ValueError` about a part of the checkpoint."""
    verbosity, shows_progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)  # the warnings repeat the error
    logging.disable_progress_bar()
    try:
        with rust_panics_as_errors():
            yield
    except Exception as error:  # tokenizers raises plain `Exception`
        message = f"{error_prefix} cannot be loaded: {part} cannot be used ({first_error_line(error)})."
        raise ValueError(f"{message} Correct this setting, or copy the checkpoint again.") from error
    finally:
        logging.set_verbosity(verbosity)
        if shows_progress:
            logging.enable_progress_bar()


@contextmanager
def rust_panics_as_errors() -> Iterator[None]:
    """Context manager that converts a Rust panic, which is not an `Exception`, into a `ValueError`.

    Output to file descriptor 2 is buffered, because Rust writes its message there. After a panic, it is discarded.
    """
    sys.stderr.flush()
    with STDERR_LOCK, tempfile.TemporaryFile() as file, os.fdopen(os.dup(2), "wb") as stderr:
        os.dup2(file.fileno(), 2)
        panic: ValueError | None = None
        try:
            yield
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # class of pyo3 that cannot be imported
                raise
            panic = ValueError(str(error))
            raise panic from error
        finally:
            sys.stderr.flush()
            os.dup2(stderr.fileno(), 2)
            file.seek(0)
            if panic is None and (written := file.read()):
                stderr.write(written)


def first_error_line(error: BaseException) -> str:
    """Return the first line of an error message, and the second one if the first ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 1 + lines[0].endswith(":")]).rstrip(".:")
