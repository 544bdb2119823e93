"""Export to ONNX graphs for onnxruntime, optimum, and transformers.js in a browser or under Node.

`hub/exporting/onnx_graphs.py` documents the inputs and outputs of each graph. The directory has the layout that these
libraries expect: the graphs in `onnx/`, next to them the configuration and the tokenizer. The model type is "marian",
the simplest encoder-decoder that they know. The computation is defined by the graphs only.
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

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.shared.command_line import logger
from vanilla_transformer.shared.generation_settings import special_token_ids, unsupported_settings
from vanilla_transformer.shared.transformers_conversion import SAME_FIELDS, TWO_VOCABULARY_FIELDS

from .onnx_graphs import CROSS_CACHE, export_graphs, merge_decoder_graphs, suppress_logging

USAGE = """{out} contains ONNX graphs. To translate with @huggingface/transformers only (greedily, one sentence at a time):
    const source = await AutoTokenizer.from_pretrained("{source}"), target = await AutoTokenizer.from_pretrained("{target}");
    const model = await AutoModelForSeq2SeqLM.from_pretrained("{out}");
    const ids = await model.generate({{ ...source("a sentence"), num_beams: 1 }});
    console.log(target.batch_decode(ids, {{ skip_special_tokens: true }}));
With onnxruntime only, in Python: see docs/exporting.md."""  # noqa: E501
UNSUPPORTED_SETTINGS = """The ONNX graphs do not contain these settings of the generation config: {}. optimum and \
transformers.js apply those that they support. The loop in docs/exporting.md ignores them."""
MAX_BYTES = 2_000_000_000  # float32 weights per graph; protobuf limits the complete graph to 2 GiB
FORMATS = {None: ("", "fp32"), "int8": ("_quantized", "q8"), "fp16": ("_fp16", "fp16")}  # names in transformers.js


def convert(
    model: VanillaTransformerForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, quantization: str | None
) -> Callable[[Path], None]:
    """Return a function that writes the equivalent graphs, of any architecture, to a directory.

    The quantization is `int8` (matrices and embeddings), `fp16` (weights and computation) or None (float32). Raises
    ValueError if the weights of a graph are larger than `MAX_BYTES`.
    """
    suffix, dtype = FORMATS[quantization]
    stacks = ([model.get_encoder()], [model.get_decoder(), model.lm_head])
    size = 4 * max(sum(each.numel() for each in nn.ModuleList(parts).parameters()) for parts in stacks)
    if size > MAX_BYTES:
        raise ValueError(f"A graph has {size:,} bytes of weights, the maximum is {MAX_BYTES:,}. Use --to ctranslate2.")
    ids = special_token_ids(model)
    if ids["decoder_start_token_id"] is None:
        raise ValueError("The model has no decoder start token. Set decoder_start_token_id in its config.json.")
    # EOS is forced only at the length limit, which each client library sets
    implied = {"renormalize_logits": True, "forced_eos_token_id": ids["eos_token_id"]}
    if settings := unsupported_settings(model.generation_config, **implied):
        logger.warning(UNSUPPORTED_SETTINGS.format(", ".join(settings)))

    def write(folder: Path) -> None:
        graphs = export_graphs(model, half=quantization == "fp16")
        if quantization == "int8":
            graphs = {name: quantize_int8(graph, folder) for name, graph in graphs.items()}
        cross_cache = graphs.pop(CROSS_CACHE)
        graphs["decoder_model_merged"] = merge_decoder_graphs(graphs["decoder_with_past_model"], cross_cache)
        (folder / "onnx").mkdir()
        for name, graph in graphs.items():
            onnx.save(graph, folder / "onnx" / f"{name}{suffix}.onnx")
        config = native_config(model) | {"transformers.js_config": {"dtype": dtype}}
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        model.generation_config.save_pretrained(folder)

    return write


def native_config(model: VanillaTransformerForConditionalGeneration) -> dict[str, Any]:
    """Return a `MarianConfig` with the sizes, and the special ids that `generate()` uses.

    `vocab_size` is the target vocabulary size, because client libraries use it as the number of logits in beam search.
    """
    fields = {name: getattr(model.config, name) for name in (*SAME_FIELDS, *TWO_VOCABULARY_FIELDS)}
    fields["vocab_size"] = model.config.decoder_vocab_size
    fields |= special_token_ids(model)
    return MarianConfig(architectures=["MarianMTModel"], forced_eos_token_id=None, **fields).to_dict()


def quantize_int8(graph: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """Return the graph with 8-bit weights. onnxruntime writes it to a temporary file."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary, suppress_logging():
        path = Path(temporary, "quantized.onnx")
        quantize_dynamic(graph, path, weight_type=QuantType.QInt8)
        return onnx.load(path)
