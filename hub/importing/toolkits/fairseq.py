"""Settings and layout of the `transformer` models of fairseq.

Source: fairseq 0.12.2, models/transformer/, modules/sinusoidal_positional_embedding.py and multihead_attention.py.
"""

import math
from typing import Any

import torch

from ..layout import DECODER, ENCODER, CheckpointInfo, Keys, Kind, Layout, State, TensorRule, layers
from ..pickle_stubs import to_plain_data
from ..weight_folding import fused_attention

PAD = 1  # dictionaries of fairseq start with <s>, <pad>, </s>, <unk>
ACTIVATIONS = {  # names in fairseq -> names in transformers
    **{"relu": "relu", "gelu": "gelu", "tanh": "tanh", "linear": "linear"},
    **{"gelu_accurate": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh"},
}
SETTINGS: dict[str, Kind] = {
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), int),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), int),
    **dict.fromkeys(("encoder_normalize_before", "decoder_normalize_before", "layernorm_embedding"), bool),
    **dict.fromkeys(("no_scale_embedding", "share_all_embeddings", "share_decoder_input_output_embed"), bool),
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), float),
    **dict.fromkeys(("source_lang", "target_lang"), str),
    "activation_fn": tuple(ACTIVATIONS),
}
DEFAULT_SETTINGS = {  # defaults of fairseq
    **dict.fromkeys(("encoder_normalize_before", "decoder_normalize_before", "layernorm_embedding"), False),
    **{"no_scale_embedding": False, "activation_fn": "relu"},
    **{"max_source_positions": 1024, "max_target_positions": 1024},
}
UNSUPPORTED_ARCHITECTURES = (  # `transformer*` architectures that compute something else
    *("transformer_lm", "transformer_monotonic", "transformer_pointer", "transformer_from_pretrained_xlm"),
    *("transformer_ulm", "transformer_unidirectional", "transformer_modular", "transformer_seqgen"),
)
UNSUPPORTED_SETTINGS = (  # settings that must be off
    *("no_token_positional_embeddings", "no_cross_attention", "cross_self_attention", "adaptive_input"),
    *("adaptive_softmax_cutoff", "char_inputs", "no_decoder_final_norm", "base_layers", "simul_type", "waitk_lagging"),
    *("encoder_layers_to_keep", "decoder_layers_to_keep", "quant_noise_pq", "quant_noise_scalar"),
    *("scale_attn", "scale_heads", "scale_fc", "scale_resids", "relative_positions", "max_relative_positions"),
    *("tensor_parallel", "moe_freq", "encoder_xformers_att_config", "decoder_xformers_att_config"),
    *("use_alibi", "alibi", "encoder_langtok", "decoder_langtok"),
)


def read_arguments(content: dict) -> dict[str, Any]:
    """Return the flat command-line arguments from `args` (up to fairseq 0.10), or from sections of `cfg`."""
    arguments = to_plain_data(content.get("args"))
    if isinstance(arguments, dict):
        return arguments
    sections = to_plain_data(content.get("cfg"))
    flat: dict[str, Any] = {}
    for section in [sections.get(name) for name in ("task", "model")] if isinstance(sections, dict) else []:
        for key, value in section.items() if isinstance(section, dict) else ():
            if key in ("encoder", "decoder", "quant_noise") and isinstance(value, dict):
                flat |= {f"{key}_{inner}": each for inner, each in value.items()}
            else:
                flat[key] = value
    if "arch" not in flat and isinstance(flat.get("_name"), str):
        flat["arch"] = flat["_name"]
    return flat


