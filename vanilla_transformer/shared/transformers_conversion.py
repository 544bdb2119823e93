"""Models of ours as transformers' own sequence-to-sequence classes, and back: one mapping a class, used both ways.

    stock = to_stock(model)       # a MarianMTModel, PegasusForConditionalGeneration, ...: of the first class that fits
    model = from_stock(stock)     # a model of any of these classes as ours

All of them compute what ours does, less names and an order: where sinusoids are computed, all sines stand before all
cosines there, and they alternate here. The residual stream is then permuted through every weight, so that weights go
there and back bit for bit.
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

EPS = 1e-5  # of LayerNorm, fixed in their code
SAME_FIELDS = (  # of both configurations, by these names
    *("vocab_size", "d_model", "encoder_layers", "decoder_layers", "dropout", "attention_dropout"),
    *("encoder_attention_heads", "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim"),
    *("activation_function", "scale_embedding", "activation_dropout", "max_position_embeddings", "init_std"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "tie_word_embeddings"),
)
TWO_VOCABULARIES = ("decoder_vocab_size", "share_encoder_decoder_embeddings")
SIDES = ("encoder", "decoder")
OTHER_POSITIONS = "its positions are other ones, or its decoder starts with the pad token"
NAMES = (  # ours, theirs
    ("feed_forward_layer_norm", "final_layer_norm"),
    ("embedding_layer_norm", "layernorm_embedding"),
    ("feed_forward.", ""),
    ("cross_attn", "encoder_attn"),
    ("coder.norm.", "coder.layer_norm."),
    ("lm_head.bias", "final_logits_bias"),
)


@dataclass(frozen=True)
class NativeArchitecture:
    """What a class of transformers computes, in the words of our configuration.

    Args:
        model_class: of transformers.
        norm_position, embedding_norm: as in `VanillaTransformerConfig`; a final norm stands there with pre-norm alone.
        positions: "computed": sinusoids of section 3.5, which the class keeps to itself, sines before cosines.
            "learned": a table. "tensor2tensor_sinusoids": those of tensor2tensor, which are a table here.
        unread: rows of a learned table before that of the first position, which nothing reads.
        two_vocabularies: source and target may have embeddings of their own.
        lm_head_bias: logits have a bias, `final_logits_bias`.
    """

    model_class: type[PreTrainedModel]
    norm_position: str
    embedding_norm: bool = False
    positions: str = "computed"
    position_offset: int = 0
    two_vocabularies: bool = False
    lm_head_bias: bool = True

    @property
    def model_type(self) -> str:
        return self.model_class.config_class.model_type

    def incompatibilities(self, model: VanillaTransformerForConditionalGeneration) -> list[str]:
        """Why the class cannot express a model of ours; none: it can."""
        config = model.config
        has_final_norm = isinstance(model.get_encoder().norm, nn.LayerNorm)
        is_learned = config.position_embedding_type == "learned"
        needs_table = self.positions == "tensor2tensor_sinusoids"
        found = {
            f"it is {config.norm_position}-norm": config.norm_position != self.norm_position,
            "it has a final norm": has_final_norm and self.norm_position == "post",
            "it has no final norm": not has_final_norm and self.norm_position == "pre",
            "its positions are learned": is_learned and self.positions == "computed",
            OTHER_POSITIONS: needs_table and not self.has_tensor2tensor_sinusoids(model),
            "its width is odd": config.d_model % 2 == 1 and self.positions != "learned",
            "it has a norm on its embeddings": config.embedding_norm and not self.embedding_norm,
            "it has no norm on its embeddings": self.embedding_norm and not config.embedding_norm,
            "source and target have embeddings of their own": not (
                config.share_encoder_decoder_embeddings or self.two_vocabularies
            ),
            "the projection before its softmax has a bias": config.lm_head_bias and not self.lm_head_bias,
            "its heads have a width of their own (key_head_dim, value_head_dim)": bool(
                config.key_head_dim or config.value_head_dim
            ),
            f"its layer_norm_eps is {config.layer_norm_eps}, and {EPS} is fixed there": config.layer_norm_eps != EPS,
        }
        return [reason for reason, holds in found.items() if holds]

    def hidden_permutation(self, d_model: int) -> torch.Tensor:
        """Where the dimensions of their residual stream stand in ours: (d_model)."""
        if self.positions != "computed":
            return torch.arange(d_model)
        return torch.cat([torch.arange(0, d_model, 2), torch.arange(1, d_model, 2)])  # sines, cosines

    def tensor2tensor_sinusoids(self, config: Any) -> torch.Tensor:
        """Table of "tensor2tensor_sinusoids": (positions, d_model)."""
        first = config.pad_token_id + 1  # as fairseq counts
        rows = first + config.max_position_embeddings
        return M2M100SinusoidalPositionalEmbedding.get_embedding(rows, config.d_model, config.pad_token_id)[first:]

    def has_tensor2tensor_sinusoids(self, model: VanillaTransformerForConditionalGeneration) -> bool:
        config = model.config  # the class gives a pad token no position, also if the decoder starts with it
        if config.position_embedding_type != "learned" or config.pad_token_id in (None, config.decoder_start_token_id):
            return False
        table = self.tensor2tensor_sinusoids(config)
        weights = [stack.embed_positions.weight for stack in (model.get_encoder(), model.get_decoder())]
        return all(torch.equal(weight, table.to(weight.dtype)) for weight in weights)


NATIVE_ARCHITECTURES = (  # a model becomes one of the first class that fits
    MARIAN := NativeArchitecture(MarianMTModel, "post", two_vocabularies=True),
    NativeArchitecture(PegasusForConditionalGeneration, "pre"),
    NativeArchitecture(
        BartForConditionalGeneration, "post", embedding_norm=True, positions="learned", position_offset=2
    ),
    NativeArchitecture(
        MBartForConditionalGeneration, "pre", embedding_norm=True, positions="learned", position_offset=2
    ),
    NativeArchitecture(M2M100ForConditionalGeneration, "pre", positions="tensor2tensor_sinusoids", lm_head_bias=False),
    NativeArchitecture(BlenderbotForConditionalGeneration, "pre", positions="learned"),
)


def to_transformers(
    model: VanillaTransformerForConditionalGeneration, stock: NativeArchitecture | None = None
) -> PreTrainedModel:
    """An equal model of transformers' own class, in evaluation mode, with the same settings of generation.

    Sinusoids become a table of `config.max_position_embeddings` positions: the longest sentence that it takes.

    Args:
        stock: the class; None: the first of `NATIVE_ARCHITECTURES` that fits.

    Raises:
        ValueError: it cannot express the model; names why.
    """
    stock = stock or find_native_architecture(model)
    if reasons := stock.incompatibilities(model):
        raise ValueError(f"{stock.model_class.__name__} cannot express this model: {'; '.join(reasons)}.")
    config = model.config
    theirs = stock.model_class(to_native_config(stock, config))
    state = theirs.state_dict()
    order, ours = stock.hidden_permutation(config.d_model), model.state_dict()
    for name, tensor in ours.items():
        if "embed_positions" not in name:
            tensor = permute_hidden_dims(name, tensor, order)
            state[native_parameter_name(name)] = tensor[None] if name == "lm_head.bias" else tensor
    if stock.positions == "learned":
        for side in SIDES:
            state[f"model.{side}.embed_positions.weight"] = native_position_table(stock, config, ours, side)
    if "model.shared.weight" in state:
        state["model.shared.weight"] = state["model.encoder.embed_tokens.weight"]
    theirs.load_state_dict(state)
    theirs.generation_config = copy_generation_config(model)
    return theirs.eval()


def to_marian(model: VanillaTransformerForConditionalGeneration) -> MarianMTModel:
    """A `MarianMTModel` with equal logits. Raises ValueError for an architecture that it cannot express."""
    return to_transformers(model, MARIAN)


def copy_generation_config(model: Any) -> GenerationConfig:
    """Return a copy of a model's generation config, not marked as derived from its configuration: transformers 4 would
    derive it again. Unlike a new object, a copy counts as unmodified, so that it is saved without strict validation."""
    settings = copy.deepcopy(model.generation_config)
    settings._from_model_config = False
    return settings


def find_native_architecture(model: VanillaTransformerForConditionalGeneration) -> NativeArchitecture:
    """The first class that can express a model. Raises ValueError that says what keeps it from the nearest ones."""
    reasons = {stock: stock.incompatibilities(model) for stock in NATIVE_ARCHITECTURES}
    fewest = min(map(len, reasons.values()))
    nearest = [stock for stock in NATIVE_ARCHITECTURES if len(reasons[stock]) == fewest]
    if fewest:
        told = " ".join(f"Not {each.model_class.__name__}: {'; '.join(reasons[each])}." for each in nearest)
        raise ValueError(f"no class of transformers can express this model. {told}")
    return nearest[0]


def to_native_config(stock: NativeArchitecture, config: VanillaTransformerConfig) -> Any:
    names = SAME_FIELDS + (TWO_VOCABULARIES if stock.two_vocabularies else ())
    fields = {name: getattr(config, name) for name in names}
    off: dict[str, Any] = {"forced_eos_token_id": None, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
    off |= {"encoder_no_repeat_ngram_size": 0} if stock.model_type == "blenderbot" else {}  # 3 where it is unset
    return stock.model_class.config_class(**(fields | off))


def native_position_table(
    stock: NativeArchitecture, config: Any, ours: dict[str, torch.Tensor], side: str
) -> torch.Tensor:
    """A stack's learned positions, or its sinusoids, behind the rows that nothing reads."""
    table = ours.get(f"model.{side}.embed_positions.weight")
    if table is None:
        table = sinusoidal_encoding(torch.arange(config.max_position_embeddings), config.d_model)
    return nn.functional.pad(table, (0, 0, stock.position_offset, 0))


