# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""The encoder-decoder of "Attention Is All You Need" (Vaswani et al. 2017, arXiv:1706.03762), in the paper's order.

- 3.2.1  scaled dot-product attention   scaled_dot_product_attention
- 3.2.2  multi-head attention           MultiHeadAttention
- 3.3    feed-forward network           PositionWiseFeedForward
- 3.4    embeddings and softmax         resolve_inputs_embeds, TransformerStack.embed, lm_head
- 3.5    positional encoding            sinusoidal_encoding, LearnedPositionalEmbedding
- 3.1    encoder and decoder stacks     EncoderLayer, DecoderLayer, Encoder, Decoder
- 5.4    residual dropout               TransformerLayer.apply_sublayer, apply_dropout (dropout_vanilla_transformer.py)

Shapes: B batch, S source length, T target length, D hidden size, H heads, V target vocabulary.
K key dimension and E value dimension per head. In attention, T is the number of queries and S the number of keys.
"""

import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_vanilla_transformer import VanillaTransformerConfig, include_code
from .dropout_vanilla_transformer import apply_dropout
from .generation_vanilla_transformer import CACHE_NAME, VanillaTransformerGenerationMixin, accept_past_key_values
from .loss_vanilla_transformer import fused_linear_cross_entropy, is_eager_on_cpu

if TYPE_CHECKING:  # only so that transformers copies this file into a saved checkpoint
    from .pipeline_vanilla_transformer import TranslationPipeline as TranslationPipeline


# --- 3.2 Attention ---------------------------------------------------------------------------------------------------


def scaled_dot_product_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax(Q K^T / sqrt(d_k)) V (section 3.2.1, equation 1): the `"eager"` attention implementation.

    The shapes are query (B, H, T, K), key (B, H, S, K) and value (B, H, S, E); `scaling` is 1 / sqrt(d_k).
    `attention_mask` is broadcast to (B, H, T, S). A boolean mask is True for visible keys. Any other mask is added to
    the scores: it is 0 for visible keys and very negative for others.

    Returns:
        The weighted values (B, T, H, E) and the attention weights (B, H, T, S).
    """
    scores = torch.matmul(query * scaling, key.transpose(2, 3))  # (B, H, T, S)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
        if scores.dtype == torch.float16:  # the sum may be -inf, which would give NaN in rows of padding
            scores = scores.clamp(min=torch.finfo(scores.dtype).min)
    weights = nn.functional.softmax(scores, dim=-1)
    weights = apply_dropout(weights, dropout, module.training)
    return torch.matmul(weights, value).transpose(1, 2), weights


