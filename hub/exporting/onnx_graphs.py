"""A model of ours as ONNX graphs, traced from its own modules, in the names that onnxruntime's users have agreed on.

Shapes: B batch, S source length, P tokens so far, T new tokens, D model width, H heads, K and E width of a head's keys
and of its values, V target vocabulary. `i` counts layers from 0.

    encoder_model            input_ids, attention_mask (B, S) -> last_hidden_state (B, S, D)
    decoder_model            encoder_attention_mask (B, S), input_ids (B, T), encoder_hidden_states (B, S, D)
                             -> logits (B, T, V), present.{i}.{decoder,encoder}.{key,value}, cross_attentions.{i}
    decoder_with_past_model  past_key_values.{i}.{decoder,encoder}.{key,value} instead of the states
                             -> logits (B, T, V), present.{i}.decoder.{key,value}, cross_attentions.{i}
    decoder_model_merged     all of these, and use_cache_branch (1): false in the first step, where no past is read

Keys are (B, H, P, K) and values (B, H, P, E), those of the encoder (B, H, S, K) and (B, H, S, E), and the weights of
cross-attention (B, H, T, S). Ids and masks are int64, use_cache_branch is boolean, all else is float32.
"""

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper
from torch import nn
from torch.export import Dim

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.modeling_vanilla_transformer import (
    MultiHeadAttention,
    create_position_ids,
    scaled_dot_product_attention,
)

OPSET = 18  # what torch writes without a translation of its own; onnxruntime has read it since 1.14
B, S, P, T = (
    Dim(f"{name}")
    for name in ("batch_size", "encoder_sequence_length", "past_sequence_length", "decoder_sequence_length")
)
PAST, PRESENT, SIDES, PARTS = "past_key_values", "present", ("decoder", "encoder"), ("key", "value")
SOURCES = "sources"  # the graph of cross-attention's keys and values, which becomes a part of the merged one
Layers = list[tuple[torch.Tensor, torch.Tensor]]  # of each layer keys and values


class EncoderGraph(nn.Module):
    def __init__(self, model: VanillaTransformerForConditionalGeneration):
        super().__init__()
        self.encoder = model.get_encoder()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        embedded = self.encoder.embed_tokens(input_ids)
        states = self.encoder.embed(embedded, create_position_ids(attention_mask, embedded))
        mask = to_additive_mask(attention_mask, states)
        for layer in self.encoder.layers:
            attend_ = partial(attend_to_itself, layer.self_attn, mask=mask)
            states = layer.apply_sublayer(layer.self_attn_layer_norm, states, attend_)
            states = layer.apply_sublayer(layer.feed_forward_layer_norm, states, layer.feed_forward)
        return self.encoder.norm(states).float()


