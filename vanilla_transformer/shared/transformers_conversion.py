"""Conversion between this package's models and native Transformers classes, with one mapping for both directions.

    native = to_transformers(model)      # first class that fits: MarianMTModel, PegasusForConditionalGeneration, ...
    model = from_transformers(native)    # a model of any of these classes as a model of this package

The classes have the same layers with different parameter names. Sinusoidal positions also have a different order: sines
and cosines alternate in this package, but native classes put all sines before all cosines. The conversion therefore
permutes the hidden dimensions of all weights. A round trip is bit-for-bit exact.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    BartForConditionalGeneration,
    BlenderbotForConditionalGeneration,
    GenerationConfig,
    M2M100ForConditionalGeneration,
    MarianMTModel,
    MBartForConditionalGeneration,
    PegasusForConditionalGeneration,
    PreTrainedModel,
)
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration, sinusoidal_encoding
from .generation_settings import special_token_ids

EPS = 1e-5  # epsilon of LayerNorm, hard-coded in the native classes
SAME_FIELDS = (  # config fields with the same name in both packages
    *("vocab_size", "d_model", "encoder_layers", "decoder_layers", "dropout", "attention_dropout"),
    *("encoder_attention_heads", "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim"),
    *("activation_function", "scale_embedding", "activation_dropout", "max_position_embeddings", "init_std"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "tie_word_embeddings"),
)
TWO_VOCABULARY_FIELDS = ("decoder_vocab_size", "share_encoder_decoder_embeddings")
SIDES = ("encoder", "decoder")
POSITION_MISMATCH = "its position encoding is not that of the class, or its decoder starts with the pad token"
PARAMETER_NAMES = (  # this package, native class
    ("feed_forward_layer_norm", "final_layer_norm"),
    ("embedding_layer_norm", "layernorm_embedding"),
    ("feed_forward.", ""),
    ("cross_attn", "encoder_attn"),
    ("coder.norm.", "coder.layer_norm."),
    ("lm_head.bias", "final_logits_bias"),
)


@dataclass(frozen=True)
class NativeArchitecture:
    """A native Transformers architecture, described by fields of `VanillaTransformerConfig`.

    `positions` is "learned" or "sinusoidal": as in section 3.5, but all sines precede all cosines. This package stores
    "tensor2tensor_sinusoids", a variant of tensor2tensor, as a learned table.
    """

    model_class: type[PreTrainedModel]
    norm_position: str  # only pre-norm classes have a final LayerNorm
    embedding_norm: bool = False
    positions: str = "sinusoidal"
    position_offset: int = 0  # unused rows before the first position in a learned table (`offset` in Bart)
    two_vocabularies: bool = False  # whether source and target can have separate embeddings
    lm_head_bias: bool = True  # whether the logits have a bias, `final_logits_bias`

    @property
    def model_type(self) -> str:
        """`model_type` of the native config."""
        return self.model_class.config_class.model_type

    def incompatibilities(self, model: VanillaTransformerForConditionalGeneration) -> list[str]:
        """Return the reasons why the class cannot represent a model; empty if it can."""
        config = model.config
        has_final_layer_norm = isinstance(model.get_encoder().norm, nn.LayerNorm)
        is_learned = config.position_embedding_type == "learned"
        has_two_vocabularies = not config.share_encoder_decoder_embeddings
        is_tensor2tensor = self.positions == "tensor2tensor_sinusoids"
        conditions = {
            f"it is {config.norm_position}-norm": config.norm_position != self.norm_position,
            "it has a final LayerNorm": has_final_layer_norm and self.norm_position == "post",
            "it has no final LayerNorm": not has_final_layer_norm and self.norm_position == "pre",
            "its positions are learned": is_learned and self.positions == "sinusoidal",
            POSITION_MISMATCH: is_tensor2tensor and not self.has_tensor2tensor_sinusoids(model),
            "its d_model is odd": config.d_model % 2 == 1 and self.positions != "learned",
            "it has an embedding LayerNorm": config.embedding_norm and not self.embedding_norm,
            "it has no embedding LayerNorm": self.embedding_norm and not config.embedding_norm,
            "source and target have separate embeddings": has_two_vocabularies and not self.two_vocabularies,
            "its LM head has a bias": config.lm_head_bias and not self.lm_head_bias,
            "it sets key_head_dim or value_head_dim": bool(config.key_head_dim or config.value_head_dim),
            f"its layer_norm_eps is {config.layer_norm_eps} instead of {EPS}": config.layer_norm_eps != EPS,
            "it has no decoder start token": (  # the config of Marian requires one
                self.model_type == "marian" and special_token_ids(model)["decoder_start_token_id"] is None
            ),
        }
        return [reason for reason, is_true in conditions.items() if is_true]

    def hidden_permutation(self, d_model: int) -> torch.Tensor:
        """Return, for each hidden dimension of the native class, its index in this package (d_model)."""
        if self.positions != "sinusoidal":
            return torch.arange(d_model)
        return torch.cat([torch.arange(0, d_model, 2), torch.arange(1, d_model, 2)])  # sines, cosines

    def compute_sinusoid_table(self, config: Any) -> torch.Tensor:
        """Return the sinusoids of tensor2tensor: (max_position_embeddings, d_model)."""
        first = config.pad_token_id + 1  # table row of the first token of a sentence in M2M100
        rows = first + config.max_position_embeddings
        return M2M100SinusoidalPositionalEmbedding.get_embedding(rows, config.d_model, config.pad_token_id)[first:]

    def has_tensor2tensor_sinusoids(self, model: VanillaTransformerForConditionalGeneration) -> bool:
        """Return whether the position tables equal the sinusoids of tensor2tensor."""
        config = model.config  # M2M100 gives pad tokens no position, so they cannot start the decoder
        if config.position_embedding_type != "learned" or config.pad_token_id in (None, config.decoder_start_token_id):
            return False
        table = self.compute_sinusoid_table(config)
        weights = [stack.embed_positions.weight for stack in (model.get_encoder(), model.get_decoder())]
        return all(torch.equal(weight, table.to(weight)) for weight in weights)


NATIVE_ARCHITECTURES = (  # `to_transformers` chooses the first one that fits
    MARIAN := NativeArchitecture(MarianMTModel, "post", two_vocabularies=True),
    NativeArchitecture(PegasusForConditionalGeneration, "pre"),
    NativeArchitecture(BartForConditionalGeneration, "post", True, "learned", position_offset=2),
    NativeArchitecture(MBartForConditionalGeneration, "pre", True, "learned", position_offset=2),
    NativeArchitecture(M2M100ForConditionalGeneration, "pre", False, "tensor2tensor_sinusoids", lm_head_bias=False),
    NativeArchitecture(BlenderbotForConditionalGeneration, "pre", False, "learned"),
)


def validate_no_adapter(model: nn.Module, name: str = "the model") -> None:
    """Raise ValueError if a model has or had an adapter of PEFT, which changes modules and names of weights."""
    if hasattr(model, "peft_config") or any(".base_layer." in key for key, _ in model.named_parameters()):
        raise ValueError(f"{name} has a PEFT adapter. Call merge_and_unload() on the PeftModel, and use the result.")


def to_transformers(
    model: VanillaTransformerForConditionalGeneration, architecture: NativeArchitecture | None = None
) -> PreTrainedModel:
    """Convert to an equivalent native Transformers model in evaluation mode, with the same generation config and dtype.

    Sinusoids become a table of `config.max_position_embeddings` positions, which limits the sentence length.
    `architecture` defaults to the first of `NATIVE_ARCHITECTURES` that fits. Raises ValueError if it does not fit.
    """
    validate_no_adapter(model)
    architecture = architecture or find_native_architecture(model)
    if reasons := architecture.incompatibilities(model):
        raise ValueError(f"{architecture.model_class.__name__} cannot represent this model: {'; '.join(reasons)}.")
    config = model.config
    # without features that this package does not have
    fields: dict[str, Any] = {"forced_eos_token_id": None, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
    if architecture.model_type == "blenderbot":
        fields["encoder_no_repeat_ngram_size"] = 0  # its default is 3
    for name in SAME_FIELDS + (TWO_VOCABULARY_FIELDS if architecture.two_vocabularies else ()):
        fields[name] = getattr(config, name)
    if architecture.model_type == "marian" and config.decoder_start_token_id is None:
        fields["decoder_start_token_id"] = special_token_ids(model)["decoder_start_token_id"]
    native = architecture.model_class(architecture.model_class.config_class(**fields)).to(model.dtype)
    state, weights = native.state_dict(), model.state_dict()
    order = architecture.hidden_permutation(config.d_model)
    for name, tensor in weights.items():
        if "embed_positions" not in name:
            tensor = permute_hidden_dims(name, tensor, order)
            state[native_parameter_name(name)] = tensor[None] if name == "lm_head.bias" else tensor
    if architecture.positions == "learned":
        sinusoids = sinusoidal_encoding(torch.arange(config.max_position_embeddings), config.d_model)
        for name in (f"model.{side}.embed_positions.weight" for side in SIDES):
            state[name] = nn.functional.pad(weights.get(name, sinusoids), (0, 0, architecture.position_offset, 0))
    if "model.shared.weight" in state:
        state["model.shared.weight"] = state["model.encoder.embed_tokens.weight"]
    native.load_state_dict(state)
    native.generation_config = copy_generation_config(model)
    return native.eval()


def to_marian(model: VanillaTransformerForConditionalGeneration) -> MarianMTModel:
    """Convert a model to an equivalent `MarianMTModel`. Raises ValueError if that class cannot represent the model."""
    return to_transformers(model, MARIAN)


def copy_generation_config(model: Any) -> GenerationConfig:
    """Return a copy of a model's generation config, not marked as derived from its model config."""
    settings = copy.deepcopy(model.generation_config)  # a new object would be validated more strictly when saved
    settings._from_model_config = False  # otherwise, transformers 4 replaces it when saving
    return settings


