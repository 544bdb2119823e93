"""fairseq's `transformer` models: what their files tell, and the layout of their weights.

Read off fairseq 0.12.2: models/transformer/, modules/sinusoidal_positional_embedding.py and multihead_attention.py.
"""

import math
from typing import Any

import torch

from hub.importing.layout import (
    DECODER,
    ENCODER,
    CheckpointInfo,
    Kind,
    Layout,
    State,
    TensorRule,
    attention,
    feed_forward,
    left_out,
)
from hub.importing.pickle_stubs import plain
from hub.importing.weight_folding import split_qkv

PAD = 1  # in every dictionary of fairseq's: <s>, <pad>, </s>, <unk>
DEFAULT_MAX_POSITIONS = 1024  # positions, where a file tells none: its DEFAULT_MAX_SOURCE_POSITIONS
ACTIVATIONS = {  # its names -> transformers'
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
ASSUMED = {  # of a file that lacks them, as fairseq itself takes it
    **dict.fromkeys(("encoder_normalize_before", "decoder_normalize_before", "layernorm_embedding"), False),
    **{"no_scale_embedding": False, "activation_fn": "relu"},
    **{"max_source_positions": DEFAULT_MAX_POSITIONS, "max_target_positions": DEFAULT_MAX_POSITIONS},
}
UNSUPPORTED_ARCHITECTURES = (  # architectures whose names begin like ours, and whose arithmetic is another
    *("transformer_lm", "transformer_monotonic", "transformer_pointer", "transformer_from_pretrained_xlm"),
    *("transformer_ulm", "transformer_unidirectional", "transformer_modular", "transformer_seqgen"),
)
FEATURES = (  # settings that must be off
    *("no_token_positional_embeddings", "no_cross_attention", "cross_self_attention", "adaptive_input"),
    *("adaptive_softmax_cutoff", "char_inputs", "no_decoder_final_norm", "base_layers", "simul_type", "waitk_lagging"),
    *("encoder_layers_to_keep", "decoder_layers_to_keep", "quant_noise_pq", "quant_noise_scalar"),
    *("scale_attn", "scale_heads", "scale_fc", "scale_resids", "relative_positions", "max_relative_positions"),
    *("tensor_parallel", "moe_freq", "encoder_xformers_att_config", "decoder_xformers_att_config"),
    *("use_alibi", "alibi", "encoder_langtok", "decoder_langtok"),
)


def is_toolkit_checkpoint(content: Any) -> bool:
    """Whether fairseq's trainer wrote a file: a state beside `args` (until 0.10) or `cfg` that name an architecture."""
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        return False
    return isinstance(arguments(content).get("arch"), str)


def arguments(content: dict) -> dict[str, Any]:
    """The flat arguments of its command line, from `args`, or from the sections `model` and `task` of `cfg`."""
    flat = plain(content.get("args"))
    if isinstance(flat, dict):
        return flat
    sections = plain(content.get("cfg"))
    sections = sections if isinstance(sections, dict) else {}
    flat = {}
    for name in ("task", "model"):
        for key, value in as_dict(sections.get(name)).items():
            if key in ("encoder", "decoder", "quant_noise") and isinstance(value, dict):
                flat |= {f"{key}_{inner}": each for inner, each in value.items()}
            else:
                flat[key] = value
    if "arch" not in flat and isinstance(flat.get("_name"), str):
        flat["arch"] = flat["_name"]
    return flat


def as_dict(value: Any) -> dict:
    return value if isinstance(value, dict) else {}


def parse_checkpoint(content: dict) -> tuple[dict, dict[str, Any]]:
    """The model's tensors and its arguments. Raises ValueError for other architectures, naming what is other."""
    given = arguments(content)
    arch = given["arch"]
    if not arch.startswith("transformer") or arch.startswith(UNSUPPORTED_ARCHITECTURES):
        raise ValueError(
            f"is a model of fairseq's architecture {arch[:80]!r}: of fairseq's, transformer* alone is read."
        )
    for name in FEATURES:
        value = given.get(name)
        if value not in (None, False, 0, "", [], "null"):
            raise ValueError(f"is a model of fairseq's with {name}={str(value)[:80]}, which is not ours.")
    for name in ("embed_dim", "normalize_before", "learned_pos"):
        sides = [given.get(f"{side}_{name}") for side in ("encoder", "decoder")]
        if None not in sides and sides[0] != sides[1]:
            raise ValueError(
                f"is a model of fairseq's with encoder_{name}={sides[0]} and decoder_{name}={sides[1]}: here they are "
                f"the same."
            )
    if given.get("relu_dropout") and not given.get("activation_dropout"):  # its earlier name
        given["activation_dropout"] = given["relu_dropout"]
    told = ASSUMED | {name: given[name] for name in SETTINGS if given.get(name) is not None}
    if told.get("share_all_embeddings"):
        told["share_decoder_input_output_embed"] = True
    return content["model"], told


def sinusoids_in_halves(length: int, d_model: int) -> torch.Tensor:
    """fairseq's table of positions (length, d_model): all sines, then all cosines, of pos / 10000^(i / (d/2 - 1)).

    The paper's exponent is i / (d/2), and its sines and cosines alternate. The first token has the position PAD + 1.
    """
    half = d_model // 2
    frequencies = torch.exp(torch.arange(half, dtype=torch.float) * -(math.log(10000) / (half - 1)))
    angles = torch.arange(PAD + 1, PAD + 1 + length, dtype=torch.float)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos(), torch.zeros(length, d_model % 2)], dim=1)


