# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""Configuration of the encoder-decoder of "Attention Is All You Need" (Vaswani et al. 2017, arXiv:1706.03762)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig, PreTrainedConfig
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import logging
from transformers.utils.versions import require_version

# before the class, which older versions cannot define
require_version("transformers>=5.18", "Run: pip install --upgrade transformers")

logger = logging.get_logger(__name__)

# Model sizes of the paper's table 3, by name; "tiny" trains in minutes on a laptop's CPU.
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
    """Return a dataclass field with a help text, which `--help` and the documentation show."""
    return field(default=default, metadata={"help": text})


@strict
class VanillaTransformerConfig(PreTrainedConfig):
    """Configuration of the model architecture. The defaults are the paper's base model (table 3, first row).

    Field names are those of Bart and Marian, because caches, beam search and other libraries read them.
    The constructor rejects unknown names. `from_dict` and `from_pretrained` keep them as attributes.
    Generation parameters (`num_beams`, `max_length`, ...) belong to `GenerationConfig`.

    Deviations from the paper, off by default: `norm_position="pre"`, `final_norm=True`, `lm_head_bias`,
    `embedding_norm`, `share_encoder_decoder_embeddings=False`, `tie_word_embeddings=False`, `attention_dropout`,
    `activation_dropout`, `position_embedding_type="learned"` (table 3, row E), `key_head_dim`/`value_head_dim` (row B).

    Raises:
        ValueError: If a field name is unknown or values contradict each other. The message suggests a fix.
        huggingface_hub.errors.StrictDataclassError: If a value has the wrong type.
    """

    model_type = "vanilla_transformer"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]
    attribute_map = {
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    }

    # Vocabulary
    vocab_size: int = config_field(37000, "Size of the source vocabulary (section 5.1: about 37,000 shared tokens).")
    decoder_vocab_size: int | None = config_field(None, "Size of the target vocabulary. Defaults to `vocab_size`.")
    share_encoder_decoder_embeddings: bool = config_field(
        True, "Whether source and target share an embedding (section 3.4)."
    )
    tie_word_embeddings: bool = config_field(True, "Whether target embedding and LM head share a matrix (section 3.4).")
    pad_token_id: int | None = config_field(0, "Id of the pad token.")
    bos_token_id: int | None = config_field(1, "Id of the BOS token.")
    eos_token_id: int | list[int] | None = config_field(2, "Id of the EOS token, or a list of ids.")
    decoder_start_token_id: int | None = config_field(1, "Id of the first input token of the decoder.")

    # Size (section 3, table 3)
    d_model: int = config_field(512, "Hidden size: dimension of the input and output of every layer.")
    encoder_layers: int = config_field(6, "Number of encoder layers (N in the paper).")
    decoder_layers: int = config_field(6, "Number of decoder layers (N in the paper).")
    encoder_attention_heads: int = config_field(8, "Number of attention heads in the encoder (h in the paper).")
    decoder_attention_heads: int = config_field(8, "Number of decoder attention heads, for self- and cross-attention.")
    encoder_ffn_dim: int = config_field(2048, "Inner dimension of the encoder's feed-forward networks (d_ff).")
    decoder_ffn_dim: int = config_field(2048, "Inner dimension of the decoder's feed-forward networks.")
    key_head_dim: int | None = config_field(None, "Query/key dimension per head (d_k). Defaults to d_model / heads.")
    value_head_dim: int | None = config_field(None, "Value dimension per head (d_v). Defaults to d_model / heads.")
    activation_function: str = config_field(
        "relu", "Activation function of the feed-forward networks (section 3.3), for example `gelu` or `silu`."
    )

    # Normalization (section 3.1)
    norm_position: Literal["post", "pre"] = config_field(
        "post", "Position of LayerNorm. `post`: LayerNorm(x + f(x)). `pre`: x + f(LayerNorm(x))."
    )
    final_norm: bool | None = config_field(None, "Whether each stack ends with LayerNorm. Default: only with pre-norm.")
    embedding_norm: bool = config_field(False, "Whether LayerNorm follows the sum of embeddings and positions.")
    layer_norm_eps: float = config_field(
        1e-5, "Epsilon of LayerNorm, added to the variance. The paper does not specify it; 1e-5 is PyTorch's default."
    )

    # Embeddings and positions (sections 3.4 and 3.5)
    scale_embedding: bool = config_field(True, "Whether to multiply embeddings by sqrt(d_model) (section 3.4).")
    position_embedding_type: Literal["sinusoidal", "learned"] = config_field(
        "sinusoidal", "Type of the position embeddings. `sinusoidal`: section 3.5. `learned`: table 3, row E."
    )
    max_position_embeddings: int = config_field(1024, "Maximum sequence length; applies only to learned positions.")
    lm_head_bias: bool = config_field(False, "Whether the LM head has a bias.")

    # Regularization (section 5.4), as probabilities
    dropout: float | int = config_field(
        0.1, "Dropout on the output of every sublayer and on the sum of token and position embeddings."
    )
    attention_dropout: float | int = config_field(0.0, "Dropout on attention weights.")
    activation_dropout: float | int = config_field(0.0, "Dropout inside the feed-forward network.")

    # Initialization
    initialization: Literal["xavier", "torch", "normal"] = config_field(
        "xavier",
        "Initialization of the weights. `xavier`: Glorot uniform, zero biases. `torch`: PyTorch's defaults. "
        "`normal`: N(0, init_std^2), zero biases.",
    )
    init_std: float = config_field(0.02, "Standard deviation of the weights with initialization `normal`.")

    use_cache: bool = config_field(True, "Whether decoding caches keys and values of earlier tokens.")
    is_encoder_decoder: bool = config_field(True, "Always True. Other libraries read it.")

    def __post_init__(self, **kwargs):
        unknown = self._unknown_names(kwargs)
        if unknown:
            raise ValueError(" ".join(self._explain_unknown(name) for name in unknown))
        if self.decoder_vocab_size is None:
            self.decoder_vocab_size = self.vocab_size
        super().__post_init__(**kwargs)
        self.validate_architecture()  # not called by `@strict`, because it must raise ValueError

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "vocab_size" and self.share_encoder_decoder_embeddings:
            self.decoder_vocab_size = value  # the embedding is shared

    @classmethod
    def from_size(cls, size: str, **overrides: Any) -> "VanillaTransformerConfig":
        """Return the config of a size: "base" or "big" (table 3), or "tiny" (d_model 128, 4+4 layers)."""
        if size not in SIZES:
            raise ValueError(f"size={size!r} is not supported: choose one of {', '.join(SIZES)}.")
        return cls(**(SIZES[size] | overrides))

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """Override of the base method that keeps unknown keys as attributes instead of rejecting them."""
        unknown = {name: config_dict[name] for name in cls._unknown_names(config_dict)}
        known = {name: value for name, value in config_dict.items() if name not in unknown}
        # keyword arguments override unknown keys, too: `from_pretrained(..., custom_field=3)`
        overrides = {name: kwargs.pop(name) for name in unknown if name in kwargs}
        result = super().from_dict(known, **kwargs)
        config = result[0] if isinstance(result, tuple) else result
        for name, value in (unknown | overrides).items():
            setattr(config, name, value)
        return result

    def validate_architecture(self) -> None:
        """Raise ValueError if fields contradict each other; called by the constructor and by `save_pretrained`."""
        self._validate_ranges()
        for side in ("encoder", "decoder"):
            heads = getattr(self, f"{side}_attention_heads")
            if (self.key_head_dim is None or self.value_head_dim is None) and self.d_model % heads:
                raise ValueError(
                    f"d_model={self.d_model} is not a multiple of {side}_attention_heads={heads}: choose a number of "
                    f"heads that divides it, or set key_head_dim and value_head_dim."
                )
        if self.position_embedding_type == "sinusoidal" and self.d_model % 2:
            raise ValueError(
                f"d_model={self.d_model} is odd, but sinusoidal positions need an even number (pairs of sine and "
                f"cosine). Change d_model, or set position_embedding_type='learned'."
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
                raise ValueError(f"{name}={getattr(self, name)} must be a probability in [0, 1).")
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
        """Disable the check of transformers, which only warns. `validate_architecture` raises errors instead."""

    @classmethod
    def _unknown_names(cls, names) -> list[str]:
        """Return the names that are neither fields of this class nor keys that transformers reads or writes."""
        known = {each.name for each in fields(cls)} | set(cls.attribute_map)
        known |= {"model_type", "dtype", "torch_dtype", "num_labels", "name_or_path", "_name_or_path", "_commit_hash"}
        known |= {"output_attentions", "attn_implementation", "_attn_implementation", "experts_implementation"}
        known |= {"auto_map", "custom_pipelines", "quantization_config", "per_layer_config", "distributed_config"}
        return [name for name in names if name not in known]

    @classmethod
    def _explain_unknown(cls, name: str) -> str:
        if name in GenerationConfig().to_dict():
            return f"{name!r} is a generation parameter: set it in model.generation_config or pass it to generate()."
        matches = get_close_matches(name, [each.name for each in fields(cls)] + list(cls.attribute_map), n=1)
        hint = f"did you mean {matches[0]!r}?" if matches else "see the fields of VanillaTransformerConfig."
        return f"{name!r} is not a field of VanillaTransformerConfig: {hint}"


@contextmanager
def include_code(
    model: Any, base_class: Any, directory: Any, is_main_process: bool = True, *_: Any, **__: Any
) -> Iterator[None]:
    """Context manager that makes `save_pretrained` save the code of the model class, too.

    `base_class` is a class of the modeling file. If the model class is a subclass from another module, this
    modeling file is saved together with its module.
    """
    head = model.get_output_embeddings()
    if head is not None and head.weight is model.get_decoder().embed_tokens.weight:
        model.config.tie_word_embeddings = True  # merging an adapter with PEFT sets it to False
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
        Path(directory).mkdir(parents=True, exist_ok=True)
        custom_object_save(base_class, directory)
        in_main = module == "__main__"
        logger.warning_once(
            f"The code of {name} is {'not ' * in_main}saved with the model"
            f"{': define the class in a module instead of __main__' * in_main}. If vanilla_transformer is installed, "
            f"Auto classes load its class instead of {name}. Use {name}.from_pretrained, or register {name} "
            f"with a config of another model_type."
        )
    model.__class__ = own_class  # not the wrapper class of FSDP, whose code would be saved instead
    try:
        yield
    finally:
        model.__class__ = wrapped_class


__all__ = ["SIZES", "VanillaTransformerConfig"]