class MultiHeadAttention(nn.Module):
    """Section 3.2.2: Concat(head_1, ..., head_h) W^O with head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V).

    In self-attention, queries, keys and values come from the same sequence. In cross-attention ("encoder-decoder
    attention", section 3.2.3), keys and values come from the output of the encoder.
    """

    def __init__(self, config: VanillaTransformerConfig, num_heads: int, layer_idx: int = 0, is_causal: bool = False):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = is_causal  # attention functions use this flag if no attention mask is passed
        self.key_head_dim = config.key_head_dim or config.d_model // num_heads
        self.value_head_dim = config.value_head_dim or config.d_model // num_heads
        self.scaling = self.key_head_dim**-0.5
        self.q_proj = nn.Linear(config.d_model, num_heads * self.key_head_dim)
        self.k_proj = nn.Linear(config.d_model, num_heads * self.key_head_dim)
        self.v_proj = nn.Linear(config.d_model, num_heads * self.value_head_dim)
        self.out_proj = nn.Linear(num_heads * self.value_head_dim, config.d_model)

    @accept_past_key_values
    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: EncoderDecoderCache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from `hidden_states` (B, T, D) to `encoder_hidden_states` (B, S, D), or to itself if that is None.

        Returns:
            The output (B, T, D), and the attention weights (B, H, T, S) if the attention function computes them.
        """
        query = self.split_heads(self.q_proj(hidden_states), self.key_head_dim)  # (B, H, T, K)
        key, value = self.get_key_value_states(hidden_states, encoder_hidden_states, cache)
        implementation = self.config._attn_implementation
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, scaled_dot_product_attention)
        dropout = self.config.attention_dropout if self.training else 0.0
        heads, weights = attend(
            self, query, key, value, attention_mask, scaling=self.scaling, dropout=dropout, **kwargs
        )
        concatenated = heads.reshape(*hidden_states.shape[:-1], -1)  # (B, T, H * E)
        return self.out_proj(concatenated), weights

    def get_key_value_states(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None, cache: EncoderDecoderCache | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys (B, H, S, K) and values (B, H, S, E), including cached ones, and update the cache.

        In cross-attention, keys and values are computed in the first decoding step. Later steps read the cache.
        """
        is_cross = encoder_hidden_states is not None
        if is_cross and cache is not None and cache.is_updated.get(self.layer_idx):
            layer = cache.cross_attention_cache.layers[self.layer_idx]
            return layer.keys, layer.values

        states = encoder_hidden_states if encoder_hidden_states is not None else hidden_states
        key = self.split_heads(self.k_proj(states), self.key_head_dim)
        value = self.split_heads(self.v_proj(states), self.value_head_dim)
        if cache is None:
            return key, value
        layer_cache = cache.cross_attention_cache if is_cross else cache.self_attention_cache
        key, value = layer_cache.update(key, value, self.layer_idx)
        if is_cross:
            cache.is_updated[self.layer_idx] = True
        return key, value

    @staticmethod
    def split_heads(states: torch.Tensor, head_dim: int) -> torch.Tensor:
        """(B, T, H * head_dim) -> (B, H, T, head_dim). H is inferred, because tensor parallelism splits the heads."""
        return states.view(*states.shape[:-1], -1, head_dim).transpose(1, 2)


# --- 3.3 Position-wise feed-forward networks -------------------------------------------------------------------------


class PositionWiseFeedForward(nn.Module):
    """Section 3.3, equation 2: FFN(x) = max(0, x W_1 + b_1) W_2 + b_2, the same at every position."""

    def __init__(self, config: VanillaTransformerConfig, ffn_dim: int):
        super().__init__()
        self.fc1 = nn.Linear(config.d_model, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, config.d_model)
        if (name := config.activation_function) not in ACT2FN:
            raise ValueError(f"activation_function={name!r} is not supported: choose one of {', '.join(ACT2FN)}.")
        self.activation = ACT2FN[name]
        self.dropout = config.activation_dropout

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, D)."""
        hidden_states = self.activation(self.fc1(hidden_states))  # (B, T, d_ff)
        hidden_states = apply_dropout(hidden_states, self.dropout, self.training)
        return self.fc2(hidden_states)


# --- 3.4 Embeddings and softmax --------------------------------------------------------------------------------------


def resolve_inputs_embeds(
    embed_tokens: nn.Module,
    vocab_size: int,
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None = None,
    name_prefix: str = "",
) -> torch.Tensor:
    """Return the token embeddings (B, T, D) of `input_ids` (B, T), or `inputs_embeds` unchanged (section 3.4).

    `TransformerStack.embed` scales them by sqrt(d_model). `name_prefix` precedes argument names in error messages.

    Raises:
        ValueError: If not exactly one of the two is given, or if an id is outside the vocabulary (CPU only).
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError(f"Specify exactly one of {name_prefix}input_ids and {name_prefix}inputs_embeds.")
    if input_ids is None:
        return inputs_embeds  # type: ignore[return-value]
    if is_eager_on_cpu(input_ids) and input_ids.numel():
        low, high = (int(bound) for bound in input_ids.aminmax())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"{name_prefix}input_ids contains the id {low if low < 0 else high}, outside the vocabulary of "
                f"{vocab_size} tokens (0 to {vocab_size - 1}). Encode the text with the tokenizer of this model."
            )
    return embed_tokens(input_ids)


# --- 3.5 Positional encoding -----------------------------------------------------------------------------------------


def sinusoidal_encoding(positions: torch.Tensor, d_model: int) -> torch.Tensor:
    """Compute PE(pos, 2i) = sin(pos / 10000^(2i / d_model)) and PE(pos, 2i + 1) = cos of the same (section 3.5).

    It is computed, not read from a table, so sequences can have any length. It is float32, because bfloat16 cannot
    represent all integers above 256. Integer positions of shape (...) give an encoding of shape (..., d_model).
    """
    even = torch.arange(0, d_model, 2, device=positions.device, dtype=torch.float32)  # 2i
    angles = positions.float().unsqueeze(-1) * torch.exp(even * (-math.log(10000.0) / d_model))
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)


