# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""Translation pipeline for strings. It replaces the translation pipeline that transformers 5 has removed."""

import importlib
import math
from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import compress, groupby, islice
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import GenerationConfig, Pipeline, PreTrainedModel
from transformers.generation import MaxTimeCriteria, StopStringCriteria
from transformers.utils import logging

from .generation_vanilla_transformer import (
    OWN_ARGUMENTS,
    SHARED_VOCABULARY_OPTIONS,
    beam_search,
    find_unsupported,
    resolve_generation_config,
)

logger = logging.get_logger(__name__)

BATCHES_PER_WINDOW = 64  # sentences are sorted by length within this many batches
DEFAULT_BATCH_SIZE = 64  # sentences
MAX_GPU_BATCH_SIZE = 512  # sentences
MAX_GPU_BATCH_TOKENS = 2**14  # source tokens times beams
DEFAULT_GLOSSARY_BEAMS = 4  # section 6.1
EXTRA_TOKENS = 50  # section 6.1: "the maximum output length during inference [is] input length + 50"
ROW_ARGUMENTS = ("decoder_input_ids", "decoder_attention_mask", "prefix_allowed_tokens_fn", "adapter_names")


class TranslationPipeline(Pipeline):
    """Pipeline that translates a string, a list of strings, or any iterable of strings, such as a dataset column.

    Sentences are sorted by length within a window of batches, to reduce padding. The output is in input order.

    ```python
    translator = TranslationPipeline(model=model, tokenizer=tokenizer)
    translator("A dog runs.")                      # [{"translation_text": "Ein Hund rennt."}]
    translator(["A dog.", "A cat."])               # list with one such dictionary per sentence
    translator(open("source.txt"))                 # lazy iterator of dictionaries
    translator("A dog.", num_beams=4, num_return_sequences=3, return_scores=True)   # 3 dictionaries
    ```

    Keyword arguments of the constructor or of a call:
        batch_size: Number of sentences per batch. Defaults to 64. On a GPU, it depends on their length, up to 512.
        return_scores: Add `"score"`: sum of the log-probabilities of the tokens / length ** length_penalty, as in
            `generate()` after logits processors. With the option `alpha` of `beam_search`, the divisor is the length
            penalty of the paper.
        return_token_scores: Add `"tokens"`, `"token_scores"` (log-probabilities in nats, without logits processors) and
            their sum, `"log_probability"`.
        return_alignments: Add `"alignments"`: word alignments as pairs of character spans, `((start, end), (start,
            end))` of the source and of the translation. See `align`.
        progress: Show a progress bar on stderr.
        glossary: Required translations of source terms, `{"dog": "Hund", "cat": ["Katze", "Kater"]}`. With several
            alternatives, the search chooses one. Adds `"terms"`: each `"source"` term with its `"target"`, which is
            None if the translation does not contain it. If the generation config has one beam, 4 beams are used.
        ensemble: Additional vanilla_transformer models with the same tokenizer, on the same device. Probabilities of
            all models are averaged.
        other arguments: Passed to `model.generate()`. If no length is set, a translation may be 50 tokens longer than
            its source (section 6.1). `ROW_ARGUMENTS`, which depend on the order of sentences in a batch, raise errors.

    A sentence has fewer than `num_return_sequences` translations if beam search finds fewer hypotheses. White space at
    the end of a sentence is ignored. An empty string has an empty translation with score 0. A sentence that is too long
    for learned positions is not truncated. Its translation is empty with score -inf, `"error"` states the reason, and a
    warning is logged. A translation does not depend on the other sentences of its batch. The options `glossary`,
    `return_alignments` and `return_token_scores` require the installed package `vanilla_transformer`, as checkpoints do
    not contain their code.
    """

    _load_tokenizer = True

    def _sanitize_parameters(self, **kwargs: Any) -> tuple[dict, dict, dict]:
        names = ("return_scores", "return_token_scores", "return_alignments", "progress", "glossary")
        return {}, kwargs, {name: kwargs.pop(name) for name in names if name in kwargs}

    def __call__(self, inputs: str | Iterable[str], **kwargs: Any) -> list | Iterator:
        """Translate strings (see the class). Return a list for a string or list, an iterator for other iterables."""
        batch_size = kwargs.pop("batch_size", None) or self._batch_size
        kwargs.pop("num_workers", None)  # no worker processes: tokenization is fast
        _, generate_kwargs, output_options = self._sanitize_parameters(**kwargs)
        generate_kwargs = self._forward_params | generate_kwargs
        generate_kwargs = {k: v for k, v in generate_kwargs.items() if v is not None or k not in OWN_ARGUMENTS}
        output_options = self._postprocess_params | output_options
        sentences: Iterable[str] = [inputs] if isinstance(inputs, str) else inputs
        total = len(sentences) if isinstance(sentences, Sized) else None
        progress, glossary = output_options.pop("progress", False), output_options.pop("glossary", None)
        configs = [generate_kwargs.get("generation_config"), self.model.generation_config]
        if glossary and next((each.num_beams for each in configs if each and each.num_beams), 1) == 1:
            # also for sentences without terms, so that a translation does not depend on its batch
            generate_kwargs = {"num_beams": DEFAULT_GLOSSARY_BEAMS} | generate_kwargs
        self._validate_options(generate_kwargs, glossary)
        matcher = None if glossary is None else import_module("glossary").GlossaryMatcher(glossary, self.tokenizer)
        translations = self._translate(sentences, batch_size, generate_kwargs, matcher, **output_options)
        if progress:
            translations = tqdm(translations, total=total, unit=" sentences")
        if isinstance(inputs, str):
            (translation,) = translations
            return translation if isinstance(translation, list) else [translation]
        return list(translations) if isinstance(inputs, list | tuple) else translations

    def _validate_options(self, generate_kwargs: dict[str, Any], glossary: Any) -> None:
        """Raise ValueError for options that depend on the batch, the vocabularies or each other."""
        per_row = [name for name in ROW_ARGUMENTS if generate_kwargs.get(name) is not None]
        per_row += ["decoder_start_token_id"] * isinstance(generate_kwargs.get("decoder_start_token_id"), list)
        if per_row:
            raise ValueError(f"{per_row[0]} depends on the rows of a batch. Call model.generate() with one batch.")
        config = resolve_generation_config(self.model, generate_kwargs)
        is_marian = hasattr(self.tokenizer, "target_encoder")
        if is_marian and config.stop_strings is not None:  # `StopStringCriteria` would read the source vocabulary
            raise ValueError("stop_strings does not support a MarianTokenizer with two vocabularies. Omit it.")
        if config.stop_strings is not None:
            try:
                StopStringCriteria(self._target_tokenizer(), config.stop_strings)
            except ValueError as error:
                letters = f"this {type(self.tokenizer).__name__} has no single letters"  # it looks for "abcdef"
                reason = letters if str(error) == "substring not found" else str(error).rstrip(".")
                raise ValueError(f"stop_strings={config.stop_strings} cannot be used: {reason}. Omit it.") from error
        if hasattr(self.tokenizer, "stock") or is_marian:  # it has two vocabularies
            for name, neutral in SHARED_VOCABULARY_OPTIONS.items():
                if (value := getattr(config, name)) not in (None, neutral):
                    raise ValueError(f"{name}={value} requires one vocabulary for source and target. Omit it.")
        unsupported = self._find_unsupported(generate_kwargs)
        for name, label in OWN_ARGUMENTS.items():
            value = glossary if name == "glossary" else generate_kwargs.get(name)
            if value not in (None, (), [], {}) and unsupported is not None:
                raise ValueError(
                    f"{label} requires `beam_search`, which does not support {unsupported}. Omit one of the two."
                )

    def _translate(
        self,
        sentences: Iterable[str],
        batch_size: int | None,
        generate_kwargs: dict[str, Any],
        matcher: Any = None,  # `GlossaryMatcher` or None
        **output_options: bool,
    ) -> Iterator[dict[str, Any] | list[dict[str, Any]]]:
        """Yield the translation of each sentence, or with `num_return_sequences` > 1, the list of its translations."""
        sentences = iter(sentences)
        if output_options.get("return_alignments") or output_options.get("return_token_scores"):
            import_module("alignment")  # raise an error before decoding
        n = resolve_generation_config(self.model, generate_kwargs).num_return_sequences or 1
        while window := list(islice(sentences, (batch_size or DEFAULT_BATCH_SIZE) * BATCHES_PER_WINDOW)):
            window = [each.rstrip() if isinstance(each, str) else each for each in window]  # training strips lines
            encoded: dict[int, Any] = {}
            results: dict[int, list[dict[str, Any]]] = {}
            for i, sentence in enumerate(window):
                model_inputs, error = self._encode(sentence, generate_kwargs.get("ensemble"))
                if model_inputs is not None:
                    encoded[i] = model_inputs
                else:
                    results[i] = [empty_translation(error, matcher is not None, **output_options) for _ in range(n)]
            forwarded = []  # outputs of all batches: a subclass may decode several batches at the same time
            for indices in self._iter_batches(window, encoded, batch_size, generate_kwargs, matcher):
                batch = self.tokenizer.pad([encoded[i] for i in indices], padding_side="right", return_tensors="pt")
                options = {name: value for name, value in output_options.items() if name != "return_alignments"}
                if matcher and (glossary := matcher.build_constraints([window[i] for i in indices])):
                    options["glossary"] = glossary
                forwarded.append((indices, self.forward(batch, **options, **generate_kwargs)))
            for indices, model_outputs in forwarded:
                outputs = self.postprocess(model_outputs)
                if output_options.get("return_alignments"):
                    self._add_alignments([window[i] for i in indices], outputs)
                for i, candidates in zip(indices, outputs, strict=True):
                    results[i] = candidates
                    for each in candidates if matcher is not None else ():
                        each["terms"] = matcher.report_terms(window[i], each["translation_text"])
            yield from (results[i] if n > 1 else results[i][0] for i in range(len(window)))

    def _iter_batches(
        self,
        window: list[str],
        encoded: dict[int, Any],
        batch_size: int | None,
        generate_kwargs: dict[str, Any],
        matcher: Any,
    ) -> Iterator[list[int]]:
        """Yield the indices of each batch: sentences with glossary terms first, then by descending length."""
        config = resolve_generation_config(self.model, generate_kwargs)
        has_limit = config.max_new_tokens is not None or config.max_length is not None
        # The default limit is source length + 50. If a batch can have only one limit, its sources need equal lengths
        can_mix_lengths = has_limit or self._supports_extra_tokens(generate_kwargs, config)
        has_terms = {i: matcher is not None and bool(matcher.find(window[i])) for i in encoded}
        lengths = {i: len(each["input_ids"]) for i, each in encoded.items()}
        order = sorted(encoded, key=lambda i: (has_terms[i], lengths[i]), reverse=True)
        while order:
            indices = order[: batch_size or self._auto_batch_size(lengths[order[0]], generate_kwargs)]
            if not can_mix_lengths:
                indices = list(next(groupby(indices, lengths.__getitem__))[1])
            yield indices
            order = order[len(indices) :]

    def _encode(
        self, sentence: str, ensemble: Sequence[PreTrainedModel] | None
    ) -> tuple[dict[str, list[int]] | None, str | None]:
        """Return the model inputs of a sentence or None, and the reason if it cannot be translated."""
        if not isinstance(sentence, str):
            raise ValueError(f"{sentence!r} is not a string: pass sentences, such as a dataset's text column.")
        if not sentence.strip():
            return None, None
        limit = self._max_sequence_length(ensemble)
        try:
            sentence.encode()
        except UnicodeEncodeError as exception:
            character = exception.start + 1
            error = f"character {character} of the sentence is half of a surrogate pair, which UTF-8 cannot encode."
        else:
            model_inputs = self.preprocess(sentence)
            length = len(model_inputs["input_ids"])
            if length and (limit is None or length <= limit):
                return model_inputs, None
            too_long = f"the sentence has {length} tokens, and the model takes at most {limit}."
            error = too_long if length else "the sentence has no tokens."
        logger.warning(f"Not translated: {error} {sentence[:80]!r}...")
        return None, error

    @property
    def ensemble(self) -> Sequence[PreTrainedModel]:
        """The additional models of the ensemble."""
        return self._forward_params.get("ensemble", ())

    def preprocess(self, sentence: str) -> dict[str, list[int]]:
        """Return the ids and the attention mask of a sentence, without padding."""
        encoding = self.tokenizer(sentence)
        return {"input_ids": encoding["input_ids"], "attention_mask": encoding["attention_mask"]}

    def _forward(
        self,
        model_inputs: dict[str, torch.Tensor],
        return_scores: bool = False,
        return_token_scores: bool = False,
        **generate_kwargs: Any,
    ) -> dict:
        """Return ids (B, n, T) of a padded batch (B, S); on request, scores (B, n) and token scores (B, n, T - 1)."""
        config = resolve_generation_config(self.model, generate_kwargs)
        source_length = model_inputs["input_ids"].shape[1]
        ensemble = generate_kwargs.get("ensemble", ())
        limit = self._max_sequence_length(ensemble)
        if config.max_new_tokens is None and config.max_length is None:
            if self._supports_extra_tokens(generate_kwargs, config):
                generate_kwargs.setdefault("extra_tokens", EXTRA_TOKENS)
            config.max_new_tokens = generate_kwargs["max_new_tokens"] = source_length + EXTRA_TOKENS
        if limit is not None and (config.max_new_tokens or config.max_length - 1) > limit - 1:
            generate_kwargs["max_new_tokens"] = limit - 1  # generate() would raise an error at the limit
        uses_own_loops = self._find_unsupported(generate_kwargs) is None
        if uses_own_loops:
            uses_own_loops = generate_kwargs.setdefault("custom_generate", beam_search) is beam_search
        config = resolve_generation_config(self.model, generate_kwargs)
        if config.stop_strings is not None:
            generate_kwargs.setdefault("tokenizer", self._target_tokenizer())
        output_flags = dict.fromkeys(("output_logits", "output_attentions", "output_hidden_states"), False)
        output_flags |= {"return_dict_in_generate": return_scores}
        # the loops of transformers need this flag to return scores; it keeps the scores of all tokens at each step
        output_flags |= {"output_scores": return_scores and not uses_own_loops}
        outputs = self.model.generate(**model_inputs, **(generate_kwargs | output_flags))
        shape = (len(model_inputs["input_ids"]), -1)
        sequences = outputs.sequences if return_scores else outputs
        result = {"sequences": sequences.view(*shape, sequences.shape[-1])}
        is_token = self._token_mask(result["sequences"], model_inputs, config, generate_kwargs)
        if return_scores:
            result["scores"] = self._compute_scores(outputs, is_token, config).view(shape)
        if (config.num_beams or 1) > 1:  # beam search repeats a hypothesis if it finds fewer than n
            lists = result["sequences"].tolist()
            result["is_found"] = [[rows.index(row) == i for i, row in enumerate(rows)] for rows in lists]
        if return_token_scores:
            inputs, models = (model_inputs, result["sequences"], is_token), (self.model, *ensemble)
            function = import_module("alignment").compute_token_log_probs
            scores = torch.stack([function(model, *inputs) for model in models])
            result["token_scores"] = scores.logsumexp(0) - math.log(len(models))  # logarithm of the mean probability
        return result

    def _find_unsupported(self, generate_kwargs: dict[str, Any]) -> str | None:
        """Return the first option or modification that requires a loop of transformers, or None."""
        config = resolve_generation_config(self.model, generate_kwargs)
        config.return_dict_in_generate = False  # `_forward` requests no per-step outputs from `beam_search`
        return find_unsupported((self.model, *generate_kwargs.get("ensemble", ())), config, generate_kwargs)

    def _supports_extra_tokens(self, generate_kwargs: dict[str, Any], config: GenerationConfig) -> bool:
        """Return whether each sentence of a batch can have its own limit, with `extra_tokens` of `beam_search`."""
        is_default = generate_kwargs.get("custom_generate", beam_search) is beam_search
        return is_default and config.forced_eos_token_id is None and self._find_unsupported(generate_kwargs) is None

    def _token_mask(
        self,
        sequences: torch.Tensor,
        model_inputs: dict[str, torch.Tensor],
        config: GenerationConfig,
        generate_kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """Return a mask (B, n, T) of the ids in sequences (B, n, 1 + T) that belong to the translation.

        EOS tokens do not suffice to find the end of a sentence. Stopped sentences and those at their limit have none,
        and the pad token may have the same id.
        """
        ids = sequences[..., 1:]
        eos_ids = [config.eos_token_id] if isinstance(config.eos_token_id, int) else config.eos_token_id or []
        is_eos = torch.isin(ids, torch.tensor(eos_ids, dtype=ids.dtype, device=ids.device))
        is_token = is_eos.cumsum(-1) - is_eos.long() == 0
        if config.pad_token_id is not None:
            is_token &= (ids != config.pad_token_id) | is_eos
        if "extra_tokens" in generate_kwargs:
            limits = (model_inputs["attention_mask"].sum(-1) + generate_kwargs["extra_tokens"]).clamp(min=1)
            is_token &= torch.arange(ids.shape[-1], device=ids.device) < limits.to(ids.device)[:, None, None]
        criteria = [*(generate_kwargs.get("stopping_criteria") or ())]
        criteria = [each for each in criteria if not isinstance(each, MaxTimeCriteria)]  # changes with time
        if config.stop_strings is not None:
            criteria.append(StopStringCriteria(self._target_tokenizer(), config.stop_strings))
        for length in range(1, ids.shape[-1] if criteria else 0):  # padding after a stop may have the id of EOS
            for criterion in criteria:
                is_stopped = criterion(sequences[..., : length + 1].flatten(0, 1), None).view(ids.shape[:2])
                is_token[..., length:] &= ~is_stopped[..., None]
        return is_token

    def _target_tokenizer(self) -> Any:
        return self.tokenizer.stock("target") if hasattr(self.tokenizer, "stock") else self.tokenizer

    def _compute_scores(self, outputs: Any, is_token: torch.Tensor, config: GenerationConfig) -> torch.Tensor:
        if getattr(outputs, "sequences_scores", None) is not None:
            return outputs.sequences_scores  # computed by beam search
        steps = len(outputs.scores)
        log_probabilities = torch.stack(outputs.scores, dim=1).log_softmax(-1)  # (B, T, V)
        log_probabilities = log_probabilities.gather(-1, outputs.sequences[:, -steps:, None]).squeeze(-1)
        is_token = is_token.flatten(0, 1)[:, -steps:]
        penalty = 1.0 if config.length_penalty is None else float(config.length_penalty)
        return log_probabilities.masked_fill(~is_token, 0.0).sum(-1) / is_token.sum(-1).clamp(min=1) ** penalty

    def postprocess(self, model_outputs: dict[str, torch.Tensor]) -> list[list[dict[str, Any]]]:
        """Return at most n dictionaries per sentence for token ids (B, n, T)."""
        results = []
        target_tokenizer = self._target_tokenizer()
        for row, sequences in enumerate(model_outputs["sequences"]):
            texts = self.tokenizer.batch_decode(sequences, skip_special_tokens=True)
            candidates: list[dict[str, Any]] = [{"translation_text": text} for text in texts]
            for i, candidate in enumerate(candidates):
                if "scores" in model_outputs:
                    candidate["score"] = float(model_outputs["scores"][row, i])
                if "token_scores" in model_outputs:
                    scores = model_outputs["token_scores"][row, i]
                    is_token = ~scores.isnan()
                    candidate["tokens"] = target_tokenizer.convert_ids_to_tokens(sequences[i, 1:][is_token].tolist())
                    candidate["token_scores"] = scores[is_token].tolist()
                    candidate["log_probability"] = sum(candidate["token_scores"])
            if "is_found" in model_outputs:
                candidates = candidates[:1] + list(compress(candidates[1:], model_outputs["is_found"][row][1:]))
            results.append(candidates)
        return results

    def _add_alignments(self, sources: list[str], outputs: list[list[dict[str, Any]]]) -> None:
        """Add alignments, except to translations that are too long for the model after re-tokenization."""
        limit = self._max_sequence_length()
        pairs = []
        for source, candidates in zip(sources, outputs, strict=True):
            for each in candidates:
                each["alignments"] = []
                length = 0 if limit is None else len(self.tokenizer(text_target=each["translation_text"])["input_ids"])
                if limit is None or length <= limit:
                    pairs.append((source, each))
                else:
                    logger.warning(f"Not aligned: a translation has {length} tokens. The model takes at most {limit}.")
        texts = [source for source, _ in pairs], [each["translation_text"] for _, each in pairs]
        links = import_module("alignment").align(self.model, self.tokenizer, *texts)
        for (_, each), alignments in zip(pairs, links, strict=True):
            each["alignments"] = alignments

    def _auto_batch_size(self, length: int, generate_kwargs: dict[str, Any]) -> int:
        """Return the default batch size for sources of `length` tokens."""
        if self.model.device.type != "cuda":
            return DEFAULT_BATCH_SIZE
        num_beams = resolve_generation_config(self.model, generate_kwargs).num_beams or 1
        return max(1, min(MAX_GPU_BATCH_SIZE, MAX_GPU_BATCH_TOKENS // (length * num_beams)))

    def _max_sequence_length(self, ensemble: Sequence[PreTrainedModel] | None = None) -> int | None:
        """Return the maximum length of source and target for all models, or None if there is no limit."""
        configs = [each.config for each in (self.model, *(ensemble or ()))]
        limited = [each for each in configs if getattr(each, "position_embedding_type", None) != "sinusoidal"]
        return min(filter(None, (getattr(each, "max_position_embeddings", None) for each in limited)), default=None)


def import_module(name: str) -> Any:
    """Import `alignment` or `glossary` from the installed package, because checkpoints do not contain these modules."""
    try:
        return importlib.import_module(f"vanilla_transformer.{name}_vanilla_transformer")
    except ImportError as error:
        raise ImportError(
            "Glossaries, alignments and token scores require the package vanilla_transformer. The code in a checkpoint "
            "does not contain them. Clone the repository of the package, and run `pip install .` in it."
        ) from error


def empty_translation(
    error: str | None,
    has_glossary: bool,
    return_scores: bool = False,
    return_token_scores: bool = False,
    return_alignments: bool = False,
) -> dict[str, Any]:
    """Return the translation of an empty sentence, or of one that cannot be translated because of `error`."""
    score = 0.0 if error is None else float("-inf")
    result: dict[str, Any] = {"translation_text": ""} | ({} if error is None else {"error": error})
    result |= {"score": score} if return_scores else {}
    result |= {"tokens": [], "token_scores": [], "log_probability": score} if return_token_scores else {}
    result |= {"alignments": []} if return_alignments else {}
    return result | ({"terms": []} if has_glossary else {})


__all__ = ["TranslationPipeline"]
