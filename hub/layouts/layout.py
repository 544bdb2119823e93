"""What a layout is: a table from somebody's parameter names to ours, and the folds that make their formulas ours.

A fold changes weights so that our architecture computes what theirs does: where a norm divides by the unbiased standard
deviation, say, its weight is multiplied by a constant instead of giving our model another norm.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

State = dict[str, torch.Tensor]
Run = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Use:
    """What becomes of one tensor of the file.

    Args:
        targets: our names, with the same `{...}` as the key that it stands for; none: the tensor is left out.
        fold: (tensor, facts) -> one tensor for each target; None: it is taken as it is.
        told: what the fold does, or why the tensor is left out, for the report.
        bound: "exact", or up to what.
    """

    targets: tuple[str, ...]
    fold: Callable[[torch.Tensor, "Facts"], tuple[torch.Tensor, ...]] | None = None
    told: str = ""
    bound: str = "exact"


@dataclass
class Facts:
    """What the file and the user say: dimensions, number of heads (None: nobody said), metadata of the file."""

    d_model: int
    num_heads: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """A tutorial's checkpoint.

    Args:
        name: as `--layout` takes it.
        title: whose it is.
        keys: their names -> ours, or a `Use`. `{i}` stands for a number, `{p}` for weight or bias, `{a|b}` for one of
            these words; on the other side they stand for the same.
        config: fields of our configuration that the layout fixes.
        norm_eps: (d_model) -> `layer_norm_eps`.
        num_heads: how many heads the layout's code always has, or a function of the state; None: it must be asked for.
        zero_biases: whether the layout's linear maps may lack biases; ours are then zero.
        special_ids: of the layout, where its code fixes them.
        check: what the user must look at, since the file cannot tell.
        settle: (facts, state) -> further configuration fields, for layouts with variants.
        run: how their model is called for logits or log-probabilities (B, T, V): (model, source (B, S), source mask
            (B, 1, 1, S), target (B, T), target mask (B, 1, T, T)); masks are True where a token may be seen.
        optional: keys that a file may lack.
    """

    name: str
    title: str
    keys: dict[str, "str | Use"]
    config: dict[str, Any]
    norm_eps: Callable[[int], float] = lambda d_model: 1e-5
    num_heads: Callable[[State], int] | None = None
    zero_biases: bool = False
    special_ids: dict[str, int] = field(default_factory=dict)
    check: tuple[str, ...] = ()
    settle: Callable[[Facts, State], dict[str, Any]] | None = None
    run: Run = lambda model, source, source_mask, target, target_mask: model(source, target)
    optional: tuple[str, ...] = ()

    def uses(self) -> dict[str, Use]:
        return {key: use if isinstance(use, Use) else Use((use,)) for key, use in self.keys.items()}


ENCODER, DECODER = "model.encoder.layers.{i}", "model.decoder.layers.{i}"  # ours
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


def attention(theirs: str, names: Iterable[str], *ours: str) -> dict[str, "str | Use"]:
    """The four projections of one attention, theirs in the order q, k, v, output; `ours` where it is, or several."""
    table: dict[str, str | Use] = {}
    for name, projection in zip(names, PROJECTIONS, strict=True):
        targets = [f"{place}.{projection}.{{p}}" for place in ours]
        several = copied(*targets, told="one attention that their decoder uses for itself and across")
        table[f"{theirs}.{name}.{{p}}"] = targets[0] if len(targets) == 1 else several
    return table


def feed_forward(theirs: str, names: Iterable[str], ours: str) -> dict[str, "str | Use"]:
    """The two maps of a feed-forward network."""
    return {
        f"{theirs}{name}.{{p}}": f"{ours}.feed_forward.{fc}.{{p}}"
        for name, fc in zip(names, ("fc1", "fc2"), strict=True)
    }


# --- Names with variables --------------------------------------------------------------------------------------------


def pattern(key: str) -> re.Pattern:
    """`layers.{i}.fc.{p}` -> a regular expression with a group for each variable, numbered v0, v1, ..."""
    parts = re.split(r"(\{[^}]*\})", key)
    regex, count = "", 0
    for part in parts:
        if part.startswith("{"):
            body = {"{i}": r"\d+", "{p}": "weight|bias"}.get(part, part[1:-1])
            regex += f"(?P<v{count}>{body})"
            count += 1
        else:
            regex += re.escape(part)
    return re.compile(regex)


def fill(target: str, values: Iterable[str]) -> str:
    """Our name with the variables' values, in their order."""
    values = iter(values)
    return re.sub(r"\{[^}]*\}", lambda _: next(values), target)


