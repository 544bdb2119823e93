"""Greedy decoding of ONNX graphs by onnxruntime, as docs/exporting.md shows it to a user."""

from pathlib import Path
from typing import Any

import numpy as np

NAMES = ("encoder_model", "decoder_model", "decoder_with_past_model")


class Graphs:
    """The graphs of a folder that `hub.export --to onnx` made, in whichever format they are.

    Raises:
        ValueError: onnxruntime is missing, or graphs are.
    """

    def __init__(self, folder: Path, threads: int):
        try:
            import onnxruntime  # an extra of hub
        except ModuleNotFoundError as error:
            raise ValueError(f"{folder} needs {error.name}: pip install '.[hub]'") from error
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = threads
        suffix = next(iter(path.stem[len(NAMES[0]) :] for path in (folder / "onnx").glob(f"{NAMES[0]}*.onnx")), "")
        paths = [folder / "onnx" / f"{name}{suffix}.onnx" for name in NAMES]
        for path in paths:
            if not path.is_file():
                raise ValueError(f"{path} is missing: give a folder that hub.export made.")
        sessions = [onnxruntime.InferenceSession(path, options) for path in paths]
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
