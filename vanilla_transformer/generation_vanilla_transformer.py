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

import inspect
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput, GenerateEncoderDecoderOutput

from .incremental_vanilla_transformer import Ensemble, IncrementalDecoder

NEVER = -1.0e9  # the score of what is not there


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
    **model_kwargs: Any,
) -> torch.Tensor | GenerateEncoderDecoderOutput | GenerateBeamEncoderDecoderOutput:
    """For `generate(custom_generate=beam_search)`, which prepares the first six arguments and `model_kwargs`.

    Beam size, n-best and limits are those of `generation_config` (`num_beams`, `num_return_sequences`,
    `max_new_tokens`, ...) and of `stopping_criteria`; one beam is greedy decoding. A given beginning
    (`decoder_input_ids`) may be padded on the left, as its `decoder_attention_mask` says. Without the arguments below
    the result is that of `generate()`.

    Args:
        alpha: of the paper's length penalty: a hypothesis that ended after n tokens has the score
            log P / ((5 + n) / 6)^alpha (Wu et al. 2016, equation 14), and the search ends when no other can reach a
            better one. None: the `length_penalty` and `early_stopping` of `generate()`: log P / n^length_penalty.
        extra_tokens: a translation may have so many tokens more than its source (section 6.1: 50), instead of the
            limit in `generation_config`.
        ensemble: further models with the same vocabularies.

    Returns:
        As `generate()`: ids (B * n-best, T), or with `return_dict_in_generate` an output that also has
        `sequences_scores` (B * n-best).

    Raises:
        ValueError: something is asked for that this search does not have, which it names: sampling, processors of
            logits, other criteria to stop, attentions, a cache that holds something, ...; or a model of the ensemble
            has other vocabularies; or a penalty overflows.
    """
    refuse_what_is_not_here(model, generation_config, logits_processor, stopping_criteria, model_kwargs)
    num_beams, num_return = generation_config.num_beams, generation_config.num_return_sequences
    copies = max(num_beams, num_return)  # generate() has repeated each source so many times
    prompt = input_ids[::copies]
    masks = [model_kwargs.get(name) for name in ("attention_mask", "decoder_attention_mask")]
    mask, prompt_mask = (each if each is None else each[::copies] for each in masks)
    decoders = [IncrementalDecoder(model, model_kwargs["encoder_outputs"][0][::copies], mask, num_beams, prompt_mask)]
    for other in ensemble:
        refuse_other_vocabularies(model, other)
        refuse_no_ids(inputs_tensor)
        states = other.get_encoder()(inputs_tensor, attention_mask=mask).last_hidden_state
        decoders.append(IncrementalDecoder(other, states, mask, num_beams, prompt_mask))
    lengths = [each.max_length for each in stopping_criteria if isinstance(each, MaxLengthCriteria)]
    limits = torch.full((len(prompt),), generation_config.max_length, device=prompt.device)
    if extra_tokens is not None:
        own = mask.sum(-1) if mask is not None else torch.full_like(limits, inputs_tensor.shape[1])
        limits = prompt.shape[1] + own + extra_tokens
        lengths = [length for length in lengths if length != generation_config.max_length]
    limits = limits.clamp(max=min(lengths, default=int(limits.max())))
    eos_ids = torch.tensor([id for each in stopping_criteria for id in ids_of(each)], dtype=torch.long)
    eos_ids = eos_ids.to(prompt.device)
    pad_id = generation_config._pad_token_tensor
    pad_id = int(pad_id) if pad_id is not None else 0
    decoder = Ensemble(decoders)
    wants_output = generation_config.return_dict_in_generate
    if num_beams == 1:
        tokens = greedy(decoder, prompt, limits, eos_ids, pad_id)
        return GenerateEncoderDecoderOutput(sequences=tokens) if wants_output else tokens

    def penalty(length: torch.Tensor | int) -> Any:
        return ((5 + length) / 6) ** alpha if alpha is not None else length**generation_config.length_penalty

    try:
        penalty(int(limits.max()))
    except OverflowError as error:
        name, value = ("alpha", alpha) if alpha is not None else ("length_penalty", generation_config.length_penalty)
        raise ValueError(f"{name}={value} makes numbers too large to compute with: choose one such as 1.0.") from error
    early_stopping = generation_config.early_stopping if alpha is None else "exact"
    if early_stopping == "never" and generation_config.length_penalty <= 0:
        early_stopping = False  # no hypothesis gains by growing, so that its length is the one to compare with
    ends = generation_config._eos_token_tensor
    width = num_beams * max(2, 1 + (0 if ends is None else len(ends)))
    tokens, scores = search(
        decoder, prompt, limits, eos_ids, pad_id, num_beams, width, num_return, penalty, early_stopping
    )
    return GenerateBeamEncoderDecoderOutput(sequences=tokens, sequences_scores=scores) if wants_output else tokens


