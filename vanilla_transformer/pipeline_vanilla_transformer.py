# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""`TranslationPipeline`: text in, text out. transformers 5 removed its own."""

import copy
from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import islice
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import GenerationConfig, Pipeline, PreTrainedModel
from transformers.generation import StopStringCriteria
from transformers.utils import logging

from .alignment_vanilla_transformer import align, token_scores
from .constraints_vanilla_transformer import GlossaryMatcher
from .generation_vanilla_transformer import beam_search, resolve_generation_config, supports_generate_kwargs

logger = logging.get_logger(__name__)

BATCHES_PER_WINDOW = 64  # sentences of this many batches are sorted by length together
DEFAULT_BATCH_SIZE = 64  # a batch, where nothing else is said
MAX_GPU_BATCH_SIZE = 512  # the most
GPU_MEMORY_FRACTION = 0.5  # of a GPU's free memory that a batch may take by our reckoning
DEFAULT_GLOSSARY_BEAMS = 4  # of a glossary, where nothing sets several; section 6.1
EXTRA_TOKENS = 50  # section 6.1: "the maximum output length during inference [is] input length + 50"


class TranslationPipeline(Pipeline):
    """Translates a string, a list of strings, or any iterable of strings such as a generator or a dataset's column.

    Sentences are sorted by length inside a window of batches, so that little is padded, and come out in input order.

        translator = TranslationPipeline(model=model, tokenizer=tokenizer)
        translator("A dog runs.")                      # [{"translation_text": "Ein Hund rennt."}]
        translator(["A dog.", "A cat."])               # a list with one such dictionary a sentence
        translator(open("source.txt"))                 # an iterator of them; reads as it goes
        translator("A dog.", num_beams=4, num_return_sequences=3, return_scores=True)   # 3 dictionaries

    Keyword arguments, of the constructor or of a call:
        batch_size: sentences a batch. Default: 64; on a GPU up to 512, as many as its memory holds.
        return_scores: add `"score"`: the sum of the tokens' log-probabilities / length ** length_penalty.
        return_token_scores: add `"tokens"`, `"token_scores"` (the log-probability of each, by the model alone and in
            nats) and their sum, `"log_probability"`.
        return_alignments: add `"alignments"`: which words translate each other, as pairs of spans of characters,
            `((start, end), (start, end))` of the source and of the translation. See `align`.
        progress: show a progress bar on stderr.
        glossary: what source terms have to become, `{"dog": "Hund", "cat": ["Katze", "Kater"]}`, of several the one
            that fits. Each dictionary then has `"terms"`, each with its `"source"` and its `"target"` in the
            translation, None where it is missing. Needs beams: 4 where one is the default.
        ensemble: further models of ours with the same tokenizer, on the same device; all predict together, the mean of
            their probabilities.
        any other: passed to `model.generate()`, over the model's `generation_config`. Where nothing sets a length, a
            translation may be 50 tokens longer than its source (section 6.1).

    An empty string has an empty translation with the score 0. A sentence that the model cannot take (learned positions
    have a last one) is not cut: its dictionary has an empty translation with the score -inf and an `"error"` that gives
    the reason, and a warning is logged. A translation does not depend on the batch that its sentence is in.
    """

    _load_tokenizer = True

    def _sanitize_parameters(self, **kwargs: Any) -> tuple[dict, dict, dict]:
        names = ("return_scores", "return_token_scores", "return_alignments", "progress", "glossary")
        own = {name: kwargs.pop(name) for name in names if name in kwargs}
        return {}, kwargs, own

    def __call__(self, inputs: str | Iterable[str], **kwargs: Any) -> list | Iterator:
        """Translates; see the class. A string or list gives a list, any other iterable an iterator."""
        batch_size = kwargs.pop("batch_size", None) or self._batch_size
        kwargs.pop("num_workers", None)  # transformers' loaders; tokenizing is not worth a process here
        _, generate_kwargs, own = self._sanitize_parameters(**kwargs)
        generate_kwargs = self._forward_params | generate_kwargs
        own = self._postprocess_params | own
        single = isinstance(inputs, str)
        sentences: Iterable[str] = [inputs] if isinstance(inputs, str) else inputs
        total = len(sentences) if isinstance(sentences, Sized) else None
        progress, words = own.pop("progress", False), own.pop("glossary", None)
        terminology = None if words is None else GlossaryMatcher(words, self.tokenizer)
        if terminology is not None and not self._can_search(generate_kwargs):
            raise ValueError(
                "a glossary needs our own beam search, which does not decode this model with these options."
            )
        if words and (resolve_generation_config(self.model, generate_kwargs).num_beams or 1) == 1:
            generate_kwargs = {
                "num_beams": DEFAULT_GLOSSARY_BEAMS
            } | generate_kwargs  # for all sentences, so that a batch changes none
        translations = self._translate(sentences, batch_size, generate_kwargs, terminology, **own)
        if progress:
            translations = tqdm(translations, total=total, unit=" sentences")
        if single:
            (translation,) = translations
            return translation if isinstance(translation, list) else [translation]
        return list(translations) if isinstance(inputs, list | tuple) else translations

    def _translate(
        self,
        sentences: Iterable[str],
        batch_size: int | None,
        generate_kwargs: dict[str, Any],
        terminology: GlossaryMatcher | None = None,
        return_scores: bool = False,
        return_token_scores: bool = False,
        return_alignments: bool = False,
    ) -> Iterator[dict[str, Any] | list[dict[str, Any]]]:
        sentences = iter(sentences)
        config = resolve_generation_config(self.model, generate_kwargs)
        last = self._max_source_length(generate_kwargs.get("ensemble"))
        own: dict[str, Any] = {"return_scores": return_scores, "return_token_scores": return_token_scores}
        has_limit = config.max_new_tokens is not None or config.max_length is not None
        # Otherwise a batch has one limit, and therefore sources of one length
        is_mixed = has_limit or self._has_row_limits(generate_kwargs, config)

        def in_shape(candidates: list[dict[str, Any]]) -> Any:
            return candidates[0] if (config.num_return_sequences or 1) == 1 else candidates

        while window := list(islice(sentences, (batch_size or DEFAULT_BATCH_SIZE) * BATCHES_PER_WINDOW)):
            window = [each.rstrip("\r\n") if isinstance(each, str) else each for each in window]  # lines of a file
            results: list[Any] = [None] * len(window)
            encoded = {}
            for i, sentence in enumerate(window):
                if not isinstance(sentence, str):
                    raise ValueError(f"{sentence!r} is not a string: pass sentences, such as a dataset's text column.")
                model_inputs, error = {}, encoding_error(sentence)
                if error is None and sentence.strip():
                    model_inputs = self.preprocess(sentence)
                    error = self._length_error(len(model_inputs["input_ids"]), last)
                if error is not None:
                    logger.warning(f"Not translated: {error} {sentence[:80]!r}...")
                elif model_inputs:
                    encoded[i] = model_inputs
                    continue
                empty: dict[str, Any] = {"translation_text": ""} | ({} if error is None else {"error": error})
                score = 0.0 if error is None else float("-inf")
                empty |= {"score": score} if return_scores else {}
                if return_token_scores:
                    empty |= {"tokens": [], "token_scores": [], "log_probability": score}
                empty |= {"alignments": []} if return_alignments else {}
                empty |= {} if terminology is None else {"terms": []}
                results[i] = in_shape([copy.deepcopy(empty) for _ in range(config.num_return_sequences or 1)])
            has_terms = {i: terminology is not None and bool(terminology.find(window[i])) for i in encoded}
            # the largest batch first; the price of terms is paid where there are some
            order = sorted(encoded, key=lambda i: (has_terms[i], len(encoded[i]["input_ids"])), reverse=True)
            while order:
                length = len(encoded[order[0]]["input_ids"])
                size = batch_size or self._auto_batch_size(length, generate_kwargs)
                indices = order[:size]
                if not is_mixed:
                    indices = [i for i in indices if len(encoded[i]["input_ids"]) == length]
                order = order[len(indices) :]
                batch = self.tokenizer.pad([encoded[i] for i in indices], return_tensors="pt")
                if terminology is not None:
                    own["glossary"] = terminology.build_constraints([window[i] for i in indices])
                found = self.postprocess(self.forward(batch, **own, **generate_kwargs))
                if return_alignments:
                    self._add_alignments([window[i] for i in indices], found)
                for i, candidates in zip(indices, found, strict=True):
                    if terminology is not None:
                        for candidate in candidates:
                            candidate["terms"] = terminology.report_terms(window[i], candidate["translation_text"])
                    results[i] = in_shape(candidates)
            yield from results

    @property
    def ensemble(self) -> Sequence[PreTrainedModel]:
        """The further models that predict with `model`."""
        return self._forward_params.get("ensemble", ())

    def preprocess(self, sentence: str) -> dict[str, list[int]]:
        """A sentence -> its ids and mask, without padding."""
        encoding = self.tokenizer(sentence)
        return {"input_ids": encoding["input_ids"], "attention_mask": encoding["attention_mask"]}

    def _forward(
        self,
        model_inputs: dict[str, torch.Tensor],
        return_scores: bool,
        return_token_scores: bool = False,
        **generate_kwargs: Any,
    ) -> dict:
        """A padded batch (B, S) -> token ids (B, n, T) and, on request, scores (B, n), of each token (B, n, T - 1)."""
        config = resolve_generation_config(self.model, generate_kwargs)
        prompt = generate_kwargs.get("decoder_input_ids")
        start = 1 if prompt is None else prompt.shape[-1]
        last = self._max_source_length(generate_kwargs.get("ensemble"))
        if config.max_new_tokens is None and config.max_length is None:
            if self._has_row_limits(generate_kwargs, config):
                generate_kwargs.setdefault("extra_tokens", EXTRA_TOKENS)
            generate_kwargs["max_new_tokens"] = longest_output(model_inputs["input_ids"].shape[1], last, start)
        elif last is not None and (config.max_new_tokens or config.max_length - start) > last - start:
            generate_kwargs["max_new_tokens"] = last - start  # generate() raises an error at the last position
        if generate_kwargs.get("glossary") is None:
            generate_kwargs.pop("glossary", None)
        searched = self._can_search(generate_kwargs)
        if searched:
            generate_kwargs.setdefault("custom_generate", beam_search)
        elif generate_kwargs.pop("ensemble", None):
            raise ValueError(
                "an ensemble needs our own beam search, which does not decode this model with these options."
            )
        config = resolve_generation_config(self.model, generate_kwargs)
        beams = config.num_beams or 1
        wanted = dict.fromkeys(("output_logits", "output_attentions", "output_hidden_states"), False)
        wanted |= {
            "return_dict_in_generate": return_scores,
            "output_scores": return_scores and not (searched and beams > 1),
        }
        outputs = self.model.generate(**model_inputs, **(generate_kwargs | wanted))
        shape = (len(model_inputs["input_ids"]), -1)
        sequences = outputs.sequences if return_scores else outputs
        result = {"sequences": sequences.view(*shape, sequences.shape[-1])}
        is_token = self._are_tokens(result["sequences"], start, model_inputs, config, generate_kwargs)
        if return_scores:
            result["scores"] = self._scores(outputs, is_token, config).view(shape)
        if return_token_scores:
            result["token_scores"] = token_scores(self.model, model_inputs, result["sequences"], is_token)
        return result

    def _can_search(self, generate_kwargs: dict[str, Any]) -> bool:
        """Whether our own search decodes this model so; else that of `generate()` does."""
        adapter = getattr(self.model, "active_peft_config", None)
        has_prompt = adapter is not None and adapter.is_prompt_learning  # PEFT's, which generate() puts in front
        ours = self.model.config.model_type == "vanilla_transformer" and not has_prompt
        return ours and supports_generate_kwargs(self.model, generate_kwargs)

    def _has_row_limits(self, generate_kwargs: dict[str, Any], config: GenerationConfig) -> bool:
        """Whether each sentence of a batch has its own limit, by `extra_tokens` of `beam_search`."""
        is_default = generate_kwargs.get("custom_generate", beam_search) is beam_search
        return is_default and config.forced_eos_token_id is None and self._can_search(generate_kwargs)

    def _are_tokens(
        self,
        sequences: torch.Tensor,
        start: int,
        model_inputs: dict[str, torch.Tensor],
        config: GenerationConfig,
        generate_kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """Return which ids after the first one of sequences (B, n, 1 + T) belong to the translation: (B, n, T).

        The pad token may be the end token, and a sentence that was stopped or is at its limit has no end token.

        Args:
            start: Length of the decoder prompt.
        """
        ids = sequences[..., 1:]
        ends = [config.eos_token_id] if isinstance(config.eos_token_id, int) else config.eos_token_id or []
        is_end = torch.isin(ids, torch.tensor(ends, dtype=ids.dtype, device=ids.device))
        is_token = is_end.cumsum(-1) - is_end.long() == 0
        if config.pad_token_id is not None:
            is_token &= (ids != config.pad_token_id) | is_end
        if "extra_tokens" in generate_kwargs:
            own = (model_inputs["attention_mask"].sum(-1) + generate_kwargs["extra_tokens"]).clamp(min=1)
            is_token &= torch.arange(ids.shape[-1], device=ids.device) < (own + start - 1).to(ids.device)[:, None, None]
        criteria = [*(generate_kwargs.get("stopping_criteria") or ())]
        if config.stop_strings is not None:
            criteria.append(StopStringCriteria(self._target_tokenizer(), config.stop_strings))
        if config.pad_token_id in ends:  # after a stop, the first pad token is not an end token
            for length in range(start, ids.shape[-1] if criteria else 0):
                for criterion in criteria:
                    is_stopped = criterion(sequences[..., : length + 1].flatten(0, 1), None).view(ids.shape[:2])
                    is_token[..., length:] &= ~is_stopped[..., None]
        return is_token

    def _target_tokenizer(self) -> Any:
        return self.tokenizer.stock("target") if hasattr(self.tokenizer, "stock") else self.tokenizer

    def _scores(self, outputs: Any, is_token: torch.Tensor, config: GenerationConfig) -> torch.Tensor:
        if getattr(outputs, "sequences_scores", None) is not None:
            return outputs.sequences_scores  # beam search has them
        steps = len(outputs.scores)
        log_probabilities = torch.stack(outputs.scores, dim=1).log_softmax(-1)  # (B, T, V)
        log_probabilities = log_probabilities.gather(-1, outputs.sequences[:, -steps:, None]).squeeze(-1)
        is_token = is_token.flatten(0, 1)[:, -steps:]
        penalty = 1.0 if config.length_penalty is None else config.length_penalty
        return log_probabilities.masked_fill(~is_token, 0.0).sum(-1) / is_token.sum(-1).clamp(min=1) ** penalty

    def postprocess(self, model_outputs: dict[str, torch.Tensor]) -> list[list[dict[str, Any]]]:
        """Token ids (B, n, T) -> n dictionaries a sentence."""
        results = []
        target_tokenizer = self._target_tokenizer()
        for row, sequences in enumerate(model_outputs["sequences"]):
            texts = self.tokenizer.batch_decode(sequences, skip_special_tokens=True)
            candidates = [{"translation_text": text} for text in texts]
            if "scores" in model_outputs:
                for candidate, score in zip(candidates, model_outputs["scores"][row].tolist(), strict=True):
                    candidate["score"] = score
            if "token_scores" in model_outputs:
                for candidate, ids, scores in zip(
                    candidates, sequences[:, 1:], model_outputs["token_scores"][row], strict=True
                ):
                    is_token = ~scores.isnan()
                    candidate["tokens"] = target_tokenizer.convert_ids_to_tokens(ids[is_token].tolist())
                    candidate["token_scores"] = scores[is_token].tolist()
                    candidate["log_probability"] = sum(candidate["token_scores"])
            results.append(candidates)
        return results

    def _add_alignments(self, sources: list[str], found: list[list[dict[str, Any]]]) -> None:
        """Add alignments; a translation that becomes longer than the model's positions, tokenized again, has none."""
        limit = self._max_source_length()
        pairs = []
        for source, candidates in zip(sources, found, strict=True):
            for each in candidates:
                each["alignments"] = []
                length = 0 if limit is None else len(self.tokenizer(text_target=each["translation_text"])["input_ids"])
                if limit is None or length <= limit:
                    pairs.append((source, each))
                else:
                    logger.warning(
                        f"Not aligned: the translation has {length} tokens, the model takes at most {limit}."
                    )
        texts = [each["translation_text"] for _, each in pairs]
        links = align(self.model, self.tokenizer, [source for source, _ in pairs], texts)
        for (_, each), own in zip(pairs, links, strict=True):
            each["alignments"] = own

    @staticmethod
    def _length_error(length: int, limit: int | None) -> str | None:
        if not length:
            return "the sentence has no tokens."
        if limit is None or length <= limit:
            return None
        return f"the sentence has {length} tokens, and the model takes at most {limit}."

    def _auto_batch_size(self, length: int, generate_kwargs: dict[str, Any]) -> int:
        """How many sentences of so many tokens make a batch where nobody says it."""
        if self.model.device.type != "cuda" or self.model.config.model_type != "vanilla_transformer":
            return DEFAULT_BATCH_SIZE
        config = resolve_generation_config(self.model, generate_kwargs)
        ensemble = generate_kwargs.get("ensemble") or ()
        limit = config.max_new_tokens or config.max_length or longest_output(length, self._max_source_length(ensemble))
        models = 1 + len(ensemble)
        needed = models * estimate_memory_per_sentence(self.model, length, config.num_beams or 1, limit)
        return max(1, min(MAX_GPU_BATCH_SIZE, int(GPU_MEMORY_FRACTION * free_memory(self.model.device) / needed)))

    def _max_source_length(self, ensemble: Sequence[PreTrainedModel] | None = None) -> int | None:
        """Return the number of positions that the model and the ensemble all have; None: there is no limit."""
        configs = [each.config for each in (self.model, *(ensemble or ()))]
        limited = [each for each in configs if getattr(each, "position_embedding_type", None) != "sinusoidal"]
        return min(filter(None, (getattr(each, "max_position_embeddings", None) for each in limited)), default=None)


def longest_output(source_length: int, limit: int | None, start: int = 1) -> int:
    return source_length + EXTRA_TOKENS if limit is None else min(source_length + EXTRA_TOKENS, limit - start)


def estimate_memory_per_sentence(model: PreTrainedModel, length: int, beams: int, limit: int) -> int:
    """Bytes that decoding takes for a source of `length` tokens with so many beams, up to `limit` tokens: roughly, and
    rather too many."""
    config, width = model.config, model.dtype.itemsize
    encoded = length * width * (8 * config.d_model + 2 * config.encoder_ffn_dim)
    states = 2 * config.decoder_layers * config.d_model * width  # keys and values of a token
    room = 3 * limit  # buffers are doubled, out of the old ones
    logits = 6 * 4 * config.decoder_vocab_size  # in float32, and what is made of them
    return encoded + length * states + beams * (room * states + logits)


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU's memory that nobody has, or that torch keeps for reuse."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def encoding_error(sentence: str) -> str | None:
    """What is wrong with a string that has no UTF-8, if it is one."""
    try:
        sentence.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start + 1} of the sentence is half of a surrogate pair, which is no text."
    return None


__all__ = ["TranslationPipeline"]
