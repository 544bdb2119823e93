"""Comparison of the log-probabilities of an imported model and the original code."""

import importlib
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vanilla_transformer import VanillaTransformerForConditionalGeneration

from .layout import Forward, Layout, State, compile_pattern
from .tokenizer import find_repeats

BATCHES = 3
TOLERANCE = 1e-4  # of log-probabilities


def compare_with_user_model(
    location: str,
    layout: Layout,
    state: State,
    model: VanillaTransformerForConditionalGeneration,
    rows: dict[str, list[int]] | None = None,
) -> dict[str, Any]:
    """Compare the imported model with the user's code (`MODULE:CALLABLE`) and return the entry of the report.

    The code is imported, also from the working directory, and executed. `rows` is as in `max_log_prob_difference`.
    Raises ValueError if the code fails, if its model does not match the file, or if the difference is too large.
    """
    try:
        user_model = load_user_model(location)
        load_user_weights(location, user_model, layout, state)
        difference = max_log_prob_difference(layout.forward, user_model.eval(), model, rows)
    except ValueError:
        raise
    except (Exception, SystemExit) as error:  # user code may raise any exception or exit
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        raise ValueError(f"--compare-with {location} fails: {reason}. Nothing was written.") from error
    if not math.isfinite(difference):
        message = f"the log-probabilities of {location} or of the imported model are not all finite"
        raise ValueError(f"{message} and cannot be compared. Check the weights in the file. Nothing was written.")
    if difference > TOLERANCE:
        message = f"the log-probabilities of {location} and of the imported model differ by {difference:.2g}"
        raise ValueError(f"{message}. Check the layout, --num-heads and --set. Nothing was written.")
    return {"with": location, "largest_difference_of_log_probabilities": difference, "batches": BATCHES}


def load_user_model(location: str) -> nn.Module:
    module_name, _, name = location.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        model = getattr(importlib.import_module(module_name), name)()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        expected = "Expected MODULE:CALLABLE, where CALLABLE takes no arguments."
        raise ValueError(f"--compare-with {location}: {error}. {expected}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"--compare-with {location} returns a {type(model).__name__}, expected a torch.nn.Module.")
    return model


def load_user_weights(location: str, model: nn.Module, layout: Layout, state: State) -> None:
    """Load the weights of the file into the user's model, except position tables that are rounded or missing."""
    tables = [compile_pattern(key) for key, rule in layout.rules().items() if rule.is_recomputed]
    computed = {name for name in model.state_dict() if any(table.fullmatch(name) for table in tables)}
    skipped = {name for name in computed if name not in state or state[name].dtype.itemsize < 4}
    mismatch = f"the model from {location} does not match the weights in the file"
    try:
        result = model.load_state_dict({name: state[name] for name in state if name not in skipped}, strict=False)
    except RuntimeError as error:
        raise ValueError(f"{mismatch}: {error}") from error
    if differing := [*(set(result.missing_keys) - skipped), *result.unexpected_keys]:
        names = ", ".join(sorted(differing)[:3])
        raise ValueError(f"{mismatch}: {names} exist in only one of the two.")


@torch.no_grad()
def max_log_prob_difference(
    forward: Forward,
    source_model: nn.Module,
    model: VanillaTransformerForConditionalGeneration,
    rows: dict[str, list[int]] | None = None,
) -> float:
    """Return the largest difference of log-probabilities on random batches, or NaN if one value is NaN.

    Sequences are padded on the right. Padding of the source is masked, and the target mask is causal. Only real target
    tokens are compared.

    `forward` calls the source model, as `Layout.forward`. For each side ("source", "target"), `rows` has the id in the
    source model for each id of `model`. If several ids have the same row, only the first one is compared. Defaults to
    equal ids.
    """
    config, differences = model.config, []
    pad = config.pad_token_id if config.pad_token_id is not None else 0
    sizes = {"source": (config.vocab_size, 9), "target": (model.lm_head.out_features, 7)}
    rows = rows or {side: list(range(size)) for side, (size, _) in sizes.items()}
    row_ids = {side: torch.tensor(each) for side, each in rows.items()}
    is_unique = ~torch.tensor(find_repeats(rows["target"]))
    generator = torch.Generator().manual_seed(0)
    for _ in range(BATCHES):
        ids = {}
        for side, (size, length) in sizes.items():
            tokens = torch.randint(0, size - 1, (4, length), generator=generator)
            tokens[tokens >= pad] += 1  # any token except padding
            for row in range(4):
                tokens[row, length - row :] = pad
            ids[side] = tokens
        real = {side: tokens != pad for side, tokens in ids.items()}
        source, target = (row_ids[side][tokens] for side, tokens in ids.items())
        causal = torch.ones(7, 7, dtype=torch.bool).tril()
        source_mask, target_mask = real["source"][:, None, None], causal & real["target"][:, None, None]
        expected = forward(source_model, source, source_mask, target, target_mask).log_softmax(-1)
        actual = model(
            input_ids=ids["source"], attention_mask=real["source"].long(), decoder_input_ids=ids["target"]
        ).logits.log_softmax(-1)[..., is_unique]
        if expected.shape != actual.shape:
            shapes = f"{tuple(expected.shape)}, expected {tuple(actual.shape)}"
            raise ValueError(f"the output of the original model has the shape {shapes}.")
        differences.append((expected[..., row_ids["target"][is_unique]] - actual)[real["target"]].abs().max())
    return float(torch.stack(differences).max())  # max() of Python would drop NaN
