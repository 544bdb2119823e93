"""Pictures of a run: the training curve, and where the decoder looks in the source."""

from pathlib import Path
from typing import Any

import matplotlib
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

matplotlib.use("Agg")  # files only: no screen is needed
from matplotlib import pyplot as plt  # noqa: E402


def plot_training_curve(log_history: list[dict[str, Any]], path: Path) -> None:
    """Loss of training and validation, and validation BLEU, over updates.

    Args:
        log_history: of `trainer.state`.
        path: of the PNG.
    """
    figure, loss_axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for key, label, color in (("loss", "training", "tab:blue"), ("eval_loss", "validation", "tab:orange")):
        points = [(entry["step"], entry[key]) for entry in log_history if key in entry]
        if points:
            loss_axis.plot(*zip(*points, strict=True), label=f"loss, {label}", color=color)
    loss_axis.set_xlabel("updates")
    loss_axis.set_ylabel("loss (nats a token)")
    lines = list(loss_axis.get_lines())
    bleu = [(entry["step"], entry["eval_bleu"]) for entry in log_history if "eval_bleu" in entry]
    if bleu:
        bleu_axis = loss_axis.twinx()
        lines += bleu_axis.plot(*zip(*bleu, strict=True), "o-", label="BLEU, validation", color="tab:green")
        bleu_axis.set_ylabel("BLEU")
        bleu_axis.set_ylim(0, 100)
    loss_axis.legend(handles=lines, loc="center right")
    figure.savefig(path, dpi=120)
    plt.close(figure)


@torch.no_grad()
def plot_cross_attention(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, source: str, translation: str, path: Path
) -> None:
    """Cross-attention of the last layer, mean over its heads, as a heat map: source tokens across, target tokens down.

    Args:
        source, translation: one sentence pair.
        path: of the PNG.
    """
    batch = tokenizer(source, text_target=translation, return_tensors="pt").to(model.device)
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")  # the one that computes attention weights
    outputs = model.eval()(**batch, output_attentions=True)
    model.set_attn_implementation(implementation)
    weights = outputs.cross_attentions[-1][0].mean(0).float().cpu()  # (T, S)
    to_token = getattr(getattr(tokenizer, "target_tokenizer", None), "id_to_token", tokenizer.convert_ids_to_tokens)
    source_tokens = tokenizer.convert_ids_to_tokens(batch["input_ids"][0].tolist())
    target_tokens = [to_token(token_id) for token_id in batch["labels"][0].tolist()]
    figure, axis = plt.subplots(
        figsize=(2 + 0.45 * len(source_tokens), 1.5 + 0.35 * len(target_tokens)), layout="constrained"
    )
    image = axis.imshow(weights, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    axis.set_xticks(range(len(source_tokens)), source_tokens, rotation=60, ha="right")
    axis.set_yticks(range(len(target_tokens)), target_tokens)
    axis.set_xlabel("source")
    axis.set_ylabel("predicted token")
    figure.colorbar(image, label="attention weight")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_benchmark(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars for every comparison of `training.benchmark`, with the range of its turns and the ratio; ours stand out.

    Args:
        rows: its `size`, `line`, `unit` and `rates` (name to `median`, `low`, `high`, `ratio`).
        path: of the PNG.
    """
    heights = [1.2 + 0.28 * len(row["rates"]) for row in rows]
    figure, axes = plt.subplots(
        len(rows), figsize=(8, sum(heights)), height_ratios=heights, layout="constrained", squeeze=False
    )
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
    plt.close(figure)