class LearnedPositionalEmbedding(nn.Embedding):
    """Position embedding with one learned vector per position, up to a maximum length (table 3, row E)."""

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """(B, T) -> (B, T, D). Raises ValueError for positions outside the table (checked on CPU only)."""
        size = self.num_embeddings
        if is_eager_on_cpu(positions) and positions.numel() and (length := int(positions.max()) + 1) > size:
            raise ValueError(
                f"A sequence of {length} tokens is longer than the {size} learned positions "
                f"(max_position_embeddings={size}): shorten it, or train with sinusoidal positions."
            )
        return super().forward(positions)


def create_position_ids(
    attention_mask: torch.Tensor | None, states: torch.Tensor, past_length: int = 0
) -> torch.Tensor:
    """Return positions (B, T) or (1, T). Padding on either side is not counted.

    Args:
        attention_mask: Padding mask (B, past and new tokens), non-zero for real tokens. Or a causal 4D mask
            (B, 1, T, S), boolean or additive. If it is None or a FlexAttention `BlockMask`, all tokens are counted.
        states: Hidden states (B, T, D).
        past_length: Number of cached tokens before `states`. Only used if `attention_mask` is not a tensor.
    """
    length = states.shape[1]
    if not isinstance(attention_mask, torch.Tensor):
        return (torch.arange(length, device=states.device) + past_length)[None]
    if attention_mask.ndim == 2:
        counts = attention_mask.long().cumsum(-1)
    else:
        visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        counts = visible[:, 0].sum(-1)
    return (counts[:, -length:] - 1).clamp(min=0)


# --- 3.1 Encoder and decoder stacks ----------------------------------------------------------------------------------


class TransformerLayer(GradientCheckpointingLayer):
    """Base class of the layers of both stacks, with a residual connection around each sublayer."""

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__()
        self.dropout = config.dropout
        self.norm_position = config.norm_position

    def apply_sublayer(self, norm: nn.LayerNorm, hidden_states: torch.Tensor, sublayer: Callable) -> torch.Tensor:
        """Compute LayerNorm(x + Sublayer(x)) (section 3.1), with the dropout of section 5.4 on the sublayer's output.

        Pre-norm deviates from the paper: x + Sublayer(LayerNorm(x)).
        """
        if self.norm_position == "pre":
            return hidden_states + apply_dropout(sublayer(norm(hidden_states)), self.dropout, self.training)
        return norm(hidden_states + apply_dropout(sublayer(hidden_states), self.dropout, self.training))


class EncoderLayer(TransformerLayer):
    """Encoder layer (section 3.1): self-attention and a feed-forward network."""

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int):
        super().__init__(config)
        self.self_attn = MultiHeadAttention(config, config.encoder_attention_heads, layer_idx)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.feed_forward = PositionWiseFeedForward(config, config.encoder_ffn_dim)
        self.feed_forward_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Unpack[TransformersKwargs]
    ) -> torch.Tensor:
        """(B, S, D) -> (B, S, D)."""
        hidden_states = self.apply_sublayer(
            self.self_attn_layer_norm,
            hidden_states,
            lambda x: self.self_attn(x, attention_mask=attention_mask, **kwargs)[0],
        )
        return self.apply_sublayer(self.feed_forward_layer_norm, hidden_states, self.feed_forward)


class DecoderLayer(TransformerLayer):
    """Decoder layer (section 3.1): masked self-attention, cross-attention and a feed-forward network."""

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int):
        super().__init__(config)
        self.self_attn = MultiHeadAttention(config, config.decoder_attention_heads, layer_idx, is_causal=True)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.cross_attn = MultiHeadAttention(config, config.decoder_attention_heads, layer_idx)
        self.cross_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.feed_forward = PositionWiseFeedForward(config, config.decoder_ffn_dim)
        self.feed_forward_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    @accept_past_key_values
    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        cache: EncoderDecoderCache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """(B, T, D) and encoder states (B, S, D) -> (B, T, D)."""
        options = {"cache": cache, **kwargs}
        hidden_states = self.apply_sublayer(
            self.self_attn_layer_norm,
            hidden_states,
            lambda x: self.self_attn(x, attention_mask=attention_mask, **options)[0],
        )
        hidden_states = self.apply_sublayer(
            self.cross_attn_layer_norm,
            hidden_states,
            lambda x: self.cross_attn(x, encoder_hidden_states, attention_mask=encoder_attention_mask, **options)[0],
        )
        return self.apply_sublayer(self.feed_forward_layer_norm, hidden_states, self.feed_forward)


