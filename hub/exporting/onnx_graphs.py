"""ONNX graphs of a model, traced from its modules, with the names that onnxruntime client libraries expect.

Shapes: B batch, S source length, P past tokens, T new tokens, D hidden size, H heads, K and E key and value head
dimensions, V target vocabulary size. `i` is the 0-based layer.

    encoder_model            input_ids, attention_mask (B, S) -> last_hidden_state (B, S, D)
    decoder_model            encoder_attention_mask (B, S), input_ids (B, T), encoder_hidden_states (B, S, D)
                             -> logits (B, T, V), present.{i}.{decoder,encoder}.{key,value}, cross_attentions.{i}
    decoder_with_past_model  past_key_values.{i}.{decoder,encoder}.{key,value} replace the hidden states
                             -> logits (B, T, V), present.{i}.decoder.{key,value}, cross_attentions.{i}
    decoder_model_merged     all of these, and use_cache_branch (1): false in the first step, which ignores the past

Keys are (B, H, P, K) and values (B, H, P, E). Those of the encoder are (B, H, S, K) and (B, H, S, E). Cross-attention
weights are (B, H, T, S). Ids and masks are int64, use_cache_branch is boolean, all other tensors are float32.
"""

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper
from torch import nn
from torch.export import Dim
from transformers import DynamicCache, EncoderDecoderCache

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.modeling_vanilla_transformer import create_position_ids
from vanilla_transformer.shared.generation_settings import masked_bias

OPSET = 18  # written by torch without a version conversion; supported since onnxruntime 1.14
B, S, P, T = map(Dim, ("batch_size", "encoder_sequence_length", "past_sequence_length", "decoder_sequence_length"))
PAST, PRESENT, SIDES, PARTS = "past_key_values", "present", ("decoder", "encoder"), ("key", "value")
MASKED_SCORE = -1e4  # logit bias that sets the probability of a token to 0; float16 can represent it
CROSS_CACHE = "cross_cache"  # name of the CrossAttentionCacheGraph, which becomes a part of the merged graph
by_name = attrgetter("name")  # sort key of graph outputs
Layers = list[tuple[torch.Tensor, torch.Tensor]]  # keys and values per layer


class EncoderGraph(nn.Module):
    def __init__(self, model: VanillaTransformerForConditionalGeneration):
        super().__init__()
        self.encoder = model.get_encoder()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        embedded = self.encoder.embed_tokens(input_ids)
        states = self.encoder.embed(embedded, create_position_ids(attention_mask, embedded))
        mask = to_additive_mask(attention_mask, states)
        for layer in self.encoder.layers:
            states = layer(states, mask)
        return self.encoder.norm(states).float()


