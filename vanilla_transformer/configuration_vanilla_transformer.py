# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""Configuration of the encoder-decoder of "Attention Is All You Need" (Vaswani et al. 2017, arXiv:1706.03762)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field, fields
from difflib import get_close_matches
from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig, PretrainedConfig
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import logging

logger = logging.get_logger(__name__)

# The paper's table 3 by name; "tiny" trains in minutes on a laptop's CPU.
SIZES: dict[str, dict[str, Any]] = {
    "base": {},
    "big": {
        "d_model": 1024,
        "encoder_attention_heads": 16,
        "decoder_attention_heads": 16,
        "encoder_ffn_dim": 4096,
        "decoder_ffn_dim": 4096,
        "dropout": 0.3,
    },
    "tiny": {
        "vocab_size": 8000,
        "d_model": 128,
        "encoder_layers": 4,
        "decoder_layers": 4,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 256,
        "decoder_ffn_dim": 256,
    },
}


def config_field(default: Any, text: str) -> Any:
    """A field with its meaning in words, which `--help` and the documentation show."""
    return field(default=default, metadata={"help": text})


@strict
class VanillaTransformerConfig(PretrainedConfig):
    """Every choice that shapes the model; the defaults are the paper's base model (table 3, first row).

    Field names are those of Bart and Marian, because caches, beam search and other tools read them.
    A name that is not listed here is refused by the constructor (`from_dict` and `from_pretrained` let it through).
    Parameters of decoding (`num_beams`, `max_length`, ...) live in `GenerationConfig`.

    Departures from the paper, each off by default: `norm_position="pre"`, `final_norm=True`,
    `position_embedding_type="learned"` (the paper's table 3, row E), `key_head_dim`/`value_head_dim` (row B),
    `lm_head_bias`, `embedding_norm`, `share_encoder_decoder_embeddings=False`, `tie_word_embeddings=False`,
    `attention_dropout`, `activation_dropout`.

    Raises:
        ValueError: an unknown field name, or values that contradict each other; names both and the cure.
        huggingface_hub.errors.StrictDataclassError: a value of the wrong type.
    """

    model_type = "vanilla_transformer"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    }

    # Vocabulary
    vocab_size: int = config_field(37000, "Source tokens (section 5.1: about 37,000 shared byte-pair tokens).")
    decoder_vocab_size: int | None = config_field(None, "Target tokens. None: as many as source tokens.")
    share_encoder_decoder_embeddings: bool = config_field(
        True, "Source and target share one embedding matrix (section 3.4)."
    )
    tie_word_embeddings: bool = config_field(
        True, "The target embedding and the projection before the softmax share one matrix (section 3.4)."
    )
    pad_token_id: int | None = config_field(0, "Id of the token that fills a batch up.")
    bos_token_id: int | None = config_field(1, "Id of the token that begins a sequence.")
    eos_token_id: int | list[int] | None = config_field(2, "Id of the token that ends a sequence.")
    decoder_start_token_id: int | None = config_field(1, "Id that the decoder begins with.")

    # Size (section 3, table 3)
    d_model: int = config_field(512, "Width of every layer's input and output.")
    encoder_layers: int = config_field(6, "Layers of the encoder (N in the paper).")
    decoder_layers: int = config_field(6, "Layers of the decoder (N in the paper).")
    encoder_attention_heads: int = config_field(8, "Attention heads of the encoder (h in the paper).")
    decoder_attention_heads: int = config_field(8, "Attention heads of the decoder, in self- and cross-attention.")
    encoder_ffn_dim: int = config_field(2048, "Inner width of the encoder's feed-forward networks (d_ff in the paper).")
    decoder_ffn_dim: int = config_field(2048, "Inner width of the decoder's feed-forward networks.")
    key_head_dim: int | None = config_field(None, "Width of a head's queries and keys (d_k). None: d_model / heads.")
    value_head_dim: int | None = config_field(None, "Width of a head's values (d_v). None: d_model / heads.")
    activation_function: str = config_field(
        "relu",
        "What stands between the two linear maps of the feed-forward network (section 3.3): relu, gelu, silu, ...",
    )

    # Normalization (section 3.1)
    norm_position: Literal["post", "pre"] = config_field("post", "post: LayerNorm(x + f(x)). pre: x + f(LayerNorm(x)).")
    final_norm: bool | None = config_field(
        None, "LayerNorm after the last layer of each stack. None: with pre-norm only."
    )
    embedding_norm: bool = config_field(False, "LayerNorm on the sum of embeddings and positions.")
    layer_norm_eps: float = config_field(
        1e-5, "What LayerNorm adds to the variance. The paper names none; this is torch's."
    )

    # Embeddings and positions (sections 3.4 and 3.5)
    scale_embedding: bool = config_field(True, "Multiply embeddings by the square root of d_model (section 3.4).")
    position_embedding_type: Literal["sinusoidal", "learned"] = config_field(
        "sinusoidal", "How positions are told apart (section 3.5)."
    )
    max_position_embeddings: int = config_field(1024, "Hard limit of learned positions; sinusoids go on beyond it.")
    lm_head_bias: bool = config_field(False, "The projection before the softmax has a bias.")

    # Regularization (section 5.4), as probabilities
    dropout: float | int = config_field(
        0.1, "Dropout on every sublayer's output and on the sum of embeddings and positions."
    )
    attention_dropout: float | int = config_field(0.0, "Dropout on attention weights.")
    activation_dropout: float | int = config_field(0.0, "Dropout inside the feed-forward network.")

    # Initialization
    initialization: Literal["xavier", "torch", "normal"] = config_field(
        "xavier",
        "xavier: uniform Glorot for every matrix, zero biases. torch: PyTorch's own defaults. normal: N(0, "
        "init_std^2), zero biases.",
    )
    init_std: float = config_field(0.02, "Standard deviation of the initial weights, with initialization: normal.")

    use_cache: bool = config_field(True, "Keep keys and values of earlier tokens while decoding.")
    is_encoder_decoder: bool = config_field(True, "What other tools read; it is one.")

    def __post_init__(self, **kwargs):
        unknown = self._unknown_names(kwargs)
        if unknown:
            raise ValueError(" ".join(self._explain_unknown(name) for name in unknown))
        if self.decoder_vocab_size is None:
            self.decoder_vocab_size = self.vocab_size
        super().__post_init__(**kwargs)
        self.validate_architecture()  # here too: `@strict` calls it later and would wrap the ValueError in its own type

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "vocab_size" and self.share_encoder_decoder_embeddings:
            self.decoder_vocab_size = value  # one vocabulary: `config.vocab_size = n` means both sides

    @classmethod
    def from_size(cls, size: str, **overrides: Any) -> "VanillaTransformerConfig":
        """A configuration by name: the paper's `base` and `big` (table 3), or `tiny` (d_model 128, 4+4 layers).

        Args:
            size: `"base"`, `"big"` or `"tiny"`.
            **overrides: fields that differ from that size.
        """
        if size not in SIZES:
            raise ValueError(f"size={size!r} is not known; choose one of {', '.join(SIZES)}.")
        return cls(**(SIZES[size] | overrides))

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """As in transformers. Keys that this version does not know are kept as attributes, never refused."""
        unknown = {name: config_dict[name] for name in cls._unknown_names(config_dict)}
        known = {name: value for name, value in config_dict.items() if name not in unknown}
        # set on the configuration first, so that a keyword given here (`from_pretrained(..., custom_field=3)`) wins
        overrides = {name: kwargs.pop(name) for name in unknown if name in kwargs}
        loaded = super().from_dict(known, **kwargs)
        config = loaded[0] if isinstance(loaded, tuple) else loaded
        for name, value in (unknown | overrides).items():
            setattr(config, name, value)
        return loaded

    def validate_architecture(self) -> None:
        """Checks that the fields fit together; called by the constructor and by `save_pretrained`."""
        self._validate_ranges()
        for side in ("encoder", "decoder"):
            heads = getattr(self, f"{side}_attention_heads")
            if (self.key_head_dim is None or self.value_head_dim is None) and self.d_model % heads:
                raise ValueError(
                    f"d_model={self.d_model} is not a multiple of {side}_attention_heads={heads}: choose a number of "
                    f"heads that divides it, or give key_head_dim and value_head_dim."
                )
        if self.position_embedding_type == "sinusoidal" and self.d_model % 2:
            raise ValueError(
                f"d_model={self.d_model} is odd, but sinusoidal positions pair a sine with a cosine: use an even "
                f"d_model, or position_embedding_type='learned'."
            )
        if self.share_encoder_decoder_embeddings and self.decoder_vocab_size != self.vocab_size:
            raise ValueError(
                f"vocab_size={self.vocab_size} and decoder_vocab_size={self.decoder_vocab_size} cannot share one "
                f"embedding: make them equal, or set share_encoder_decoder_embeddings=False."
            )

    def _validate_ranges(self) -> None:
        target_size = self.decoder_vocab_size or self.vocab_size
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is a probability: choose a value in [0, 1).")
        positive = ["vocab_size", "decoder_vocab_size", "d_model", "encoder_layers", "decoder_layers"]
        positive += ["encoder_attention_heads", "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim"]
        positive += ["max_position_embeddings", "key_head_dim", "value_head_dim"]
        for name in positive:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")

        limits = {"pad_token_id": min(self.vocab_size, target_size)}
        limits |= dict.fromkeys(("bos_token_id", "eos_token_id", "decoder_start_token_id"), target_size)
        for name, limit in limits.items():
            ids = getattr(self, name)
            for token_id in ids if isinstance(ids, list) else [ids]:
                if token_id is not None and not 0 <= token_id < limit:
                    raise ValueError(
                        f"{name}={token_id} is outside the vocabulary of {limit} tokens: choose an id from 0 to "
                        f"{limit - 1}, or enlarge the vocabulary."
                    )

    def validate_token_ids(self) -> None:
        """Replaces transformers' warning: `validate_architecture` raises for ids outside the vocabulary."""

    @classmethod
    def _unknown_names(cls, names) -> list[str]:
        """Those of `names` that are neither a field here nor a key that transformers itself reads or writes."""
        known = {each.name for each in fields(cls)} | set(cls.attribute_map)
        known |= {"model_type", "dtype", "torch_dtype", "num_labels", "name_or_path", "_name_or_path", "_commit_hash"}
        known |= {"output_attentions", "attn_implementation", "_attn_implementation", "experts_implementation"}
        known |= {"auto_map", "custom_pipelines", "quantization_config", "per_layer_config", "distributed_config"}
        return [name for name in names if name not in known]

    @classmethod
    def _explain_unknown(cls, name: str) -> str:
        if name in GenerationConfig().to_dict():
            return f"{name!r} is a parameter of decoding: set it in model.generation_config or pass it to generate()."
        close = get_close_matches(name, [each.name for each in fields(cls)] + list(cls.attribute_map), n=1)
        hint = f"did you mean {close[0]!r}?" if close else "see the fields of VanillaTransformerConfig."
        return f"{name!r} is not a field of VanillaTransformerConfig: {hint}"


