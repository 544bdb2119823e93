# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""The paper's decoding (section 6.1): beam search with a length penalty, and its greedy limit, as a callable.

    model.generate(**batch, custom_generate=beam_search)                                # what generate() gives, faster
    model.generate(**batch, custom_generate=beam_search, num_beams=4, alpha=0.6, extra_tokens=50)         # the paper's
    model.generate(**batch, custom_generate=beam_search, ensemble=[other, third])       # the mean of several models

Faster, for what `IncrementalDecoder` does. Imports nothing of the model, so that it can stand in a repository of its
own: a model here is a `VanillaTransformerForConditionalGeneration`.

Shapes: B sentences still being translated, K beams, T tokens so far, S source length, V target vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput, GenerateEncoderDecoderOutput

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
    """For `generate(custom_generate=beam_search)`, which prepares the first six arguments and `model_kwargs`.

    Everything is that of `generate()`: beam size, n-best and limits, sampling, processors of logits, criteria to stop,
    and what is returned of each step. One beam is greedy decoding. A given beginning (`decoder_input_ids`) may be
    padded on the left, as its `decoder_attention_mask` says. Without the arguments below the result is that of
    `generate()`, but that a hypothesis is always filled up with the padding's id behind its end.

    Sentences leave the batch when they are done. They stay where `generate()` would show the difference: for
    sampling, for what is returned of each step, and for processors and criteria of the user's own. On a GPU they stay
    without that, too, in tensors that keep their places, so that a step is recorded and repeated, and the GPU is waited
    for once in several tokens.

    Args:
        alpha: of the paper's length penalty: a hypothesis that ended after n tokens has the score
            log P / ((5 + n) / 6)^alpha (Wu et al. 2016, equation 14), and the search ends when no other can reach a
            better one. None: the `length_penalty` and `early_stopping` of `generate()`: log P / n^length_penalty.
        extra_tokens: a translation may have so many tokens more than its source (section 6.1: 50), instead of the
            limit in `generation_config`.
        ensemble: further models with the same vocabularies.
        streamer: of one hypothesis; `generate()` of our models hands it on.
        glossary: terms that have to occur in each translation, with several beams; `TranslationPipeline` makes it of
            words. Where a limit leaves no room for them, they are missing.

    Returns:
        As `generate()`: ids (B * n-best, T), or with `return_dict_in_generate` an output without `past_key_values`, in
        which beams always have `sequences_scores` (B * n-best).

    Raises:
        ValueError: something is asked for that this search does not have, which it names: assisted decoding, a cache
            that holds something, ...; or a model of the ensemble has other vocabularies; or a penalty overflows.
    """
    validate_supported_options(model, generation_config, model_kwargs)
    validate_option_combinations(generation_config, logits_processor, extra_tokens, ensemble, glossary)
    num_beams, num_return = generation_config.num_beams, generation_config.num_return_sequences
    copies = max(num_beams, num_return)  # generate() has repeated each source so many times
    rows = input_ids if num_beams == 1 else input_ids[::copies]
    masks = [model_kwargs.get(name) for name in ("attention_mask", "decoder_attention_mask")]
    mask, prompt_mask = (each if each is None else each[::copies] for each in masks)
    returned = generation_config.return_dict_in_generate
    asked = {name for name in STEP_OUTPUT_NAMES if returned and getattr(generation_config, f"output_{name}")}
    process, is_row_independent = build_logits_processor(logits_processor, model.config.decoder_vocab_size, rows.device)
    criteria = tuple(each for each in stopping_criteria if type(each) not in (MaxLengthCriteria, EosTokenCriteria))
    has_ends = any(hasattr(each, "eos_token_id") for each in stopping_criteria)
    together = (
        bool(generation_config.do_sample or asked or streamer is not None or not is_row_independent)
        or (bool(criteria) and not has_ends)
        or any(type(each) not in (MaxTimeCriteria, StopStringCriteria) for each in criteria)
    )
    in_place = is_async_device(rows.device) and not together
    states = [model_kwargs["encoder_outputs"][0][::copies]]
    for other in ensemble:
        validate_same_vocabularies(model, other)
        validate_ensemble_inputs(inputs_tensor)
        states.append(other.get_encoder()(inputs_tensor, attention_mask=mask).last_hidden_state)
    decoders: list[IncrementalDecoder] = []
    for each, own in zip((model, *ensemble), states, strict=True):
        if in_place:
            decoders.append(StaticShapeDecoder(each, own, mask, copies, prompt_mask, supports_cuda_graphs(each)))
        else:
            kept = [not decoders and name in asked for name in ("attentions", "hidden_states")]  # of the first
            decoders.append(IncrementalDecoder(each, own, mask, copies, prompt_mask, *kept))
    lengths = [each.max_length for each in stopping_criteria if type(each) is MaxLengthCriteria]
    limits = torch.full((len(rows),), min(lengths, default=generation_config.max_length), device=rows.device)
    if extra_tokens is not None:
        own = mask.sum(-1) if mask is not None else torch.full((len(inputs_tensor),), inputs_tensor.shape[1])
        own = (own + extra_tokens).clamp(min=1).to(rows.device)
        limits = rows.shape[1] + own.repeat_interleave(len(rows) // len(own))
        lengths = [length for length in lengths if length != generation_config.max_length]
        configs = [each.config for each in (model, *ensemble)]
        lengths += [each.max_position_embeddings for each in configs if each.position_embedding_type == "learned"]
        limits = limits.clamp(max=min(lengths, default=int(limits.max())))
    if glossary is not None and len(glossary.tokens) != len(input_ids) // copies:
        raise ValueError(
            f"the glossary is for {len(glossary.tokens)} sentences, and {len(input_ids) // copies} are given."
        )
    eos_ids = torch.tensor([id for each in stopping_criteria for id in eos_ids_of(each)], dtype=torch.long)
    pad_id = generation_config._pad_token_tensor
    task = DecodingTask(
        decoder=Ensemble(decoders),
        prompt=rows,
        limits=limits,
        eos_ids=eos_ids.to(rows.device),
        pad_id=int(pad_id) if pad_id is not None else 0,
        process=process,
        criteria=criteria,
        do_sample=generation_config.do_sample,
        together=together,
        in_place=in_place,
        keeps_padding=has_ends or in_place,
        keep=frozenset("states" if name in ("attentions", "hidden_states") else name for name in asked),
        return_beam_indices=bool(returned),
        streamer=streamer,
        glossary=None if glossary is None else glossary.to(rows.device, model.config.decoder_vocab_size),
        max_length_bound=generation_config.max_length if extra_tokens is None and alpha is None else None,
    )
    encoded = model_kwargs["encoder_outputs"]
    if num_beams == 1:
        tokens = decode_single_beam(task)
        if streamer is not None:
            streamer.end()
        return GenerateEncoderDecoderOutput(sequences=tokens, **steps(task, encoded, asked)) if returned else tokens
    found = run_beam_search(task, num_beams, *beam_settings(generation_config, alpha, limits))
    if not returned:
        return found.tokens
    return GenerateBeamEncoderDecoderOutput(
        sequences=found.tokens,
        sequences_scores=found.scores,
        beam_indices=found.parents,
        **steps(task, encoded, asked),
    )


def is_async_device(device: torch.device) -> bool:
    """Whether asking for a value of a tensor waits for all that the device has been told to do."""
    return device.type != "cpu"


def supports_cuda_graphs(model: Any) -> bool:
    """Whether a step is nothing but kernels on one GPU: weights are not fetched for it, nor unpacked on the way."""
    places = set(getattr(model, "hf_device_map", {}).values())  # of its parts, where accelerate has put them
    return model.device.type == "cuda" and len(places) <= 1 and not getattr(model, "is_quantized", False)


def beam_settings(config: GenerationConfig, alpha: float | None, limits: torch.Tensor) -> tuple[Any, ...]:
    """What `run_beam_search` takes beside its task: width, n-best, the length penalty and when to stop."""

    def penalty(length: torch.Tensor | int) -> Any:
        return ((5 + length) / 6) ** alpha if alpha is not None else length**config.length_penalty

    try:
        penalty(int(limits.max()))
    except OverflowError as error:
        name, value = ("alpha", alpha) if alpha is not None else ("length_penalty", config.length_penalty)
        raise ValueError(f"{name}={value} makes numbers too large to compute with: choose one such as 1.0.") from error
    early_stopping = config.early_stopping if alpha is None else "exact"
    if early_stopping in ("never", "exact") and (config.length_penalty if alpha is None else alpha) < 0:
        early_stopping = False  # no hypothesis gains by growing, so that its length is the one to compare with
    ends = config._eos_token_tensor
    width = config.num_beams * max(2, 1 + (0 if ends is None else len(ends)))
    return width, config.num_return_sequences, penalty, early_stopping


STEP_OUTPUT_NAMES = ("scores", "logits", "attentions", "hidden_states")


def steps(task: DecodingTask, encoded: Any, asked: set[str]) -> dict[str, tuple]:
    """What is returned of each step, as `generate()` names it: that of the beginning is one step."""
    start = task.prompt.shape[1]
    result: dict[str, tuple] = {}
    for name, each in task.kept.items():
        if name == "scores":
            result[name] = tuple(each)
        elif name == "logits":
            result[name] = tuple(each[start - 1 :])
        else:
            along = 1 if name == "decoder_hidden_states" else 2  # the tokens
            layers = [
                [pad_attention_weights(tensor, start, name) for tensor in layer]
                for layer in zip(*each[:start], strict=True)
            ]
            result[name] = (tuple(torch.cat(layer, along) for layer in layers), *each[start:])
    for name in {"attentions", "hidden_states"} & asked:
        result[f"encoder_{name}"] = encoded.get(name)
    return result


def pad_attention_weights(weights: torch.Tensor, length: int, name: str) -> torch.Tensor:
    """Weights on the tokens so far, with zeros for those that come after them."""
    if name != "decoder_attentions":
        return weights
    return torch.nn.functional.pad(weights, (0, length - weights.shape[-1]))


def eos_ids_of(criterion: Any) -> list[int]:
    """The tokens that end a hypothesis by a criterion to stop."""
    return criterion.eos_token_id.flatten().tolist() if type(criterion) is EosTokenCriteria else []


SUPPORTED_MODEL_KWARGS = {  # of the model, at a step of generate(); others would change a result
    *("attention_mask", "decoder_attention_mask", "encoder_outputs", "past_key_values", "use_cache"),
    *("output_attentions", "output_hidden_states", "return_dict", "input_ids", "inputs_embeds"),
}


def validate_supported_options(model: Any, config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Raises ValueError that names what would change the result of `generate()`, or is asked for beside it."""
    if model.config.model_type != "vanilla_transformer":
        raise ValueError(f"beam_search decodes a vanilla_transformer, not a {model.config.model_type}.")
    cache, prompt_mask = model_kwargs.get("past_key_values"), model_kwargs.get("decoder_attention_mask")
    wanted = {
        **dict.fromkeys(unsupported_options(config), True),
        **{name: value is not None for name, value in model_kwargs.items() if name not in SUPPORTED_MODEL_KWARGS},
        "past_key_values that hold something": cache is not None and cache.get_seq_length() > 0,
        "decoder_attention_mask of four dimensions": prompt_mask is not None and prompt_mask.ndim != 2,
        "prepare_inputs_for_generation of another (a prompt or prefix of PEFT)": (
            "prepare_inputs_for_generation" in vars(model)
        ),
        "weights shared out over processes (tensor parallelism, FSDP)": any(
            isinstance(parameter, DTensor) for parameter in model.parameters()
        ),
    }
    if found := [name for name, is_wanted in wanted.items() if is_wanted]:
        raise ValueError(f"beam_search has no {found[0]}: leave custom_generate out, and generate() does it.")


def unsupported_options(config: GenerationConfig) -> list[str]:
    """What these settings ask for that the search does not have."""
    mode = config.get_generation_mode()
    wanted = {
        mode.value: mode not in MODES,
        "low_memory": getattr(config, "low_memory", False),
        "guidance_scale": config.guidance_scale not in (None, 1),
        "token_healing": config.token_healing,
        "cache_implementation='quantized'": config.cache_implementation == "quantized",
    }
    return [name for name, is_wanted in wanted.items() if is_wanted]


def resolve_generation_config(model: Any, arguments: dict[str, Any]) -> GenerationConfig:
    """Return the settings that `generate(**arguments)` uses: arguments over `generation_config` over the model's."""
    config = copy.deepcopy(arguments.get("generation_config") or model.generation_config)
    config.update(**model.generation_config.to_dict(), defaults_only=True)
    config.update(**arguments)
    return config


def supports_generate_kwargs(model: Any, arguments: dict[str, Any]) -> bool:
    """Whether `beam_search` has all that these arguments of `generate()` ask for, and not in another's stead."""
    return (
        not unsupported_options(resolve_generation_config(model, arguments))
        and arguments.get("assistant_model") is None
    )


MODES = (
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
    """Raises ValueError that names two things of which only one can be."""
    states = config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states)
    pairs = {
        "a glossary with a single beam": glossary is not None and config.num_beams == 1,
        "a glossary with do_sample": glossary is not None and config.do_sample,
        "output_attentions or output_hidden_states of an ensemble": states and ensemble,
        "forced_eos_token_id with extra_tokens": (
            extra_tokens is not None and any("ForcedEOS" in type(each).__name__ for each in processors)
        ),
    }
    if found := [name for name, is_wanted in pairs.items() if is_wanted]:
        raise ValueError(f"beam_search has no {found[0]}: leave one of the two out.")


def validate_ensemble_inputs(inputs: torch.Tensor) -> None:
    """Raises ValueError where the source is not tokens, which further models of an ensemble have to encode."""
    if inputs.is_floating_point() or bool((inputs == -100).all()):  # what generate() has for encoder_outputs alone
        raise ValueError(
            "an ensemble needs input_ids, since each model encodes them: give these instead of inputs_embeds or "
            "encoder_outputs."
        )


def validate_same_vocabularies(model: Any, other: Any) -> None:
    for name in ("model_type", "vocab_size", "decoder_vocab_size"):
        first, second = getattr(model.config, name), getattr(other.config, name, None)
        if first != second:
            raise ValueError(
                f"a model of the ensemble has {name}={second}, and the first one {first}: give models of ours that "
                f"were trained with the same tokenizer."
            )


def prepare_custom_generate_kwargs(model: Any, function: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `generate()` with a function of its own as `custom_generate`, and what transformers would then drop
    in silence: the streamer, and stop strings, for which it loses the tokenizer.

    Raises:
        ValueError: the function feeds no streamer, for which somebody would wait for ever, or not with several beams;
            or there is an assistant model.
    """
    if arguments.get("assistant_model") is not None:
        raise ValueError("custom_generate takes no assistant_model: leave one of the two out.")
    configs = [each for each in (arguments.get("generation_config"), model.generation_config) if each is not None]

    def setting(name: str) -> Any:
        values = [arguments[name]] if name in arguments else [getattr(each, name, None) for each in configs]
        return next((value for value in values if value is not None), None)

    if (streamer := arguments.get("streamer")) is not None:
        if "streamer" not in inspect.signature(function).parameters:
            raise ValueError("custom_generate feeds no streamer: leave custom_generate out, and generate() does it.")
        if (setting("num_beams") or 1) > 1:
            raise ValueError("a streamer goes with num_beams=1: of several beams none is the result before the end.")
        function = partial(function, streamer=streamer)
    strings, tokenizer = setting("stop_strings"), arguments.get("tokenizer")
    if strings is not None and tokenizer is not None:
        criteria = [*(arguments.get("stopping_criteria") or ()), StopStringCriteria(tokenizer, strings)]
        arguments = arguments | {"stop_strings": None, "stopping_criteria": StoppingCriteriaList(criteria)}
    return arguments | {"custom_generate": function}


class VanillaTransformerGenerationMixin(GenerationMixin):
    """`generate()` as in transformers, less what that drops in silence. (transformers goes by the end of its name.)"""

    @wraps(GenerationMixin.generate)
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        if hasattr(kwargs.get("tokenizer"), "stock"):  # of two vocabularies: stop_strings are of the target's
            kwargs["tokenizer"] = kwargs["tokenizer"].stock("target")
        given = GENERATE_SIGNATURE.bind_partial(self, *args, **kwargs).arguments
        if not callable(function := given.get("custom_generate")):
            return super().generate(*args, **kwargs)
        arguments = {name: value for name, value in given.items() if name not in ("self", "kwargs")}
        return super().generate(**prepare_custom_generate_kwargs(self, function, arguments | given.get("kwargs", {})))


GENERATE_SIGNATURE = inspect.signature(GenerationMixin.generate)

__all__ = [
    "VanillaTransformerGenerationMixin",
    "beam_search",
    "supports_generate_kwargs",
    "prepare_custom_generate_kwargs",
    "resolve_generation_config",
]
