"""Plots of a run: training curve and cross-attention heat maps."""

import warnings
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from vanilla_transformer.shared.vocabularies import tokens_by_id, vocabularies

from ...inference.decoder_input import add_decoder_input_ids

CJK_FONTS = ("Noto Sans CJK JP", "Hiragino Sans", "PingFang SC", "Microsoft YaHei", "Yu Gothic", "Malgun Gothic")
MAX_FIGURE_INCHES = 60  # per side; 900 by 100 tokens in full size would take 7 GiB


def plot_training_curve(
    log_history: list[dict[str, Any]],
    path: Path,
    smoothing: float = 0.0,
    rdrop_alpha: float = 0.0,
    simcut_alpha: float = 0.0,
) -> Figure:
    """Plot training and validation loss, loss increase with shuffled sources and BLEU over updates.

    The legend shows label smoothing, R-Drop and SimCut, which only the training loss includes.
    """
    parts = {"label smoothing": smoothing, "R-Drop": rdrop_alpha, "SimCut": simcut_alpha}
    extras = [f"{name} {value:g}" for name, value in parts.items() if value]
    train_loss = "loss with " + " and ".join(extras) if extras else "loss"
    eval_loss = "cross-entropy" if extras else "loss"
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    loss_axis = figure.subplots()
    curves = {"loss": (f"{train_loss}, training", "tab:blue"), "eval_loss": (f"{eval_loss}, validation", "tab:orange")}
    curves["eval_source_gain"] = ("loss increase with shuffled sources, validation", "tab:red")
    for key, (label, color) in curves.items():
        points = [(entry["step"], entry[key]) for entry in log_history if key in entry]
        if points:
            loss_axis.plot(*zip(*points, strict=True), label=label, color=color)
    loss_axis.set_xlabel("updates")
    loss_axis.set_ylabel("loss (nats per token)")
    lines = list(loss_axis.get_lines())
    bleu = [(entry["step"], entry["eval_bleu"]) for entry in log_history if "eval_bleu" in entry]
    if bleu:
        bleu_axis = loss_axis.twinx()
        lines += bleu_axis.plot(*zip(*bleu, strict=True), "o-", label="BLEU, validation", color="tab:green")
        bleu_axis.set_ylabel("BLEU")
        bleu_axis.set_ylim(0, 100)
    loss_axis.legend(handles=lines, loc="center right")
    figure.savefig(path, dpi=120, metadata={"Software": None})
    return figure


def plot_learning_curve(points: list[dict[str, Any]], path: Path) -> None:
    """Plot the test score over the number of training pairs, one curve for each training time."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    for minutes in sorted({point["minutes"] for point in points}, reverse=True):
        part = [point for point in sorted(points, key=itemgetter("train_pairs")) if point["minutes"] == minutes]
        pairs, scores = ([point[key] for point in part] for key in ("train_pairs", "score"))
        errors = [point["interval_95"] or 0.0 for point in part]
        axis.errorbar(pairs, scores, errors, fmt="o-", capsize=3, label=f"{minutes:g} minutes")
    axis.set_xscale("log", base=2)
    axis.set_xticks(pairs := sorted({point["train_pairs"] for point in points}), [f"{count:,}" for count in pairs])
    axis.set_xlabel("training pairs")
    axis.set_ylabel(points[0]["metric"].replace("_", " ").replace("bleu", "BLEU"))
    axis.legend()
    figure.savefig(path, dpi=120, metadata={"Software": None})


@torch.no_grad()
def plot_cross_attention(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, source: str, translation: str, path: Path
) -> None:
    """Plot the cross-attention of the last layer, averaged over its heads, and write it to a PNG file."""
    batch = tokenizer(source, text_target=translation, return_tensors="pt").to(model.device)
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")  # returns attention weights
    inputs = add_decoder_input_ids(model.eval(), batch) | {"labels": None}  # FSMT would decode its source
    outputs = model(**inputs, output_attentions=True)
    model.set_attn_implementation(implementation)
    weights = outputs.cross_attentions[-1][0].mean(0).float().cpu()  # (T, S)
    names = map(tokens_by_id, vocabularies(tokenizer))
    ids = (batch[name][0].tolist() for name in ("input_ids", "labels"))
    source_tokens, target_tokens = ([tokens[i] for i in row] for tokens, row in zip(names, ids, strict=True))
    inches = 2 + 0.45 * len(source_tokens), 1.5 + 0.35 * len(target_tokens)
    figure = Figure(figsize=tuple(np.minimum(inches, MAX_FIGURE_INCHES)), layout="constrained")
    installed = {font.name for font in fontManager.ttflist}
    fonts = ["DejaVu Sans", *(name for name in CJK_FONTS if name in installed)]
    with rc_context({"font.family": fonts}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the plot has boxes for them
        axis = figure.subplots()
        image = axis.imshow(weights, cmap="viridis", vmin=0, vmax=1, aspect="auto")
        axis.set_xticks(range(len(source_tokens)), source_tokens, rotation=60, ha="right", parse_math=False)
        axis.set_yticks(range(len(target_tokens)), target_tokens, parse_math=False)
        axis.set_xlabel("source")
        axis.set_ylabel("predicted token")
        figure.colorbar(image, label="attention weight")
        figure.savefig(path, dpi=120, metadata={"Software": None})