@contextmanager
def saving_code_of(
    model: Any, base_class: Any, save_directory: Any, is_main_process: bool = True, **_: Any
) -> Iterator[None]:
    """Context manager in which transformers saves a model with the code of its class.

    Args:
        base_class: a class of the modeling file, whose code and siblings the code of a subclass needs.
    """
    head = model.get_output_embeddings()
    if head is not None and head.weight is model.get_decoder().embed_tokens.weight:
        model.config.tie_word_embeddings = True  # PEFT resets it when it merges an adapter
    model.config.auto_map = {
        "AutoConfig": "configuration_vanilla_transformer.VanillaTransformerConfig",
        "AutoModel": "modeling_vanilla_transformer.VanillaTransformerModel",
        "AutoModelForSeq2SeqLM": "modeling_vanilla_transformer.VanillaTransformerForConditionalGeneration",
    }
    translation = {"impl": "pipeline_vanilla_transformer.TranslationPipeline", "pt": ["AutoModelForSeq2SeqLM"]}
    model.config.custom_pipelines = {"translation": translation | {"type": "text"}}
    wrapped_class = type(model)
    own_class: Any = next(each for each in wrapped_class.__mro__ if not each.__name__.startswith("FSDP"))
    name, module = own_class.__name__, own_class.__module__
    if module != base_class.__module__ and own_class._auto_class and is_main_process:
        os.makedirs(save_directory, exist_ok=True)
        custom_object_save(base_class, save_directory)
        is_lost = module == "__main__"
        logger.warning_once(
            f"The code of {name} is {'not ' * is_lost}saved with the model"
            f"{': define the class in a module instead of __main__' * is_lost}. If vanilla_transformer is installed, "
            f"Auto classes load the model without it: use {name}.from_pretrained, or register the class with a config "
            f"of another model_type."
        )
    model.__class__ = own_class  # FSDP replaces the class, and transformers would save the code of that one
    try:
        yield
    finally:
        model.__class__ = wrapped_class


__all__ = ["SIZES", "VanillaTransformerConfig"]
