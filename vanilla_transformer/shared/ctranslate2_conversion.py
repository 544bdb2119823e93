"""Conversion to CTranslate2, an inference engine in C++ for CPUs and GPUs, with optional quantization.

The model is written as a `TransformerSpec`. CTranslate2's converter for Marian checkpoints is not used: it starts the
decoder from a zero embedding and drops the embedding of the pad token.
"""

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from ctranslate2.converters.transformers import BartLoader
from ctranslate2.specs import transformer_spec
from ctranslate2.specs.common_spec import Activation
from torch import nn
from transformers import GenerationConfig

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.modeling_vanilla_transformer import TransformerStack, sinusoidal_encoding
from vanilla_transformer.shared.generation_settings import masked_bias, special_token_ids, unsupported_settings
from vanilla_transformer.shared.transformers_conversion import validate_no_adapter

LOADER = BartLoader()  # copies the weights of modules that have the names of Bart
MASKED_SCORE = -1e9  # logit bias that sets the probability of a token to 0
ACTIVATIONS = {"relu": Activation.RELU, "gelu": Activation.GELU, "silu": Activation.SWISH, "swish": Activation.SWISH}
ACTIVATIONS |= {"gelu_new": Activation.GELUTanh, "gelu_pytorch_tanh": Activation.GELUTanh}


@torch.no_grad()
def to_spec(
    model: VanillaTransformerForConditionalGeneration,
    source: Sequence[str],
    target: Sequence[str],
    unk_token: str,
    bos_token: str | None = None,
    quantization: str | None = None,
    num_positions: int | None = None,
) -> transformer_spec.TransformerSpec:
    """Return the specification of the equivalent model for `ctranslate2.Translator`. Its method `save` writes it.

    `source` and `target` are the names of the tokens, in the order of their ids. `unk_token` replaces names that are
    not in `source`. `bos_token` defaults to the decoder start token. `quantization` is the type of the weight matrices,
    such as int8, or None (float32). `num_positions` is the maximum number of tokens of a sentence with sinusoidal
    positions, which are stored as a table. It defaults to `config.max_position_embeddings`.

    Raises ValueError if CTranslate2 does not support the architecture or the generation config.
    """
    validate_no_adapter(model)
    model = copy.deepcopy(model).float()  # quantization writes to the arrays
    config: Any = model.config
    config.update(special_token_ids(model))
    validate_ctranslate2_support(config, model.generation_config)
    encoder, decoder = model.get_encoder(), model.get_decoder()
    spec = transformer_spec.TransformerSpec(
        stack_spec(transformer_spec.TransformerEncoderSpec, config.encoder_attention_heads, encoder),
        stack_spec(transformer_spec.TransformerDecoderSpec, config.decoder_attention_heads, decoder),
    )
    positions = torch.arange(num_positions or config.max_position_embeddings)
    LOADER.set_encoder(spec.encoder, rename_modules(encoder, positions))
    LOADER.set_decoder(spec.decoder, rename_modules(decoder, positions))
    LOADER.set_linear(spec.decoder.projection, model.lm_head)
    if (bias := masked_bias(model, MASKED_SCORE)) is not None:
        spec.decoder.projection.bias = bias

    spec.register_source_vocabulary(source)
    spec.register_target_vocabulary(target)
    spec.config.layer_norm_epsilon = config.layer_norm_eps
    spec.config.unk_token = unk_token
    spec.config.bos_token = bos_token or target[config.decoder_start_token_id]
    spec.config.eos_token = target[config.eos_token_id]
    spec.config.decoder_start_token = target[config.decoder_start_token_id]
    spec.validate()
    spec.optimize(quantization=quantization)
    return spec


def stack_spec(spec_class: type, heads: int, stack: TransformerStack):
    """Return the empty specification of an encoder or decoder."""
    config = stack.config
    spec = spec_class(
        len(stack.layers), heads, pre_norm=True, no_final_norm=not isinstance(stack.norm, nn.LayerNorm),
        activation=ACTIVATIONS[config.activation_function], layernorm_embedding=config.embedding_norm,
    )  # fmt: skip
    spec.pre_norm = config.norm_position == "pre"  # with post-norm, the constructor would reject a final LayerNorm
    return spec


def rename_modules(stack: TransformerStack, positions: torch.Tensor) -> SimpleNamespace:
    """Return the modules of an encoder or decoder with the names of Bart, which `LOADER` reads."""
    config, layers = stack.config, []
    for layer in cast(Any, stack.layers):
        modules = {**layer._modules, **layer.feed_forward._modules, "final_layer_norm": layer.feed_forward_layer_norm}
        if "cross_attn" in modules:
            modules |= {"encoder_attn": layer.cross_attn, "encoder_attn_layer_norm": layer.cross_attn_layer_norm}
        layers.append(SimpleNamespace(**modules))
    modules = {**stack._modules, "layers": layers, "config": config}
    if config.position_embedding_type == "sinusoidal":
        modules["embed_positions"] = SimpleNamespace(weight=sinusoidal_encoding(positions, config.d_model))
    if config.embedding_norm:
        modules["layernorm_embedding"] = stack.embedding_layer_norm
    if isinstance(stack.norm, nn.LayerNorm):
        modules["layer_norm"] = stack.norm
    return SimpleNamespace(**modules)


def validate_ctranslate2_support(config: VanillaTransformerConfig, generation: GenerationConfig) -> None:
    """Raise ValueError if CTranslate2 does not support the architecture or the generation config."""
    # EOS is forced only at the length limit, which is an argument of `translate_batch()`
    implied = {"min_new_tokens": 1, "renormalize_logits": True, "forced_eos_token_id": config.eos_token_id}
    fields = unsupported_settings(generation, **implied)
    reasons = {
        "key_head_dim and value_head_dim must be None": bool(config.key_head_dim or config.value_head_dim),
        f"activation_function={config.activation_function}": config.activation_function not in ACTIVATIONS,
        "it has multiple eos_token_id": isinstance(config.eos_token_id, list),
        "a special token id is not set": None in (config.eos_token_id, config.decoder_start_token_id),
        f"remove {', '.join(fields)} from its generation_config.json": bool(fields),
    }
    if problems := [reason for reason, holds in reasons.items() if holds]:
        raise ValueError(f"CTranslate2 does not support this model: {'; '.join(problems)}.")
