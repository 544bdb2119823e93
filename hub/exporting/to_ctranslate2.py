"""A model of ours for CTranslate2, an inference engine in C++ for serving, with quantized weights where asked.

Straight through its `TransformerSpec`: its loader for Marian's checkpoints would start the decoder from a zero
embedding and drop the padding's row, neither of which is so here.
"""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ctranslate2.specs import common_spec, transformer_spec
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from hub.exporting.tokenizer import tokens_by_id, vocabularies
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.modeling_vanilla_transformer import MultiHeadAttention, TransformerStack, sinusoidal_encoding

USAGE = """{out} is a model for CTranslate2. To translate, with ctranslate2 and transformers alone:
    source, target = (AutoTokenizer.from_pretrained(folder) for folder in ("{source}", "{target}"))
    tokens = source.convert_ids_to_tokens(source("a sentence").input_ids)
    best = ctranslate2.Translator("{out}").translate_batch([tokens], beam_size=5)[0].hypotheses[0]
    print(target.decode(target.convert_tokens_to_ids(best)))"""
MASKED_SCORE = -1e9  # a bias of the softmax that leaves a token no probability
UNSTORED = {  # fields of a generation config that a CTranslate2 model cannot store, with the value without effect
    **{"forced_bos_token_id": None, "begin_suppress_tokens": None, "repetition_penalty": 1.0},
    **{"no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0},
}
ACTIVATIONS = {
    "relu": common_spec.Activation.RELU,
    "gelu": common_spec.Activation.GELU,
    "gelu_new": common_spec.Activation.GELUTanh,
    "gelu_pytorch_tanh": common_spec.Activation.GELUTanh,
    "silu": common_spec.Activation.SWISH,
    "swish": common_spec.Activation.SWISH,
}


def convert(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    quantization: str | None = None,
) -> Callable[[Path], None]:
    """What writes the equal model into a folder for `ctranslate2.Translator`; arguments and errors: `to_spec`."""
    spec = to_spec(model, tokenizer, quantization)
    return lambda folder: spec.save(str(folder))


def to_spec(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    quantization: str | None = None,
) -> transformer_spec.TransformerSpec:
    """The specification of an equal model for `ctranslate2.Translator`; its `save(folder)` writes it.

    Sinusoids become a table of `config.max_position_embeddings` positions: the longest sentence that it takes.

    Args:
        quantization: how the weights of its matrices are stored: `int8`, `int16`, `float16`, `bfloat16`, ...; None:
            float32.

    Raises:
        ValueError: an architecture or a generation config that CTranslate2 cannot express; names what.
    """
    settings, names = model.generation_config, ("eos_token_id", "decoder_start_token_id")
    config: Any = copy.deepcopy(model.config)  # with the special ids that generate() reads
    config.update({name: each for name in names if (each := getattr(settings, name)) is not None})
    validate_ctranslate2_support(config, settings)
    encoder, decoder = model.get_encoder(), model.get_decoder()
    spec = transformer_spec.TransformerSpec(
        stack_spec(transformer_spec.TransformerEncoderSpec, config.encoder_attention_heads, encoder),
        stack_spec(transformer_spec.TransformerDecoderSpec, config.decoder_attention_heads, decoder),
    )
    set_stack(spec.encoder, spec.encoder.embeddings[0], encoder)
    set_stack(spec.decoder, spec.decoder.embeddings, decoder)
    set_linear(spec.decoder.projection, model.lm_head)
    if forbidden := forbidden_tokens(model):
        bias = torch.zeros(config.decoder_vocab_size) if model.lm_head.bias is None else model.lm_head.bias.detach()
        spec.decoder.projection.bias = array(bias.index_fill(0, torch.tensor(forbidden), MASKED_SCORE))

    sizes = (config.vocab_size, config.decoder_vocab_size)
    source, target = map(tokens_by_id, vocabularies(tokenizer), sizes)
    spec.register_source_vocabulary(source)
    spec.register_target_vocabulary(target)
    spec.config.layer_norm_epsilon = config.layer_norm_eps
    spec.config.unk_token = tokenizer.unk_token or tokenizer.pad_token
    spec.config.bos_token = tokenizer.bos_token or target[config.decoder_start_token_id]
    spec.config.eos_token = target[config.eos_token_id]
    spec.config.decoder_start_token = target[config.decoder_start_token_id]
    spec.validate()
    spec.optimize(quantization=quantization)
    return spec


def forbidden_tokens(model: VanillaTransformerForConditionalGeneration) -> list[int]:
    """Those that its settings of generation never let come, such as the padding of an OPUS-MT model."""
    words = model.generation_config.bad_words_ids or []
    return sorted({*(word[0] for word in words if len(word) == 1), *(model.generation_config.suppress_tokens or [])})


def stack_spec(spec_class: type, heads: int, stack: TransformerStack):
    """An encoder's or decoder's empty specification.

    CTranslate2 has a last norm with pre-norm only, as the paper's successors do; its engine takes one after either.
    """
    config = stack.config
    spec = spec_class(
        len(stack.layers),
        heads,
        pre_norm=True,
        no_final_norm=not isinstance(stack.norm, nn.LayerNorm),
        activation=ACTIVATIONS[config.activation_function],
        layernorm_embedding=config.embedding_norm,
    )
    spec.pre_norm = config.norm_position == "pre"
    return spec


def set_stack(spec, embeddings, stack: TransformerStack) -> None:
    """Fills the specification of an encoder or decoder."""
    config = stack.config
    spec.scale_embeddings = math.sqrt(config.d_model) if config.scale_embedding else 1.0
    embeddings.weight = array(stack.embed_tokens.weight)
    if config.position_embedding_type == "learned":
        spec.position_encodings.encodings = array(stack.embed_positions.weight)
    else:
        positions = torch.arange(config.max_position_embeddings)
        spec.position_encodings.encodings = array(sinusoidal_encoding(positions, config.d_model))
    if config.embedding_norm:
        set_norm(spec.layernorm_embedding, stack.embedding_layer_norm)
    if isinstance(stack.norm, nn.LayerNorm):
        set_norm(spec.layer_norm, stack.norm)
    layers: Any = stack.layers
    for layer_spec, layer in zip(spec.layer, layers, strict=True):
        set_attention(layer_spec.self_attention, layer.self_attn, layer.self_attn_layer_norm)
        if hasattr(layer, "cross_attn"):
            set_attention(layer_spec.attention, layer.cross_attn, layer.cross_attn_layer_norm)
        set_norm(layer_spec.ffn.layer_norm, layer.feed_forward_layer_norm)
        set_linear(layer_spec.ffn.linear_0, layer.feed_forward.fc1)
        set_linear(layer_spec.ffn.linear_1, layer.feed_forward.fc2)


def set_attention(spec, attention: MultiHeadAttention, norm: nn.LayerNorm) -> None:
    """Self-attention has one matrix for queries, keys and values; cross-attention one for queries, one for the rest."""
    set_norm(spec.layer_norm, norm)
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    fused = [projections] if len(spec.linear) == 2 else [projections[:1], projections[1:]]
    for linear, parts in zip(spec.linear, fused, strict=False):
        linear.weight = array(torch.cat([part.weight for part in parts]))
        linear.bias = array(torch.cat([part.bias for part in parts]))
    set_linear(spec.linear[-1], attention.out_proj)


def set_linear(spec, linear: nn.Linear) -> None:
    spec.weight = array(linear.weight)
    if linear.bias is not None:
        spec.bias = array(linear.bias)


def set_norm(spec, norm: nn.LayerNorm) -> None:
    spec.gamma, spec.beta = array(norm.weight), array(norm.bias)


def array(tensor: torch.Tensor):
    return tensor.detach().float().contiguous().numpy()


def validate_ctranslate2_support(config: VanillaTransformerConfig, settings: GenerationConfig) -> None:
    unstored = [name for name, neutral in UNSTORED.items() if getattr(settings, name) not in (None, neutral)]
    unstored += ["bad_words_ids of several tokens"] * any(len(word) > 1 for word in settings.bad_words_ids or [])
    reasons = {
        "its heads have a width of their own (*_head_dim)": bool(config.key_head_dim or config.value_head_dim),
        f"its activation_function is {config.activation_function}": config.activation_function not in ACTIVATIONS,
        "it has several eos_token_id": isinstance(config.eos_token_id, list),
        "its special ids are not all set": None in (config.eos_token_id, config.decoder_start_token_id),
        f"remove {', '.join(unstored)} from its generation_config.json": bool(unstored),
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise ValueError(f"CTranslate2 cannot express this model: {'; '.join(found)}.")