# --- Folds -----------------------------------------------------------------------------------------------------------


def left_out(reason: str) -> Use:
    return Use((), told=reason)


def copied(*targets: str, told: str) -> Use:
    """One tensor that their code uses in several places."""
    return Use(targets, lambda tensor, facts: (tensor,) * len(targets), told)


def in_thirds(query: str, key: str, value: str) -> Use:
    """A fused projection, (3 d, d) or (3 d), cut into those of queries, keys and values."""
    return Use((query, key, value), lambda tensor, facts: tensor.chunk(3), "fused q, k, v are cut in three")


def unbiased_norm(target: str, told: str, bound: str = "exact") -> Use:
    """A norm's weight (d) or (1) whose code divides by the unbiased deviation: sqrt(n / (n - 1)) of ours."""

    def fold(tensor: torch.Tensor, facts: Facts) -> tuple[torch.Tensor, ...]:
        n = facts.d_model
        return (tensor.expand(n) * ((n - 1) / n) ** 0.5,)

    return Use((target,), fold, told, bound)


STD_BOUND = "relative error below 1e-6 / s for a norm's input of deviation s, from an epsilon outside the root"


def std_norm(target: str) -> Use:
    """alpha * (x - mean) / (std + 1e-6) with the unbiased std; a scalar alpha is spread over the width."""
    return unbiased_norm(target, "alpha / unbiased std: alpha times sqrt((n - 1) / n)", STD_BOUND)


def spread(target: str) -> Use:
    """A scalar bias (1) spread over the width (d)."""
    return Use((target,), lambda tensor, facts: (tensor.expand(facts.d_model),), "bias spread over the width")


def shared_by_heads(target: str, scores_divided_by_width: bool = False) -> Use:
    """One matrix (k, k) that every head uses on its part of the input: a block-diagonal (d, d).

    Where the scores are divided by sqrt(d) instead of sqrt(k), the queries take the difference: times sqrt(k / d).
    """

    def fold(tensor: torch.Tensor, facts: Facts) -> tuple[torch.Tensor, ...]:
        width = tensor.shape[0]
        scale = (width / facts.d_model) ** 0.5 if scores_divided_by_width else 1.0
        return (torch.block_diag(*[tensor * scale] * (facts.d_model // width)),)

    told = "a matrix shared by the heads, as block diagonal"
    return Use((target,), fold, told + (", with the scale of its scores" if scores_divided_by_width else ""))


def sinusoids() -> Use:
    """A table of positions that is compared with ours, which is computed, and then left out."""
    return Use((), sinusoids_must_agree, "positions are computed; the table agrees")


def sinusoids_must_agree(table: torch.Tensor, facts: Facts) -> tuple[torch.Tensor, ...]:
    from vanilla_transformer.modeling_vanilla_transformer import sinusoidal_encoding

    rows = table.reshape(-1, table.shape[-1]).float()
    ours = sinusoidal_encoding(torch.arange(len(rows)), rows.shape[-1])
    difference = float((rows - ours).abs().max())
    if difference > 1e-3:  # float32 angles of some thousand positions
        raise ValueError(
            f"its table of positions differs from sin / cos of section 3.5 by {difference:.2g}: this layout cannot "
            f"take it."
        )
    return ()
