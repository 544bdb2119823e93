"""Confidence intervals of test scores, and scores of baselines that a trained model has to exceed."""

import numpy as np
from sacrebleu.metrics import BLEU, CHRF, TER

from ...data.analysis.near_duplicates import MAX_SENTENCES, WordIndex
from ...data.parallel_text import ParallelText
from ...inference.metrics import SequenceMetric, transpose_references
from ...inference.scoring import bootstrap_scores
from ...inference.settings import NUM_BOOTSTRAP_SAMPLES

BASELINES = {
    "copied_source": "the copied source",
    "translation_memory": "the target of the nearest training source",
}


def compare_with_baselines(
    translations: list[str], test: ParallelText, train: ParallelText | None, metric: str
) -> dict[str, float]:
    """Return the 95 % intervals of the test scores, and the scores of the baselines.

    Without `train`, the translation memory is omitted.

    Returns:
        `<metric>_interval_95` (half-width of the interval), `copied_source_<metric>` and `translation_memory_<metric>`
        for BLEU, chrF and TER, or for exact match, in percent.
    """
    systems = {"model": translations, "copied_source": test.sources}
    if train is not None and len(train) <= MAX_SENTENCES:
        index = WordIndex(train.sources)
        systems["translation_memory"] = [train.targets[index.nearest(source)] for source in test.sources]
    references = test.references or test.targets
    result = {}
    if metric == "sequence":
        for name, texts in systems.items():
            score = SequenceMetric().compute(predictions=texts, references=references)["exact_match"]
            result[f"{name}_exact_match"] = score
        correct = np.random.default_rng(0).binomial(
            len(test), result.pop("model_exact_match") / 100, NUM_BOOTSTRAP_SAMPLES
        )
        low, high = np.percentile(100 * correct / len(test), (2.5, 97.5))
        return result | {"exact_match_interval_95": (high - low) / 2}
    metrics = {"bleu": BLEU(), "chrf": CHRF(), "ter": TER()}
    found = bootstrap_scores(systems, metrics, transpose_references(references), NUM_BOOTSTRAP_SAMPLES)
    for key in metrics:
        result[f"{key}_interval_95"] = found[key].pop("model")["interval_95"]
        result |= {f"{name}_{key}": row["score"] for name, row in found[key].items()}
    return result