class CrossAttentionCacheGraph(nn.Module):
    """Cross-attention keys and values of the encoder output for all layers."""

    def __init__(self, model: VanillaTransformerForConditionalGeneration):
        super().__init__()
        self.decoder = model.get_decoder()

    def forward(self, encoder_hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        states = encoder_hidden_states.to(self.decoder.embed_tokens.weight.dtype)
        pairs = [layer.cross_attn.get_key_value_states(states, None, None) for layer in self.decoder.layers]
        return tuple(tensor.float() for pair in pairs for tensor in pair)


class FirstStepGraph(nn.Module):
    """The decoder without past keys and values."""

    def __init__(self, model: VanillaTransformerForConditionalGeneration):
        super().__init__()
        self.cross_cache, self.step = CrossAttentionCacheGraph(model), NextStepGraph(model)

    def forward(self, encoder_attention_mask, input_ids, encoder_hidden_states) -> tuple[torch.Tensor, ...]:
        cross_cache = self.cross_cache(encoder_hidden_states)
        layers = len(self.step.decoder.layers)
        logits, *others = self.step.decode(encoder_attention_mask, input_ids, [], to_pairs(cross_cache))
        self_cache, weights = others[: 2 * layers], others[2 * layers :]
        cache = [[*self_cache[i : i + 2], *cross_cache[i : i + 2]] for i in range(0, 2 * layers, 2)]
        return (logits, *(tensor for each in cache for tensor in each), *weights)


class NextStepGraph(nn.Module):
    """The decoder with past keys and values."""

    def __init__(self, model: VanillaTransformerForConditionalGeneration):
        super().__init__()
        self.decoder, self.lm_head = model.get_decoder(), model.lm_head

    def forward(self, encoder_attention_mask, input_ids, *past_key_values) -> tuple[torch.Tensor, ...]:
        pairs = to_pairs(past_key_values)
        return self.decode(encoder_attention_mask, input_ids, pairs[::2], pairs[1::2])

    def decode(self, mask, input_ids, past: Layers, cross_cache: Layers) -> tuple[torch.Tensor, ...]:
        """Return the logits, the self-attention keys and values including the new ones, and cross-attention weights."""
        embedded = self.decoder.embed_tokens(input_ids)
        length = past[0][0].shape[2] if past else 0
        positions = create_position_ids(None, embedded, length)  # (1, T)
        states = self.decoder.embed(embedded, positions)
        keys = torch.arange(length + input_ids.shape[1], device=states.device)[None]  # (1, P + T)
        causal = to_additive_mask(keys[:, None] <= positions[..., None], states)  # (1, 1, T, P + T)
        caches = [[tuple(each.to(states.dtype) for each in pair) for pair in pairs] for pairs in (past, cross_cache)]
        cache = EncoderDecoderCache(*map(DynamicCache, caches))
        weights: list[torch.Tensor] = []
        hooks = [
            layer.cross_attn.register_forward_hook(lambda module, inputs, output: weights.append(output[1]))
            for layer in self.decoder.layers
        ]
        for layer in self.decoder.layers:
            states = layer(states, states, causal, to_additive_mask(mask, states), cache=cache)
        for hook in hooks:
            hook.remove()
        logits = self.lm_head(self.decoder.norm(states))
        present = [each for layer in cache.self_attention_cache.layers for each in (layer.keys, layer.values)]
        return tuple(tensor.float() for tensor in (logits, *present, *weights))


def to_additive_mask(mask: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Convert a 0/1 mask (B, S) or (B, T, S) to a mask (B, 1, 1 or T, S) that is added to attention scores."""
    additive = torch.where(mask.bool(), 0.0, torch.finfo(states.dtype).min).to(states.dtype)
    return additive[:, None, None] if mask.ndim == 2 else additive[:, None]


def to_pairs(tensors) -> Layers:
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def export_graphs(model: VanillaTransformerForConditionalGeneration, half: bool) -> dict[str, onnx.ModelProto]:
    """Trace all graphs except the merged one, and the `CROSS_CACHE` graph. `half` computes in float16 internally.

    Tokens that the generation config bans have probability zero.
    """
    model = copy.deepcopy(model).eval()
    if (bias := masked_bias(model, MASKED_SCORE)) is not None:
        model.lm_head.bias = nn.Parameter(bias)
    model = model.half() if half else model.float()
    model.set_attn_implementation("eager")  # returns attention weights
    config: Any = model.config
    heads, layers = config.decoder_attention_heads, range(config.decoder_layers)
    attention: Any = model.get_decoder().layers[0].self_attn
    dims = [attention.key_head_dim, attention.value_head_dim]
    text, mask, ids = (torch.ones(2, length, dtype=torch.long) for length in (5, 5, 3))  # text is not mask
    states = torch.zeros(2, 5, config.d_model)
    lengths = {"decoder": (4, P), "encoder": (5, S)}
    past = [torch.zeros(2, heads, lengths[side][0], dim) for _ in layers for side in SIDES for dim in dims]
    past_shapes = tuple({0: B, 2: lengths[side][1]} for _ in layers for side in SIDES for _ in dims)
    present = [f"{PRESENT}.{i}.{side}.{part}" for i in layers for side in SIDES for part in PARTS]
    past_names = [name.replace(PRESENT, PAST) for name in present]
    self_cache, cross_cache = ([name for name in present if f".{side}." in name] for side in SIDES)
    weights = [f"cross_attentions.{i}" for i in layers]
    source, target = {0: B, 1: S}, {0: B, 1: T}
    graphs: dict[str, tuple[nn.Module, dict[str, torch.Tensor], tuple, list[str]]] = {
        "encoder_model": (
            EncoderGraph(model), {"input_ids": text, "attention_mask": mask}, (source, source), ["last_hidden_state"]
        ),
        "decoder_model": (
            FirstStepGraph(model), {"encoder_attention_mask": mask, "input_ids": ids, "encoder_hidden_states": states},
            (source, target, source), ["logits", *present, *weights],
        ),
        "decoder_with_past_model": (
            NextStepGraph(model),
            {"encoder_attention_mask": mask, "input_ids": ids} | dict(zip(past_names, past, strict=True)),
            (source, target, past_shapes), ["logits", *self_cache, *weights],
        ),
        CROSS_CACHE: (
            CrossAttentionCacheGraph(model), {"encoder_hidden_states": states}, (source,), cross_cache,
        ),
    }  # fmt: skip
    return {name: to_onnx(*graph) for name, graph in graphs.items()}


def to_onnx(
    module: nn.Module, inputs: dict[str, torch.Tensor], dynamic_shapes: tuple, output_names: list[str]
) -> onnx.ModelProto:
    """Trace `module` to an ONNX graph without local paths."""
    with torch.no_grad(), suppress_logging():
        program = torch.onnx.export(
            module.eval(), tuple(inputs.values()), dynamo=True, verbose=False, opset_version=OPSET,
            dynamic_shapes=dynamic_shapes, input_names=list(inputs), output_names=output_names,
        )  # fmt: skip
    assert program is not None
    proto = program.model_proto
    del proto.metadata_props[:], proto.graph.metadata_props[:], proto.graph.value_info[:]
    for node in proto.graph.node:  # stack traces contain local paths
        del node.metadata_props[:]
        node.doc_string = ""
    return proto


@contextmanager
def suppress_logging() -> Iterator[None]:
    """Context manager that suppresses log messages below ERROR and warnings."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


def merge_decoder_graphs(next_step: onnx.ModelProto, cross_cache: onnx.ModelProto) -> onnx.ModelProto:
    """Build one decoder graph for the first and later steps, in which each weight is stored once.

    In the first step, the graph computes the cross-attention cache and truncates the self-attention cache to length 0.
    In later steps, it reads both caches from its inputs.
    """
    merged, branch = copy.deepcopy(next_step), copy.deepcopy(cross_cache)
    graph, cross_outputs = merged.graph, sorted(cross_cache.graph.output, key=by_name)
    cross_names = [each.name for each in cross_outputs]
    onnx.compose.add_prefix(branch, f"{CROSS_CACHE}.", inplace=True, rename_inputs=False, rename_outputs=False)
    past = [each.name for each in graph.input if each.name.startswith(PAST)]
    renamed = {name: f"{name}.read" if ".decoder." in name else name.replace(PAST, PRESENT) for name in past}
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]

    cached = helper.make_graph(
        [helper.make_node("Identity", [key.replace(PRESENT, PAST)], [f"cached.{key}"]) for key in cross_names],
        "cached", [], [helper.make_value_info(f"cached.{each.name}", each.type) for each in cross_outputs],
    )  # fmt: skip
    # The outer graph contains the weights of this branch
    computed = helper.make_graph(list(branch.graph.node), "computed", [], sorted(branch.graph.output, key=by_name))
    for node in computed.node:
        node.output[:] = [f"computed.{name}" if name in cross_names else name for name in node.output]
        node.input[:] = [f"computed.{name}" if name in cross_names else name for name in node.input]
    for each in computed.output:
        each.name = f"computed.{each.name}"
    longest = helper.make_tensor("longest", TensorProto.INT64, [1], [2**31])
    zero, axis = (helper.make_tensor(name, TensorProto.INT64, [1], [n]) for name, n in (("zero", 0), ("axis", 2)))
    first = [
        helper.make_node("Cast", ["use_cache_branch"], ["reads_past"], to=TensorProto.INT64),
        helper.make_node("Mul", ["reads_past", "longest"], ["past_end"]),
        *(
            helper.make_node("Slice", [key, "zero", "past_end", "axis"], [renamed[key]])
            for key in past
            if ".decoder." in key
        ),
        helper.make_node("If", ["use_cache_branch"], cross_names, then_branch=cached, else_branch=computed),
    ]
    nodes = [*first, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    graph.initializer.extend([longest, zero, axis, *branch.graph.initializer])
    graph.input.extend(cross_cache.graph.input)
    graph.input.append(helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1]))
    outputs = {each.name: each for each in [*graph.output, *cross_cache.graph.output]}
    del graph.output[:]
    graph.output.extend(outputs.values())
    merged.functions.extend(branch.functions)
    onnx.checker.check_model(merged)
    return merged
