"""What the benchmark compares with: models of the same size, and, but for Bart, with the same weights.

Both classes here take what a model of transformers takes, and give its loss and logits; they cannot decode step by
step, so they are compared in training alone.
"""

import math
from typing import Any

import torch
from torch import nn
from transformers import BartConfig, BartForConditionalGeneration

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.modeling_vanilla_transformer import sinusoidal_encoding
from vanilla_transformer.shared.stock import SAME_FIELDS


class Peer(nn.Module):
    """Embeddings, positions, projection and loss, as one writes them around the stacks of a tutorial.

    Args:
        model: post-norm, with shared and tied embeddings and sinusoidal positions; its weights are copied.
    """

    def __init__(self, model: VanillaTransformerForConditionalGeneration):
        super().__init__()
        config: Any = model.config  # its special ids are set
        self.d_model, self.pad_id, self.start_id = config.d_model, config.pad_token_id, config.decoder_start_token_id
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.embedding.load_state_dict(model.get_input_embeddings().state_dict())
        self.dropout = nn.Dropout(config.dropout)
        positions = sinusoidal_encoding(torch.arange(config.max_position_embeddings), config.d_model)
        self.positions: torch.Tensor
        self.register_buffer("positions", positions)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.embedding(ids) * math.sqrt(self.d_model) + self.positions[: ids.shape[1]])

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        """Source (B, S) with its mask, labels (B, T) with -100 -> `loss` and `logits` (B, T, V)."""
        shifted = labels.roll(1, dims=1).masked_fill(labels.roll(1, dims=1) == -100, self.pad_id)
        shifted[:, 0] = self.start_id
        states = self.transform(self.embed(input_ids), self.embed(shifted), attention_mask)
        logits = states @ self.embedding.weight.T
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    def transform(self, source: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class TorchPeer(Peer):
    """The stacks of `torch.nn.Transformer`, without the norm that it has behind each."""

    def __init__(self, model: VanillaTransformerForConditionalGeneration):
        super().__init__(model)
        config = model.config
        own: dict[str, Any] = {"dropout": config.dropout, "activation": "relu", "batch_first": True}
        heads, ffn = config.encoder_attention_heads, config.encoder_ffn_dim
        encoder_layer = nn.TransformerEncoderLayer(config.d_model, heads, ffn, **own)
        decoder_layer = nn.TransformerDecoderLayer(config.d_model, heads, ffn, **own)
        self.encoder = nn.TransformerEncoder(encoder_layer, config.encoder_layers)
        self.decoder = nn.TransformerDecoder(decoder_layer, config.decoder_layers)
        for theirs, ours in ((self.encoder, model.get_encoder()), (self.decoder, model.get_decoder())):
            for layer, source in zip(theirs.layers, ours.layers, strict=True):
                copy_layer(layer, source)

    def transform(self, source: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        padding = mask == 0
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device) < 0
        memory = self.encoder(source, src_key_padding_mask=padding)
        return self.decoder(target, memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=padding)


@torch.no_grad()
def copy_layer(layer: Any, source: Any) -> None:
    """A layer of ours into one of PyTorch's. Its dropout inside attention and feed-forward, which we have not, goes."""
    attentions = {"self_attn": source.self_attn}
    norms = [source.self_attn_layer_norm, source.feed_forward_layer_norm]
    if hasattr(source, "cross_attn"):
        attentions["multihead_attn"] = source.cross_attn
        norms.insert(1, source.cross_attn_layer_norm)
    for name, attention in attentions.items():
        theirs, parts = getattr(layer, name), [attention.q_proj, attention.k_proj, attention.v_proj]
        theirs.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        theirs.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
        theirs.out_proj.load_state_dict(attention.out_proj.state_dict())
        theirs.dropout = 0.0
    for number, norm in enumerate(norms, 1):
        getattr(layer, f"norm{number}").load_state_dict(norm.state_dict())
    layer.linear1.load_state_dict(source.feed_forward.fc1.state_dict())
    layer.linear2.load_state_dict(source.feed_forward.fc2.state_dict())
    layer.dropout = nn.Identity()


class TutorialPeer(Peer):
    """As tutorials write it: everything spelled out, masks of ones and zeros, scores masked with -1e9."""

    def __init__(self, model: VanillaTransformerForConditionalGeneration):
        super().__init__(model)
        config = model.config
        self.encoder = nn.ModuleList(TutorialLayer(config, cross=False) for _ in range(config.encoder_layers))
        self.decoder = nn.ModuleList(TutorialLayer(config, cross=True) for _ in range(config.decoder_layers))
        self.encoder.load_state_dict(model.get_encoder().layers.state_dict())
        self.decoder.load_state_dict(model.get_decoder().layers.state_dict())

    def transform(self, source: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        visible = mask[:, None, None, :]
        causal = torch.tril(torch.ones(target.shape[1], target.shape[1], device=target.device))
        for layer in self.encoder:
            source = layer(source, visible)
        for layer in self.decoder:
            target = layer(target, causal, source, visible)
        return target


class TutorialAttention(nn.Module):
    def __init__(self, d_model: int, heads: int):
        super().__init__()
        self.heads, self.d_k = heads, d_model // heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, queries: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch = len(queries)
        q = self.q_proj(queries).view(batch, -1, self.heads, self.d_k).transpose(1, 2)
        k = self.k_proj(memory).view(batch, -1, self.heads, self.d_k).transpose(1, 2)
        v = self.v_proj(memory).view(batch, -1, self.heads, self.d_k).transpose(1, 2)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_k)
        weights = torch.softmax(scores.masked_fill(mask == 0, -1e9), dim=-1)
        heads = torch.matmul(weights, v).transpose(1, 2).contiguous().view(batch, -1, self.heads * self.d_k)
        return self.out_proj(heads)


class TutorialFeedForward(nn.Module):
    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(self.fc1(states)))


class TutorialLayer(nn.Module):
    """An encoder's layer, or with `cross` a decoder's; the names of its weights are ours."""

    def __init__(self, config: VanillaTransformerConfig, cross: bool):
        super().__init__()
        self.self_attn = TutorialAttention(config.d_model, config.encoder_attention_heads)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model)
        if cross:
            self.cross_attn = TutorialAttention(config.d_model, config.decoder_attention_heads)
            self.cross_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.feed_forward = TutorialFeedForward(config.d_model, config.encoder_ffn_dim)
        self.feed_forward_layer_norm = nn.LayerNorm(config.d_model)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, states: torch.Tensor, mask: torch.Tensor, memory: Any = None, memory_mask: Any = None) -> Any:
        states = self.self_attn_layer_norm(states + self.dropout(self.self_attn(states, states, mask)))
        if memory is not None:
            states = self.cross_attn_layer_norm(states + self.dropout(self.cross_attn(states, memory, memory_mask)))
        return self.feed_forward_layer_norm(states + self.dropout(self.feed_forward(states)))


def bart(config: VanillaTransformerConfig) -> BartForConditionalGeneration:
    """Bart of the same size, new weights. It has learned positions and a norm on its embeddings besides."""
    fields = {name: getattr(config, name) for name in SAME_FIELDS}
    return BartForConditionalGeneration(BartConfig(forced_eos_token_id=None, **fields))
