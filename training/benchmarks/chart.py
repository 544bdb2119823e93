"""The chart of a benchmark."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def plot_benchmark(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars for every comparison of `training.benchmark`, with the range of its turns and the ratio; ours stand out.

    Args:
        rows: its `size`, `line`, `unit` and `rates` (name to `median`, `low`, `high`, `ratio`).
        path: of the PNG.
    """
    heights = [1.2 + 0.28 * len(row["rates"]) for row in rows]
    figure = Figure(figsize=(8, sum(heights)), layout="constrained")
    axes = figure.subplots(len(rows), height_ratios=heights, squeeze=False)
    for axis, row in zip(axes[:, 0], rows, strict=True):
        names = list(row["rates"])
        medians = [row["rates"][name]["median"] for name in names]
        below = [rate["median"] - rate["low"] for rate in row["rates"].values()]
        above = [rate["high"] - rate["median"] for rate in row["rates"].values()]
        colors = ["tab:blue" if name.startswith("ours") else "lightgray" for name in names]
        bars = axis.barh(names, medians, xerr=[below, above], color=colors, ecolor="gray")
        axis.bar_label(bars, [f"{row['rates'][name]['ratio']:.2f}" for name in names], padding=4)
        axis.invert_yaxis()
        axis.margins(x=0.15)
        axis.set_xlabel(row["unit"])
        axis.set_title(f"{row['size']}  {row['line']}", fontsize="medium", loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
