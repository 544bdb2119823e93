# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""Decoding of the paper (section 6.1) for `custom_generate`: beam search with length penalty, and greedy decoding.

    model.generate(**batch, custom_generate=beam_search)                             # as generate(), but faster
    model.generate(**batch, custom_generate=beam_search, num_beams=4, alpha=0.6, extra_tokens=50)    # as in the paper
    model.generate(**batch, custom_generate=beam_search, ensemble=[model_2, model_3])     # mean of the probabilities

`find_unsupported` decides for each call whether the loops of this package can decode it. For all other calls,
`generate()` uses its own loops. This module does not import the model, so that it can be published in a separate
repository. A model is a `VanillaTransformerForConditionalGeneration`.

Shapes: B sentences, K beams, T tokens so far, S source length, V target vocabulary.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, logits_process
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from .beam_search_vanilla_transformer import (
    BeamSearch,
    DecodingInputs,
    compute_limits,
    greedy_search,
    make_length_penalty,
)
from .decoder_vanilla_transformer import Ensemble, is_async_device

logger = logging.get_logger(__name__)

# Argument and field of outputs. Before version 5.24 of transformers, it was `past_key_values`
CACHE_NAME = "cache" if "cache" in GenerateBeamEncoderDecoderOutput.__dataclass_fields__ else "past_key_values"


def accept_past_key_values(forward: Callable) -> Callable:
    """Return `forward` so that it also accepts `cache` under its name before transformers 5.24, `past_key_values`."""

    @wraps(forward)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        if "past_key_values" in kwargs:
            rename_cache(kwargs, "cache")
        return forward(*args, **kwargs)

    return renamed


def rename_cache(arguments: dict[str, Any], name: str) -> None:
    """Rename the argument `cache` or `past_key_values` to `name`.

    If both are given, `past_key_values` replaces an empty `cache`: so PEFT adds a prefix to each call of `generate()`.
    """
    if CACHE_NAME == "cache" and "past_key_values" in arguments and not torch.compiler.is_compiling():
        warnings.warn("`past_key_values` is deprecated. Use `cache` instead.", FutureWarning, stacklevel=2)
    cache, previous = arguments.pop("cache", None), arguments.pop("past_key_values", None)
    if cache is None or (previous is not None and not cache.get_seq_length()):
        cache = previous
    if cache is not None:
        arguments[name] = cache


