"""Settings and layout of the transformer models of OpenNMT-py, versions 2 and 3.

Source: OpenNMT-py 2.3.0 and 3.5.1, model_builder.py, modules/embeddings.py, encoders/ and decoders/transformer.py.
"""

from argparse import Namespace
from typing import Any

import torch

from ..layout import DECODER, ENCODER, PROJECTIONS, CheckpointInfo, Kind, Layout, State, TensorRule, layers
from ..pickle_stubs import ObjectStub
from ..weight_folding import validate_sinusoidal_table

SPECIAL = {"unk_token_id": "<unk>", "pad_token_id": "<blank>", "bos_token_id": "<s>", "eos_token_id": "</s>"}
SOURCE = "encoder.embeddings.make_embedding.emb_luts.0.weight"
TARGET = "decoder.embeddings.make_embedding.emb_luts.0.weight"
SETTINGS: dict[str, Kind] = {
    **dict.fromkeys(("heads", "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), int),
    "max_new_tokens": int,
    **dict.fromkeys(("norm_eps", "dropout", "attention_dropout", "length_penalty"), float),
    **dict.fromkeys(("share_embeddings", "share_decoder_embeddings"), bool),
    "position_encoding_type": ("SinusoidalInterleaved", "SinusoidalConcat"),
    "pos_ffn_activation_fn": ("relu", "gelu"),
}
DEFAULT_SETTINGS: dict[str, Any] = {
    **{"position_encoding_type": "SinusoidalInterleaved", "pos_ffn_activation_fn": "relu", "norm_eps": 1e-6},
    **{"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3},
}
SUPPORTED_VALUES = {  # of the options that change the architecture
    **{"model_type": "text", "model_task": "seq2seq", "data_task": "seq2seq", "encoder_type": "transformer"},
    **{"decoder_type": "transformer", "self_attn_type": ("scaled-dot", "scaled-dot-flash"), "layer_norm": "standard"},
    **{"position_encoding": True, "generator_function": "softmax", "copy_attn": False, "num_kv": 0},
    **{"max_relative_positions": 0, "relative_positions_buckets": 0, "parallel_residual": False},
    **{"shared_layer_norm": False, "num_experts": 0, "sliding_window": 0, "n_src_feats": 0, "lora_layers": []},
    **{"lora_embedding": False, "quant_layers": [], "multiquery": False, "decoder_start_token": ("<s>", "</s>")},
    "pos_ffn_activation_fn": ("relu", "gelu"),
    "position_encoding_type": ("SinusoidalInterleaved", "SinusoidalConcat"),
}


def parse_checkpoint(content: Any) -> tuple[dict, dict[str, Any]] | None:
    """Return the tensors of model and generator, and the settings and vocabularies, or None for other files.

    Source vocabularies of version 2 lack <s> and </s>. They get unused rows for these tokens.
    """
    if not (isinstance(content, dict) and "vocab" in content and isinstance(content.get("opt"), Namespace)):
        return None
    vocab = content["vocab"] if isinstance(content["vocab"], dict) else {}
    options = vars(content["opt"]) | {"decoder_start_token": vocab.get("decoder_start_token")}
    for name, expected in SUPPORTED_VALUES.items():
        value = options.get(name)
        supported = expected if isinstance(expected, tuple) else (expected, None)
        if value is not None and value not in supported:
            raise ValueError(f"has the OpenNMT-py option {name}={str(value)[:80]}, which is not supported.")
    if not isinstance(content.get("model"), dict) or not isinstance(content.get("generator"), dict):
        raise ValueError(
            "has no `model` and `generator`. Save it with save_format: pytorch, and not only LoRA weights."
        )
    state = dict(content["model"])
    state |= {f"generator.{key.removeprefix('0.')}": value for key, value in content["generator"].items()}
    settings = DEFAULT_SETTINGS | {name: options[name] for name in SETTINGS if options.get(name) is not None}
    phases = [name for name in ("dropout", "attention_dropout") if isinstance(settings.get(name), list)]
    settings |= {name: (settings[name] or [0.0])[0] for name in phases}  # lists have one value per training phase
    vocabularies = read_vocabularies(vocab)
    if vocabularies:
        for key, side in ((SOURCE, "source"), (TARGET, "target")):
            rows = len(state[key]) if isinstance(state.get(key), torch.Tensor) and state[key].ndim else 0
            if rows and rows != len(vocabularies[side]):
                raise ValueError(f"has {rows} rows in {key}, but {len(vocabularies[side])} tokens in the vocabulary.")
        if vocabularies["source"] != vocabularies["target"]:
            add_special_rows(state, vocabularies)
        settings |= {name: vocabularies["target"].index(SPECIAL[name]) for name in DEFAULT_SETTINGS if name in SPECIAL}
    if isinstance(vocab.get("src"), list):  # version 2 has torchtext fields
        settings |= {"length_penalty": 1.0, "max_new_tokens": 250}  # defaults of onmt_translate 3
    if options["decoder_start_token"] == "</s>":
        settings["decoder_start_token_id"] = settings["eos_token_id"]
    return state, settings | {"vocabularies": vocabularies}


def read_vocabularies(vocab: dict) -> dict[str, list[str]]:
    """Return the tokens of both sides from torchtext fields (version 2) or lists (version 3), or {} for others."""
    vocabularies = {}
    for side, name in (("source", "src"), ("target", "tgt")):
        tokens = vocab.get(name)
        if isinstance(tokens, ObjectStub):  # TextMultiField with fields [(name, Field)]; Field.vocab.itos
            try:
                tokens = tokens.state["fields"][0][1].state["vocab"].state["itos"]
            except (KeyError, IndexError, TypeError, AttributeError):
                return {}
        if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
            return {}
        if len(set(tokens)) < len(tokens):
            raise ValueError(f"has a repeated token in the {side} vocabulary.")
        vocabularies[side] = tokens
    if missing := [token for token in SPECIAL.values() if token not in vocabularies["target"]]:
        raise ValueError(f"has no {missing[0]} in the target vocabulary, which is required.")
    return vocabularies


def add_special_rows(state: dict, vocabularies: dict[str, list[str]]) -> None:
    """Insert missing special tokens into the source at their target ids, with rows of zeros."""
    table = state.get(SOURCE)
    for row, token in enumerate(vocabularies["target"][: max(map(vocabularies["target"].index, SPECIAL.values())) + 1]):
        if token in SPECIAL.values() and token not in vocabularies["source"] and isinstance(table, torch.Tensor):
            if table.ndim != 2:
                return  # reported later
            vocabularies["source"] = [*vocabularies["source"][:row], token, *vocabularies["source"][row:]]
            state[SOURCE] = table = torch.cat([table[:row], table.new_zeros(1, table.shape[1]), table[row:]])


def fold_position_table(table: torch.Tensor, info: CheckpointInfo) -> tuple[torch.Tensor, ...]:
    """Validate and drop a table (length, 1, d_model) with the sinusoids of the paper."""
    is_computed = info.metadata["position_encoding_type"] == "SinusoidalConcat"
    return () if is_computed else validate_sinusoidal_table(table.transpose(0, 1), info)


def computed_tensors(info: CheckpointInfo, tensors: State) -> dict[str, State]:
    """Return the sinusoids of fairseq, if used, as a table of learned positions."""
    if info.metadata["position_encoding_type"] != "SinusoidalConcat":
        return {}
    names = [f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")]
    tables = [info.state[key].float().flatten(0, -2) for key in POSITIONS]
    return {"sinusoids of fairseq as a table of learned positions": dict(zip(names, tables, strict=True))}


def variant_config(info: CheckpointInfo) -> dict[str, Any]:
    settings, state = info.metadata, info.state
    learned = settings["position_encoding_type"] == "SinusoidalConcat"
    output = state["generator.weight"]
    fields = {
        "layer_norm_eps": settings["norm_eps"],
        "activation_function": settings["pos_ffn_activation_fn"],
        "position_embedding_type": "learned" if learned else "sinusoidal",
        "tie_word_embeddings": settings.get("share_decoder_embeddings", torch.equal(output, state[TARGET])),
        "share_encoder_decoder_embeddings": settings.get("share_embeddings", torch.equal(state[SOURCE], state[TARGET])),
        **{name: settings[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
    }
    names = ("dropout", "attention_dropout", "decoder_start_token_id")
    return fields | {name: settings[name] for name in names if name in settings}


QKVO = ("linear_query", "linear_keys", "linear_values", "final_linear")
FFN = ("feed_forward.w_1", "feed_forward.w_2")
ENCODER_NORMS = ("layer_norm", "feed_forward.layer_norm")
DECODER_NORMS = ("layer_norm_1", "layer_norm_2", "feed_forward.layer_norm")
POSITION_RULE = TensorRule((), fold_position_table, "positions are computed; the table agrees", is_recomputed=True)
POSITIONS = [f"{side}.embeddings.make_embedding.pe.pe" for side in ("encoder", "decoder")]

LAYOUT = Layout(
    name="opennmt",
    title="OpenNMT-py, transformer",
    keys={
        SOURCE: "model.encoder.embed_tokens.weight",
        TARGET: "model.decoder.embed_tokens.weight",
        **dict.fromkeys(POSITIONS, POSITION_RULE),
        **layers(ENCODER, "encoder.transformer.{i}", ("self_attn",), FFN, ENCODER_NORMS, QKVO),
        **layers(DECODER, "decoder.transformer_layers.{i}", ("self_attn", "context_attn"), FFN, DECODER_NORMS, QKVO),
        "{encoder|decoder}.layer_norm.{p}": "model.{encoder|decoder}.norm.{p}",
        "generator.{p}": "lm_head.{p}",
    },
    config={"norm_position": "pre", "lm_head_bias": True},
    num_heads=lambda info: info.metadata.get("heads"),
    zero_biases=(*PROJECTIONS, "fc1", "fc2"),
    settings=SETTINGS,
    default_settings=DEFAULT_SETTINGS,
    variant_config=variant_config,
    computed_tensors=computed_tensors,
    generation={"num_beams": 5, "length_penalty": 0.0, "max_new_tokens": 100},  # defaults of onmt_translate 2
)