def from_transformers(theirs: PreTrainedModel) -> VanillaTransformerForConditionalGeneration:
    """Convert a native Transformers model to an equal model of this package, in evaluation mode and the same dtype.

    Raises:
        ValueError: a model of another class; or its configuration contradicts its weights or is not supported.
    """
    stock, state = native_architecture_of(theirs.config), theirs.state_dict()
    config = from_native_config(stock, theirs.config, state)
    model = VanillaTransformerForConditionalGeneration(config).to(theirs.dtype)
    back = stock.hidden_permutation(config.d_model).argsort()
    ours = {}
    for name in model.state_dict():
        if name == "lm_head.bias":
            ours[name] = state["final_logits_bias"][0]
        elif "embed_positions" in name:
            is_table = stock.positions == "learned"
            ours[name] = state[name][stock.position_offset :] if is_table else stock.tensor2tensor_sinusoids(config)
        else:
            ours[name] = permute_hidden_dims(name, state[native_parameter_name(name)], back)
    model.load_state_dict(ours)
    if reasons := stock.incompatibilities(model):
        raise ValueError(f"a model of ours cannot be equal to it: {'; '.join(reasons)}.")
    model.generation_config = copy_generation_config(theirs)
    return model.eval()


def native_architecture_of(config: Any) -> NativeArchitecture:
    """The class of a configuration of transformers. Raises ValueError for one that has no equal among ours."""
    known = {stock.model_type: stock for stock in NATIVE_ARCHITECTURES}
    if config.model_type in known:
        return known[config.model_type]
    if config.model_type in UNSUPPORTED_MODEL_TYPES:
        raise ValueError(
            f"a {config.model_type} is no model of this kind: it has {UNSUPPORTED_MODEL_TYPES[config.model_type]}."
        )
    raise ValueError(f"a {config.model_type} is not known here: models of {', '.join(known)} are.")


