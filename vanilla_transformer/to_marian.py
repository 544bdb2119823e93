"""A model of ours as transformers' `MarianMTModel`, which the world loads without our code.

`MarianMTModel` is post-norm with sinusoidal positions, which stand in two halves there and alternate here: the residual
stream is permuted through every weight, and the logits are equal.
"""

import torch
from transformers import GenerationConfig, MarianConfig, MarianMTModel

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

MARIAN_EPS = 1e-5  # fixed in its code
SAME_FIELDS = (
    *("vocab_size", "decoder_vocab_size", "d_model", "encoder_layers", "decoder_layers", "dropout"),
    *("encoder_attention_heads", "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim"),
    *("activation_function", "scale_embedding", "attention_dropout", "activation_dropout"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "max_position_embeddings"),
    *("share_encoder_decoder_embeddings", "tie_word_embeddings"),
)


def to_marian(model: VanillaTransformerForConditionalGeneration) -> MarianMTModel:
    """A `MarianMTModel` with equal logits. Raises ValueError for an architecture that it cannot express."""
    config = model.config
    refuse_beyond_marian(config)
    order = torch.cat([torch.arange(0, config.d_model, 2), torch.arange(1, config.d_model, 2)])  # sines, cosines
    marian = MarianMTModel(
        MarianConfig(forced_eos_token_id=None, **{name: getattr(config, name) for name in SAME_FIELDS})
    )
    state = marian.state_dict()
    for name, tensor in model.state_dict().items():
        if name == "lm_head.bias":
            state["final_logits_bias"] = tensor[None]
            continue
        state[marian_name(name)] = permuted(name, tensor, order)
    if "model.shared.weight" in state:
        state["model.shared.weight"] = state["model.encoder.embed_tokens.weight"]
    marian.load_state_dict(state)
    marian.generation_config = GenerationConfig.from_dict(model.generation_config.to_dict())
    return marian.eval()


def marian_name(name: str) -> str:
    name = name.replace("feed_forward_layer_norm", "final_layer_norm").replace("feed_forward.", "")
    return name.replace("cross_attn", "encoder_attn")


def permuted(name: str, tensor: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Rows of what writes into the residual stream, columns of what reads from it."""
    if any(part in name for part in ("out_proj", "fc2", "layer_norm")):
        return tensor[order]
    return tensor[:, order] if tensor.ndim == 2 else tensor


def refuse_beyond_marian(config: VanillaTransformerConfig) -> None:
    reasons = {
        "it is pre-norm": config.norm_position == "pre",
        "it has a final norm": bool(config.final_norm),
        "its positions are learned": config.position_embedding_type == "learned",
        "it has a norm on its embeddings": config.embedding_norm,
        "its heads have a width of their own (key_head_dim, value_head_dim)": bool(
            config.key_head_dim or config.value_head_dim
        ),
        f"its layer_norm_eps is {config.layer_norm_eps}, and Marian's is fixed to {MARIAN_EPS}": (
            config.layer_norm_eps != MARIAN_EPS
        ),
        "its width is odd": config.d_model % 2 == 1,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ValueError(f"MarianMTModel cannot express this model: {'; '.join(found)}.")