def beam_search(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    inputs_tensor: torch.Tensor,
    alpha: float | None = None,
    extra_tokens: int | None = None,
    ensemble: Sequence[PreTrainedModel] = (),
    glossary: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Decode with beam search or greedily. Pass it as `generate(custom_generate=beam_search)`.

    `generate()` prepares the first six arguments and `model_kwargs`. A decoder prompt (`decoder_input_ids`) may be
    padded on the left, according to its `decoder_attention_mask`. Without `alpha`, `extra_tokens`, `ensemble` and
    `glossary`, the result equals that of `generate()`, except that finished hypotheses are always padded with
    `pad_token_id`. For requests that this function cannot decode, `generate()` ignores it and uses its own loops.

    Args:
        model: A `VanillaTransformerForConditionalGeneration`.
        input_ids: Decoder prompt (B * K, T).
        logits_processor: Logits processors.
        stopping_criteria: Stopping criteria.
        generation_config: Generation config.
        inputs_tensor: Source token ids or embeddings.
        alpha: Exponent of the paper's length penalty. A hypothesis of n tokens has the score
            log P / ((5 + n) / 6)^alpha (Wu et al. 2016, equation 14), and the search ends when no other hypothesis can
            reach a better one. By default, `length_penalty` and `early_stopping` apply, as in `generate()`.
        extra_tokens: Maximum length of a translation minus the length of its source, in tokens (section 6.1: 50).
            Replaces the limit of `generation_config`.
        ensemble: Additional models with the same vocabularies.
        glossary: `LexicalConstraints`, created by `TranslationPipeline`, or None. Requires several beams.
            Terms that do not fit into the length limit are missing.
        **model_kwargs: Encoder outputs and masks.

    Returns:
        Token ids (B * n, T) for n returned sequences. With `return_dict_in_generate`, the output class of beam search
        in `generate()`, with `sequences_scores` (B * n) and without a cache.

    Raises:
        ValueError: If options exclude each other, vocabularies of the ensemble differ, or a penalty overflows.
    """
    models, arguments = (model, *(ensemble or ())), {**model_kwargs, "logits_processor": logits_processor}
    config, num_beams = generation_config, generation_config.num_beams
    validate_request(models, config, stopping_criteria, arguments, extra_tokens, glossary)
    prompt = input_ids[::num_beams]  # generate() has repeated each source K times
    masks = [model_kwargs.get(name) for name in ("attention_mask", "decoder_attention_mask")]
    mask, prompt_mask = (each if each is None else each[::num_beams] for each in masks)
    states = [model_kwargs["encoder_outputs"][0][::num_beams]]
    for other in models[1:]:
        validate_ensemble(model, other, inputs_tensor)
        states.append(other.get_encoder()(inputs_tensor, attention_mask=mask).last_hidden_state)
    limits = compute_limits(models, config.max_length, prompt, extra_tokens, mask, states[0])
    inputs = prepare_inputs(models, config, prompt, limits, states, mask, prompt_mask, logits_processor, alpha)
    output = run_search(inputs, config, alpha, glossary)
    return output if config.return_dict_in_generate else output.sequences


def prepare_inputs(
    models: Sequence[PreTrainedModel],
    config: GenerationConfig,
    prompt: torch.Tensor,
    limits: torch.Tensor,
    states: Sequence[torch.Tensor],
    mask: torch.Tensor | None,
    prompt_mask: torch.Tensor | None,
    logits_processor: LogitsProcessorList,
    alpha: float | None,
) -> DecodingInputs:
    """Return the inputs of the loops for encoder outputs `states` of each model, with their mask."""
    eos_ids, pad_id, is_static = config._eos_token_tensor, config._pad_token_tensor, is_async_device(prompt.device)
    prompt_mask = None if prompt_mask is None else (prompt_mask != 0).long()  # generate() also accepts float masks
    return DecodingInputs(
        decoder=Ensemble(models, states, mask, config.num_beams, prompt_mask, is_static),
        prompt=prompt,
        limits=limits,
        eos_ids=prompt.new_empty(0) if eos_ids is None else eos_ids.to(prompt),
        pad_id=0 if pad_id is None else int(pad_id),
        logits_processor=logits_processor or None,
        is_static=is_static,
        penalty=make_length_penalty(config.length_penalty, alpha, int(limits.max())),
    )


def validate_request(
    models: Sequence[PreTrainedModel],
    config: GenerationConfig,
    criteria: StoppingCriteriaList,
    arguments: Mapping[str, Any],
    extra_tokens: int | None,
    glossary: Any,
) -> None:
    """Raise ValueError if the loops of this package cannot decode. See `beam_search` for the arguments."""
    if models[0].config.model_type != "vanilla_transformer":
        raise ValueError(f"beam_search requires a vanilla_transformer model, got {models[0].config.model_type}.")
    conflict = find_unsupported(models, config, arguments)
    if not all(is_from_config(each, config) for each in criteria):
        conflict = conflict or "stopping_criteria"
    if glossary is not None and config.num_beams == 1:
        conflict = "a glossary with a single beam"
    if extra_tokens is not None and any("ForcedEOS" in type(each).__name__ for each in arguments["logits_processor"]):
        conflict = "forced_eos_token_id with extra_tokens"
    if conflict is not None:
        raise ValueError(f"beam_search does not support {conflict}. Omit it, or omit custom_generate.")


def run_search(
    inputs: DecodingInputs, config: GenerationConfig, alpha: float | None, glossary: Any
) -> GenerateBeamEncoderDecoderOutput:
    """Decode with the settings of `generate()`, or with those of the paper if `alpha` is given."""
    if config.num_beams == 1:
        sequences, scores = greedy_search(inputs, config.return_dict_in_generate)
        return GenerateBeamEncoderDecoderOutput(sequences=sequences, sequences_scores=scores)
    if glossary is not None:
        if len(glossary.tokens) != (size := len(inputs.prompt)):
            raise ValueError(f"The glossary must be for {size} sentences, but it is for {len(glossary.tokens)}.")
        glossary.to(inputs.prompt.device, inputs.decoder.vocab_size)
    early_stopping = config.early_stopping if alpha is None else "exact"
    if early_stopping in ("never", "exact") and (config.length_penalty if alpha is None else alpha) < 0:
        early_stopping = False  # longer hypotheses score lower, so the current length gives the bound
    search = BeamSearch(
        inputs,
        num_beams=config.num_beams,
        num_candidates=config.num_beams * max(2, 1 + len(inputs.eos_ids)),
        num_return_sequences=config.num_return_sequences,
        early_stopping=early_stopping,
        glossary=glossary,
    )
    sequences, scores, beam_indices = search.run()
    return GenerateBeamEncoderDecoderOutput(sequences=sequences, sequences_scores=scores, beam_indices=beam_indices)


OWN_ARGUMENTS = {"alpha": "alpha", "extra_tokens": "extra_tokens", "ensemble": "an ensemble", "glossary": "a glossary"}
# Arguments of generate() with which the loops of this package decode; others require a loop of transformers
SUPPORTED_ARGUMENTS = {
    *("inputs", "input_ids", "inputs_embeds", "attention_mask", "encoder_outputs"),
    *("decoder_input_ids", "decoder_attention_mask", CACHE_NAME, "use_cache"),
    *("output_attentions", "output_hidden_states", "return_dict"),
    *("generation_config", "logits_processor", "tokenizer", "custom_generate", *OWN_ARGUMENTS),
}
NEUTRAL_VALUES = {  # fields of a generation config, and the values with which the loops of this package decode
    "do_sample": (False,), "max_time": (), "stop_strings": (), "guidance_scale": (1,), "watermarking_config": (),
    "encoder_no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1,), "token_healing": (False,),
    "low_memory": (False,), "cache_implementation": ("dynamic", "static"),
}  # fmt: skip
STEP_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
OVERRIDABLE_METHODS = (  # of GenerationMixin, used by the loops of transformers
    *("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_prefill", "_sample", "_beam_search"),
)
STATELESS_PROCESSORS = {  # the scores of a row depend only on this row
    *(logits_process.MinLengthLogitsProcessor, logits_process.MinNewTokensLengthLogitsProcessor),
    *(logits_process.NoRepeatNGramLogitsProcessor, logits_process.RepetitionPenaltyLogitsProcessor),
    *(logits_process.SequenceBiasLogitsProcessor, logits_process.NoBadWordsLogitsProcessor),
    *(logits_process.ForcedBOSTokenLogitsProcessor, logits_process.ForcedEOSTokenLogitsProcessor),
    *(logits_process.SuppressTokensLogitsProcessor, logits_process.SuppressTokensAtBeginLogitsProcessor),
    *(logits_process.InfNanRemoveLogitsProcessor, logits_process.LogitNormalization),
    logits_process.ExponentialDecayLengthPenalty,
}
OUTPUT_CAPTURING = "transformers.utils.output_capturing"  # its hooks stay after a call, and then have no effect
MODEL_CLASS = "VanillaTransformerForConditionalGeneration"


def find_unsupported(
    models: Sequence[PreTrainedModel], config: GenerationConfig, arguments: Mapping[str, Any]
) -> str | None:
    """Return the name of the first option or modification that requires a loop of transformers, or None.

    `arguments` are those of `generate()`, or the ones that it prepared for the decoding loop.
    """
    mode = config.get_generation_mode(arguments.get("assistant_model"))
    given = {name: value for name, value in arguments.items() if value is not None}
    unsupported = [
        *(name for name, values in NEUTRAL_VALUES.items() if getattr(config, name, None) not in (None, *values)),
        *(name for name in STEP_OUTPUTS if config.return_dict_in_generate and getattr(config, name)),
        *(each for each in given if each not in SUPPORTED_ARGUMENTS and each not in vars(config)),
        *(type(each).__name__ for each in given.get("logits_processor", ()) if not is_stateless(each)),
    ]
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.BEAM_SEARCH):
        unsupported.append(mode.value)
    cache = given.get(CACHE_NAME)  # generate() extends a cache of the user in place
    if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0):
        unsupported.append(CACHE_NAME)
    if "decoder_attention_mask" in given:
        if given["decoder_attention_mask"].ndim != 2:
            unsupported.append("decoder_attention_mask that is not 2-dimensional")
        if config.repetition_penalty not in (None, 1):  # its logits processor then has one value per row
            unsupported.append("repetition_penalty with decoder_attention_mask")
    return next(chain(unsupported, *map(iter_modifications, models)), None)


def is_from_config(criterion: Any, config: GenerationConfig) -> bool:
    """Return whether a stopping criterion is one that `generate()` creates from its config."""
    if type(criterion) is MaxLengthCriteria:
        return criterion.max_length == config.max_length
    return type(criterion) is EosTokenCriteria and criterion.eos_token_id is config._eos_token_tensor


def is_stateless(processor: Any) -> bool:
    """Return whether a logits processor can be applied to any subset of the rows."""
    has_row_values = isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor)
    return type(processor) in STATELESS_PROCESSORS and not has_row_values


def iter_modifications(model: Any, with_encoder: bool = False) -> Iterator[str]:
    """Yield how this model differs from the classes of this package. Reads no weights.

    `with_encoder` also examines the modules of the encoder, which the loops of this package call through `forward`.
    """
    modeling_module = next((each.__module__ for each in type(model).__mro__ if each.__name__ == MODEL_CLASS), None)
    if modeling_module is None:
        yield f"a {type(model).__name__}"
        return
    if model.training:
        yield "a model in training mode"
    if model.device.type != "meta" and torch.is_autocast_enabled(model.device.type):  # meta: offloaded by accelerate
        yield "autocast"
    if nn.modules.module._has_any_global_hook():
        yield "hooks of all modules"
    implementation = model.config._attn_implementation
    functions = {"eager": None, "sdpa": sdpa_attention_forward}
    if implementation not in functions or ALL_ATTENTION_FUNCTIONS.get(implementation) is not functions[implementation]:
        yield f"attn_implementation={implementation!r}"
    for name in OVERRIDABLE_METHODS:
        if getattr(getattr(model, name, None), "__func__", None) is not getattr(GenerationMixin, name, None):
            yield f"an overridden {name}"
    if any(isinstance(each, DTensor) for each in model.parameters()):
        yield "sharded weights (tensor parallelism, FSDP)"
    modules: Iterable[Any] = (model, model.model, model.lm_head, *model.get_decoder().modules())
    if with_encoder:
        modules = (*modules, *model.get_encoder().modules())
    yield from (f"a modified {type(each).__name__}" for each in modules if is_modified(each, modeling_module))


def is_modified(module: Any, modeling_module: str) -> bool:
    """Return whether a module has hooks, or a `forward` that neither `modeling_module` nor torch defines."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    if "forward" in vars(module) or any(getattr(each, "__module__", None) != OUTPUT_CAPTURING for each in hooks):
        return True
    return not type(module).forward.__module__.startswith((modeling_module, "torch.nn.", "transformers.activations"))


def resolve_generation_config(model: Any, arguments: dict[str, Any]) -> GenerationConfig:
    """Return the generation config of `generate(**arguments)`. `arguments` override the config of the model."""
    config = copy.deepcopy(arguments.get("generation_config") or model.generation_config)
    config.update(**model.generation_config.to_dict(), defaults_only=True)
    config.update(**arguments)
    return config


def validate_ensemble(model: Any, other: Any, inputs: torch.Tensor) -> None:
    """Raise ValueError if two models have different vocabularies, or if the source is not given as token ids."""
    for name in ("model_type", "vocab_size", "decoder_vocab_size"):
        expected, value = getattr(model.config, name), getattr(other.config, name, None)
        if expected != value:
            raise ValueError(
                f"Models of an ensemble must have the same {name} and tokenizer, got {expected} and {value}."
            )
    if inputs.is_floating_point() or bool((inputs == -100).all()):  # -100: placeholder for encoder_outputs
        raise ValueError("An ensemble requires input_ids. Do not pass inputs_embeds or encoder_outputs.")


def prepare_custom_generate_kwargs(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call with `custom_generate=beam_search`, or without it to use transformers' loops.

    Raises ValueError if an argument of `beam_search` requires a loop of transformers.
    """
    models = (model, *(arguments.get("ensemble") or ()))
    unsupported = find_unsupported(models, resolve_generation_config(model, arguments), arguments)
    if arguments.get(CACHE_NAME) is not None:  # generate() extends it in place, also if it is empty
        unsupported = unsupported or CACHE_NAME
    if unsupported is None:
        return arguments
    names = [label for name, label in OWN_ARGUMENTS.items() if arguments.get(name) not in (None, (), [])]
    if names:
        raise ValueError(f"beam_search does not support {names[0]} with {unsupported}. Omit one of the two.")
    return {name: value for name, value in arguments.items() if name not in {"custom_generate", *OWN_ARGUMENTS}}


class VanillaTransformerGenerationMixin(GenerationMixin):
    """Mixin that ignores `custom_generate=beam_search` if it cannot decode.

    transformers requires a class name that ends with GenerationMixin.
    """

    @wraps(GenerationMixin.generate)
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Override of `GenerationMixin.generate` that decides for each call which loops decode."""
        if hasattr(kwargs.get("tokenizer"), "stock"):  # stop strings use the target vocabulary
            kwargs["tokenizer"] = kwargs["tokenizer"].stock("target")
        rename_cache(kwargs, CACHE_NAME)
        prefix, cache = kwargs.get("decoder_input_ids"), kwargs.get(CACHE_NAME)
        if prefix is not None and isinstance(cache, Cache) and cache.get_seq_length():
            # without a mask, cached tokens would be decoded again. This mask assumes no padding, as `forward` does
            kwargs.setdefault("decoder_attention_mask", torch.ones_like(prefix))
        assistant, size = kwargs.get("assistant_model"), self.config.decoder_vocab_size
        if assistant is not None and getattr(assistant.config, "decoder_vocab_size", size) != size:
            raise ValueError("assistant_model has another target vocabulary. Use a model with the same vocabularies.")
        if kwargs.get("custom_generate") is beam_search:
            bound = GENERATE_SIGNATURE.bind_partial(self, *args).arguments  # positional arguments, by name
            args, kwargs = (), {name: value for name, value in bound.items() if name != "self"} | kwargs
            kwargs = prepare_custom_generate_kwargs(self, kwargs)
        return super().generate(*args, **kwargs)

    def _get_logits_processor(self, generation_config: GenerationConfig, *args: Any, **kwargs: Any) -> Any:
        """Override that rejects options for which transformers assumes one vocabulary for source and target."""
        for name, neutral in SHARED_VOCABULARY_OPTIONS.items():
            value, config = getattr(generation_config, name), self.config
            if value in (None, neutral) or config.share_encoder_decoder_embeddings:
                continue
            if config.vocab_size != config.decoder_vocab_size:
                raise ValueError(f"{name}={value} requires one vocabulary for source and target. Omit it.")
            logger.warning_once(f"{name}={value} requires the same ids in source and target. Omit it if they differ.")
        return super()._get_logits_processor(generation_config, *args, **kwargs)

    def compute_transition_scores(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Override that uses the size of the target vocabulary, which may differ from that of the source."""
        config = copy.copy(self.config)
        config.vocab_size = self.config.decoder_vocab_size
        return GenerationMixin.compute_transition_scores(SimpleNamespace(config=config), *args, **kwargs)


GENERATE_SIGNATURE = inspect.signature(GenerationMixin.generate)
SHARED_VOCABULARY_OPTIONS = {  # option: value that disables it
    **{"encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1},
    **{"prompt_lookup_num_tokens": None, "watermarking_config": None},
}

__all__ = [
    "CACHE_NAME",
    "VanillaTransformerGenerationMixin",
    "accept_past_key_values",
    "beam_search",
    "find_unsupported",
    "resolve_generation_config",
    "OWN_ARGUMENTS",
    "SHARED_VOCABULARY_OPTIONS",
]
