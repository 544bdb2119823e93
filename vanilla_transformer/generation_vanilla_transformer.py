# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""Beam search with length penalty (section 6.1) and greedy decoding, for `generate(custom_generate=beam_search)`.

    model.generate(**batch, custom_generate=beam_search)                             # result of generate(), faster
    model.generate(**batch, custom_generate=beam_search, num_beams=4, alpha=0.6, extra_tokens=50)    # as in the paper
    model.generate(**batch, custom_generate=beam_search, ensemble=[model_2, model_3])     # mean of the probabilities

The speed comes from `IncrementalDecoder`. This module does not import the model, so that it can be published in a
separate repository. A model is a `VanillaTransformerForConditionalGeneration`.

Shapes: B sentences, K beams, T tokens so far, S source length, V target vocabulary.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput, GenerateEncoderDecoderOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .constraints_vanilla_transformer import LexicalConstraints, build_logits_processor
from .incremental_decoding_vanilla_transformer import Ensemble, IncrementalDecoder, StaticShapeDecoder
from .search_vanilla_transformer import DecodingTask, decode_single_beam, run_beam_search


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
    streamer: Any = None,
    glossary: LexicalConstraints | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateEncoderDecoderOutput | GenerateBeamEncoderDecoderOutput:
    """Decode with beam search, greedily, or by sampling. Pass it as `generate(custom_generate=beam_search)`.

    `generate()` prepares the first six arguments and `model_kwargs`. Beam size, number of returned sequences, limits,
    sampling, logits processors, stopping criteria and per-step outputs are those of `generate()`. A decoder prompt
    (`decoder_input_ids`) may be padded on the left, according to its `decoder_attention_mask`. Without the arguments
    below, the result equals that of `generate()`, except that finished hypotheses are always padded with
    `pad_token_id`.

    On a CPU, finished sentences are removed from the batch, unless this could change the result. It could for sampling,
    per-step outputs, streamers, and user-defined logits processors or stopping criteria. On a GPU, finished sentences
    stay in the batch. Tensors then keep their addresses, so that steps can be replayed as CUDA graphs.

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
        extra_tokens: Number of tokens that a translation may have more than its source (section 6.1: 50). Replaces the
            limit of `generation_config`.
        ensemble: Additional models with the same vocabularies.
        streamer: Streamer for a single hypothesis, passed as `generate(streamer=...)`.
        glossary: Terms that must occur in each translation, created by `TranslationPipeline`. Requires several beams.
            Terms that do not fit into the length limit are missing.
        **model_kwargs: Encoder outputs and masks.

    Returns:
        Token ids (B * n, T) for n returned sequences. With `return_dict_in_generate`, the output class of `generate()`
        without `past_key_values`. The output of beam search always has `sequences_scores` (B * n).

    Raises:
        ValueError: If an option is not supported, vocabularies of the ensemble differ, or a penalty overflows.
    """
    validate_supported_options(model, generation_config, model_kwargs)
    validate_option_combinations(generation_config, logits_processor, extra_tokens, ensemble, glossary)
    num_beams, num_return = generation_config.num_beams, generation_config.num_return_sequences
    copies = max(num_beams, num_return)  # number of rows per source: generate() has repeated each source
    prompts, device = input_ids if num_beams == 1 else input_ids[::copies], input_ids.device
    masks = [model_kwargs.get(name) for name in ("attention_mask", "decoder_attention_mask")]
    mask, prompt_mask = (each if each is None else each[::copies] for each in masks)
    return_dict = generation_config.return_dict_in_generate
    requested = {name for name in STEP_OUTPUT_NAMES if return_dict and getattr(generation_config, f"output_{name}")}
    process, is_row_independent = build_logits_processor(logits_processor, model.config.decoder_vocab_size, device)
    criteria = tuple(each for each in stopping_criteria if type(each) not in (MaxLengthCriteria, EosTokenCriteria))
    has_eos = any(hasattr(each, "eos_token_id") for each in stopping_criteria)
    keep_batch = (
        bool(generation_config.do_sample or requested or streamer is not None or not is_row_independent)
        or (bool(criteria) and not has_eos)
        or any(type(each) not in (MaxTimeCriteria, StopStringCriteria) for each in criteria)
    )
    static_shapes = is_async_device(device) and not keep_batch
    states = [model_kwargs["encoder_outputs"][0][::copies]]
    for other in ensemble:
        validate_same_vocabularies(model, other)
        validate_supported_options(other, generation_config, {})
        validate_ensemble_inputs(inputs_tensor)
        states.append(other.get_encoder()(inputs_tensor, attention_mask=mask).last_hidden_state)
    decoders: list[IncrementalDecoder] = []
    for each, state in zip((model, *ensemble), states, strict=True):
        if static_shapes:
            decoders.append(StaticShapeDecoder(each, state, mask, copies, prompt_mask, supports_cuda_graphs(each)))
        else:
            outputs = [not decoders and name in requested for name in LAYER_OUTPUT_NAMES]
            decoders.append(IncrementalDecoder(each, state, mask, copies, prompt_mask, *outputs))
    lengths = [each.max_length for each in stopping_criteria if type(each) is MaxLengthCriteria]
    limits = torch.full((len(prompts),), min(lengths, default=generation_config.max_length), device=device)
    if extra_tokens is not None:
        sizes = mask.sum(-1) if mask is not None else torch.full((len(inputs_tensor),), inputs_tensor.shape[1])
        sizes = (sizes + extra_tokens).clamp(min=1).to(device)
        limits = prompts.shape[1] + sizes.repeat_interleave(len(prompts) // len(sizes))
        lengths = [length for length in lengths if length != generation_config.max_length]
        configs = [each.config for each in (model, *ensemble)]
        lengths += [each.max_position_embeddings for each in configs if each.position_embedding_type == "learned"]
        limits = limits.clamp(max=min(lengths, default=int(limits.max())))
    if glossary is not None and len(glossary.tokens) != (size := len(input_ids) // copies):
        raise ValueError(f"The glossary must be for {size} sentences, but it is for {len(glossary.tokens)}.")
    eos_ids = [each.eos_token_id.flatten().to(prompts) for each in stopping_criteria if type(each) is EosTokenCriteria]
    pad_id = generation_config._pad_token_tensor
    task = DecodingTask(
        decoder=Ensemble(decoders),
        prompt=prompts,
        limits=limits,
        eos_ids=torch.cat([prompts.new_empty(0), *eos_ids]),
        pad_id=int(pad_id) if pad_id is not None else 0,
        process=process,
        criteria=criteria,
        do_sample=generation_config.do_sample,
        keep_batch=keep_batch,
        static_shapes=static_shapes,
        pad_finished=has_eos or static_shapes,
        requested_outputs=frozenset("states" if name in LAYER_OUTPUT_NAMES else name for name in requested),
        return_beam_indices=bool(return_dict),
        streamer=streamer,
        glossary=None if glossary is None else glossary.to(device, model.config.decoder_vocab_size),
        max_length_bound=generation_config.max_length if extra_tokens is None and alpha is None else None,
    )
    encoded = model_kwargs["encoder_outputs"]
    if num_beams == 1:
        tokens = decode_single_beam(task)
        if streamer is not None:
            streamer.end()
        if not return_dict:
            return tokens
        return GenerateEncoderDecoderOutput(sequences=tokens, **collect_step_outputs(task, encoded, requested))
    output = run_beam_search(task, num_beams, *beam_settings(generation_config, alpha, limits))
    if not return_dict:
        return output.tokens
    return GenerateBeamEncoderDecoderOutput(
        sequences=output.tokens,
        sequences_scores=output.scores,
        beam_indices=output.beam_indices,
        **collect_step_outputs(task, encoded, requested),
    )


def is_async_device(device: torch.device) -> bool:
    """Return whether computations are asynchronous, so that reading a value waits for them."""
    return device.type != "cpu"


def supports_cuda_graphs(model: Any) -> bool:
    """Return whether a step can be captured: on one GPU, without offloaded or quantized weights."""
    devices = set(getattr(model, "hf_device_map", {}).values())  # set by accelerate
    return model.device.type == "cuda" and len(devices) <= 1 and not getattr(model, "is_quantized", False)


def beam_settings(config: GenerationConfig, alpha: float | None, limits: torch.Tensor) -> tuple[Any, ...]:
    """Return the settings of `run_beam_search`: candidates, returned sequences, length penalty, early stopping."""

    def penalty(length: torch.Tensor | int) -> Any:
        return ((5 + length) / 6) ** alpha if alpha is not None else length**config.length_penalty

    try:
        penalty(int(limits.max()))
    except OverflowError as error:
        name, value = ("alpha", alpha) if alpha is not None else ("length_penalty", config.length_penalty)
        raise ValueError(f"{name}={value} overflows. Set it to a value such as 1.0.") from error
    early_stopping = config.early_stopping if alpha is None else "exact"
    if early_stopping in ("never", "exact") and (config.length_penalty if alpha is None else alpha) < 0:
        early_stopping = False  # longer hypotheses score lower, so the current length gives the bound
    eos_ids = config._eos_token_tensor
    num_candidates = config.num_beams * max(2, 1 + (0 if eos_ids is None else len(eos_ids)))
    return num_candidates, config.num_return_sequences, penalty, early_stopping


LAYER_OUTPUT_NAMES = ("attentions", "hidden_states")
STEP_OUTPUT_NAMES = ("scores", "logits", *LAYER_OUTPUT_NAMES)


def collect_step_outputs(task: DecodingTask, encoded: Any, requested: set[str]) -> dict[str, tuple]:
    """Return the per-step outputs in the format of `generate()`, which treats the decoder prompt as one step."""
    start = task.prompt.shape[1]
    result: dict[str, tuple] = {}
    for name, values in task.outputs.items():
        if name == "scores":
            result[name] = tuple(values)
        elif name == "logits":
            result[name] = tuple(values[start - 1 :])
        else:
            token_dim = 1 if name == "decoder_hidden_states" else 2
            steps = [[pad_attention_weights(layer, start, name) for layer in step] for step in values[:start]]
            layers = zip(*steps, strict=True)
            result[name] = (tuple(torch.cat(layer, token_dim) for layer in layers), *values[start:])
    return result | {f"encoder_{name}": encoded.get(name) for name in requested.intersection(LAYER_OUTPUT_NAMES)}


def pad_attention_weights(weights: torch.Tensor, length: int, name: str) -> torch.Tensor:
    """Pad self-attention weights with zeros for later tokens. Return other tensors unchanged."""
    if name != "decoder_attentions":
        return weights
    return torch.nn.functional.pad(weights, (0, length - weights.shape[-1]))


SUPPORTED_MODEL_KWARGS = {  # arguments that generate() passes to the model
    *("attention_mask", "decoder_attention_mask", "encoder_outputs", "past_key_values", "use_cache"),
    *("output_attentions", "output_hidden_states", "return_dict", "input_ids", "inputs_embeds"),
}


def validate_supported_options(model: Any, config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Raise ValueError for unsupported models, inputs and options."""
    if model.config.model_type != "vanilla_transformer":
        raise ValueError(f"beam_search requires a vanilla_transformer model, got {model.config.model_type}.")
    cache, prompt_mask = model_kwargs.get("past_key_values"), model_kwargs.get("decoder_attention_mask")
    unsupported = {
        **dict.fromkeys(unsupported_options(config) + bypassed_code(model), True),
        **{name: value is not None for name, value in model_kwargs.items() if name not in SUPPORTED_MODEL_KWARGS},
        "a non-empty past_key_values": cache is not None and cache.get_seq_length() > 0,
        "decoder_attention_mask that is not 2-dimensional": prompt_mask is not None and prompt_mask.ndim != 2,
        "prompts or prefixes of PEFT (prepare_inputs_for_generation)": "prepare_inputs_for_generation" in vars(model),
        "sharded weights (tensor parallelism, FSDP)": any(isinstance(each, DTensor) for each in model.parameters()),
    }
    if names := [name for name, is_requested in unsupported.items() if is_requested]:
        raise ValueError(f"beam_search does not support {names[0]}. Omit custom_generate to use generate() instead.")


def bypassed_code(model: Any) -> list[str]:
    """Return the names of user code that `IncrementalDecoder` would bypass: changed modules, hooks and attention."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # of PEFT
    decoder, attention = model.get_decoder(), str(model.config._attn_implementation)
    parts = [getattr(layer, name, None) for layer in decoder.layers for name in ("self_attn", "cross_attn")]
    modules = [model, model.base_model, decoder, *decoder.layers, *filter(None, parts)]
    code: list[Any] = [type(each) for each in modules[2:]]
    for each in modules:
        code += [each.forward, *each._forward_hooks.values(), *each._forward_pre_hooks.values()]
    if "/" not in attention and attention in ALL_ATTENTION_FUNCTIONS:  # a slash: a kernel from the Hub
        code.append(ALL_ATTENTION_FUNCTIONS[attention])
    names = [f"{each.__module__}.{getattr(each, '__qualname__', type(each).__qualname__)}" for each in code]
    native = r"(transformers|accelerate)\.|.*modeling_vanilla_transformer\."
    return [f"user-defined code in the decoder ({name})" for name in names if not re.match(native, name)]


def unsupported_options(config: GenerationConfig) -> list[str]:
    """Return the names of requested options that `beam_search` does not support."""
    mode = config.get_generation_mode()
    unsupported = {
        mode.value: mode not in SUPPORTED_MODES,
        "low_memory": getattr(config, "low_memory", False),
        "guidance_scale": config.guidance_scale not in (None, 1),
        "token_healing": config.token_healing,
        "cache_implementation='quantized'": config.cache_implementation == "quantized",
    }
    return [name for name, is_requested in unsupported.items() if is_requested]


def resolve_generation_config(model: Any, arguments: dict[str, Any]) -> GenerationConfig:
    """Return the generation config of `generate(**arguments)`. `arguments` override the config of the model."""
    config = copy.deepcopy(arguments.get("generation_config") or model.generation_config)
    config.update(**model.generation_config.to_dict(), defaults_only=True)
    config.update(**arguments)
    return config


def supports_generate_kwargs(model: Any, arguments: dict[str, Any]) -> bool:
    """Return whether `beam_search` supports the code of this model and these arguments of `generate()`."""
    unsupported = unsupported_options(resolve_generation_config(model, arguments)) + bypassed_code(model)
    return not unsupported and arguments.get("assistant_model") is None


SUPPORTED_MODES = (
    *(GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE),
    *(GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE),
)


def validate_option_combinations(
    config: GenerationConfig,
    processors: LogitsProcessorList,
    extra_tokens: int | None,
    ensemble: Sequence,
    glossary: Any,
) -> None:
    """Raise ValueError for options that exclude each other."""
    has_states = config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states)
    has_forced_eos = any("ForcedEOS" in type(each).__name__ for each in processors)
    excluded = {
        "a glossary with a single beam": glossary is not None and config.num_beams == 1,
        "a glossary with do_sample": glossary is not None and config.do_sample,
        "output_attentions or output_hidden_states with an ensemble": has_states and ensemble,
        "forced_eos_token_id with extra_tokens": extra_tokens is not None and has_forced_eos,
    }
    if names := [name for name, is_requested in excluded.items() if is_requested]:
        raise ValueError(f"beam_search does not support {names[0]}. Omit one of the two.")


def validate_ensemble_inputs(inputs: torch.Tensor) -> None:
    """Raise ValueError if the source is not token ids, which the models of an ensemble have to encode."""
    if inputs.is_floating_point() or bool((inputs == -100).all()):  # -100: placeholder for encoder_outputs
        raise ValueError("An ensemble requires input_ids. Do not pass inputs_embeds or encoder_outputs.")


def validate_same_vocabularies(model: Any, other: Any) -> None:
    for name in ("model_type", "vocab_size", "decoder_vocab_size"):
        expected, value = getattr(model.config, name), getattr(other.config, name, None)
        if expected != value:
            raise ValueError(
                f"Models of an ensemble must have the same {name} and tokenizer, got {expected} and {value}."
            )


def prepare_custom_generate_kwargs(model: Any, function: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Add the streamer and stop strings, which transformers drops with `custom_generate`, to the arguments."""
    if arguments.get("assistant_model") is not None:
        raise ValueError("custom_generate does not support assistant_model. Omit one of the two.")
    configs = [each for each in (arguments.get("generation_config"), model.generation_config) if each is not None]

    def setting(name: str) -> Any:
        values = [arguments[name]] if name in arguments else [getattr(each, name, None) for each in configs]
        return next((value for value in values if value is not None), None)

    if (streamer := arguments.get("streamer")) is not None:
        if "streamer" not in inspect.signature(function).parameters:
            raise ValueError("custom_generate does not support a streamer. Omit custom_generate to use generate().")
        if (setting("num_beams") or 1) > 1:
            raise ValueError("A streamer requires num_beams=1, because beam search has no result before the end.")
        function = partial(function, streamer=streamer)
    strings, tokenizer = setting("stop_strings"), arguments.get("tokenizer")
    if strings is not None and tokenizer is not None:
        criteria = [*(arguments.get("stopping_criteria") or ()), StopStringCriteria(tokenizer, strings)]
        arguments = arguments | {"stop_strings": None, "stopping_criteria": StoppingCriteriaList(criteria)}
    return arguments | {"custom_generate": function}


class VanillaTransformerGenerationMixin(GenerationMixin):
    """Mixin for streamers and stop strings with `custom_generate`. Its name must end in GenerationMixin."""

    @wraps(GenerationMixin.generate)
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Override of `GenerationMixin.generate` that forwards the streamer and stop strings to `custom_generate`."""
        if hasattr(kwargs.get("tokenizer"), "stock"):  # stop strings use the target vocabulary
            kwargs["tokenizer"] = kwargs["tokenizer"].stock("target")
        bound = GENERATE_SIGNATURE.bind_partial(self, *args, **kwargs).arguments
        if not callable(function := bound.get("custom_generate")):
            return super().generate(*args, **kwargs)
        arguments = {name: value for name, value in bound.items() if name not in ("self", "kwargs")}
        return super().generate(**prepare_custom_generate_kwargs(self, function, arguments | bound.get("kwargs", {})))


GENERATE_SIGNATURE = inspect.signature(GenerationMixin.generate)

__all__ = [
    "VanillaTransformerGenerationMixin",
    "beam_search",
    "supports_generate_kwargs",
    "prepare_custom_generate_kwargs",
    "resolve_generation_config",
]