def find_native_architecture(model: VanillaTransformerForConditionalGeneration) -> NativeArchitecture:
    """Return the first class that can represent a model. Raises ValueError with the reasons if there is none."""
    reasons = {architecture: architecture.incompatibilities(model) for architecture in NATIVE_ARCHITECTURES}
    fewest = min(map(len, reasons.values()))
    nearest = [architecture for architecture in NATIVE_ARCHITECTURES if len(reasons[architecture]) == fewest]
    if fewest:
        details = " ".join(f"Not {each.model_class.__name__}: {'; '.join(reasons[each])}." for each in nearest)
        raise ValueError(f"no native Transformers class can represent this model. {details}")
    return nearest[0]


def from_transformers(native: PreTrainedModel) -> VanillaTransformerForConditionalGeneration:
    """Convert a native Transformers model to an equivalent model of this package, with the same dtype.

    Raises ValueError if the class or the config is not supported, or the config contradicts the weights.
    """
    architecture, state = native_architecture_of(native.config), native.state_dict()
    validate_no_adapter(native)
    config = from_native_config(architecture, native.config, state)
    model = VanillaTransformerForConditionalGeneration(config).to(native.dtype)
    order = architecture.hidden_permutation(config.d_model).argsort()
    converted = {}
    for name in model.state_dict():
        if name == "lm_head.bias":
            converted[name] = state["final_logits_bias"][0]
        elif "embed_positions" in name and architecture.positions == "learned":
            converted[name] = state[name][architecture.position_offset :]
        elif "embed_positions" in name:
            converted[name] = architecture.compute_sinusoid_table(config)
        else:
            converted[name] = permute_hidden_dims(name, state[native_parameter_name(name)], order)
    model.load_state_dict(converted)
    if reasons := architecture.incompatibilities(model):
        raise ValueError(f"VanillaTransformer cannot represent this model: {'; '.join(reasons)}.")
    model.generation_config = copy_generation_config(native)
    return model.eval()


