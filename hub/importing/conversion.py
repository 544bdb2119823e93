"""A file's tensors, whose layout is known, as a model of ours."""

from dataclasses import dataclass, field
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import GenerationConfig

from hub.importing.layout import CheckpointInfo, Layout, State, TensorRule, compile_pattern, expand_pattern
from hub.importing.layout_settings import format_setting
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration

SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")


class Tensors(State):
    """The tensors of a file by name. A missing name raises ValueError."""

    def __missing__(self, name: str) -> torch.Tensor:
        raise ValueError(f"the file lacks {name}.")


@dataclass
class MappedTensors:
    """The file's tensors under our names, and what became of each.

    Args:
        tensors: our name -> tensor in float32.
        origin: our name -> theirs.
        used: their name -> ours.
        folds: what was done -> "exact", or up to what.
        left_out: their name -> why.
    """

    tensors: State = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    used: dict[str, list[str]] = field(default_factory=dict)
    folds: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


@dataclass
class ImportResult:
    """A model, and what its report says of it: see `MappedTensors`."""

    model: VanillaTransformerForConditionalGeneration
    shapes: dict[str, Any]  # the architecture, by the names of our configuration
    folds: dict[str, str]
    left_out: dict[str, str]
    check: list[str]  # what the user must look at
    used: dict[str, list[str]]

    def report(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "model"}


def convert(
    state: State, layout: Layout, metadata: dict[str, Any], num_heads: int | None, special_ids: dict[str, int]
) -> ImportResult:
    """Our model with the file's weights.

    Args:
        state: the file's tensors, by its own names.
        layout: theirs; every name of `state` is one of its keys.
        metadata: what the file and the user tell besides.
        num_heads: None: the layout must know.
        special_ids: those of `SPECIAL_IDS` that the user gives; they go before the layout's.

    Raises:
        ValueError: a tensor is missing, of a wrong shape, or contradicts another; names the file's key.
    """
    state = Tensors(state)
    name = next(key for key, use in layout.uses().items() if "model.encoder.embed_tokens.weight" in use.targets)
    if state[name].ndim != 2 or 0 in state[name].shape:
        raise ValueError(f"{name} has the shape {tuple(state[name].shape)}, not (tokens, width).")
    facts = CheckpointInfo(state[name].shape[1], num_heads, layout.assumed | metadata, state)
    placed = place(state, layout, facts)
    make(placed, layout, facts)
    fields = layout.config | (layout.variant_config(facts, state) if layout.variant_config else {})
    heads = resolve_num_heads(layout, facts, state)
    ids = dict.fromkeys(SPECIAL_IDS) | layout.special_ids
    ids |= {name: fields.pop(name) for name in (*SPECIAL_IDS, "decoder_start_token_id") if name in fields} | special_ids
    ids.setdefault("decoder_start_token_id", ids["bos_token_id"])
    shapes = architecture(placed, layout, heads, facts.d_model, fields)
    try:
        config = VanillaTransformerConfig(**shapes, **ids)
    except StrictDataclassError as error:
        raise ValueError(f"the file's architecture cannot be ours: {error}") from error
    zero_biases(placed, layout)
    validate_tied_weights(config, placed)
    model = build(config, placed, layout)
    shapes = {name: getattr(config, name) for name in shapes}
    check = [
        *layout.check,
        *assumptions(layout, metadata),
        *without_tables(layout, state),
        *missing_special_id_notes(config),
    ]
    return ImportResult(model, shapes, placed.folds, placed.left_out, check, placed.used)


def resolve_num_heads(layout: Layout, facts: CheckpointInfo, state: State) -> int:
    told = layout.num_heads(facts, state) if layout.num_heads else None
    heads = facts.num_heads if told is None else told
    if heads is None:
        raise ValueError("the number of attention heads cannot be read off a file: give it with --num_heads.")
    if facts.num_heads not in (None, heads):
        raise ValueError(f"the file's model has {heads} heads, so --num_heads {facts.num_heads} is not right.")
    if heads < 1:
        raise ValueError(f"{heads} attention heads: give --num_heads 1 or more.")
    return heads