RELATIVE = "relative positions and norms without a mean"
UNSUPPORTED_MODEL_TYPES = {  # classes for text to text whose arithmetic is another, and in what
    "t5": RELATIVE,
    "mt5": f"{RELATIVE}, and gated activations",
    "umt5": f"{RELATIVE}, and gated activations",
    "t5gemma": "rotary positions and gated activations",
    "longt5": f"{RELATIVE}, and attention to a part of the source",
    "switch_transformers": f"{RELATIVE}, and a mixture of experts",
    "nllb-moe": "a mixture of experts",
    "led": "attention to a part of the source",
    "bigbird_pegasus": "attention to a part of the source",
    "pegasus_x": "attention to a part of the source",
    "prophetnet": "a decoder that predicts several tokens at a time",
    "blenderbot-small": "positions that are added behind the norm of the embeddings",
    "encoder-decoder": "two models of other classes",
}


def from_native_config(
    stock: NativeArchitecture, config: Any, state: dict[str, torch.Tensor]
) -> VanillaTransformerConfig:
    """What weights tell is read off them: sizes of vocabularies, and which matrices are one."""
    source, target = (state[f"model.{side}.embed_tokens.weight"] for side in SIDES)
    is_shared, is_tied = equal(source, target), equal(target, state["lm_head.weight"])
    bias = state.get("final_logits_bias")
    fields = {name: getattr(config, name, None) for name in SAME_FIELDS}
    fields |= {
        "vocab_size": len(source),
        "decoder_vocab_size": len(target),
        "share_encoder_decoder_embeddings": is_shared,
        "tie_word_embeddings": is_tied,
        "norm_position": stock.norm_position,
        "embedding_norm": stock.embedding_norm,
        "position_embedding_type": "sinusoidal" if stock.positions == "computed" else "learned",
        "lm_head_bias": bias is not None and bool(bias.any()),
        "layer_norm_eps": EPS,
        "initialization": "normal",
    }
    return VanillaTransformerConfig(**fields)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() or torch.equal(one, other)


def native_parameter_name(name: str) -> str:
    """Of one of our parameters."""
    for ours, theirs in NAMES:
        name = name.replace(ours, theirs)
    return name


def permute_hidden_dims(name: str, tensor: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """A parameter of ours, by its name, in another order of the residual stream: rows of what writes into it, columns
    of what reads from it."""
    if any(part in name for part in ("out_proj", "fc2", "norm")):
        return tensor[order]
    return tensor[:, order] if tensor.ndim == 2 else tensor