class CrossAttentionCacheGraph(nn.Module):
    """Keys and values of the encoder's states, layer by layer."""

    def __init__(self, model: VanillaTransformerForConditionalGeneration):
        super().__init__()
        self.decoder = model.get_decoder()

    def forward(self, encoder_hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        states = encoder_hidden_states.to(self.decoder.embed_tokens.weight.dtype)
        pairs = [get_key_value_states(layer.cross_attn, states) for layer in self.decoder.layers]
        return tuple(tensor.float() for pair in pairs for tensor in pair)


class FirstStepGraph(nn.Module):
    """The decoder before there is a past."""

    def __init__(self, model: VanillaTransformerForConditionalGeneration):
        super().__init__()
        self.sources, self.step = CrossAttentionCacheGraph(model), NextStepGraph(model)

    def forward(self, encoder_attention_mask, input_ids, encoder_hidden_states) -> tuple[torch.Tensor, ...]:
        sources = self.sources(encoder_hidden_states)
        layers = len(self.step.decoder.layers)
        logits, *others = self.step.decode(encoder_attention_mask, input_ids, None, in_pairs(sources))
        own, weights = others[: 2 * layers], others[2 * layers :]
        both = [[*own[i : i + 2], *sources[i : i + 2]] for i in range(0, 2 * layers, 2)]
        return (logits, *(tensor for each in both for tensor in each), *weights)


class NextStepGraph(nn.Module):
    """The decoder behind a past."""

    def __init__(self, model: VanillaTransformerForConditionalGeneration):
        super().__init__()
        self.decoder, self.lm_head = model.get_decoder(), model.lm_head

    def forward(self, encoder_attention_mask, input_ids, *past_key_values) -> tuple[torch.Tensor, ...]:
        pairs = in_pairs(past_key_values)
        return self.decode(encoder_attention_mask, input_ids, pairs[::2], pairs[1::2])

    def decode(self, mask, input_ids, past: Layers | None, sources: Layers) -> tuple[torch.Tensor, ...]:
        """Logits, keys and values of self-attention with the new ones, layer by layer, weights of cross-attention."""
        embedded = self.decoder.embed_tokens(input_ids)
        length = past[0][0].shape[2] if past else 0
        positions = create_position_ids(None, embedded, length)  # (1, T)
        states = self.decoder.embed(embedded, positions)
        known = torch.arange(length + input_ids.shape[1], device=states.device)[None]  # (1, P + T)
        causal = to_additive_mask(known[:, None] <= positions[..., None], states)  # (1, 1, T, P + T)
        padding = to_additive_mask(mask, states)  # (B, 1, 1, S)
        present: list[torch.Tensor] = []
        weights: list[torch.Tensor] = []

        def self_attention(attention: MultiHeadAttention, i: int, states: torch.Tensor) -> torch.Tensor:
            new: tuple[torch.Tensor, ...] = get_key_value_states(attention, states)
            if past:
                new = tuple(torch.cat([old.to(each.dtype), each], 2) for old, each in zip(past[i], new, strict=True))
            present.extend(new)
            key, value = new
            return attend(attention, states, key, value, causal)[0]

        def cross_attention(attention: MultiHeadAttention, i: int, states: torch.Tensor) -> torch.Tensor:
            key, value = (each.to(states.dtype) for each in sources[i])
            output, looked_at = attend(attention, states, key, value, padding)
            weights.append(looked_at)
            return output

        for i, layer in enumerate(self.decoder.layers):
            states = layer.apply_sublayer(
                layer.self_attn_layer_norm, states, partial(self_attention, layer.self_attn, i)
            )
            states = layer.apply_sublayer(
                layer.cross_attn_layer_norm, states, partial(cross_attention, layer.cross_attn, i)
            )
            states = layer.apply_sublayer(layer.feed_forward_layer_norm, states, layer.feed_forward)
        logits = self.lm_head(self.decoder.norm(states))
        return tuple(tensor.float() for tensor in (logits, *present, *weights))


def attend(attention: MultiHeadAttention, states, key, value, mask) -> tuple[torch.Tensor, torch.Tensor]:
    """The output (B, T, D) and the weights (B, H, T, S)."""
    query = attention.split_heads(attention.q_proj(states), attention.key_head_dim)
    heads, weights = scaled_dot_product_attention(attention, query, key, value, mask, attention.scaling)
    return attention.out_proj(heads.flatten(2)), weights


def attend_to_itself(attention: MultiHeadAttention, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return attend(attention, states, *get_key_value_states(attention, states), mask)[0]


def get_key_value_states(attention: MultiHeadAttention, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    key = attention.split_heads(attention.k_proj(states), attention.key_head_dim)
    return key, attention.split_heads(attention.v_proj(states), attention.value_head_dim)


def to_additive_mask(seen: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """A mask (B, S) or (B, T, S), zero or false where nothing is seen, as what is added to scores, over all heads."""
    mask = torch.where(seen.bool(), 0.0, torch.finfo(states.dtype).min).to(states.dtype)
    return mask[:, None, None] if seen.ndim == 2 else mask[:, None]


def in_pairs(tensors) -> Layers:
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def export_graphs(model: VanillaTransformerForConditionalGeneration, half: bool = False) -> dict[str, onnx.ModelProto]:
    """The graphs above by name, and `SOURCES`; all but the merged one, which `merge_decoder_graphs` makes of others.

    Args:
        half: compute in float16; what goes in and comes out stays float32.
    """
    model = copy.deepcopy(model).eval()
    model = model.half() if half else model.float()
    config: Any = model.config
    heads, layers = config.decoder_attention_heads, range(config.decoder_layers)
    attention: Any = model.get_decoder().layers[0].self_attn
    widths = [attention.key_head_dim, attention.value_head_dim]
    text, mask, ids = (torch.ones(2, length, dtype=torch.long) for length in (5, 5, 3))  # its identity is its name
    states = torch.zeros(2, 5, config.d_model)
    lengths = {"decoder": (4, P), "encoder": (5, S)}
    past = [torch.zeros(2, heads, lengths[side][0], width) for _ in layers for side in SIDES for width in widths]
    past_shapes = tuple({0: B, 2: lengths[side][1]} for _ in layers for side in SIDES for _ in widths)
    names = {side: [f"{i}.{side}.{part}" for i in layers for part in PARTS] for side in SIDES}
    both = [f"{i}.{side}.{part}" for i in layers for side in SIDES for part in PARTS]
    weights = [f"cross_attentions.{i}" for i in layers]

    def named(prefix: str, each: list[str]) -> list[str]:
        return [f"{prefix}.{name}" for name in each]

    source, target = {0: B, 1: S}, {0: B, 1: T}
    graphs: dict[str, tuple[nn.Module, dict[str, torch.Tensor], tuple, list[str]]] = {
        "encoder_model": (
            EncoderGraph(model),
            {"input_ids": text, "attention_mask": mask},
            (source, source),
            ["last_hidden_state"],
        ),
        "decoder_model": (
            FirstStepGraph(model),
            {"encoder_attention_mask": mask, "input_ids": ids, "encoder_hidden_states": states},
            (source, target, source),
            ["logits", *named(PRESENT, both), *weights],
        ),
        "decoder_with_past_model": (
            NextStepGraph(model),
            {"encoder_attention_mask": mask, "input_ids": ids} | dict(zip(named(PAST, both), past, strict=True)),
            (source, target, past_shapes),
            ["logits", *named(PRESENT, names["decoder"]), *weights],
        ),
        SOURCES: (
            CrossAttentionCacheGraph(model),
            {"encoder_hidden_states": states},
            (source,),
            named(PRESENT, names["encoder"]),
        ),
    }
    return {name: to_onnx(*graph) for name, graph in graphs.items()}


def to_onnx(
    module: nn.Module, inputs: dict[str, torch.Tensor], dynamic_shapes: tuple, output_names: list[str]
) -> onnx.ModelProto:
    """Traces `module`; nothing of this machine stands in the result."""
    with torch.no_grad(), suppress_logging():
        program = torch.onnx.export(
            module.eval(), tuple(inputs.values()), dynamo=True, verbose=False, opset_version=OPSET,
            dynamic_shapes=dynamic_shapes, input_names=list(inputs), output_names=output_names,
        )  # fmt: skip
    assert program is not None
    proto = program.model_proto
    del proto.metadata_props[:], proto.graph.metadata_props[:], proto.graph.value_info[:]
    for node in proto.graph.node:  # the traces name files of this machine
        del node.metadata_props[:]
        node.doc_string = ""
    return proto


@contextmanager
def suppress_logging() -> Iterator[None]:
    """Without the remarks that the libraries make on themselves."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def merge_decoder_graphs(next_step: onnx.ModelProto, sources: onnx.ModelProto) -> onnx.ModelProto:
    """One graph for every step: the decoder behind a past, which in the first step is empty.

    In the first step, keys and values of the source are computed and whatever is given as past is cut to no tokens;
    afterwards those that are given are used. Every weight is there once.
    """
    merged, branch = onnx.ModelProto(), onnx.ModelProto()
    merged.CopyFrom(next_step)
    branch.CopyFrom(sources)
    graph, taken = merged.graph, {each.name for each in sources.graph.output}
    onnx.compose.add_prefix(branch, f"{SOURCES}.", inplace=True, rename_inputs=False, rename_outputs=False)
    past = [each.name for each in graph.input if each.name.startswith(PAST)]
    renamed = {name: f"{name}.read" if ".decoder." in name else name.replace(PAST, PRESENT) for name in past}
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]

    given = helper.make_graph(
        [helper.make_node("Identity", [name.replace(PRESENT, PAST)], [f"given.{name}"]) for name in sorted(taken)],
        "given", [], [rename(each, f"given.{each.name}") for each in sorted(sources.graph.output, key=by_name)],
    )  # fmt: skip
    computed = helper.make_graph(
        list(branch.graph.node), "computed", [], sorted(branch.graph.output, key=by_name)
    )  # its weights stand in the graph around it, as those of all other nodes
    for node in computed.node:
        node.output[:] = [f"computed.{name}" if name in taken else name for name in node.output]
        node.input[:] = [f"computed.{name}" if name in taken else name for name in node.input]
    for each in computed.output:
        each.name = f"computed.{each.name}"
    longest = helper.make_tensor("longest", TensorProto.INT64, [1], [2**31])
    zero, axis = (helper.make_tensor(name, TensorProto.INT64, [1], [n]) for name, n in (("zero", 0), ("axis", 2)))
    first = [
        helper.make_node("Cast", ["use_cache_branch"], ["reads_past"], to=TensorProto.INT64),
        helper.make_node("Mul", ["reads_past", "longest"], ["past_end"]),
        *(
            helper.make_node("Slice", [name, "zero", "past_end", "axis"], [renamed[name]])
            for name in past
            if ".decoder." in name
        ),
        helper.make_node("If", ["use_cache_branch"], sorted(taken), then_branch=given, else_branch=computed),
    ]
    nodes = [*first, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    graph.initializer.extend([longest, zero, axis, *branch.graph.initializer])
    graph.input.extend(sources.graph.input)
    graph.input.append(helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1]))
    outputs = {each.name: each for each in [*graph.output, *sources.graph.output]}
    del graph.output[:]
    graph.output.extend(outputs.values())
    merged.functions.extend(branch.functions)
    onnx.checker.check_model(merged)
    return merged


def by_name(each: onnx.ValueInfoProto) -> str:
    return each.name


def rename(value: onnx.ValueInfoProto, name: str) -> onnx.ValueInfoProto:
    copied = onnx.ValueInfoProto()
    copied.CopyFrom(value)
    copied.name = name
    return copied