def place(state: State, layout: Layout, facts: CheckpointInfo) -> MappedTensors:
    """Every tensor under our names, folded where the layout says so, or left out."""
    placed = MappedTensors()
    regexes = [(compile_pattern(key), use) for key, use in layout.uses().items()]
    for name, tensor in state.items():
        match, use = next((m, use) for regex, use in regexes if (m := regex.fullmatch(name)))
        targets = [expand_pattern(target, match.groupdict().values()) for target in use.targets]
        if not tensor.is_floating_point():
            raise ValueError(f"{name} holds {tensor.dtype}, not floating-point numbers.")
        for target, value in zip(targets, apply_fold(name, tensor, use, facts), strict=True):
            if value.ndim == 0:
                raise ValueError(f"{name} is a single number, of shape (), and no row of them.")
            if not value.isfinite().all():
                raise ValueError(f"{name} holds NaN, or numbers beyond float32: its training went wrong. Take another.")
            placed.tensors[target], placed.origin[target] = value, name
        if use.note and targets:
            placed.folds[use.note] = use.bound
        if targets:
            placed.used[name] = targets
        else:
            placed.left_out[name] = use.note
    return placed


def make(placed: MappedTensors, layout: Layout, facts: CheckpointInfo) -> None:
    """Adds the tensors that the layout's code computes, where it does not take them from a file."""
    for note, tensors in (layout.made(facts, placed.tensors) if layout.made else {}).items():
        placed.tensors |= tensors
        placed.folds[note] = "exact"


def apply_fold(name: str, tensor: torch.Tensor, use: TensorRule, facts: CheckpointInfo) -> tuple[torch.Tensor, ...]:
    """The tensor as ours, computed in float64."""
    tensor = tensor.double()
    try:
        results = use.fold(tensor, facts) if use.fold else (tensor,) * len(use.targets)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise ValueError(f"{name}, of shape {tuple(tensor.shape)}: {error}") from error
    if len(results) != len(use.targets):
        raise ValueError(f"{name}, of shape {tuple(tensor.shape)}, does not come apart into {len(use.targets)} parts.")
    return tuple(result.float().contiguous() for result in results)


def architecture(
    placed: MappedTensors, layout: Layout, heads: int, d_model: int, fields: dict[str, Any]
) -> dict[str, Any]:
    """Fields of our configuration, read off the tensors; `fields` are those that the layout fixes."""
    tensors = placed.tensors

    def rows(name: str) -> int:
        if name not in tensors:
            raise ValueError(missing(name, layout))
        return len(tensors[name])

    layers = {side: number_of_layers(tensors, side) for side in ("encoder", "decoder")}
    first = "model.encoder.layers.0.self_attn"
    widths = {}
    for width, name in (("key_head_dim", f"{first}.q_proj.weight"), ("value_head_dim", f"{first}.v_proj.weight")):
        if rows(name) % heads:
            raise ValueError(
                f"{heads} heads do not divide the {rows(name)} rows of {placed.origin[name]}: is --num_heads right?"
            )
        widths[width] = None if rows(name) == d_model else rows(name) // heads
    if fields.get("position_embedding_type") == "learned":
        tables = {side: rows(f"model.{side}.embed_positions.weight") for side in layers}
        if len(set(tables.values())) != 1:
            raise ValueError(f"its tables of positions have {tables} rows: ours are of one length.")
        widths["max_position_embeddings"] = tables["encoder"]
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
        **widths,
        "norm_position": "post",  # written out, since the report is to tell them
        "position_embedding_type": "sinusoidal",
        "layer_norm_eps": layout.norm_eps(d_model),
        **fields,
    }


def number_of_layers(tensors: State, side: str) -> int:
    numbers = {name.split(".")[3] for name in tensors if name.startswith(f"model.{side}.layers.")}
    if numbers != {str(i) for i in range(len(numbers))}:
        found = ", ".join(sorted(numbers)[:5])
        raise ValueError(f"the {side}'s {len(numbers)} layers have the numbers {found}: some are missing.")
    return len(numbers)


