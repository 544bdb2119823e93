"""Decoder input of a model of any class, computed from labels."""

from typing import Any


def add_decoder_input_ids(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs with `decoder_input_ids`, the labels shifted right. The labels do not change.

    `training_loss` needs them whenever the loss is not computed by the model, which then receives no labels.
    """
    config, labels = model.config, inputs["labels"]
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        labels = labels.clone()  # FSMT replaces -100 in place
        token = int(config.pad_token_id == 0)  # any token except padding: FSMT and mBART need one in each row
        labels[:, 0].masked_fill_((labels == -100).all(1), token)
        ids = model.prepare_decoder_input_ids_from_labels(labels)
    else:  # such as M2M100 and Blenderbot
        ids = labels.roll(1, -1)
        ids[:, 0] = config.decoder_start_token_id
        ids = ids.masked_fill(ids == -100, config.pad_token_id)
    return {**inputs, "decoder_input_ids": ids}
