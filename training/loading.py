"""Checkpoints for use: their translators, their settings, and the best translations of each sentence."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

from training.data.tokenizer import vocabulary_sizes
from vanilla_transformer import TranslationPipeline
from vanilla_transformer.shared.loading import load_model, load_tokenizer, told


def load_translator(checkpoint: str, device: str | None = None) -> TranslationPipeline:
    """The translator of a checkpoint.

    Args:
        checkpoint: folder of a model with its tokenizer, or a repository on the Hub.
        device: "cpu", "cuda:1", ...; None: a GPU where there is one.

    Raises:
        ValueError: it is no checkpoint, cannot be loaded, or does not translate.
    """
    model, tokenizer = load_model(checkpoint), load_tokenizer(checkpoint)
    rows = model.get_input_embeddings().num_embeddings
    if (size := vocabulary_sizes(tokenizer)[0]) > rows:
        raise ValueError(f"{checkpoint}: its tokenizer has {size} tokens, and its model {rows}: give it its own one.")
    try:
        model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, AssertionError) as error:  # torch has one or the other for a device that is not there
        raise ValueError(f"--device {device}: {str(error).splitlines()[0]}") from error
    translator = TranslationPipeline(model=model, tokenizer=tokenizer)
    with told(checkpoint, "generation_config.json or the tokenizer"):  # their values are looked at in use alone
        batch = tokenizer.pad({"input_ids": [[tokenizer.eos_token_id or 0]] * 3}, return_tensors="pt")
        translator.postprocess(translator.forward(batch, return_scores=False, max_new_tokens=1))
    return translator


def read_settings(folder: Path) -> dict[str, Any]:
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
    return settings


def n_best_options(translator: TranslationPipeline, num_return: int) -> dict[str, int]:
    """Options for several translations a sentence: the checkpoint's beams, or `num_return` where these are fewer."""
    num_beams = max(num_return, translator.model.generation_config.num_beams or 1)
    return {"num_beams": num_beams, "num_return_sequences": num_return}


def n_best(translator: TranslationPipeline, sentences: list[str], num_return: int) -> Iterator[list[str]]:
    """The `num_return` best translations of each sentence, less blank ones."""
    for candidates in translator(sentences, **n_best_options(translator, num_return), progress=sys.stderr.isatty()):
        yield [text for candidate in candidates if (text := candidate["translation_text"].strip())]
