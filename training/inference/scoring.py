"""Scores of a checkpoint on a test set: metrics with confidence intervals, or the likelihood of the references."""

import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest

from vanilla_transformer.pipeline_vanilla_transformer import DEFAULT_BATCH_SIZE
from vanilla_transformer.shared.atomic_io import atomic_write
from vanilla_transformer.shared.command_line import accept_settings, logger, shows_progress

from ..data.analysis.languages import SIDES
from ..data.files import TABLE_SUFFIXES, read_rows, read_table_pairs
from ..data.parallel_text import ParallelText, collect_valid_pairs
from .metrics import TranslationMetric, compute_pair_nll, make_corpus_metrics, transpose_references
from .settings import DecodingSettings, LikelihoodSettings, ScoreSettings, TranslationSettings
from .translation import scoring_error, translate_lines
from .translators import Paths, as_names, load_translator, read_run_recipe


@accept_settings(ScoreSettings)
def score(checkpoints: Paths, source: str | Path, references: Paths = (), **options: Any) -> dict[str, Any]:
    """Translate a test set and score the translations.

    Example: `score("runs/demo", "test.en", ["test.de"])["bleu"]` returns `{"score": 38.7, "interval_95": 1.2}`.

    Args:
        checkpoints: Directory, or repository on the Hub. Several form an ensemble.
        source: Text file with one sentence per line, or a table in a format of training data. A .tsv or .csv file can
            have several columns of references.
        references: One or more text files with references, if `source` has none.
        options: Fields of `ScoreSettings`.

    Returns:
        A dictionary from metric to `score` (percent) and `interval_95` (half-width of the 95 % interval), and the
        signatures. With `compare`: the same for each system, and the `p_value` of the difference.

    Raises:
        ValueError: If a checkpoint cannot be loaded, or the files do not form a test set.
    """
    settings = ScoreSettings(**options)
    systems = [as_names(each) for each in (checkpoints, settings.compare) if each is not None]
    if systems[1:] == systems[:1]:
        raise ValueError("--compare must differ from the scored checkpoint.")
    recipe = read_run_recipe(Path(systems[0][0]))
    text = read_test_set(source, references, recipe)
    decoding = TranslationSettings(**{each.name: getattr(settings, each.name) for each in fields(DecodingSettings)})
    outputs = {}
    for names in systems:
        results = translate_lines(load_translator(names, settings.device), text.sources, decoding)
        outputs[" + ".join(names)] = [candidates[0]["translation_text"] for candidates in results]
    metric = settings.metric or recipe.get("metric", "translation")
    language = settings.target_lang or recipe.get("target_lang", "de")
    accepted = text.references or text.targets
    return score_translations(outputs, accepted, metric, language, settings.num_bootstrap_samples)


def read_test_set(source: str | Path, references: Paths, recipe: Mapping[str, Any]) -> ParallelText:
    """Read sources and references. The header of a table can name the languages of the recipe."""
    source, paths = Path(source), [Path(each) for each in as_names(references)] if references else []
    if (source.suffix in TABLE_SUFFIXES) == bool(paths):
        raise ValueError("Set --reference and a text file as --source, or use a table with references as --source.")
    languages = recipe.get("source_lang", SIDES[0]), recipe.get("target_lang", SIDES[1])
    if paths:
        text = collect_valid_pairs(read_rows(source, *paths), ", ".join(map(str, (source, *paths))), None)
    else:
        text = read_table_pairs(source, languages, None)
    if not len(text):
        raise ValueError(f"{source} contains no sentences.")
    logger.info(f"{len(text)} sentences")
    return text


def score_translations(
    outputs: dict[str, list[str]], references: list[Any], metric: str, target_lang: str, num_samples: int
) -> dict[str, Any]:
    """Compute metrics of the translations of one system, or of two with the p-value of their difference."""
    columns = transpose_references(references)
    results = bootstrap_scores(outputs, make_corpus_metrics(metric), columns, num_samples)
    if metric == "sequence":
        return results
    tokenize = TranslationMetric(target_lang).tokenize_with_moses
    tokenized = {name: tokenize(texts) for name, texts in outputs.items()}
    tokenized_bleu = {"bleu_tokenized_lc": BLEU(tokenize="none", force=True)}
    return results | bootstrap_scores(tokenized, tokenized_bleu, [tokenize(each) for each in columns], num_samples)


def bootstrap_scores(
    systems: dict[str, list[str]], metrics: dict[str, Any], columns: list, samples: int
) -> dict[str, Any]:
    """Compute score, half-width of the 95 % interval and signature per metric, and p-values compared with the first."""
    signatures, table = PairedTest([*systems.items()], metrics, columns, test_type="bs", n_samples=samples)()
    results: dict[str, Any] = {}
    for name, (key, signature) in zip(metrics, signatures.items(), strict=True):
        rows = [{"score": float(row.score), "interval_95": float(row.ci)} for row in table[key]]
        for row, compared in zip(rows[1:], table[key][1:], strict=True):
            is_equal = row["score"] == rows[0]["score"]  # sacreBLEU returns 0 instead of 1
            row["p_value"] = 1.0 if is_equal else float(compared.p_value)
        results[name] = dict(zip(systems, rows, strict=True)) if len(rows) > 1 else rows[0]
        results[f"{name}_signature"] = str(signature)
    return results


@accept_settings(LikelihoodSettings)
def compute_likelihood(
    checkpoints: Paths, source: str | Path, references: Paths = (), **options: Any
) -> dict[str, Any]:
    """Compute the negative log-likelihood of the first reference of each pair in nats, including EOS.

    Args:
        checkpoints, source, references: As in `score`.
        options: Fields of `LikelihoodSettings`.

    Returns:
        `nll_per_token`, `perplexity`, `target_tokens` and `pairs`.

    Raises:
        ValueError: As in `score`, if a sentence is too long for the model, or if `per_pair_output` exists.
    """
    settings = LikelihoodSettings(**options)
    output = settings.per_pair_output
    if output and Path(output).exists():
        raise ValueError(f"{output} already exists. Choose another path.")
    text = read_test_set(source, references, read_run_recipe(Path(as_names(checkpoints)[0])))
    translator = load_translator(checkpoints, settings.device)
    for number, sentence, target in zip(text.line_numbers, text.sources, text.targets, strict=True):
        if reason := scoring_error(translator, [sentence], [target]):
            raise ValueError(f"{source}, line {number}: {reason}")
    size = settings.batch_size or DEFAULT_BATCH_SIZE
    models = translator.model, translator.tokenizer, text, size, translator.ensemble
    scored = compute_pair_nll(*models, show=shows_progress())
    if output:
        rows = (f"{nats:.4f}\t{tokens}\t{nats / tokens:.4f}\n" for nats, tokens in scored)
        with atomic_write(Path(output)) as path:
            path.write_text("nats\ttokens\tnats_per_token\n" + "".join(rows), encoding="utf-8")
    total, tokens = (sum(column) for column in zip(*scored, strict=True))
    mean = total / tokens
    return {"nll_per_token": mean, "perplexity": math.exp(mean), "target_tokens": tokens, "pairs": len(scored)}