class VanillaTransformerPreTrainedModel(PreTrainedModel):
    """Base class of the models: initialization, supported features, and saving together with the Python code."""

    config: VanillaTransformerConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ["EncoderLayer", "DecoderLayer"]
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize a module as `config.initialization` specifies; transformers handles "normal" and LayerNorm."""
        initialization = self.config.initialization
        if initialization == "normal" or not isinstance(module, (nn.Linear, nn.Embedding)):
            super()._init_weights(module)
            return
        bias = getattr(module, "bias", None)
        if initialization == "xavier":
            init.xavier_uniform_(module.weight)
            if bias is not None:
                init.zeros_(bias)
        elif isinstance(module, nn.Embedding):  # "torch", as nn.Embedding.reset_parameters
            init.normal_(module.weight)
        else:  # "torch", as nn.Linear.reset_parameters: U(-1 / sqrt(fan_in), 1 / sqrt(fan_in))
            bound = module.in_features**-0.5
            init.uniform_(module.weight, -bound, bound)
            if bias is not None:
                init.uniform_(bias, -bound, bound)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Return the tied parameters. Unlike in transformers, embeddings can be shared without tying the LM head."""
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        is_untied = hasattr(self, "lm_head") and not self.config.tie_word_embeddings
        return {} if is_untied else dict(self._tied_weights_keys or {})

    def save_pretrained(self, save_directory, *args, **kwargs) -> None:
        """Save the model with its code, so that `trust_remote_code=True` loads it without this package.

        The code of a subclass from another module is saved, too. A warning states how to load it.
        """
        with include_code(self, VanillaTransformerPreTrainedModel, save_directory, *args, **kwargs):
            super().save_pretrained(save_directory, *args, **kwargs)


