"""Checkpoints for use: their translators, and their settings."""

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from training.arguments import rename_keys
from training.data.tokenizer import vocabulary_sizes
from vanilla_transformer import TranslationPipeline
from vanilla_transformer.shared.loading import load_model, load_tokenizer, wrap_load_errors

CHECKPOINTS = "folder of a model with its tokenizer, or a repository on the Hub; several predict together"
GREEDY_OVERRIDES = {"length_penalty": None, "early_stopping": None}  # of a checkpoint, which one beam is refused with


def load_translator(checkpoints: str | Sequence[str], device: str | None = None) -> TranslationPipeline:
    """The translator of a checkpoint, or of several that predict together: the mean of their probabilities.

    Args:
        checkpoints: folder of a model with its tokenizer, or a repository on the Hub; or several of one tokenizer. How
            to decode is said by the first.
        device: "cpu", "cuda:1", ...; None: a GPU where there is one.

    Raises:
        ValueError: one is no checkpoint, cannot be loaded, or does not translate; or their tokenizers differ.
    """
    names = [checkpoints] if isinstance(checkpoints, str) else list(checkpoints)
    first, *others = (load_single_translator(name, device) for name in names)
    for name, other in zip(names[1:], others, strict=True):
        validate_same_tokenizer(names[0], first.tokenizer, name, other.tokenizer)
    if not others:
        return first
    return TranslationPipeline(model=first.model, tokenizer=first.tokenizer, ensemble=[each.model for each in others])


def load_single_translator(checkpoint: str, device: str | None) -> TranslationPipeline:
    """The translator of one checkpoint, after a trial; see `load_translator`."""
    model, tokenizer = load_model(checkpoint), load_tokenizer(checkpoint)
    rows = model.get_input_embeddings().num_embeddings
    if (size := vocabulary_sizes(tokenizer)[0]) > rows:
        raise ValueError(f"{checkpoint}: its tokenizer has {size} tokens, and its model {rows}: give it its own one.")
    try:
        model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, AssertionError) as error:  # torch has one or the other for a device that is not there
        raise ValueError(f"--device {device}: {str(error).splitlines()[0]}") from error
    translator = TranslationPipeline(model=model, tokenizer=tokenizer)
    with wrap_load_errors(
        checkpoint, "generation_config.json or the tokenizer"
    ):  # their values are looked at in use alone
        batch = tokenizer.pad({"input_ids": [[tokenizer.eos_token_id or 0]] * 3}, return_tensors="pt")
        translator.postprocess(translator.forward(batch, return_scores=False, max_new_tokens=1))
    return translator


def validate_same_tokenizer(name: str, tokenizer: Any, other_name: str, other: Any) -> None:
    """Raises ValueError unless both make the same ids of every text, on either side."""
    for side in ("source", "target"):
        first, second = (get_vocab(each, side) for each in (tokenizer, other))
        if first != second:
            raise ValueError(
                f"{other_name} has another tokenizer than {name} (its {side} vocabulary: {len(second):,} tokens, "
                f"{len(first):,} there, {len(first.items() & second.items()):,} of them the same): give "
                f"checkpoints that were trained with one tokenizer (--tokenizer_path)."
            )
    if tokenizer_definition(tokenizer) != tokenizer_definition(other):
        raise ValueError(
            f"{other_name} has another tokenizer than {name}: the same vocabulary, but it splits text in another way. "
            f"Give checkpoints that were trained with one tokenizer (--tokenizer_path)."
        )


def get_vocab(tokenizer: Any, side: str) -> dict[str, int]:
    own = getattr(tokenizer, f"{side}_tokenizer", None)
    return own.get_vocab() if own is not None else tokenizer.get_vocab()


def tokenizer_definition(tokenizer: Any) -> list[Any]:
    """What makes ids of text, as it would be saved; of a tokenizer that is not fast its class alone is known."""
    backends = [getattr(tokenizer, name, None) for name in ("backend_tokenizer", "target_tokenizer")]
    parts = [json.loads(each.to_str()) for each in backends if each is not None]
    passing = ("padding", "truncation")  # of the last text that it was given
    ways: list[Any] = [{key: value for key, value in part.items() if key not in passing} for part in parts]
    return ways or [type(tokenizer).__name__]


def read_run_recipe(folder: Path) -> dict[str, Any]:
    """The `recipe.yaml` of a run that was trained here; of others none. Raises ValueError for one that is damaged."""
    path = folder / "recipe.yaml"
    if not path.exists():
        return {}
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(
            f"{path} cannot be read ({str(error).splitlines()[0]}): copy it anew, or remove it."
        ) from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path} holds no settings: copy it anew, or remove it.")
    return rename_keys(settings)


def get_decoding_options(arguments: Namespace) -> dict[str, Any]:
    """Returns the options of `generate()` that a command line gives."""
    names = ("num_beams", "length_penalty", "max_new_tokens")
    given = {name: value for name in names if (value := getattr(arguments, name, None)) is not None}
    return GREEDY_OVERRIDES | given if given.get("num_beams") == 1 else given


def get_nbest_options(translator: TranslationPipeline, num_return: int) -> dict[str, int]:
    """Options for several translations a sentence: the checkpoint's beams, or `num_return` where these are fewer."""
    num_beams = max(num_return, translator.model.generation_config.num_beams or 1)
    return {"num_beams": num_beams, "num_return_sequences": num_return}