def parse_checkpoint(content: Any) -> tuple[dict, dict[str, Any]] | None:
    """Return the tensors and settings of a file with weights and an architecture, or None for other files."""
    arguments = read_arguments(content) if isinstance(content, dict) and isinstance(content.get("model"), dict) else {}
    arch = arguments.get("arch")
    if not isinstance(arch, str):
        return None
    if not arch.startswith("transformer") or arch.startswith(UNSUPPORTED_ARCHITECTURES):
        raise ValueError(f"has the fairseq architecture {arch[:80]!r}. Only transformer* is supported.")
    for name in UNSUPPORTED_SETTINGS:
        value = arguments.get(name)
        if value not in (None, False, 0, "", [], "null"):
            raise ValueError(f"has the fairseq setting {name}={str(value)[:80]}, which is not supported.")
    for name in ("embed_dim", "normalize_before", "learned_pos"):
        sides = [arguments.get(f"{side}_{name}") for side in ("encoder", "decoder")]
        if None not in sides and sides[0] != sides[1]:
            raise ValueError(f"has encoder_{name}={sides[0]} and decoder_{name}={sides[1]}. They must be equal.")
    if arguments.get("relu_dropout") and not arguments.get("activation_dropout"):  # older name
        arguments["activation_dropout"] = arguments["relu_dropout"]
    settings = DEFAULT_SETTINGS | {name: arguments[name] for name in SETTINGS if arguments.get(name) is not None}
    if settings.get("share_all_embeddings"):
        settings["share_decoder_input_output_embed"] = True
    return content["model"], settings


def concatenated_sinusoids(length: int, d_model: int) -> torch.Tensor:
    """Return the position table (length, d_model) of fairseq: first the sines, then the cosines.

    The angles are pos / 10000^(i / (d/2 - 1)), starting at pos = PAD + 1. In the paper, the exponent is i / (d/2), and
    sines and cosines alternate.
    """
    half = d_model // 2
    frequencies = torch.exp(torch.arange(half, dtype=torch.float) * -(math.log(10000) / (half - 1)))
    angles = torch.arange(PAD + 1, PAD + 1 + length, dtype=torch.float)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos(), torch.zeros(length, d_model % 2)], dim=1)


def drop_unused_rows(table: torch.Tensor, info: CheckpointInfo) -> tuple[torch.Tensor, ...]:
    """Drop the rows up to the pad token, and truncate the table to the shorter side."""
    rows = [len(info.state[key]) for key in POSITIONS if key in info.state]
    return (table[PAD + 1 : min(rows)],)


def fold_input_projection(table: torch.Tensor, info: CheckpointInfo) -> tuple[torch.Tensor, ...]:
    inner = info.state.get("decoder.project_in_dim.weight")
    return (table if inner is None else table @ inner.double().T,)


def fold_output_projection(projection: torch.Tensor, info: CheckpointInfo) -> tuple[torch.Tensor, ...]:
    inner = info.state.get("decoder.project_out_dim.weight")
    return (projection if inner is None else projection @ inner.double(),)