class TransformerStack(VanillaTransformerPreTrainedModel):
    """Base class of encoder and decoder: embeddings, positions, N layers and an optional final LayerNorm."""

    def __init__(self, config: VanillaTransformerConfig, vocab_size: int, layers: list[TransformerLayer]):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(vocab_size, config.d_model)
        if config.position_embedding_type == "learned":
            self.embed_positions = LearnedPositionalEmbedding(config.max_position_embeddings, config.d_model)
        if config.embedding_norm:
            self.embedding_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.layers = nn.ModuleList(layers)
        has_final_layer_norm = config.norm_position == "pre" if config.final_norm is None else config.final_norm
        self.norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps) if has_final_layer_norm else nn.Identity()
        self.gradient_checkpointing = False
        self.post_init()

    def embed(self, inputs_embeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return dropout(embeddings * sqrt(d_model) + positions), of shape (B, T, D) (sections 3.4, 3.5 and 5.4)."""
        if self.config.scale_embedding:
            inputs_embeds = inputs_embeds * math.sqrt(self.config.d_model)
        if self.config.position_embedding_type == "learned":
            encoding = self.embed_positions(positions)
        else:
            encoding = sinusoidal_encoding(positions, self.config.d_model)
        hidden_states = inputs_embeds + encoding.to(inputs_embeds.dtype)
        if self.config.embedding_norm:
            hidden_states = self.embedding_layer_norm(hidden_states)
        return apply_dropout(hidden_states, self.config.dropout, self.training)

    def may_omit_mask(self, mask: torch.Tensor | None) -> bool:
        """Return whether transformers may test a mask for padding, to omit it. On a GPU, this test synchronizes."""
        return mask is None or mask.device.type == "cpu" or not self.training


def tensor_parallel_plan(*attentions: str) -> dict[str, str]:
    """Return the tensor-parallel plan of a layer: q, k, v and fc1 are split by columns, the others by rows."""
    columns = [f"{attention}.{name}_proj" for attention in attentions for name in "qkv"] + ["feed_forward.fc1"]
    rows = [f"{attention}.out_proj" for attention in attentions] + ["feed_forward.fc2"]
    plan = dict.fromkeys(columns, "colwise") | dict.fromkeys(rows, "rowwise")
    return {f"layers.*.{name}": style for name, style in plan.items()}


class Encoder(TransformerStack):
    """Encoder stack of N layers (section 3.1): source tokens (B, S) to hidden states (B, S, D)."""

    _can_record_outputs = {"hidden_states": EncoderLayer, "attentions": MultiHeadAttention}
    _tp_plan = tensor_parallel_plan("self_attn")

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config, config.vocab_size, [EncoderLayer(config, i) for i in range(config.encoder_layers)])

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """Encode source tokens (B, S) or their unscaled embeddings (B, S, D).

        `attention_mask` (B, S) is zero at padding positions and defaults to no padding. On a CPU, a source without
        tokens raises ValueError.
        """
        inputs_embeds = resolve_inputs_embeds(self.embed_tokens, self.config.vocab_size, input_ids, inputs_embeds)
        padding_mask = attention_mask if attention_mask is not None and attention_mask.ndim == 2 else None
        if inputs_embeds.shape[1] == 0:
            raise ValueError("The sources are empty (length 0): every source needs at least one token, such as </s>.")
        if padding_mask is not None and is_eager_on_cpu(padding_mask) and (empty := (padding_mask == 0).all(-1)).any():
            row = int(empty.int().argmax())
            raise ValueError(f"Source {row} of the batch is empty: its attention_mask has no 1. Remove this source.")
        positions = create_position_ids(padding_mask, inputs_embeds)
        hidden_states = self.embed(inputs_embeds, positions)
        attention_mask = create_bidirectional_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            allow_is_bidirectional_skip=self.may_omit_mask(attention_mask),
        )
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask, **kwargs)
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))


class Decoder(TransformerStack):
    """Decoder stack of N layers (section 3.1): target tokens (B, T) and encoder states to hidden states (B, T, D)."""

    _can_record_outputs = {
        "hidden_states": DecoderLayer,
        "attentions": OutputRecorder(MultiHeadAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(MultiHeadAttention, index=1, layer_name="cross_attn"),
    }
    _tp_plan = tensor_parallel_plan("self_attn", "cross_attn")

    def __init__(self, config: VanillaTransformerConfig):
        layers = [DecoderLayer(config, i) for i in range(config.decoder_layers)]
        super().__init__(config, config.decoder_vocab_size, layers)  # type: ignore[arg-type]  # never None in a config

    @accept_past_key_values
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decode target tokens (B, T) or their unscaled embeddings (B, T, D). Attention is causal.

        With `cache`, which is extended in place, only the new tokens are given.
        `attention_mask` is a padding mask (B, past and new tokens) or a 4D mask. It defaults to no padding.
        `encoder_hidden_states` (B, S, D) has the padding mask `encoder_attention_mask` (B, S).
        """
        vocab_size: int = self.config.decoder_vocab_size  # type: ignore[assignment]  # never None in a config
        inputs_embeds = resolve_inputs_embeds(self.embed_tokens, vocab_size, input_ids, inputs_embeds, "decoder_")
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if cache is not None and not isinstance(cache, EncoderDecoderCache):
            cache = EncoderDecoderCache(cache, DynamicCache(config=self.config))
        self_cache = cache.self_attention_cache if cache is not None else None

        past_length = cache.get_seq_length() if cache is not None else 0
        positions = create_position_ids(attention_mask, inputs_embeds, past_length)
        hidden_states = self.embed(inputs_embeds, positions)

        causal_mask = create_causal_mask(self.config, inputs_embeds, attention_mask, self_cache)
        encoder_attention_mask = create_bidirectional_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=encoder_attention_mask,
            encoder_hidden_states=encoder_hidden_states,
            allow_is_bidirectional_skip=self.may_omit_mask(encoder_attention_mask),
        )
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                encoder_hidden_states,
                attention_mask=causal_mask,
                encoder_attention_mask=encoder_attention_mask,
                **{CACHE_NAME: cache},  # as GradientCheckpointingLayer expects it
                **kwargs,
            )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.norm(hidden_states), **{CACHE_NAME: cache if use_cache else None}
        )


