"""Greedy decoding with exported ONNX graphs: a reference for the loop in docs/exporting.md."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

NAMES = ("encoder_model", "decoder_model", "decoder_with_past_model")


class OnnxGreedyDecoder:
    """Greedy decoder for a float32 export of `hub.export --to onnx`."""

    def __init__(self, folder: Path, threads: int):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = threads
        sessions = [onnxruntime.InferenceSession(folder / "onnx" / f"{name}.onnx", options) for name in NAMES]
        self.encoder, self.first_step, self.next_step = sessions

    def generate(
        self, ids: np.ndarray, mask: np.ndarray, start: int, eos_ids: int | list[int] | None, max_new_tokens: int
    ) -> np.ndarray:
        """Return ids (B, T) for sources and their mask (B, S). Ids after EOS are arbitrary."""
        (states,) = self.encoder.run(None, {"input_ids": ids, "attention_mask": mask})
        tokens = np.full((len(ids), 1), start)
        rows, done, decoder = [tokens], np.zeros(len(ids), bool), self.first_step
        inputs: dict[str, Any] = {"encoder_attention_mask": mask, "encoder_hidden_states": states}
        for _ in range(max_new_tokens):
            names = [each.name for each in decoder.get_outputs() if not each.name.startswith("cross_attentions")]
            values = decoder.run(names, inputs | {"input_ids": tokens})
            outputs = dict(zip(names, values, strict=True))
            tokens = outputs.pop("logits")[:, -1].argmax(-1)[:, None]
            rows.append(tokens)
            done |= np.isin(tokens[:, 0], [] if eos_ids is None else eos_ids)
            if done.all():
                break
            inputs.pop("encoder_hidden_states", None)
            inputs |= {name.replace("present", "past_key_values"): value for name, value in outputs.items()}
            decoder = self.next_step
        return np.concatenate(rows, 1)
