"""Folds: what changes a tutorial's weights so that our architecture computes what the tutorial's does.

Where a norm divides by the unbiased standard deviation, say, its weight is multiplied by a constant instead of giving
our model another norm.
"""

import torch

from hub.importing.layout import CheckpointInfo, TensorRule
from vanilla_transformer.modeling_vanilla_transformer import sinusoidal_encoding


def split_qkv(query: str, key: str, value: str) -> TensorRule:
    """A fused projection, (3 d, d) or (3 d), cut into those of queries, keys and values."""
    return TensorRule((query, key, value), lambda tensor, facts: tensor.chunk(3), "fused q, k, v are cut in three")


def unbiased_norm(target: str, note: str, bound: str = "exact") -> TensorRule:
    """A norm's weight (d) or (1) whose code divides by the unbiased deviation, unless a setting denies it."""

    def fold(tensor: torch.Tensor, facts: CheckpointInfo) -> tuple[torch.Tensor, ...]:
        n = facts.d_model
        ratio = (n - 1) / n if facts.metadata.get("unbiased_norm", True) else 1.0
        return (tensor.expand(n) * ratio**0.5,)

    return TensorRule((target,), fold, note, bound)


STD_BOUND = "relative error below 1e-6 / s for a norm's input of deviation s, from an epsilon outside the root"


def std_norm(target: str) -> TensorRule:
    """alpha * (x - mean) / (std + 1e-6) with the unbiased std; a scalar alpha is spread over the width."""
    return unbiased_norm(target, "alpha / unbiased std: alpha times sqrt((n - 1) / n)", STD_BOUND)


def expand_scalar_bias(target: str) -> TensorRule:
    """A scalar bias (1) spread over the width (d)."""
    return TensorRule((target,), lambda tensor, facts: (tensor.expand(facts.d_model),), "bias spread over the width")


def block_diagonal_heads(target: str, scores_divided_by_width: bool = False) -> TensorRule:
    """One matrix (k, k), or bias (k), that every head uses on its part of the input: a block-diagonal (d, d).

    If k is d, the matrix is that of all heads. Where the scores are divided by sqrt(d), and not by the root of a head's
    width, the queries take the difference: divided by the root of the number of heads.
    """

    def fold(tensor: torch.Tensor, facts: CheckpointInfo) -> tuple[torch.Tensor, ...]:
        width = len(tensor)
        if tensor.shape not in ((width,), (width, width)) or not width or facts.d_model % width:
            raise ValueError(f"it should be square, and its width a divisor of {facts.d_model}.")
        copies = facts.d_model // width
        scale = max(copies, facts.num_heads or 1) ** -0.5 if scores_divided_by_width else 1.0
        parts = [tensor * scale] * copies
        return (torch.cat(parts) if tensor.ndim == 1 else torch.block_diag(*parts),)

    note = "a matrix shared by the heads, as block diagonal"
    return TensorRule((target,), fold, note + (", with the scale of its scores" if scores_divided_by_width else ""))


def sinusoids() -> TensorRule:
    """A table of positions that is compared with ours, which is computed, and then left out."""
    return TensorRule((), validate_sinusoidal_table, "positions are computed; the table agrees", computed=True)


def validate_sinusoidal_table(table: torch.Tensor, facts: CheckpointInfo) -> tuple[torch.Tensor, ...]:
    for dim in range(table.ndim - 1):
        if (table == table.narrow(dim, 0, 1)).all():  # one table, repeated for each sentence of a batch
            table = table.narrow(dim, 0, 1)
    rows = table.reshape(-1, table.shape[-1]).float()
    ours = sinusoidal_encoding(torch.arange(len(rows)), rows.shape[-1])
    difference = float((rows - ours).abs().max())
    if not difference <= 2.5e-3:  # float32 angles of some thousand positions; sines in bfloat16 (2e-3); and no NaN
        raise ValueError(
            f"its table of positions differs from sin / cos of section 3.5 by {difference:.2g}: this layout cannot "
            f"take it."
        )
    return ()
