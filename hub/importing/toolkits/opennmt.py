"""OpenNMT-py's transformers, versions 2 and 3: what their files tell, and the layout of their weights.

Read off OpenNMT-py 2.3.0 and 3.5.1: model_builder.py, modules/embeddings.py, encoders/ and decoders/transformer.py.
"""

from argparse import Namespace
from typing import Any

import torch

from hub.importing.layout import (
    DECODER,
    ENCODER,
    PROJECTIONS,
    CheckpointInfo,
    Kind,
    Layout,
    State,
    TensorRule,
    attention,
    feed_forward,
)
from hub.importing.pickle_stubs import ObjectStub
from hub.importing.weight_folding import sinusoids

SPECIAL = {"unk_token_id": "<unk>", "pad_token_id": "<blank>", "bos_token_id": "<s>", "eos_token_id": "</s>"}
SOURCE = "encoder.embeddings.make_embedding.emb_luts.0.weight"
TARGET = "decoder.embeddings.make_embedding.emb_luts.0.weight"
SETTINGS: dict[str, Kind] = {
    **dict.fromkeys(("heads", "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), int),
    **dict.fromkeys(("norm_eps", "dropout", "attention_dropout"), float),
    **dict.fromkeys(("share_embeddings", "share_decoder_embeddings"), bool),
    "position_encoding_type": ("SinusoidalInterleaved", "SinusoidalConcat"),
    "pos_ffn_activation_fn": ("relu", "gelu"),
}
ASSUMED = {
    **{"position_encoding_type": "SinusoidalInterleaved", "pos_ffn_activation_fn": "relu", "norm_eps": 1e-6},
    **{"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3},
}
EXPECTED = {  # the only values of settings that are ours
    **{"model_type": "text", "model_task": "seq2seq", "data_task": "seq2seq", "encoder_type": "transformer"},
    **{"decoder_type": "transformer", "self_attn_type": ("scaled-dot", "scaled-dot-flash"), "layer_norm": "standard"},
    **{"position_encoding": True, "generator_function": "softmax", "copy_attn": False, "num_kv": 0},
    **{"max_relative_positions": 0, "relative_positions_buckets": 0, "parallel_residual": False},
    **{"shared_layer_norm": False, "num_experts": 0, "sliding_window": 0, "n_src_feats": 0, "lora_layers": []},
    **{"lora_embedding": False, "quant_layers": [], "multiquery": False, "decoder_start_token": ("<s>", "</s>")},
    "pos_ffn_activation_fn": ("relu", "gelu"),
    "position_encoding_type": ("SinusoidalInterleaved", "SinusoidalConcat"),
}


def is_toolkit_checkpoint(content: Any) -> bool:
    """Whether OpenNMT-py wrote a file: weights in two parts, a vocabulary and its options."""
    return isinstance(content, dict) and {"vocab", "opt"} <= content.keys() and isinstance(content["opt"], Namespace)


def parse_checkpoint(content: dict) -> tuple[dict, dict[str, Any]]:
    """The model's and the generator's tensors, its options and vocabularies.

    A source's vocabulary of version 2 lacks <s> and </s>: it gets rows for them, which no text reaches.

    Raises:
        ValueError: no transformer, or one with an option that is none of ours; names it.
    """
    vocab = content["vocab"] if isinstance(content["vocab"], dict) else {}
    options = vars(content["opt"]) | {"decoder_start_token": vocab.get("decoder_start_token")}
    for name, expected in EXPECTED.items():
        value = options.get(name)
        ours = expected if isinstance(expected, tuple) else (expected, None)
        if value is not None and value not in ours:
            raise ValueError(f"is a model of OpenNMT-py's with {name}={str(value)[:80]}, which is not ours.")
    if not isinstance(content.get("model"), dict) or not isinstance(content.get("generator"), dict):
        raise ValueError(
            "has no weights: OpenNMT-py put them elsewhere (save_format: safetensors, or LoRA alone). Give a file of "
            "save_format: pytorch, with `model` and `generator`."
        )
    state = dict(content["model"])
    state |= {f"generator.{key.removeprefix('0.')}": value for key, value in content["generator"].items()}
    told: dict[str, Any] = ASSUMED | {name: options[name] for name in SETTINGS if options.get(name) is not None}
    for name in ("dropout", "attention_dropout"):  # a list of them, one for each part of a training
        if isinstance(told.get(name), list):
            told[name] = told[name][0] if told[name] else 0.0
    found = vocabularies(content["vocab"])
    if found:
        for key, side in ((SOURCE, "source"), (TARGET, "target")):
            rows = len(state[key]) if isinstance(state.get(key), torch.Tensor) and state[key].ndim else 0
            if rows and rows != len(found[side]):
                raise ValueError(f"has {rows} rows in {key}, but {len(found[side])} tokens in its vocabulary.")
        if found["source"] != found["target"]:
            with_special_rows(state, found)
        told |= {name: found["target"].index(SPECIAL[name]) for name in ASSUMED if name in SPECIAL}
    if options["decoder_start_token"] == "</s>":
        told["decoder_start_token_id"] = told["eos_token_id"]
    return state, told | {"vocabularies": found}


def vocabularies(vocab: Any) -> dict[str, list[str]]:
    """The tokens of both sides by id, of torchtext's fields (version 2) or plain lists (version 3); {} if unknown."""
    if not isinstance(vocab, dict):
        return {}
    found = {}
    for side, name in (("source", "src"), ("target", "tgt")):
        tokens = vocab.get(name)
        if isinstance(tokens, ObjectStub):  # TextMultiField: fields [(name, Field)], its vocab's itos
            try:
                tokens = tokens.state["fields"][0][1].state["vocab"].state["itos"]
            except (KeyError, IndexError, TypeError, AttributeError):
                return {}
        if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
            return {}
        if len(set(tokens)) < len(tokens):
            raise ValueError(f"has a token twice in its vocabulary of the {side}.")
        found[side] = tokens
    if lacking := [token for token in SPECIAL.values() if token not in found["target"]]:
        raise ValueError(
            f"has no {lacking[0]} in its vocabulary of the target: a model without it cannot be used here."
        )
    return found


def with_special_rows(state: dict, found: dict[str, list[str]]) -> None:
    """Puts the special tokens that the source lacks to where the target has them, with rows of zeros."""
    table = state.get(SOURCE)
    for row, token in enumerate(found["target"][: max(map(found["target"].index, SPECIAL.values())) + 1]):
        if token in SPECIAL.values() and token not in found["source"] and isinstance(table, torch.Tensor):
            if table.ndim != 2:
                return  # which is told elsewhere
            found["source"] = [*found["source"][:row], token, *found["source"][row:]]
            state[SOURCE] = table = torch.cat([table[:row], table.new_zeros(1, table.shape[1]), table[row:]])


def table_of_positions(table: torch.Tensor, facts: CheckpointInfo) -> tuple[torch.Tensor, ...]:
    """A table (length, 1, d_model) that is the paper's is compared with ours and left out."""
    if facts.metadata["position_encoding_type"] == "SinusoidalConcat":
        return ()
    fold = sinusoids().fold
    return fold(table.transpose(0, 1), facts) if fold else ()


def made(facts: CheckpointInfo, tensors: State) -> dict[str, State]:
    """fairseq's sinusoids, which are one of its two kinds, are the table of learned positions that its file holds."""
    found: dict[str, State] = {}
    if facts.metadata["position_encoding_type"] == "SinusoidalConcat":
        tables = {}
        for side in ("encoder", "decoder"):
            key = f"{side}.embeddings.make_embedding.pe.pe"
            if key not in facts.state:
                raise ValueError(f"the file lacks {key} (our model.{side}.embed_positions.weight).")
            tables[f"model.{side}.embed_positions.weight"] = facts.state[key].float().flatten(0, -2)
        found["sinusoids in halves as a table of learned positions"] = tables
    return found


def variant_config(facts: CheckpointInfo, state: State) -> dict[str, Any]:
    told = facts.metadata
    learned = told["position_encoding_type"] == "SinusoidalConcat"
    output = state["generator.weight"]
    fields = {
        "layer_norm_eps": told["norm_eps"],
        "activation_function": told["pos_ffn_activation_fn"],
        "position_embedding_type": "learned" if learned else "sinusoidal",
        "tie_word_embeddings": told.get("share_decoder_embeddings", torch.equal(output, state[TARGET])),
        "share_encoder_decoder_embeddings": told.get("share_embeddings", torch.equal(state[SOURCE], state[TARGET])),
        **{name: told[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
    }
    names = ("dropout", "attention_dropout", "decoder_start_token_id")
    return fields | {name: told[name] for name in names if name in told}


QKVO = ("linear_query", "linear_keys", "linear_values", "final_linear")
FFN = ("w_1", "w_2")
ENC, DEC = "encoder.transformer.{i}", "decoder.transformer_layers.{i}"
POSITIONS = [f"{side}.embeddings.make_embedding.pe.pe" for side in ("encoder", "decoder")]

LAYOUT = Layout(
    name="opennmt",
    title="OpenNMT-py, transformer",
    keys={
        SOURCE: "model.encoder.embed_tokens.weight",
        TARGET: "model.decoder.embed_tokens.weight",
        **{
            key: TensorRule((), table_of_positions, "positions are computed; the table agrees", computed=True)
            for key in POSITIONS
        },
        **attention(f"{ENC}.self_attn", QKVO, f"{ENCODER}.self_attn"),
        **attention(f"{DEC}.self_attn", QKVO, f"{DECODER}.self_attn"),
        **attention(f"{DEC}.context_attn", QKVO, f"{DECODER}.cross_attn"),
        **feed_forward(f"{ENC}.feed_forward.", FFN, ENCODER),
        **feed_forward(f"{DEC}.feed_forward.", FFN, DECODER),
        f"{ENC}.layer_norm.{{p}}": f"{ENCODER}.self_attn_layer_norm.{{p}}",
        f"{ENC}.feed_forward.layer_norm.{{p}}": f"{ENCODER}.feed_forward_layer_norm.{{p}}",
        f"{DEC}.layer_norm_1.{{p}}": f"{DECODER}.self_attn_layer_norm.{{p}}",
        f"{DEC}.layer_norm_2.{{p}}": f"{DECODER}.cross_attn_layer_norm.{{p}}",
        f"{DEC}.feed_forward.layer_norm.{{p}}": f"{DECODER}.feed_forward_layer_norm.{{p}}",
        "{encoder|decoder}.layer_norm.{p}": "model.{encoder|decoder}.norm.{p}",
        "generator.{p}": "lm_head.{p}",
    },
    config={"norm_position": "pre", "lm_head_bias": True},
    num_heads=lambda facts, state: facts.metadata.get("heads"),
    zero_biases=(*PROJECTIONS, "fc1", "fc2"),
    settings=SETTINGS,
    assumed=ASSUMED,
    variant_config=variant_config,
    made=made,
    generation={"num_beams": 5, "length_penalty": 0.0, "max_new_tokens": 250},  # of onmt_translate
)
