"""Greedy decoding with the ONNX graphs of an export: a second loop to compare with the one in docs/exporting.md."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

NAMES = ("encoder_model", "decoder_model", "decoder_with_past_model")


class Graphs:
    """The graphs of a folder that `hub.export --to onnx` made, in float32."""

    def __init__(self, folder: Path, threads: int):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = threads
        sessions = [onnxruntime.InferenceSession(folder / "onnx" / f"{name}.onnx", options) for name in NAMES]
        self.encoder, self.first_step, self.next_step = sessions

    def generate(
        self, ids: np.ndarray, mask: np.ndarray, start: int, ends: int | list[int] | None, max_new_tokens: int
    ) -> np.ndarray:
        """Sources and their mask (B, S) -> ids (B, T) from `start` on; behind a row's end anything may stand."""
        (states,) = self.encoder.run(None, {"input_ids": ids, "attention_mask": mask})
        tokens = np.full((len(ids), 1), start)
        rows, done, decoder = [tokens], np.zeros(len(ids), bool), self.first_step
        inputs: dict[str, Any] = {"encoder_attention_mask": mask, "encoder_hidden_states": states}
        for _ in range(max_new_tokens):
            wanted = [each.name for each in decoder.get_outputs() if not each.name.startswith("cross_attentions")]
            found = decoder.run(wanted, inputs | {"input_ids": tokens})
            outputs = dict(zip(wanted, found, strict=True))
            tokens = outputs.pop("logits")[:, -1].argmax(-1)[:, None]
            rows.append(tokens)
            done |= np.isin(tokens[:, 0], [] if ends is None else ends)
            if done.all():
                break
            inputs.pop("encoder_hidden_states", None)
            inputs |= {name.replace("present", "past_key_values"): value for name, value in outputs.items()}
            decoder = self.next_step
        return np.concatenate(rows, 1)
