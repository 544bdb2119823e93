"""A model of ours as ONNX graphs: for onnxruntime, for transformers.js in a browser or under Node, and for optimum.

`hub/exporting/onnx_graphs.py` documents the inputs and outputs of each graph. The directory has the layout that these
libraries expect: the graphs in `onnx/`, next to them the configuration and the tokenizer. The model type
is "marian", the simplest encoder-decoder that they know. The computation is defined by the graphs only.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
from onnxruntime.quantization import QuantType, quantize_dynamic
from torch import nn
from transformers import MarianConfig, PreTrainedTokenizerBase

from hub.exporting.onnx_graphs import SOURCES, export_graphs, merge_decoder_graphs, suppress_logging
from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.shared.transformers_conversion import SAME_FIELDS, TWO_VOCABULARIES

USAGE = """{out} holds ONNX graphs. To translate, with @huggingface/transformers alone (greedily, a sentence at a time):
    const source = await AutoTokenizer.from_pretrained("{source}"), target = await AutoTokenizer.from_pretrained("{target}");
    const model = await AutoModelForSeq2SeqLM.from_pretrained("{out}");
    const ids = await model.generate({{ ...source("a sentence"), num_beams: 1 }});
    console.log(target.batch_decode(ids, {{ skip_special_tokens: true }}));
With onnxruntime alone, in Python: see docs/exporting.md."""  # noqa: E501
MAX_BYTES = 2_000_000_000  # of float32 weights per graph: protobuf ends at 2 GiB, which the rest of a graph shares
FORMATS = {None: ("", "fp32"), "int8": ("_quantized", "q8"), "fp16": ("_fp16", "fp16")}  # transformers.js' names


def convert(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase | None = None,
    quantization: str | None = None,
) -> Callable[[Path], None]:
    """What writes the equal graphs, of any architecture, into a folder.

    Args:
        quantization: `int8`: weights of matrices and embeddings in 8 bits, by onnxruntime; `fp16`: weights and
            computation in 16 bits; None: float32. Raises ValueError if a graph does not fit into a file.
    """
    suffix, dtype = FORMATS[quantization]
    stacks = ([model.get_encoder()], [model.get_decoder(), model.lm_head])
    size = 4 * max(sum(each.numel() for each in nn.ModuleList(parts).parameters()) for parts in stacks)
    if size > MAX_BYTES:
        raise ValueError(f"a graph has {size:,} bytes of weights, and a file at most {MAX_BYTES:,}: use ctranslate2.")

    def write(folder: Path) -> None:
        graphs = export_graphs(model, half=quantization == "fp16")
        if quantization == "int8":
            graphs = {name: quantize_int8(graph, folder) for name, graph in graphs.items()}
        sources = graphs.pop(SOURCES)
        graphs["decoder_model_merged"] = merge_decoder_graphs(graphs["decoder_with_past_model"], sources)
        (folder / "onnx").mkdir()
        for name, graph in graphs.items():
            onnx.save(graph, folder / "onnx" / f"{name}{suffix}.onnx")
        described = describe(model) | {"transformers.js_config": {"dtype": dtype}}
        (folder / "config.json").write_text(json.dumps(described, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        model.generation_config.save_pretrained(folder)

    return write


def describe(model: VanillaTransformerForConditionalGeneration) -> dict[str, Any]:
    """The configuration as readers of graphs want it: sizes, special ids, and the name of a model that they know.

    Their beam search takes `vocab_size` for the number of logits, which is that of the target's tokens.
    """
    fields = {name: getattr(model.config, name) for name in (*SAME_FIELDS, *TWO_VOCABULARIES)}
    fields["vocab_size"] = model.config.decoder_vocab_size
    return MarianConfig(architectures=["MarianMTModel"], forced_eos_token_id=None, **fields).to_dict()


def quantize_int8(graph: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """The graph with weights in 8 bits; onnxruntime wants a file to write, which lies in `folder` meanwhile."""
    with tempfile.TemporaryDirectory(dir=folder) as place, suppress_logging():
        path = Path(place, "quantized.onnx")
        quantize_dynamic(graph, path, weight_type=QuantType.QInt8)
        return onnx.load(path)
