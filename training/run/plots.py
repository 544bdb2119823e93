"""Pictures of a run: the training curve, and where the decoder looks in the source."""

from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from transformers import PreTrainedModel, PreTrainedTokenizerFast

LARGEST = 60  # inches of a side: a picture of 900 by 100 tokens in full size takes 7 GiB


def plot_training_curve(
    log_history: list[dict[str, Any]],
    path: Path,
    smoothing: float = 0.0,
    rdrop_alpha: float = 0.0,
    simcut_alpha: float = 0.0,
) -> Figure:
    """Plot the losses of training and validation, the source gain, and validation BLEU over updates.

    Args:
        log_history: of `trainer.state`.
        path: of the PNG.
        smoothing, rdrop_alpha, simcut_alpha: of the loss in training, which the legend then names: that of validation
            has none of them, and the two are no measure of each other.
    """
    parts = {"label smoothing": smoothing, "R-Drop": rdrop_alpha, "SimCut": simcut_alpha}
    extras = [f"{name} {value:g}" for name, value in parts.items() if value]
    trained = "loss with " + " and ".join(extras) if extras else "loss"
    plain = "plain loss" if extras else "loss"
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    loss_axis = figure.subplots()
    curves = {"loss": (f"{trained}, training", "tab:blue"), "eval_loss": (f"{plain}, validation", "tab:orange")}
    curves["eval_source_gain"] = ("gain by the source, validation", "tab:red")
    for key, (label, color) in curves.items():
        points = [(entry["step"], entry[key]) for entry in log_history if key in entry]
        if points:
            loss_axis.plot(*zip(*points, strict=True), label=label, color=color)
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
    figure.savefig(path, dpi=120, metadata={"Software": None})
    return figure


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
    size = min(LARGEST, 2 + 0.45 * len(source_tokens)), min(LARGEST, 1.5 + 0.35 * len(target_tokens))
    figure = Figure(figsize=size, layout="constrained")
    axis = figure.subplots()
    image = axis.imshow(weights, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    axis.set_xticks(range(len(source_tokens)), source_tokens, rotation=60, ha="right", parse_math=False)
    axis.set_yticks(range(len(target_tokens)), target_tokens, parse_math=False)
    axis.set_xlabel("source")
    axis.set_ylabel("predicted token")
    figure.colorbar(image, label="attention weight")
    figure.savefig(path, dpi=120, metadata={"Software": None})
