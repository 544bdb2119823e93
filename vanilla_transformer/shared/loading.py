"""Reading a checkpoint, ours or another, so that whatever is wrong with it is told in one line.

    model = load_model("runs/mine")
    tokenizer = load_tokenizer("runs/mine")

Weights that were cut off, settings of the wrong kind, and files that are something else come out of the libraries as
errors of some twenty types, and often of several lines. Here they become a `ValueError` that names the checkpoint, what
is wrong in which of its files, and a cure.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from vanilla_transformer import VanillaTransformerConfig  # and registers the model

MAX_OUTPUT_TOKENS = 100_000  # of an output: a larger limit is a slip of the pen, and a search makes room for it
MAX_LAYERS = 1000  # each is built before a weight is read: a slip of the pen would take the memory


def load_model(checkpoint: str | Path, name: str = "", **options: Any) -> Any:
    """The model of a checkpoint, whatever its class, on the CPU, for use.

    Args:
        checkpoint: folder, or a repository on the Hub.
        name: what messages call it, such as "base_model=runs/mine:"; default: as `checkpoint` does.
        options: fields of its configuration that are to be others.

    Raises:
        ValueError: it is no checkpoint, or one of its files cannot be used.
    """
    folder, name = Path(checkpoint), name or str(checkpoint)
    if folder.exists() and not (folder / "config.json").exists():
        raise ValueError(f"{name} is no checkpoint: it has no config.json. Give the folder of a model.")
    with wrap_load_errors(name, "config.json"):
        config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=False, **options)
        for key in ("encoder_layers", "decoder_layers", "num_hidden_layers"):
            if (layers := getattr(config, key, 0) or 0) > MAX_LAYERS:
                raise ValueError(f"{key}={layers} are more than {MAX_LAYERS}")
    if (folder / "generation_config.json").exists():  # transformers would do without one that it cannot read
        with wrap_load_errors(name, "generation_config.json"):
            settings = GenerationConfig.from_pretrained(checkpoint)
            for key in ("max_length", "max_new_tokens"):
                if (tokens := getattr(settings, key) or 0) > MAX_OUTPUT_TOKENS:
                    raise ValueError(f"{key}={tokens} are more than {MAX_OUTPUT_TOKENS}")
    with wrap_load_errors(name, "the weights"):
        model, found = AutoModelForSeq2SeqLM.from_pretrained(
            checkpoint, config=config, trust_remote_code=False, output_loading_info=True, ignore_mismatched_sizes=True
        )
        validate_weights(model, found)
    return model.eval()


def validate_weights(model: Any, found: dict[str, Any]) -> None:
    """Raises ValueError for weights that transformers draws at random or passes over, and for such as are no numbers.

    Args:
        found: what transformers tells of the loading.
    """
    for name, stored, wanted in found["mismatched_keys"]:
        raise ValueError(f"{name} is {tuple(stored)}, and config.json asks for {tuple(wanted)}")
    parameters = dict(model.named_parameters())
    missing = [name for name in found["missing_keys"] if name in parameters]
    ours = model.config.model_type == VanillaTransformerConfig.model_type
    for names, what in ((missing, "config.json asks for"), (found["unexpected_keys"] if ours else [], "is of no use:")):
        if names:
            raise ValueError(f"{what} {min(names)}" + f" and {len(names) - 1} more" * (len(names) > 1))
    for name, parameter in parameters.items():
        if not parameter.isfinite().all():
            raise ValueError(f"{name} holds values that are not finite")


def load_tokenizer(checkpoint: str | Path, name: str = "") -> Any:
    """The tokenizer of a checkpoint. Raises ValueError where there is none, or its files cannot be used."""
    with wrap_load_errors(name or str(checkpoint), "the tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
        tokenizer("a")  # some of what is wrong shows in use alone
        return tokenizer


@contextmanager
def wrap_load_errors(name: str, part: str) -> Iterator[None]:
    """Within it whatever the libraries raise becomes a `ValueError` of one line about a part of the checkpoint."""
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)  # else several lines of warning, and then an error that says the same
    logging.disable_progress_bar()
    try:
        with rust_panics_as_errors():
            yield
    except Exception as error:  # tokenizers raises no narrower type
        message = f"{name} cannot be loaded: {part} cannot be used ({first_error_line(error)})."
        raise ValueError(f"{message} Copy it anew from where it was made.") from error
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


@contextmanager
def rust_panics_as_errors() -> Iterator[None]:
    """Within it a panic of a library in Rust, which is no `Exception`, becomes a `ValueError`; and nothing of what Rust
    writes then, past Python, goes to stderr. What others write there in the meantime does, a little later."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file, os.fdopen(os.dup(2), "wb") as stderr:
        os.dup2(file.fileno(), 2)
        panic: ValueError | None = None
        try:
            yield
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # as pyo3 calls it, in no module that could be imported
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
    """What an error says first; where that ends in a colon, the next line, too."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 1 + lines[0].endswith(":")]).rstrip(".:")