def native_architecture_of(config: Any) -> NativeArchitecture:
    """Return the architecture of a native config. Raises ValueError if it is not supported."""
    known = {architecture.model_type: architecture for architecture in NATIVE_ARCHITECTURES}
    if config.model_type in known:
        return known[config.model_type]
    if config.model_type in UNSUPPORTED_MODEL_TYPES:
        reason = UNSUPPORTED_MODEL_TYPES[config.model_type]
        raise ValueError(f"model_type={config.model_type} is not supported: it has {reason}.")
    raise ValueError(f"model_type={config.model_type} is not supported. Expected one of {', '.join(known)}.")


T5_DIFFERENCES = "relative positions and RMSNorm"
UNSUPPORTED_MODEL_TYPES = {  # sequence-to-sequence model type -> how its architecture differs
    "t5": T5_DIFFERENCES,
    "mt5": f"{T5_DIFFERENCES}, and gated activations",
    "umt5": f"{T5_DIFFERENCES}, and gated activations",
    "t5gemma": "rotary positions and gated activations",
    "longt5": f"{T5_DIFFERENCES}, and sparse attention",
    "switch_transformers": f"{T5_DIFFERENCES}, and a mixture of experts",
    "nllb-moe": "a mixture of experts",
    "led": "sparse attention",
    "bigbird_pegasus": "sparse attention",
    "pegasus_x": "sparse attention",
    "prophetnet": "a decoder that predicts several tokens per step",
    "blenderbot-small": "positions that are added after the embedding LayerNorm",
    "encoder-decoder": "an encoder and a decoder of other classes",
}


def from_native_config(
    architecture: NativeArchitecture, config: Any, state: dict[str, torch.Tensor]
) -> VanillaTransformerConfig:
    """Convert a native config. Vocabulary sizes and tied matrices are inferred from the weights."""
    source, target = (state[f"model.{side}.embed_tokens.weight"] for side in SIDES)
    is_shared, is_tied = is_same_tensor(source, target), is_same_tensor(target, state["lm_head.weight"])
    bias = state.get("final_logits_bias")
    fields = {name: getattr(config, name, None) for name in SAME_FIELDS}
    fields |= {
        "vocab_size": len(source),
        "decoder_vocab_size": len(target),
        "share_encoder_decoder_embeddings": is_shared,
        "tie_word_embeddings": is_tied,
        "norm_position": architecture.norm_position,
        "embedding_norm": architecture.embedding_norm,
        "position_embedding_type": "sinusoidal" if architecture.positions == "sinusoidal" else "learned",
        "lm_head_bias": bias is not None and bool(bias.any()),
        "layer_norm_eps": EPS,
        "initialization": "normal",
    }
    return VanillaTransformerConfig(**fields)


def is_same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors share memory or have equal values."""
    return one.data_ptr() == other.data_ptr() or torch.equal(one, other)


def native_parameter_name(name: str) -> str:
    """Return the native name of a parameter of this package."""
    for old, new in PARAMETER_NAMES:
        name = name.replace(old, new)
    return name


def permute_hidden_dims(name: str, tensor: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Permute the hidden dimensions of a parameter, given its name in this package."""
    if any(part in name for part in ("out_proj", "fc2", "norm")):
        return tensor[order]  # writes to the residual stream
    return tensor[:, order] if tensor.ndim == 2 else tensor
