"""Conversion of the tensors of a file with a known layout into a model."""

from dataclasses import dataclass, field
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import GenerationConfig

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration

from .layout import CheckpointInfo, Layout, State, TensorRule, compile_pattern, expand_pattern
from .layout_settings import format_setting

SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")


class Tensors(State):
    """The tensors of a file by name. A missing name raises ValueError."""

    def __missing__(self, name: str) -> torch.Tensor:
        raise ValueError(f"the file lacks {name}.")


@dataclass
class MappedTensors:
    """Converted tensors in float32, and the record of each conversion."""

    tensors: State = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)  # name in this model -> name in the file
    used: dict[str, list[str]] = field(default_factory=dict)  # name in the file -> names in this model
    folds: dict[str, str] = field(default_factory=dict)  # description of a conversion -> "exact" or its error bound
    dropped: dict[str, str] = field(default_factory=dict)  # name in the file -> reason


@dataclass
class ImportResult:
    """Imported model and the contents of its report; see `MappedTensors`."""

    model: VanillaTransformerForConditionalGeneration
    shapes: dict[str, Any]  # config fields
    folds: dict[str, str]
    dropped: dict[str, str]
    user_notes: list[str]
    used: dict[str, list[str]]

    def report(self) -> dict[str, Any]:
        """Return the entries of `import_report.json`."""
        report = {"shapes": self.shapes, "folds": self.folds, "left_out": self.dropped}
        return report | {"check": self.user_notes, "used": self.used}


def convert(
    state: State, layout: Layout, metadata: dict[str, Any], num_heads: int | None, special_ids: dict[str, int]
) -> ImportResult:
    """Build a model from the tensors of a file, whose names all match keys of the layout.

    `metadata` has the settings of the file and the user. `special_ids` of the user override those of the layout.

    Raises:
        ValueError: If a tensor is missing, has a wrong shape or contradicts another. The message contains its name.
    """
    state = Tensors(state)
    name = next(key for key, rule in layout.rules().items() if "model.encoder.embed_tokens.weight" in rule.targets)
    if state[name].ndim != 2 or 0 in state[name].shape:
        raise ValueError(f"{name} has the shape {tuple(state[name].shape)}, expected (vocabulary size, hidden size).")
    info = CheckpointInfo(state[name].shape[1], num_heads, layout.default_settings | metadata, state)
    mapped = map_tensors(state, layout, info)
    for note, tensors in layout.computed_tensors(info, mapped.tensors).items():
        mapped.tensors |= tensors
        mapped.folds[note] = "exact"
    fields = layout.config | layout.variant_config(info)
    heads = resolve_num_heads(layout, info)
    ids = dict.fromkeys(SPECIAL_IDS)
    ids |= {name: fields.pop(name) for name in (*SPECIAL_IDS, "decoder_start_token_id") if name in fields} | special_ids
    ids.setdefault("decoder_start_token_id", ids["bos_token_id"])
    shapes = infer_architecture(mapped, layout, heads, info.d_model, fields)
    try:
        config = VanillaTransformerConfig(**shapes, **ids)
    except StrictDataclassError as error:
        raise ValueError(f"the architecture of the file is not supported: {error}") from error
    add_zero_biases(mapped, layout)
    validate_tied_weights(config, mapped)
    model = build_model(config, mapped, layout, metadata)
    shapes = {name: getattr(config, name) for name in shapes}
    notes = collect_user_notes(layout, metadata, state)
    return ImportResult(model, shapes, mapped.folds, mapped.dropped, notes, mapped.used)


def resolve_num_heads(layout: Layout, info: CheckpointInfo) -> int:
    inferred = layout.num_heads(info)
    heads = info.num_heads if inferred is None else inferred
    if heads is None:
        raise ValueError("the file does not specify the number of attention heads. Set --num-heads.")
    if info.num_heads not in (None, heads):
        raise ValueError(f"--num-heads {info.num_heads} is wrong: the model in the file has {heads} heads.")
    if heads < 1:
        raise ValueError(f"--num-heads {heads} must be at least 1.")
    return heads