# --- The full model (figure 1) ---------------------------------------------------------------------------------------


class VanillaTransformerModel(VanillaTransformerPreTrainedModel):
    """Encoder and decoder without the LM head (figure 1), with one shared or two separate embeddings (section 3.4)."""

    _tied_weights_keys = {"decoder.embed_tokens.weight": "encoder.embed_tokens.weight"}

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        config.validate_architecture()  # fields may have changed after the constructor
        if not config.share_encoder_decoder_embeddings:
            self._tied_weights_keys = {}  # also read by PEFT
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the source embedding."""
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Set the source embedding, which may also be the target embedding."""
        self.encoder.embed_tokens = value
        if self.config.share_encoder_decoder_embeddings:
            self.decoder.embed_tokens = value

    def resize_decoder_token_embeddings(self, new_num_tokens: int) -> nn.Embedding:
        """Resize the target embedding of a model with two vocabularies."""
        if self.config.share_encoder_decoder_embeddings:
            raise ValueError("Source and target share one vocabulary: use resize_token_embeddings for both.")
        self.decoder.embed_tokens = self._get_resized_embeddings(self.decoder.embed_tokens, new_num_tokens)
        self.config.decoder_vocab_size = new_num_tokens
        return self.decoder.embed_tokens

    @can_return_tuple
    @accept_past_key_values
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: tuple[torch.Tensor] | BaseModelOutput | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """Encode the source, unless `encoder_outputs` is given, and decode the target.

        Args:
            input_ids: Source ids (B, S).
            attention_mask: Padding mask of the source (B, S), zero at padding. Defaults to no padding.
            decoder_input_ids: Target ids (B, T), starting with `decoder_start_token_id`.
            decoder_attention_mask: Padding mask of the target (B, T). Only left padding requires it.
            encoder_outputs: Return value of `get_encoder()(...)` for the source.
            cache: Cache of earlier steps, also accepted as `past_key_values`. `decoder_input_ids` then contains only
                the new tokens.
            inputs_embeds: Unscaled source embeddings (B, S, D), instead of `input_ids`.
            decoder_inputs_embeds: Unscaled target embeddings (B, T, D), instead of `decoder_input_ids`.
            use_cache: Whether to return the cache. Defaults to `config.use_cache`.
            **kwargs: Further options, such as `output_attentions`.

        Returns:
            `last_hidden_state` (B, T, D), and if requested, caches, hidden states and attention weights.
        """
        if encoder_outputs is None:
            encoded = self.encoder(
                input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
            )
        elif isinstance(encoder_outputs, BaseModelOutput):
            encoded = encoder_outputs
        else:
            encoded = BaseModelOutput(*encoder_outputs)
        decoder_outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=encoded.last_hidden_state,
            encoder_attention_mask=attention_mask,
            cache=cache,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            **{CACHE_NAME: getattr(decoder_outputs, CACHE_NAME)},
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoded.last_hidden_state,
            encoder_hidden_states=encoded.hidden_states,
            encoder_attentions=encoded.attentions,
        )


