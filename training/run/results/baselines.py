"""Confidence intervals of test scores, and scores of baselines that a trained model has to exceed."""

from ...data.analysis.near_duplicates import MAX_SENTENCES, WordIndex
from ...data.parallel_text import ParallelText
from ...inference.metrics import make_corpus_metrics, transpose_references
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
        of all metrics, in percent.
    """
    systems = {"model": translations, "copied_source": test.sources}
    if train is not None and len(train) <= MAX_SENTENCES:
        index = WordIndex(train.sources)
        systems["translation_memory"] = [train.targets[index.nearest(source)] for source in test.sources]
    metrics, columns = make_corpus_metrics(metric), transpose_references(test.references or test.targets)
    found = bootstrap_scores(systems, metrics, columns, NUM_BOOTSTRAP_SAMPLES)
    result = {}
    for key in metrics:
        result[f"{key}_interval_95"] = found[key].pop("model")["interval_95"]
        result |= {f"{name}_{key}": row["score"] for name, row in found[key].items()}
    return result