def greedy(
    decoder: Ensemble, prompt: torch.Tensor, limits: torch.Tensor, eos_ids: torch.Tensor, pad_id: int
) -> torch.Tensor:
    """The likeliest token each time, until it is one of `eos_ids` or the sentence is at its limit: ids (B, T)."""
    tokens = torch.full((len(prompt), int(limits.max())), pad_id, device=prompt.device)
    tokens[:, : prompt.shape[1]] = prompt
    active = torch.arange(len(prompt), device=prompt.device)  # rows of tokens that go on
    for length in range(1, tokens.shape[1]):
        logits = decoder.step(tokens[active, length - 1])
        if length < prompt.shape[1]:
            continue
        new = best_token(logits)
        tokens[active, length] = new
        going = ~torch.isin(new, eos_ids) & (limits[active] > length + 1)
        if going.all():
            continue
        rows = going.nonzero()[:, 0]
        active = active[rows]
        if not len(active):
            return tokens[:, : length + 1]
        decoder.keep(rows, rows)
    return tokens


def search(
    decoder: Ensemble,
    prompt: torch.Tensor,
    limits: torch.Tensor,
    eos_ids: torch.Tensor,
    pad_id: int,
    num_beams: int,
    width: int,
    num_return: int,
    penalty: Callable[[Any], Any],
    early_stopping: bool | str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Beam search: ids (B * num_return, T) and scores (B * num_return).

    At every step each sentence has K hypotheses. Of their continuations the W (`width`) best are looked at, enough for
    K that do not end: those among the first K that end are candidates for the result, the K best of the others go on.
    """
    device, start, longest = prompt.device, prompt.shape[1], int(limits.max())
    result = torch.full((len(prompt), num_return, longest), pad_id, device=device)
    result_scores = torch.full((len(prompt), num_return), NEVER, device=device)
    active = torch.arange(len(prompt), device=device)  # rows of the result that go on
    running = prompt[:, None].expand(-1, num_beams, -1).contiguous()  # (B, K, T)
    scores = torch.full((len(prompt), num_beams), NEVER, device=device)
    scores[:, 0] = 0.0  # one hypothesis to begin with, not K equal ones
    finished = torch.full((len(prompt), num_beams, longest), pad_id, device=device)
    finished_scores = torch.full((len(prompt), num_beams), NEVER, device=device)
    used = start  # tokens of the longest finished hypothesis
    for length in range(1, start):
        decoder.step(running[:, :, length - 1].flatten())

    for length in range(start, longest):  # of the tokens that are there; one is added
        new = length + 1 - start  # tokens behind the prompt
        log_probs = decoder.step(running[:, :, -1].flatten()).log_softmax(-1)
        values, ids = best_tokens(log_probs, min(width, log_probs.shape[-1]))  # (B * K, W), or all that there are
        looked_at = values.shape[-1]
        totals = scores[..., None] + values.view(-1, num_beams, looked_at)
        values, picks = totals.flatten(1).topk(width)  # (B, W)
        ids, parents = ids.view(len(active), -1).gather(1, picks), picks // looked_at
        grown = torch.cat([take(running, parents), ids[..., None]], -1)  # (B, W, T + 1)
        ended = torch.isin(ids, eos_ids) | (limits[active] <= length + 1)[:, None]

        among_first = ended & (torch.arange(width, device=device) < num_beams)
        if among_first.any():
            used = length + 1
            padded = nn.functional.pad(grown, (0, longest - length - 1), value=pad_id)
            candidates = torch.where(among_first, values / penalty(new), NEVER)
            finished_scores, order = torch.cat([finished_scores, candidates], 1).topk(num_beams)
            finished = take(torch.cat([finished, padded], 1), order)
        scores, order = torch.where(ended, NEVER, values).topk(num_beams)
        running, parents = take(grown, order), parents.gather(1, order)

        going = may_improve(scores, finished_scores, penalty, new, limits[active] - start, num_return, early_stopping)
        if not going.all():
            gone = active[~going]
            result[gone], result_scores[gone] = finished[~going, :num_return], finished_scores[~going, :num_return]
            active = active[going]
            if not len(active):
                break
            running, scores, parents = running[going], scores[going], parents[going]
            finished, finished_scores = finished[going], finished_scores[going]
        rows = going.nonzero()[:, 0]
        sentences = None if going.all() else rows
        decoder.keep((rows[:, None] * num_beams + parents).flatten(), sentences)
    return result[..., :used].flatten(0, 1), result_scores.flatten()


def best_token(logits: torch.Tensor) -> torch.Tensor:
    """`logits.argmax(-1)` of (rows, V), the first of equals; on a CPU in a fifth of the time, by blocks."""
    rows, size = logits.shape
    width = block_width(size)
    if not width:
        return logits.argmax(-1)
    blocks = logits.view(rows, -1, width)
    chosen = blocks.amax(-1).argmax(-1)  # (rows)
    return chosen * width + blocks[torch.arange(rows, device=logits.device), chosen].argmax(-1)


def best_tokens(log_probs: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`log_probs.topk(n)` of (rows, V); the n blocks with the largest maxima hold the n best tokens, and finding those
    first is on a CPU nearly twice as fast."""
    rows, size = log_probs.shape
    width = block_width(size)
    if not width or size < 4 * n * width:
        return log_probs.topk(n)
    blocks = log_probs.view(rows, -1, width)
    chosen = blocks.amax(-1).topk(n).indices  # (rows, n)
    values, places = blocks.gather(1, chosen[..., None].expand(-1, -1, width)).flatten(1).topk(n)
    return values, chosen.gather(1, places // width) * width + places % width


@cache
def block_width(size: int) -> int:
    """A width near 100 that divides a vocabulary of this size, or 0."""
    return next((width for width in range(64, 257) if size % width == 0 and size > 4 * width), 0)


def take(tokens: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Rows (B, n, T) of `tokens` (B, K, T) by `order` (B, n)."""
    return tokens.gather(1, order[..., None].expand(-1, -1, tokens.shape[-1]))


def may_improve(
    scores: torch.Tensor,
    finished: torch.Tensor,
    penalty: Callable[[Any], Any],
    new: int,
    limits: torch.Tensor,
    num_return: int,
    early_stopping: bool | str,
) -> torch.Tensor:
    """Whether each sentence's search goes on (B): by the best running and the worst of the finished hypotheses.

    "exact": a running one that went on without a loss to its limit would be better than one of the results. The others
    as in `generate()`, which waits for K finished ones: False compares with the length so far, "never" with the limit,
    True stops when there are K.
    """
    there = finished > NEVER / 2
    if early_stopping == "exact":
        bound = scores[:, 0] / penalty(limits)
        return (bound > finished[:, num_return - 1]) & (scores[:, 0] > NEVER / 2)
    full = there.all(-1)
    if early_stopping is True:
        return ~full
    bound = scores[:, 0] / penalty(limits if early_stopping == "never" else new)
    return ~full | (bound > finished[:, -1])


def ids_of(criterion: Any) -> list[int]:
    """The tokens that end a hypothesis by a criterion to stop."""
    return criterion.eos_token_id.flatten().tolist() if isinstance(criterion, EosTokenCriteria) else []


KNOWN_CRITERIA = (MaxLengthCriteria, EosTokenCriteria)
KNOWN_INPUTS = {  # of the model, at a step of generate(); others would change a result
    *("attention_mask", "decoder_attention_mask", "encoder_outputs", "past_key_values", "use_cache"),
    *("output_attentions", "output_hidden_states", "return_dict", "input_ids", "inputs_embeds"),
}


def refuse_what_is_not_here(
    model: Any,
    config: GenerationConfig,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    model_kwargs: dict[str, Any],
) -> None:
    """Raises ValueError that names what would change the result of `generate()`, or is asked for beside it."""
    if model.config.model_type != "vanilla_transformer":
        raise ValueError(f"beam_search decodes a vanilla_transformer, not a {model.config.model_type}.")
    mode = config.get_generation_mode()
    outputs = ["output_logits", "output_attentions", "output_hidden_states"]
    outputs += ["output_scores"] if config.num_beams == 1 else []  # of beams there are sequences_scores
    cache, prompt_mask = model_kwargs.get("past_key_values"), model_kwargs.get("decoder_attention_mask")
    wanted = {
        "do_sample": config.do_sample,
        mode.value: mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.BEAM_SEARCH),
        **{type(each).__name__: True for each in processors},
        **{type(each).__name__: True for each in criteria if type(each) not in KNOWN_CRITERIA},
        **{name: config.return_dict_in_generate and getattr(config, name) for name in outputs},
        **{name: value is not None for name, value in model_kwargs.items() if name not in KNOWN_INPUTS},
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


def refuse_no_ids(inputs: torch.Tensor) -> None:
    """Raises ValueError where the source is not tokens, which further models of an ensemble have to encode."""
    if inputs.is_floating_point() or bool((inputs == -100).all()):  # what generate() has for encoder_outputs alone
        raise ValueError(
            "an ensemble needs input_ids, since each model encodes them: give these instead of inputs_embeds or "
            "encoder_outputs."
        )


def refuse_streamer(streamer: Any) -> None:
    """Raises ValueError: whoever reads from it would wait for ever."""
    if streamer is not None:
        raise ValueError("custom_generate feeds no streamer: leave custom_generate out, and generate() does it.")


def refuse_other_vocabularies(model: Any, other: Any) -> None:
    for name in ("model_type", "vocab_size", "decoder_vocab_size"):
        first, second = getattr(model.config, name), getattr(other.config, name, None)
        if first != second:
            raise ValueError(
                f"a model of the ensemble has {name}={second}, and the first one {first}: give models of ours that "
                f"were trained with the same tokenizer."
            )


class VanillaTransformerGenerationMixin(GenerationMixin):
    """`generate()` as in transformers, less what that drops in silence. (transformers goes by the end of its name.)"""

    @wraps(GenerationMixin.generate)
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        given = GENERATE_SIGNATURE.bind_partial(self, *args, **kwargs).arguments
        if callable(given.get("custom_generate")):  # which is never handed these
            refuse_streamer(given.get("streamer"))
            if given.get("assistant_model") is not None:
                raise ValueError("custom_generate takes no assistant_model: leave one of the two out.")
        if hasattr(kwargs.get("tokenizer"), "stock"):  # of two vocabularies: stop_strings are of the target's
            kwargs["tokenizer"] = kwargs["tokenizer"].stock("target")
        return super().generate(*args, **kwargs)


GENERATE_SIGNATURE = inspect.signature(GenerationMixin.generate)

__all__ = ["VanillaTransformerGenerationMixin", "beam_search", "refuse_streamer"]
