"""Whether an imported model computes what the user's own code does: log-probabilities are compared."""

import importlib
import math
import os
import sys
from typing import Any

import torch
from torch import nn

from hub.importing.layout import Layout, Run, State, compile_pattern
from hub.importing.tokenizer import repeats
from vanilla_transformer import VanillaTransformerForConditionalGeneration

BATCHES = 3
TOLERANCE = 1e-4  # of log-probabilities


def compare(
    place: str,
    layout: Layout,
    state: State,
    model: VanillaTransformerForConditionalGeneration,
    rows: dict[str, list[int]] | None = None,
) -> dict[str, Any]:
    """Largest difference of log-probabilities between the user's model and ours, for the report.

    Args:
        place: the user's code, as `MODULE:CALLABLE`; it is imported from the working directory too, and run.
        layout: of the file.
        state: the file's tensors.
        model: ours.
        rows: as for `parity`.

    Raises:
        ValueError: no such code, it does not take the state, or the difference is above `TOLERANCE`, or no number.
    """
    try:
        theirs = load_user_model(place)
        load_state(place, theirs, layout, state)
        difference = max_log_prob_difference(layout.run, theirs.eval(), model, rows)
    except ValueError:
        raise
    except (Exception, SystemExit) as error:  # the user's own code, which may raise anything, and end the program
        told = f"{type(error).__name__}: {error}".rstrip(": ")
        raise ValueError(f"--compare_with {place} fails: {told}. Nothing was written.") from error
    if not math.isfinite(difference):
        raise ValueError(
            f"the log-probabilities of {place} or of the imported model are not all finite numbers, so nothing can be "
            f"compared: are the weights those of a training that went well? Nothing was written."
        )
    if difference > TOLERANCE:
        raise ValueError(
            f"the log-probabilities of {place} and of the imported model differ by {difference:.2g}: the layout, "
            f"--num_heads or a --set is not right. Nothing was written."
        )
    return {"with": place, "largest_difference_of_log_probabilities": difference, "batches": BATCHES}


def load_user_model(place: str) -> nn.Module:
    module_name, _, name = place.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        theirs = getattr(importlib.import_module(module_name), name)()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(
            f"--compare_with {place}: {error}. Give MODULE:CALLABLE, a function without arguments."
        ) from error
    if not isinstance(theirs, nn.Module):
        raise ValueError(f"--compare_with {place} gives a {type(theirs).__name__}, not a torch.nn.Module.")
    return theirs


def load_state(place: str, theirs: nn.Module, layout: Layout, state: State) -> None:
    """Fills their model. It keeps the tables of positions that it computed where the file's are rounded or absent."""
    tables = [compile_pattern(key) for key, use in layout.uses().items() if use.computed]
    computed = {name for name in theirs.state_dict() if any(table.fullmatch(name) for table in tables)}
    kept = {name for name in computed if name not in state or state[name].dtype.itemsize < 4}
    try:
        found = theirs.load_state_dict({name: value for name, value in state.items() if name not in kept}, strict=False)
    except RuntimeError as error:
        raise ValueError(f"{place} does not take the file's weights: {error}") from error
    differing = [*(set(found.missing_keys) - kept), *found.unexpected_keys]
    if differing:
        names = ", ".join(sorted(differing)[:3])
        raise ValueError(f"{place} does not take the file's weights: {names} is in one of them alone.")


@torch.no_grad()
def max_log_prob_difference(
    run_theirs: Run,
    theirs: nn.Module,
    model: VanillaTransformerForConditionalGeneration,
    rows: dict[str, list[int]] | None = None,
) -> float:
    """Largest difference of log-probabilities at real target tokens, over random batches with padding behind.

    Under the right mask: a source's padding is hidden, a target token sees itself and what stands before it. NaN where
    one of them is.

    Args:
        rows: for each side ("source", "target"), their id of each of our ids. Of those that repeat, only the first is
            compared. Defaults to the same ids.
    """
    config, differences = model.config, []
    pad = config.pad_token_id if config.pad_token_id is not None else 0
    sizes = {"source": (config.vocab_size, 9), "target": (model.lm_head.out_features, 7)}
    rows = rows or {side: list(range(size)) for side, (size, _) in sizes.items()}
    row_ids = {side: torch.tensor(each) for side, each in rows.items()}
    own = ~torch.tensor(repeats(rows["target"]))
    generator = torch.Generator().manual_seed(0)
    for _ in range(BATCHES):
        ids = {}
        for side, (size, length) in sizes.items():
            tokens = torch.randint(0, size - 1, (4, length), generator=generator)
            tokens[tokens >= pad] += 1  # any but padding
            for row in range(4):
                tokens[row, length - row :] = pad
            ids[side] = tokens
        real = {side: tokens != pad for side, tokens in ids.items()}
        source, target = (row_ids[side][tokens] for side, tokens in ids.items())
        causal = torch.ones(7, 7, dtype=torch.bool).tril()
        source_mask, target_mask = real["source"][:, None, None], causal & real["target"][:, None, None]
        expected = run_theirs(theirs, source, source_mask, target, target_mask).log_softmax(-1)
        found = model(
            input_ids=ids["source"], attention_mask=real["source"].long(), decoder_input_ids=ids["target"]
        ).logits.log_softmax(-1)[..., own]
        if expected.shape != found.shape:
            raise ValueError(f"the model gives {tuple(expected.shape)} where ours gives {tuple(found.shape)}.")
        differences.append((expected[..., row_ids["target"][own]] - found)[real["target"]].abs().max())
    return float(torch.stack(differences).max())  # NaN where one is, which max() of Python would drop