def map_tensors(state: State, layout: Layout, info: CheckpointInfo) -> MappedTensors:
    """Rename and fold all tensors of a file, and record the dropped ones."""
    mapped = MappedTensors()
    regexes = [(compile_pattern(key), rule) for key, rule in layout.rules().items()]
    for name, tensor in state.items():
        match, rule = next((m, rule) for regex, rule in regexes if (m := regex.fullmatch(name)))
        targets = [expand_pattern(target, match.groups()) for target in rule.targets]
        if not tensor.is_floating_point():
            raise ValueError(f"{name} has the dtype {tensor.dtype}, expected a floating-point dtype.")
        for target, value in zip(targets, apply_fold(name, tensor, rule, info), strict=True):
            if value.ndim == 0:
                raise ValueError(f"{name} has the shape (), expected at least one dimension.")
            if not value.isfinite().all():
                raise ValueError(f"{name} contains NaN or values outside the range of float32. Use other weights.")
            mapped.tensors[target], mapped.origin[target] = value, name
        if rule.note and targets:
            mapped.folds[rule.note] = rule.bound
        if targets:
            mapped.used[name] = targets
        else:
            mapped.dropped[name] = rule.note
    return mapped


def apply_fold(name: str, tensor: torch.Tensor, rule: TensorRule, info: CheckpointInfo) -> tuple[torch.Tensor, ...]:
    """Apply the rule of a tensor in float64. Return one float32 tensor per target."""
    tensor = tensor.double()
    try:
        results = rule.fold(tensor, info) if rule.fold else (tensor,) * len(rule.targets)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise ValueError(f"{name}, of shape {tuple(tensor.shape)}: {error}") from error
    if len(results) != len(rule.targets):
        raise ValueError(f"{name}, of shape {tuple(tensor.shape)}, cannot be split into {len(rule.targets)} parts.")
    return tuple(result.float().contiguous() for result in results)


def infer_architecture(
    mapped: MappedTensors, layout: Layout, heads: int, d_model: int, fields: dict[str, Any]
) -> dict[str, Any]:
    """Infer the config fields from the tensor shapes; `fields` has the fields that the layout fixes."""
    tensors = mapped.tensors

    def rows(name: str) -> int:
        if name not in tensors:
            raise ValueError(missing_key_message(name, layout))
        return len(tensors[name])

    layers = {side: count_layers(tensors, side) for side in ("encoder", "decoder")}
    first = "model.encoder.layers.0.self_attn"
    inferred = {}
    for field_name, name in (("key_head_dim", f"{first}.q_proj.weight"), ("value_head_dim", f"{first}.v_proj.weight")):
        if rows(name) % heads:
            size = f"the {rows(name)} rows of {mapped.origin[name]}"
            raise ValueError(f"{size} are not divisible by {heads} heads. Check --num-heads.")
        inferred[field_name] = None if rows(name) == d_model else rows(name) // heads
    if fields.get("position_embedding_type") == "learned":
        tables = {side: rows(f"model.{side}.embed_positions.weight") for side in layers}
        if len(set(tables.values())) != 1:
            raise ValueError(f"the position tables have {tables} rows; different lengths are not supported.")
        inferred["max_position_embeddings"] = tables["encoder"]
    return {
        "vocab_size": rows("model.encoder.embed_tokens.weight"),
        "decoder_vocab_size": rows("model.decoder.embed_tokens.weight"),
        "d_model": d_model,
        "encoder_layers": layers["encoder"],
        "decoder_layers": layers["decoder"],
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": rows("model.encoder.layers.0.feed_forward.fc1.weight"),
        "decoder_ffn_dim": rows("model.decoder.layers.0.feed_forward.fc1.weight"),
        **inferred,
        "norm_position": "post",  # defaults are also listed in the report
        "position_embedding_type": "sinusoidal",
        "layer_norm_eps": 1e-5,
        **fields,
    }


