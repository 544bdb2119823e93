"""Definition of a layout: a table from the parameter names of a checkpoint to the names of this model."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

State = dict[str, torch.Tensor]
Kind = type[bool] | type[int] | type[float] | type[str] | tuple[str, ...]  # of a setting; a tuple lists the choices
Forward = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TensorRule:
    """Conversion of one tensor of the file.

    Args:
        targets: parameter names of this model, with the same `{...}` as the key. Empty if the tensor is dropped.
        fold: function (tensor, info) -> one tensor per target. By default, each target is the unchanged tensor.
        note: what the fold does, or why the tensor is dropped, for the report.
        bound: "exact" or the error bound of the fold.
        is_recomputed: whether this model computes the tensor itself, so that a file may lack it.
    """

    targets: tuple[str, ...]
    fold: Callable[[torch.Tensor, "CheckpointInfo"], tuple[torch.Tensor, ...]] | None = None
    note: str = ""
    bound: str = "exact"
    is_recomputed: bool = False


Keys = dict[str, str | TensorRule]  # name or pattern in the file -> name in this model or rule


@dataclass
class CheckpointInfo:
    """Hidden size, number of heads (None if unknown), settings and tensors of a checkpoint."""

    d_model: int
    num_heads: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    state: State = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """Checkpoint format of one implementation.

    Args:
        name: value of `--layout`.
        title: author and name of the implementation.
        keys: name in the file -> name in this model, or a `TensorRule`. `{i}` matches a number, `{p}` matches "weight"
            or "bias", and `{a|b}` matches one of these words. In the value, the same braces insert the matched text.
        config: fields of `VanillaTransformerConfig` that the layout fixes, including special token ids.
        num_heads: function (info) -> number of heads. Defaults to None: `--num-heads` is required.
        zero_biases: projections whose biases may be missing in a file. Missing biases are set to zero.
        user_notes: report lines about properties that the file does not show.
        variant_config: function (info) -> further config fields, for layouts with variants.
        forward: call of the original model that returns logits or log-probabilities (B, T, V). Its arguments are
            model, source (B, S), source mask (B, 1, 1, S), target (B, T) and target mask (B, 1, T, T). Masks are True
            at visible tokens.
        optional: keys that a file may lack.
        settings: name -> kind of the settings that `--set` and the file may specify.
        default_settings: values of settings that neither the file nor the user specifies.
        computed_tensors: function (info, converted tensors) -> {note for the report: tensors that are not in the file}.
        generation: fields of `GenerationConfig` that reproduce the original decoding. Defaults to greedy decoding.
            A setting with the name of one of these fields overrides its value.
    """

    name: str
    title: str
    keys: Keys
    config: dict[str, Any]
    num_heads: Callable[[CheckpointInfo], int | None] = lambda info: None
    zero_biases: tuple[str, ...] = ()
    user_notes: tuple[str, ...] = ()
    variant_config: Callable[[CheckpointInfo], dict[str, Any]] = lambda info: {}
    forward: Forward = lambda model, source, source_mask, target, target_mask: model(source, target)
    optional: tuple[str, ...] = ()
    settings: dict[str, Kind] = field(default_factory=dict)
    default_settings: dict[str, Any] = field(default_factory=dict)
    computed_tensors: Callable[[CheckpointInfo, State], dict[str, State]] = lambda info, tensors: {}
    generation: dict[str, Any] = field(default_factory=dict)

    def rules(self) -> dict[str, TensorRule]:
        return {key: rule if isinstance(rule, TensorRule) else TensorRule((rule,)) for key, rule in self.keys.items()}


ACTIVATIONS: tuple[str, ...] = ("relu", "gelu", "gelu_pytorch_tanh", "silu", "tanh")  # names in transformers
ENCODER, DECODER = "model.encoder.layers.{i}", "model.decoder.layers.{i}"  # layers of this model
VARIABLES = {"i": "[0-9]+", "p": "weight|bias"}  # in keys -> regular expression; others list their words
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
UNTIED: dict[str, Any] = {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}


def attention(key: str, names: Iterable[str], *target_modules: str) -> Keys:
    """Map the projections `names` (query, key, value, output) of an attention sublayer with the prefix `key`.

    It has several `target_modules` if the original code shares the attention.
    """
    table: Keys = {}
    for name, projection in zip(names, PROJECTIONS, strict=True):
        targets = tuple(f"{prefix}.{projection}.{{p}}" for prefix in target_modules)
        note = "one attention that the decoder uses as self-attention and cross-attention" if len(targets) > 1 else ""
        table[f"{key}.{name}.{{p}}"] = TensorRule(targets, note=note)
    return table


def norm(key: str, target: str) -> Keys:
    return {f"{key}.{{p}}": f"{target}.{{p}}"}


def layers(
    target: str, key: str, attentions: Iterable[str], linears: Iterable[str], norms: Iterable[str],
    projections: Iterable[str] = PROJECTIONS, map_attention: Callable[..., Keys] = attention,
    map_norm: Callable[[str, str], Keys] = norm,
) -> Keys:  # fmt: skip
    """Map all layers of the stack `target`, which is `ENCODER` or `DECODER`.

    Args:
        key: prefix of a layer in the file.
        attentions: names of the self-attention and of the cross-attention, if they are mapped here.
        linears: names of the two linear layers of the feed-forward network.
        norms: names of the norms, in the order of their sublayers.
        projections: names of the projections of an attention sublayer.
    """
    sublayers = ("self_attn", *(("cross_attn",) if target == DECODER else ()), "feed_forward")
    table: Keys = {}
    for name, sublayer in zip(attentions, sublayers, strict=False):
        table |= map_attention(f"{key}.{name}", projections, f"{target}.{sublayer}")
    for name, linear in zip(linears, ("fc1", "fc2"), strict=True):
        table[f"{key}.{name}.{{p}}"] = f"{target}.feed_forward.{linear}.{{p}}"
    for name, sublayer in zip(norms, sublayers, strict=False):
        table |= map_norm(f"{key}.{name}", f"{target}.{sublayer}_layer_norm")
    return table


def compile_pattern(key: str) -> re.Pattern:
    """Compile a key such as `layers.{i}.fc.{p}` to a regular expression with a group for each variable."""
    parts = re.split(r"\{([^}]*)\}", key)
    parts[::2] = map(re.escape, parts[::2])
    parts[1::2] = [f"({VARIABLES.get(name, name)})" for name in parts[1::2]]
    return re.compile("".join(parts))


def expand_pattern(target: str, values: Iterable[str]) -> str:
    """Replace the variables of a name by `values`, in order."""
    values = iter(values)
    return re.sub(r"\{[^}]*\}", lambda _: next(values), target)
