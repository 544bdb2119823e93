"""Weight transformations that make this architecture compute the same function as the source model.

For example, if a norm divides by the unbiased standard deviation, its weight is multiplied by a constant.
"""

import torch

from vanilla_transformer.modeling_vanilla_transformer import sinusoidal_encoding

from .layout import CheckpointInfo, Keys, TensorRule


def fused_attention(key: str, projections: tuple[str, ...], target: str) -> Keys:
    """Map an attention sublayer of PyTorch, whose q, k and v projections are fused: (3 d, d) and (3 d)."""
    parts = tuple(f"{target}.{name}.{{p}}" for name in projections[:3])
    return {
        f"{key}.in_proj_{{p}}": TensorRule(parts, lambda tensor, info: tensor.chunk(3), "fused q, k, v are split"),
        f"{key}.out_proj.{{p}}": f"{target}.out_proj.{{p}}",
    }


def unbiased_norm(target: str, note: str, bound: str = "exact") -> TensorRule:
    """Rescale the weight (d) or (1) of a norm that divides by the unbiased standard deviation."""

    def fold(tensor: torch.Tensor, info: CheckpointInfo) -> tuple[torch.Tensor, ...]:
        n = info.d_model
        ratio = (n - 1) / n if info.metadata.get("unbiased_norm", True) else 1.0
        return (tensor.expand(n) * ratio**0.5,)

    return TensorRule((target,), fold, note, bound)


def std_norm(target: str) -> TensorRule:
    """Fold alpha (d) or (1) of alpha * (x - mean) / (std + 1e-6) with the unbiased std."""
    bound = "relative error below 1e-6 / s at standard deviation s of the input, from an epsilon outside the root"
    return unbiased_norm(target, "alpha / unbiased std: alpha times sqrt((n - 1) / n)", bound)


def block_diagonal_heads(target: str, scaled_by_d_model: bool = False) -> TensorRule:
    """Expand a matrix (k, k) or bias (k) that all heads share to a block-diagonal (d, d) or to (d).

    If k is d, the matrix already covers all heads. With `scaled_by_d_model`, the source model divides the scores by
    sqrt(d) instead of the root of the head dimension. The query weights are then divided by the root of the number of
    heads.
    """

    def fold(tensor: torch.Tensor, info: CheckpointInfo) -> tuple[torch.Tensor, ...]:
        size = len(tensor)
        if tensor.shape not in ((size,), (size, size)) or not size or info.d_model % size:
            raise ValueError(f"it must be square, and its size must divide {info.d_model}.")
        copies = info.d_model // size
        scale = max(copies, info.num_heads or 1) ** -0.5 if scaled_by_d_model else 1.0
        parts = [tensor * scale] * copies
        return (torch.cat(parts) if tensor.ndim == 1 else torch.block_diag(*parts),)

    note = "a matrix shared by all heads, as a block-diagonal matrix"
    return TensorRule((target,), fold, note + (", with the scale of the scores" if scaled_by_d_model else ""))


def sinusoids() -> TensorRule:
    """Validate a table of sinusoidal positions and drop it, because this model computes it."""
    return TensorRule((), validate_sinusoidal_table, "positions are computed; the table agrees", is_recomputed=True)


def validate_sinusoidal_table(table: torch.Tensor, info: CheckpointInfo) -> tuple[torch.Tensor, ...]:
    """Raise ValueError if a table (..., d) differs from the sinusoids of section 3.5."""
    for dim in range(table.ndim - 1):
        if (table == table.narrow(dim, 0, 1)).all():  # one table, repeated for each sentence of a batch
            table = table.narrow(dim, 0, 1)
    rows = table.reshape(-1, table.shape[-1]).float()
    expected = sinusoidal_encoding(torch.arange(len(rows)), rows.shape[-1])
    difference = float((rows - expected).abs().max())
    if not difference <= 2.5e-3:  # allows float32 angles of large positions and bfloat16 sines (2e-3), but not NaN
        positions = "the position table differs from the sinusoids of section 3.5"
        raise ValueError(f"{positions} by {difference:.2g}, which this layout does not support.")
    return ()