def count_layers(tensors: State, side: str) -> int:
    numbers = {name.split(".")[3] for name in tensors if name.startswith(f"model.{side}.layers.")}
    if numbers != {str(i) for i in range(len(numbers))}:
        listed = ", ".join(sorted(numbers)[:5])
        raise ValueError(f"the {len(numbers)} {side} layers have the numbers {listed}: some layers are missing.")
    return len(numbers)


def add_zero_biases(mapped: MappedTensors, layout: Layout) -> None:
    """Set the biases of a projection to zero if they are missing in all layers."""
    tensors = mapped.tensors
    for projection in layout.zero_biases:
        weights = {name: tensor for name, tensor in tensors.items() if name.endswith(f".{projection}.weight")}
        biases = {name.removesuffix("weight") + "bias": torch.zeros(len(tensor)) for name, tensor in weights.items()}
        if not biases.keys() & tensors.keys():
            mapped.folds["linear layers without biases: biases of zero"] = "exact"
            tensors |= biases


def validate_tied_weights(config: VanillaTransformerConfig, mapped: MappedTensors) -> None:
    source, target, output = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"
    ties = {"share_encoder_decoder_embeddings": (source, target), "tie_word_embeddings": (target, output)}
    for name, (first, second) in ties.items():
        is_tied = getattr(config, name) and {first, second} <= mapped.tensors.keys()
        if is_tied and not torch.equal(mapped.tensors[first], mapped.tensors[second]):
            names = " and ".join(mapped.origin.get(key, key) for key in (first, second))
            raise ValueError(f"{names} differ, but {name} of the file requires equal weights.")


def build_model(
    config: VanillaTransformerConfig, mapped: MappedTensors, layout: Layout, metadata: dict[str, Any]
) -> VanillaTransformerForConditionalGeneration:
    """Build the model. Raise ValueError if a parameter is missing or has a wrong shape."""
    with torch.device("meta"):  # allocates no memory before the shapes are validated
        expected = VanillaTransformerForConditionalGeneration(config).state_dict()
    tensors, origin = mapped.tensors, mapped.origin
    for name, tensor in expected.items():
        if name not in tensors:
            raise ValueError(missing_key_message(name, layout))
        if tensors[name].shape != tensor.shape:
            table = origin["model.decoder.embed_tokens.weight"]
            reference = f"according to {table if name.startswith('lm_head') else 'the other tensors of the file'}"
            shapes = f"{tuple(tensors[name].shape)}, expected {tuple(tensor.shape)} {reference}"
            raise ValueError(f"{origin.get(name, name)} gives {name} the shape {shapes}.")
    if extra := [name for name in tensors if name not in expected]:
        raise ValueError(f"{origin[extra[0]]} does not exist in a model with {config.encoder_layers} encoder layers.")
    model = VanillaTransformerForConditionalGeneration(config)
    model.load_state_dict(tensors)
    special = {name: getattr(config, name) for name in (*SPECIAL_IDS, "decoder_start_token_id")}
    generation = {name: metadata.get(name, default) for name, default in layout.generation.items()}
    model.generation_config = GenerationConfig(**special, **({"num_beams": 1} | generation))
    return model.eval()


def missing_key_message(name: str, layout: Layout) -> str:
    for key, rule in layout.rules().items():
        for target in rule.targets:
            if match := compile_pattern(target).fullmatch(name):
                return f"the file lacks {expand_pattern(key, match.groups())} (required for {name})."
    return f"the file lacks a tensor for {name}."


def collect_user_notes(layout: Layout, metadata: dict[str, Any], state: State) -> list[str]:
    """Return report lines on what the file does not show: properties, settings and positions."""
    notes = list(layout.user_notes)
    if names := [name for name in layout.default_settings if name not in metadata]:
        values = ", ".join(f"{name}={format_setting(layout.default_settings[name])}" for name in names)
        notes.append(f"The file does not specify {', '.join(names)}. Assumed: {values}. Use --set to change this.")
    if names := [key for key, rule in layout.rules().items() if rule.is_recomputed and key not in state]:
        notes.append(f"The file lacks {', '.join(names)}: the positions of section 3.5 are used.")
    return notes