def zero_biases(placed: MappedTensors, layout: Layout) -> None:
    """Fills in the biases of projections that the layout's linear maps do not have: all of one projection, or none."""
    tensors = placed.tensors
    for projection in layout.zero_biases:
        weights = [name for name in tensors if name.endswith(f".{projection}.weight")]
        biases = [name.removesuffix("weight") + "bias" for name in weights]
        if not any(name in tensors for name in biases):
            placed.folds["linear maps without biases: zero ones"] = "exact"
            for weight, bias in zip(weights, biases, strict=True):
                tensors[bias] = torch.zeros(len(tensors[weight]))


def validate_tied_weights(config: VanillaTransformerConfig, placed: MappedTensors) -> None:
    """Raises ValueError where two tables that are to be one differ."""
    source, target, output = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"
    for first, second, name in (
        (source, target, "share_encoder_decoder_embeddings"),
        (target, output, "tie_word_embeddings"),
    ):
        if not getattr(config, name) or not {first, second} <= placed.tensors.keys():
            continue
        if not torch.equal(placed.tensors[first], placed.tensors[second]):
            theirs = " and ".join(placed.origin.get(key, key) for key in (first, second))
            raise ValueError(f"{theirs} differ, but its settings say that they are one ({name}).")


def build(
    config: VanillaTransformerConfig, placed: MappedTensors, layout: Layout
) -> VanillaTransformerForConditionalGeneration:
    """The model, every parameter of it from the file."""
    with torch.device("meta"):  # without memory, until the shapes are known to be the file's
        expected = VanillaTransformerForConditionalGeneration(config).state_dict()
    tensors, origin = placed.tensors, placed.origin
    for name, tensor in expected.items():
        if name not in tensors:
            raise ValueError(missing(name, layout))
        if tensors[name].shape != tensor.shape:
            table = origin["model.decoder.embed_tokens.weight"]
            others = f"with {table}" if name.startswith("lm_head") else "with the file's other tensors"
            raise ValueError(
                f"{origin.get(name, name)} makes {name} of shape {tuple(tensors[name].shape)}, but {others} it should "
                f"be {tuple(tensor.shape)}."
            )
    if extra := [name for name in tensors if name not in expected]:
        raise ValueError(f"{origin[extra[0]]} has no place in a model of {config.encoder_layers} encoder layers.")
    model = VanillaTransformerForConditionalGeneration(config)
    model.load_state_dict(tensors)
    special = {name: getattr(config, name) for name in (*SPECIAL_IDS, "decoder_start_token_id")}
    model.generation_config = GenerationConfig(**special, **({"num_beams": 1} | layout.generation))
    return model.eval()


def missing(name: str, layout: Layout) -> str:
    """Which key of theirs would have filled ours."""
    for key, use in layout.uses().items():
        for target in use.targets:
            if match := compile_pattern(target).fullmatch(name):
                return f"the file lacks {expand_pattern(key, match.groupdict().values())} (our {name})."
    return f"nothing in the file fills {name}."


def assumptions(layout: Layout, metadata: dict[str, Any]) -> list[str]:
    """What nobody tells about the code, and what is taken to be so, as lines of a report."""
    names = [name for name in layout.assumed if name not in metadata]
    if not names:
        return []
    values = ", ".join(f"{name}={format_setting(layout.assumed[name])}" for name in names)
    return [f"The file does not tell {', '.join(names)}: taken as {values}. If yours differs, say it with --set."]


def without_tables(layout: Layout, state: State) -> list[str]:
    names = [key for key, use in layout.uses().items() if use.computed and key not in state]
    return [f"The file lacks {', '.join(names)}: positions are taken as those of section 3.5."] if names else []


def missing_special_id_notes(config: VanillaTransformerConfig) -> list[str]:
    """What to do about special ids that are still unknown, as lines of a report."""
    names = [name for name in SPECIAL_IDS if getattr(config, name) is None]
    if not names:
        return []
    options = " ".join(f"--{name} N" for name in names)
    return [f"The file does not tell {', '.join(names)}: generating needs them. Import again with {options}."]
