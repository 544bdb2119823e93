"""Metrics of translations and model probabilities, for validation and test."""

import math
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import datasets
import evaluate
import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object
from rapidfuzz.distance import Levenshtein
from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.metrics.base import Metric, Score
from sacremoses import MosesPunctNormalizer, MosesTokenizer
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from vanilla_transformer import TranslationPipeline

from ..data.batching import batch_by_tokens
from ..data.collators import PaddingCollator
from ..data.parallel_text import ParallelText
from ..recipe.arguments import TrainingArguments
from .decoder_input import add_decoder_input_ids
from .translators import select_engine

MAX_TOKENS = 2048  # per batch: 250 MiB of log-probabilities with a vocabulary of 32,000
SINGLE_REFERENCE = {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
MULTIPLE_REFERENCES = SINGLE_REFERENCE | {"references": datasets.Sequence(datasets.Value("string"))}


def transpose_references(references: list[str] | list[list[str]]) -> list[list[str | None]]:
    """Transpose references per sentence to sacreBLEU's streams: all first references, all second ones, ..."""
    rows = [[row] if isinstance(row, str) else row for row in references]
    return [list(column) for column in zip_longest(*rows)]


class EditRate(Metric):
    """Edits to the closest reference per unit of these references, in percent, as a corpus metric of sacreBLEU.

    `split` returns the units of a text, such as its tokens.
    """

    def __init__(self, name: str, split: Callable[[str], Sequence[str]]):
        super().__init__()
        self.name, self.split = name, split

    def _preprocess_segment(self, sent: str) -> str:
        return sent

    def _extract_reference_info(self, refs: Sequence[str]) -> dict[str, Any]:
        return {"references": [self.split(reference) for reference in refs]}

    def _compute_segment_statistics(self, hypothesis: str, ref_kwargs: dict[str, Any]) -> list[int]:
        units = self.split(hypothesis)
        return list(min((Levenshtein.distance(units, each), len(each)) for each in ref_kwargs["references"]))

    def _compute_score_from_stats(self, stats: Sequence[float]) -> Score:
        return Score(self.name, float(100 * stats[0] / max(stats[1], 1)))

    def _aggregate_and_compute(self, stats: list[list[int]]) -> Score:
        return self._compute_score_from_stats([sum(column) for column in zip(*stats, strict=True)])


class ExactMatch(EditRate):
    """Outputs that equal one of their references, in percent, as a corpus metric of sacreBLEU."""

    def _compute_segment_statistics(self, hypothesis: str, ref_kwargs: dict[str, Any]) -> list[int]:
        edits, _ = super()._compute_segment_statistics(hypothesis, ref_kwargs)
        return [int(edits == 0), 1]


def make_corpus_metrics(name: str) -> dict[str, Metric]:
    """Return the metrics of sacreBLEU for the recipe key `metric`: "translation" or "sequence"."""
    if name == "translation":
        return {"bleu": BLEU(), "chrf": CHRF(), "ter": TER()}
    return {
        "exact_match": ExactMatch("exact_match", str.split),
        "token_error_rate": EditRate("token_error_rate", str.split),
        "character_error_rate": EditRate("character_error_rate", str.strip),
    }


class TextMetric(evaluate.Metric):
    """`evaluate` metric of texts with one or several references, without network access."""

    def _info(self) -> evaluate.MetricInfo:
        features = [datasets.Features(SINGLE_REFERENCE), datasets.Features(MULTIPLE_REFERENCES)]
        return evaluate.MetricInfo(description=self.__doc__, citation="", features=features)


class TranslationMetric(TextMetric):
    """BLEU, chrF and TER of detokenized text with signatures, and BLEU as in papers on Multi30k.

        metric = TranslationMetric(target_lang="de")
        metric.compute(predictions=["Ein Hund ."], references=["Ein Hund."])

    Each reference can also be a list of accepted translations.

    Keys of the result:
        bleu, bleu_signature: sacreBLEU, cased, its own tokenizer "13a" (Post 2018).
        chrf, chrf_signature: character F-score (Popović 2015).
        ter, ter_signature: translation edit rate (Snover et al. 2006); lower is better.
        bleu_tokenized_lc: BLEU-4 of normalized, lowercased, Moses-tokenized text. Comparable only with papers that
            state this protocol.
    """

    def __init__(self, target_lang: str, **kwargs: Any):
        super().__init__(**kwargs)
        self.target_lang = target_lang

    def _compute(self, predictions: list[str], references: list) -> dict[str, float | str]:
        columns = transpose_references(references)
        result: dict[str, float | str] = {}
        for name, metric in make_corpus_metrics("translation").items():
            result[name] = metric.corpus_score(predictions, columns).score
            result[f"{name}_signature"] = str(metric.get_signature())
        tokenized = BLEU(tokenize="none", force=True)
        columns = [self.tokenize_with_moses(column) for column in columns]
        result["bleu_tokenized_lc"] = tokenized.corpus_score(self.tokenize_with_moses(predictions), columns).score
        return result

    def tokenize_with_moses(self, sentences: list) -> list:
        """Normalize, lowercase and tokenize sentences (12,103 tokens for test_2016_flickr.de)."""
        normalizer = MosesPunctNormalizer(lang=self.target_lang)
        tokenizer = MosesTokenizer(lang=self.target_lang)
        return [
            sentence and tokenizer.tokenize(normalizer.normalize(sentence).lower(), escape=False, return_str=True)
            for sentence in sentences
        ]


class SequenceMetric(TextMetric):
    """Metrics of sequences that are correct or wrong, such as phonemes, with spaces between tokens.

        SequenceMetric().compute(predictions=["K AE T S"], references=[["K AE T", "K AE T Z"]])

    Keys of the result, all in percent:
        exact_match: Outputs that equal one of their references.
        token_error_rate: Edits (insertions, deletions, substitutions of tokens) to the closest reference, divided by
            the tokens of these references, as the metric `wer` of `evaluate`. For phonemes, it is called PER.
        character_error_rate: The same for characters, as the metric `cer` of `evaluate`.
    """

    def _compute(self, predictions: list[str], references: list) -> dict[str, float]:
        columns, metrics = transpose_references(references), make_corpus_metrics("sequence")
        return {name: metric.corpus_score(predictions, columns).score for name, metric in metrics.items()}


def make_metric(name: str, target_lang: str) -> evaluate.Metric:
    """Return the metric for the recipe key `metric`: "translation" or "sequence"."""
    return TranslationMetric(target_lang) if name == "translation" else SequenceMetric()


@torch.no_grad()
def compute_pair_nll(
    model: PreTrainedModel,
    tokenizer: Any,
    text: ParallelText,
    batch_size: int,
    ensemble: Sequence[PreTrainedModel] = (),
    show: bool = True,
) -> list[tuple[float, int]]:
    """Compute (-log p(target | source) in nats, number of target tokens with EOS) of each pair.

    Batches have at most `batch_size` sentences and 2,048 tokens per side. The token probabilities of `model` and
    `ensemble` are averaged, as in `beam_search`. `show` enables a progress bar if stderr is a terminal.
    """
    if not len(text):
        return []
    models = [each.eval() for each in (model, *ensemble)]
    collate = PaddingCollator(tokenizer.pad_token_id or 0)  # on the right, also with a tokenizer that pads on the left
    encoded = tokenizer(text.sources, text_target=text.targets, return_attention_mask=False)
    pairs = [{"input_ids": s, "labels": t} for s, t in zip(encoded["input_ids"], encoded["labels"], strict=True)]
    lengths = np.array([(len(pair["input_ids"]), len(pair["labels"])) for pair in pairs])
    batches = batch_by_tokens(lengths, MAX_TOKENS, np.random.default_rng(0))
    batches = [batch[i : i + batch_size] for batch in batches for i in range(0, len(batch), batch_size)]
    nats = [0.0] * len(pairs)
    for indices in tqdm(batches, unit=" batches", desc="compute_pair_nll", leave=False, disable=None if show else True):
        batch = {name: each.to(model.device) for name, each in collate([pairs[i] for i in indices]).items()}
        labels, log_probs = batch["labels"], []
        for each in models:
            inputs = add_decoder_input_ids(each, batch)
            log_probs.append(each(**inputs | {"labels": None}).logits.float().log_softmax(-1))
        mean = torch.stack(log_probs).logsumexp(0) - math.log(len(models))  # (B, T, V)
        losses = nn.functional.nll_loss(mean.transpose(1, 2), labels, reduction="none").sum(1)
        for i, loss in zip(indices, losses.tolist(), strict=True):
            nats[i] = loss
    return [(loss, len(pair["labels"])) for loss, pair in zip(nats, pairs, strict=True)]


def translate_and_score(
    model: PreTrainedModel,
    tokenizer: Any,
    text: ParallelText,
    compute: Any,
    args: TrainingArguments,
    engine: str = "transformers",
    **decoding: Any,
) -> tuple[dict[str, Any], list[str]]:
    """Translate and score sentence pairs, distributed over all processes. The batches do not depend on their number.

    Args:
        model: Complete model, the same in each process.
        tokenizer: Tokenizer of the model.
        text: Sentence pairs. The metric uses all references, the losses use `text.targets`.
        compute: Method `compute` of a metric, or None to compute only the losses, without translating.
        args: Number and index of the processes, and sentences per batch.
        engine: Engine that translates, see `select_engine`.
        decoding: Arguments of `generate()`. Default to the generation config of the model.

    Returns:
        The scores, and the translations in the order of `text`, the same in every process. In addition to the
        metric, they contain `loss` (cross-entropy) and `source_gain`, in nats per target token. `source_gain` is the
        increase of the loss if sentences of similar length swap their sources. It is near 0 for a model that ignores
        its source, and missing if there is only one source.
    """
    model.eval()
    size = args.per_device_eval_batch_size
    lengths = [len(ids) for ids in tokenizer(text.sources)["input_ids"]]
    order = sorted(range(len(text)), key=lengths.__getitem__, reverse=True)  # as in the pipeline
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    indices = [i for batch in batches[args.process_index :: args.world_size] for i in batch]
    shard = text.select(indices)
    translations = [""] * len(shard)
    if compute is not None:
        translator = TranslationPipeline(model=model, tokenizer=tokenizer, batch_size=size, device=args.device)
        decoding |= {"num_return_sequences": 1}
        outputs = select_engine(translator, engine, len(text), decoding)(shard.sources, **decoding)
        translations = [output["translation_text"] for output in outputs]
    sources = list(dict.fromkeys(text.sources[i] for i in order))
    next_source = dict(zip(sources, sources[1:] + sources[:1], strict=True))
    swapped = ParallelText([next_source[source] for source in shard.sources], shard.targets)
    losses = [
        compute_pair_nll(model, tokenizer, pairs, size, show=args.process_index == 0) for pairs in (shard, swapped)
    ]
    rows = sorted(gather_object(list(zip(indices, translations, *losses, strict=True))))
    translations, scores = [row[1] for row in rows], dict[str, Any]()
    if args.process_index == 0:
        if compute is not None:
            scores |= compute(predictions=translations, references=text.references or text.targets)
        tokens = sum(row[2][1] for row in rows)
        loss, swapped_loss = (sum(row[column][0] for row in rows) / tokens for column in (2, 3))
        scores["loss"] = loss
        if len(sources) > 1:
            scores["source_gain"] = swapped_loss - loss
    return broadcast_object_list([scores])[0], translations