class VanillaTransformerForConditionalGeneration(VanillaTransformerPreTrainedModel, VanillaTransformerGenerationMixin):
    """The full model of figure 1: encoder, decoder, and the LM head that predicts the next token."""

    _tp_plan = {"lm_head": "colwise_gather_output"}
    _tied_weights_keys = {"lm_head.weight": "model.encoder.embed_tokens.weight"}

    def __init__(self, config: VanillaTransformerConfig):
        super().__init__(config)
        self.model = VanillaTransformerModel(config)
        target_size: int = config.decoder_vocab_size  # type: ignore[assignment]  # never None in a config
        self.lm_head = nn.Linear(config.d_model, target_size, bias=config.lm_head_bias)
        self.loss_type = "ForMaskedLM"  # a loss without shift: logits and labels are aligned
        if not config.share_encoder_decoder_embeddings:
            self._tied_weights_keys = {"lm_head.weight": "model.decoder.embed_tokens.weight"}
        self.post_init()

    @can_return_tuple
    @accept_past_key_values
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: tuple[torch.Tensor] | BaseModelOutput | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        smoothing: float | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """Return the logits of the next token for each target position, and the loss if `labels` is given.

        `labels` (B, T) has -100 at positions to ignore. Without `decoder_input_ids`, the decoder input is
        `decoder_start_token_id`, followed by the labels except for the last one. The summed loss is divided by
        `num_items_in_batch`, the number of labels per optimizer step. It defaults to the number of labels in `labels`.

        `smoothing` is the label smoothing factor (section 5.4). If it is given, the loss is computed in chunks to save
        memory, and `logits` is None. An `lm_head` with adapters or hooks computes all logits at once. Without
        `smoothing`, the loss is the cross-entropy. (The name of this argument does not contain "label", because a
        Trainer treats every argument with "label" in its name as a column of labels.)

        The other arguments are those of `VanillaTransformerModel.forward`.

        Returns:
            `loss` (scalar, nats per token), `logits` (B, T, V), and the other outputs of `VanillaTransformerModel`.
        """
        if use_cache is None and (labels is not None or self.training):
            use_cache = False  # in training, labels may be None: a Trainer with label smoothing removes them
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            cache=cache,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = loss = None
        if labels is not None and smoothing is not None:
            loss = fused_linear_cross_entropy(outputs.last_hidden_state, self.lm_head, labels, smoothing)
            loss = loss / (num_items_in_batch if num_items_in_batch is not None else (labels != -100).sum())
        else:
            logits = self.lm_head(outputs.last_hidden_state)  # (B, T, V)
        if labels is not None and logits is not None:
            vocab_size = self.config.decoder_vocab_size
            loss = self.loss_function(logits, labels, vocab_size, num_items_in_batch=num_items_in_batch)
        other_outputs = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return Seq2SeqLMOutput(loss=loss, logits=logits, **other_outputs)

    @staticmethod
    def _reorder_cache(cache: EncoderDecoderCache, beam_idx: torch.Tensor) -> EncoderDecoderCache:
        """Reorder the self-attention cache only: all beams of a source have the same cross-attention cache."""
        cache.self_attention_cache.reorder_cache(beam_idx)
        return cache

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Shift labels (B, T) right (section 3.1: "the output embeddings are offset by one position")."""
        start, pad = self.config.decoder_start_token_id, self.config.pad_token_id
        if start is None or pad is None:
            name = "decoder_start_token_id" if start is None else "pad_token_id"
            raise ValueError(f"config.{name} is None, but labels require it: set it in the config.")
        if is_eager_on_cpu(labels) and bool(((labels[:, 0] == -100) & (labels != -100).any(1)).any()):
            raise ValueError("labels begin with -100. Pad them on the right, or pass decoder_input_ids and their mask.")
        shifted = labels.roll(1, dims=-1)
        shifted[:, 0] = start
        return shifted.masked_fill(shifted == -100, pad)

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args, **kwargs) -> nn.Embedding:
        """Resize the shared embedding, or only the source embedding of a model with two vocabularies."""
        if self.config.share_encoder_decoder_embeddings:
            return super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
        return self.model.resize_token_embeddings(new_num_tokens, *args, **kwargs)

    def resize_decoder_token_embeddings(self, new_num_tokens: int) -> nn.Embedding:
        """Resize target embedding and LM head of a model with two vocabularies."""
        embeddings = self.model.resize_decoder_token_embeddings(new_num_tokens)
        requires_grad = {name: parameter.requires_grad for name, parameter in self.lm_head.named_parameters()}
        self.lm_head = self._get_resized_lm_head(self.lm_head, new_num_tokens)
        for name, parameter in self.lm_head.named_parameters():
            parameter.requires_grad_(requires_grad[name])
        self.tie_weights()
        return embeddings


# With remote code, generate() reads the signature in every step. Storing it avoids computing it each time
VanillaTransformerForConditionalGeneration.forward.__signature__ = inspect.signature(
    VanillaTransformerForConditionalGeneration.forward
)

__all__ = ["VanillaTransformerForConditionalGeneration", "VanillaTransformerModel", "VanillaTransformerPreTrainedModel"]