def computed_tensors(info: CheckpointInfo, tensors: State) -> dict[str, State]:
    """Return the sinusoids, which are not saved, and the LM head if it is tied and missing."""
    computed: dict[str, State] = {}
    if not any(key in info.state for key in POSITIONS):
        length = max(info.metadata["max_source_positions"], info.metadata["max_target_positions"])
        table = concatenated_sinusoids(length, info.d_model)
        names = [f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")]
        computed["sinusoids of fairseq as a table of learned positions"] = {name: table.clone() for name in names}
    if "lm_head.weight" not in tensors and "model.decoder.embed_tokens.weight" in tensors:
        if PROJECTIONS & info.state.keys() or not info.metadata.get("share_decoder_input_output_embed", True):
            raise ValueError("the file lacks decoder.output_projection.weight (required for lm_head.weight).")
        embeddings = tensors["model.decoder.embed_tokens.weight"]
        computed["the LM head is tied to the target embeddings"] = {"lm_head.weight": embeddings}
    return computed


def variant_config(info: CheckpointInfo) -> dict[str, Any]:
    settings, state = info.metadata, info.state
    if settings["encoder_normalize_before"] != settings["decoder_normalize_before"]:
        raise ValueError("encoder_normalize_before and decoder_normalize_before must be equal.")
    is_pre = settings["encoder_normalize_before"]
    folded = bool(PROJECTIONS & state.keys())
    output = state.get("decoder.output_projection.weight", state.get("decoder.embed_out"))
    source, target = (state[f"{side}.embed_tokens.weight"] for side in ("encoder", "decoder"))
    tied = output is None or settings.get("share_decoder_input_output_embed", torch.equal(output, target))
    shared = settings.get("share_all_embeddings", torch.equal(source, target))
    # before version 3 of the format, there was no final LayerNorm
    version = state.get("decoder.version")
    has_final_layer_norm = "decoder.layer_norm.weight" in state if version is None else bool((version > 2).all())
    fields = {
        "norm_position": "pre" if is_pre else "post",
        "final_norm": is_pre and has_final_layer_norm,
        "embedding_norm": settings["layernorm_embedding"],
        "scale_embedding": not settings["no_scale_embedding"],
        "activation_function": ACTIVATIONS[settings["activation_fn"]],
        "tie_word_embeddings": tied and not folded,
        "share_encoder_decoder_embeddings": shared and not folded,
    }
    names = ("decoder_attention_heads", "dropout", "attention_dropout", "activation_dropout")
    return fields | {name: settings[name] for name in names if name in settings}


PROJECTIONS = {"decoder.project_in_dim.weight", "decoder.project_out_dim.weight"}
POSITIONS = ("encoder.embed_positions.weight", "decoder.embed_positions.weight")
SELF, BOTH, FFN = ("self_attn",), ("self_attn", "encoder_attn"), ("fc1", "fc2")
ENC, DEC = "encoder.layers.{i}", "decoder.layers.{i}"
ENCODER_NORMS = ("self_attn_layer_norm", "final_layer_norm")
DECODER_NORMS = ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")
EARLY_NORMS = ("layer_norms.0", "layer_norms.1", "layer_norms.2")
KEYS: Keys = {
    "encoder.embed_tokens.weight": "model.encoder.embed_tokens.weight",
    "decoder.embed_tokens.weight": TensorRule(("model.decoder.embed_tokens.weight",), fold_input_projection),
    **layers(ENCODER, ENC, SELF, FFN, ENCODER_NORMS),
    **layers(DECODER, DEC, BOTH, FFN, DECODER_NORMS),
    **layers(ENCODER, ENC, SELF, FFN, EARLY_NORMS[:2], map_attention=fused_attention),
    **layers(DECODER, DEC, BOTH, FFN, EARLY_NORMS, map_attention=fused_attention),
    "{encoder|decoder}.layer_norm.{p}": "model.{encoder|decoder}.norm.{p}",
    "{encoder|decoder}.layernorm_embedding.{p}": "model.{encoder|decoder}.embedding_layer_norm.{p}",
    "{encoder|decoder}.embed_positions.weight": TensorRule(
        ("model.{encoder|decoder}.embed_positions.weight",), drop_unused_rows, "positions without the rows up to <pad>"
    ),
    "decoder.output_projection.weight": TensorRule(("lm_head.weight",), fold_output_projection),
    "decoder.embed_out": TensorRule(("lm_head.weight",), fold_output_projection),
    "decoder.project_in_dim.weight": TensorRule((), note="multiplied into the target embeddings"),
    "decoder.project_out_dim.weight": TensorRule((), note="multiplied into the LM head"),
    "encoder.layers.{i}.{in_proj|out_proj|fc1|fc2}_{weight|bias}": TensorRule((), note="copies for the fast path"),
    "{encoder|decoder}.version": TensorRule((), note="version of the format"),
    "{encoder|decoder}.embed_positions._float_tensor": TensorRule((), note="empty buffer of the sinusoids"),
    "{encoder|decoder}.embed_positions.weights": TensorRule((), note="sinusoids, which are computed"),
}

LAYOUT = Layout(
    name="fairseq",
    title="fairseq, transformer",
    keys=KEYS,
    config={
        "position_embedding_type": "learned",
        **{"bos_token_id": 0, "pad_token_id": PAD, "eos_token_id": 2, "decoder_start_token_id": 2},
    },
    num_heads=lambda info: info.metadata.get("encoder_attention_heads"),
    settings=SETTINGS,
    default_settings=DEFAULT_SETTINGS,
    variant_config=variant_config,
    computed_tensors=computed_tensors,
    generation={  # defaults of fairseq-generate
        **{"num_beams": 5, "max_new_tokens": 200, "min_new_tokens": 1, "early_stopping": True},
        "suppress_tokens": [PAD],
    },
    forward=lambda model, source, source_mask, target, target_mask: model(source, None, target)[0],
    optional=tuple(key for key in KEYS if "embed_tokens" not in key and ".fc" not in key),
)