def longest(facts: CheckpointInfo) -> int:
    return max(facts.metadata["max_source_positions"], facts.metadata["max_target_positions"])


def learned_positions(table: torch.Tensor, facts: CheckpointInfo) -> tuple[torch.Tensor, ...]:
    """Without the rows up to the padding's; as many as both sides have."""
    rows = [len(facts.state[key]) for key in POSITIONS if key in facts.state]
    return (table[PAD + 1 : min(rows)],)


def through_the_input_map(table: torch.Tensor, facts: CheckpointInfo) -> tuple[torch.Tensor, ...]:
    inner = facts.state.get("decoder.project_in_dim.weight")
    return (table if inner is None else table @ inner.double().T,)


def through_the_output_map(projection: torch.Tensor, facts: CheckpointInfo) -> tuple[torch.Tensor, ...]:
    inner = facts.state.get("decoder.project_out_dim.weight")
    return (projection if inner is None else projection @ inner.double(),)


def made(facts: CheckpointInfo, tensors: State) -> dict[str, State]:
    """What its code computes, and what older files do not repeat."""
    found: dict[str, State] = {}
    if not any(key in facts.state for key in POSITIONS):
        table = sinusoids_in_halves(longest(facts), facts.d_model)
        names = [f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")]
        found["fairseq's sinusoids as a table of learned positions"] = {name: table.clone() for name in names}
    if "lm_head.weight" not in tensors and "model.decoder.embed_tokens.weight" in tensors:
        folded = any(f"decoder.project_{way}_dim.weight" in facts.state for way in ("in", "out"))
        if folded or not facts.metadata.get("share_decoder_input_output_embed", True):
            raise ValueError("the file lacks decoder.output_projection.weight (our lm_head.weight).")
        found["the target's embeddings are the projection"] = {
            "lm_head.weight": tensors["model.decoder.embed_tokens.weight"]
        }
    return found


def variant_config(facts: CheckpointInfo, state: State) -> dict[str, Any]:
    told = facts.metadata
    if told["encoder_normalize_before"] != told["decoder_normalize_before"]:
        raise ValueError("encoder_normalize_before and decoder_normalize_before differ: here they are the same.")
    is_pre = told["encoder_normalize_before"]
    folded = any(f"decoder.project_{way}_dim.weight" in state for way in ("in", "out"))
    output = state.get("decoder.output_projection.weight", state.get("decoder.embed_out"))
    source, target = (state[f"{side}.embed_tokens.weight"] for side in ("encoder", "decoder"))
    tied = output is None or told.get("share_decoder_input_output_embed", torch.equal(output, target))
    shared = told.get("share_all_embeddings", torch.equal(source, target))
    # before version 3 there was no norm after the last layer; a file says which version it is of
    version = state.get("decoder.version")
    normed = "decoder.layer_norm.weight" in state if version is None else bool((version > 2).all())
    fields = {
        "norm_position": "pre" if is_pre else "post",
        "final_norm": is_pre and normed,
        "embedding_norm": told["layernorm_embedding"],
        "scale_embedding": not told["no_scale_embedding"],
        "activation_function": ACTIVATIONS[told["activation_fn"]],
        "tie_word_embeddings": bool(tied and not folded),
        "share_encoder_decoder_embeddings": bool(shared and not folded),
    }
    names = ("decoder_attention_heads", "dropout", "attention_dropout", "activation_dropout")
    return fields | {name: told[name] for name in names if name in told}


POSITIONS = ("encoder.embed_positions.weight", "decoder.embed_positions.weight")
QKVO = ("q_proj", "k_proj", "v_proj", "out_proj")
FFN = ("fc1", "fc2")
ATTENTIONS = {  # theirs -> ours
    "encoder.layers.{i}.self_attn": f"{ENCODER}.self_attn",
    "decoder.layers.{i}.self_attn": f"{DECODER}.self_attn",
    "decoder.layers.{i}.encoder_attn": f"{DECODER}.cross_attn",
}
NORMS = {  # of a layer, theirs -> ours; the numbers are those of earlier versions
    "encoder.layers.{i}.self_attn_layer_norm": f"{ENCODER}.self_attn_layer_norm",
    "encoder.layers.{i}.final_layer_norm": f"{ENCODER}.feed_forward_layer_norm",
    "decoder.layers.{i}.self_attn_layer_norm": f"{DECODER}.self_attn_layer_norm",
    "decoder.layers.{i}.encoder_attn_layer_norm": f"{DECODER}.cross_attn_layer_norm",
    "decoder.layers.{i}.final_layer_norm": f"{DECODER}.feed_forward_layer_norm",
}
EARLIER = {
    "encoder.layers.{i}.layer_norms.0": f"{ENCODER}.self_attn_layer_norm",
    "encoder.layers.{i}.layer_norms.1": f"{ENCODER}.feed_forward_layer_norm",
    "decoder.layers.{i}.layer_norms.0": f"{DECODER}.self_attn_layer_norm",
    "decoder.layers.{i}.layer_norms.1": f"{DECODER}.cross_attn_layer_norm",
    "decoder.layers.{i}.layer_norms.2": f"{DECODER}.feed_forward_layer_norm",
    "{encoder|decoder}.layer_norm": "model.{encoder|decoder}.norm",
    "{encoder|decoder}.layernorm_embedding": "model.{encoder|decoder}.embedding_layer_norm",
}
OPTIONAL: dict[str, str | TensorRule] = {
    **{f"{theirs}.{{p}}": f"{ours}.{{p}}" for theirs, ours in (NORMS | EARLIER).items()},
    **{key: use for theirs, ours in ATTENTIONS.items() for key, use in attention(theirs, QKVO, ours).items()},
    **{
        f"{theirs}.in_proj_{{p}}": split_qkv(*(f"{ours}.{name}.{{p}}" for name in QKVO[:3]))
        for theirs, ours in ATTENTIONS.items()
    },
    "{encoder|decoder}.embed_positions.weight": TensorRule(
        ("model.{encoder|decoder}.embed_positions.weight",), learned_positions, "positions without the padding's rows"
    ),
    "decoder.output_projection.weight": TensorRule(("lm_head.weight",), through_the_output_map),
    "decoder.embed_out": TensorRule(("lm_head.weight",), through_the_output_map),
    "decoder.project_in_dim.weight": left_out("multiplied into the target's embeddings"),
    "decoder.project_out_dim.weight": left_out("multiplied into the projection before the softmax"),
    "encoder.layers.{i}.{in_proj|out_proj|fc1|fc2}_{weight|bias}": left_out("copies for a fast path of its encoder"),
    "{encoder|decoder}.version": left_out("a number of its format"),
    "{encoder|decoder}.embed_positions._float_tensor": left_out("of its sinusoids; it holds nothing"),
    "{encoder|decoder}.embed_positions.weights": left_out("its sinusoids, which are computed"),
}

LAYOUT = Layout(
    name="fairseq",
    title="fairseq, transformer",
    keys={
        "encoder.embed_tokens.weight": "model.encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight": TensorRule(("model.decoder.embed_tokens.weight",), through_the_input_map),
        **feed_forward("encoder.layers.{i}.", FFN, ENCODER),
        **feed_forward("decoder.layers.{i}.", FFN, DECODER),
        **OPTIONAL,
    },
    config={"position_embedding_type": "learned"},
    num_heads=lambda facts, state: facts.metadata.get("encoder_attention_heads"),
    special_ids={"bos_token_id": 0, "pad_token_id": PAD, "eos_token_id": 2, "decoder_start_token_id": 2},
    settings=SETTINGS,
    assumed=ASSUMED,
    variant_config=variant_config,
    made=made,
    generation={  # of fairseq-generate: --beam, --max-len-b, --min-len; it stops at as many ends, and forbids padding
        **{"num_beams": 5, "max_new_tokens": 200, "early_stopping": True},
        **{"min_new_tokens": 1, "suppress_tokens": [PAD]},
    },
    run=lambda model, source, source_mask, target, target_mask: model(source, None, target)[0],
    optional=tuple(OPTIONAL),
)
