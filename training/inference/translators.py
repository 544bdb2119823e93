"""Loading of checkpoints for inference, and their recipes."""

import json
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml

from vanilla_transformer import TranslationPipeline
from vanilla_transformer.shared.command_line import logger
from vanilla_transformer.shared.ctranslate2_pipeline import CTranslate2Pipeline, validate_ctranslate2_options
from vanilla_transformer.shared.loading import load_model, load_tokenizer, wrap_load_errors
from vanilla_transformer.shared.vocabularies import SIDES, backend_tokenizers, vocabularies

from ..data.tokenizer import saved_files, validate_embedding_rows
from ..recipe.arguments import rename_keys
from .settings import DecodingSettings

Paths = str | Path | Sequence[str | Path]  # one or several; a checkpoint can also be a repository on the Hub
RUN_CHECKPOINT = re.compile("checkpoint-[0-9]+")  # name of a checkpoint in the output directory of a run
MIN_CTRANSLATE2_SENTENCES = 500  # with fewer, the conversion of the model takes as long as it saves
GREEDY_OVERRIDES = {"length_penalty": None, "early_stopping": None}  # transformers rejects these with one beam


def as_names(checkpoints: Paths) -> tuple[str, ...]:
    """Return the names of one checkpoint or of an ensemble. Raises ValueError if there are none."""
    names = tuple(map(str, [checkpoints] if isinstance(checkpoints, str | Path) else checkpoints))
    if not names:
        raise ValueError("the list of checkpoints is empty. Pass at least one.")
    return names


def load_translator(checkpoints: Paths, device: str | None = None) -> TranslationPipeline:
    """Load the pipeline of a checkpoint, or of an ensemble whose probabilities are averaged.

    The first checkpoint defines the generation config. Raises ValueError if a checkpoint or the device cannot be used,
    or if the tokenizers differ.
    """
    names, device = as_names(checkpoints), select_device(device)
    first, *others = (load_single_translator(name, device) for name in names)
    for name, other in zip(names[1:], others, strict=True):
        validate_same_tokenizer(names[0], first.tokenizer, name, other.tokenizer)
    if not others:
        return first
    return TranslationPipeline(model=first.model, tokenizer=first.tokenizer, ensemble=[each.model for each in others])


def select_device(device: str | None) -> str:
    """Return a device, by default a GPU if available. Raises ValueError if it cannot hold a tensor."""
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # AssertionError if torch was built without CUDA
        reason = str(error).partition("\n")[0]
        raise ValueError(f"--device: {device!r} is not a usable device ({reason}): use cpu or cuda.") from error
    return device


def load_single_translator(checkpoint: str, device: str) -> TranslationPipeline:
    """Load the pipeline of one checkpoint and test it."""
    model, tokenizer = load_model(checkpoint), load_tokenizer(checkpoint)
    validate_embedding_rows(checkpoint, model, tokenizer)
    try:
        model.to(device)
    except RuntimeError as error:  # such as too little memory
        raise ValueError(f"--device {device}: {str(error).splitlines()[0]}") from error
    translator = TranslationPipeline(model=model, tokenizer=tokenizer)
    with wrap_load_errors(checkpoint, "generation_config.json or the tokenizer"):  # validated only when used
        batch = tokenizer.pad({"input_ids": [[tokenizer.eos_token_id or 0]] * 3}, return_tensors="pt")
        translator.postprocess(translator.forward(batch, return_scores=False, max_new_tokens=1))
    return translator


def validate_same_tokenizer(name: str, tokenizer: Any, other_name: str, other: Any) -> None:
    """Raise ValueError if two tokenizers differ in the ids of source or target."""
    remedy = "Use checkpoints that were trained with one tokenizer (--tokenizer-path)."
    for side, first, second in zip(SIDES, vocabularies(tokenizer), vocabularies(other), strict=True):
        if first != second:
            raise ValueError(
                f"{other_name} has another tokenizer than {name} (its {side} vocabulary: {len(second):,} tokens "
                f"instead of {len(first):,}, {len(first.items() & second.items()):,} in common). {remedy}"
            )
    if tokenizer_definition(tokenizer) != tokenizer_definition(other):
        difference = "the same vocabulary, but it splits text differently"
        raise ValueError(f"{other_name} has another tokenizer than {name}: {difference}. {remedy}")


def tokenizer_definition(tokenizer: Any) -> list[Any]:
    """Return the serialized tokenizer without padding and truncation, or the name and files of a slow tokenizer."""
    parts = [json.loads(each.to_str()) for each in backend_tokenizers(tokenizer)]
    state = ("padding", "truncation")  # set by the last call
    definitions: list[Any] = [{key: value for key, value in part.items() if key not in state} for part in parts]
    if definitions:
        return definitions
    files = saved_files(tokenizer).items()  # .json: settings, and vocabularies in any order
    return [type(tokenizer).__name__, *(content for name, content in files if not name.endswith(".json"))]


def select_engine(
    translator: TranslationPipeline,
    engine: str,
    num_sentences: int,
    options: dict[str, Any] | None = None,
    quantization: str | None = None,
) -> TranslationPipeline:
    """Return a pipeline that decodes with an engine. For many sentences, log which one "auto" selects and why.

    `num_sentences` can be an estimate. Raises ValueError if the engine does not support the model, the options of the
    calls or the quantization.
    """
    if quantization and engine != "ctranslate2":
        raise ValueError(f"--quantization {quantization} requires --engine ctranslate2, got --engine {engine}.")
    if engine == "transformers" or (engine == "auto" and num_sentences < MIN_CTRANSLATE2_SENTENCES):
        return translator
    try:
        if find_spec("ctranslate2") is None:
            raise ValueError("ctranslate2 is not installed (pip install ctranslate2).")
        validate_ctranslate2_options(translator, options or {})
        model, tokenizer, batch_size = translator.model, translator.tokenizer, translator._batch_size
        result = CTranslate2Pipeline(quantization, model=model, tokenizer=tokenizer, batch_size=batch_size)
    except (ImportError, ValueError, OSError, RuntimeError) as error:  # such as a full disk
        if engine == "ctranslate2":
            raise ValueError(f"--engine ctranslate2: {error} Use --engine transformers.") from error
        logger.info(f"engine: transformers, because: {error}")
        return translator
    logger.info("engine: ctranslate2, which is faster for many sentences on a CPU")
    return result


def read_run_recipe(folder: Path) -> dict[str, Any]:
    """Read the `recipe.yaml` of a run or of its `checkpoint-N`, or return {} if there is none."""
    path = folder / "recipe.yaml"
    if not path.exists():
        is_checkpoint = RUN_CHECKPOINT.fullmatch(folder.resolve().name)
        return read_run_recipe(folder.resolve().parent) if is_checkpoint else {}
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(
            f"{path} cannot be read ({str(error).splitlines()[0]}): copy it again, or remove it."
        ) from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path} contains no settings: copy it again, or remove it.")
    return rename_keys(settings)


def get_decoding_options(settings: DecodingSettings) -> dict[str, Any]:
    """Return the arguments of `generate()` for one translation per sentence."""
    names = ("num_beams", "length_penalty", "max_new_tokens")
    options = {name: value for name in names if (value := getattr(settings, name)) is not None}
    options["num_return_sequences"] = 1  # the default of the model may be greater
    return GREEDY_OVERRIDES | options if options.get("num_beams") == 1 else options
