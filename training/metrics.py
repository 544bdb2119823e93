"""Scores of translations, through `evaluate`'s interface on the sacreBLEU library, with no network."""

from typing import Any

import datasets
import evaluate
from sacrebleu.metrics import BLEU, CHRF
from sacremoses import MosesPunctNormalizer, MosesTokenizer


class TranslationMetric(evaluate.Metric):
    """BLEU and chrF of detokenized text with their signatures, and BLEU as papers on Multi30k report it.

        metric = TranslationMetric(target_lang="de")
        metric.compute(predictions=["Ein Hund ."], references=["Ein Hund."])

    Keys of the result:
        bleu, bleu_signature: sacreBLEU, cased, its own tokenizer "13a" (Post 2018).
        chrf, chrf_signature: character F-score (Popović 2015).
        bleu_tokenized_lc: BLEU-4 on text that is normalised, lower-cased and tokenized as Moses does it; comparable
            with papers that state this protocol and with nothing else.
    """

    def __init__(self, target_lang: str = "de", **kwargs: Any):
        super().__init__(**kwargs)
        self.target_lang = target_lang

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation="Post 2018, A Call for Clarity in Reporting BLEU Scores",
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float | str]:
        bleu, chrf = BLEU(), CHRF()
        result = {
            "bleu": bleu.corpus_score(predictions, [references]).score,
            "chrf": chrf.corpus_score(predictions, [references]).score,
        }
        tokenized = BLEU(tokenize="none", force=True)
        predictions, references = self.moses(predictions), self.moses(references)
        result["bleu_tokenized_lc"] = tokenized.corpus_score(predictions, [references]).score
        signatures = {"bleu_signature": bleu, "chrf_signature": chrf}
        return result | {name: str(metric.get_signature()) for name, metric in signatures.items()}

    def moses(self, sentences: list[str]) -> list[str]:
        """Normalised, lower-cased, tokenized; the reference of test_2016_flickr.de has 12,103 tokens then."""
        normalizer = MosesPunctNormalizer(lang=self.target_lang)
        tokenizer = MosesTokenizer(lang=self.target_lang)
        return [
            tokenizer.tokenize(normalizer.normalize(sentence).lower(), escape=False, return_str=True)
            for sentence in sentences
        ]
