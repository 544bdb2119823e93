"""Tables of translations to train on: distillation and data diversification."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..inference.translators import as_names, read_run_recipe
from ..run.distributed import main_process_reports_first
from .candidate_selection import TableSection
from .pair_table import PairTable, PairTableBuilder

COPIES_PER_PAIR, FORWARD_NBEST, BACKWARD_NBEST = 2, 2, 3  # of `diversify`
Checkpoints = str | Path | Sequence[str | Path]


def distill(
    teachers: Checkpoints,
    source: str | Path,
    output: str | Path,
    *,
    target: str | Path | None = None,
    with_references: bool = False,
    nbest: int | None = None,
    num_beams: int | None = None,
    length_penalty: float | None = None,
    max_new_tokens: int | None = None,
    batch_size: int | None = None,
    min_score: float | None = None,
    max_length_ratio: float | None = None,
    keep_copies: bool = False,
    engine: str = "auto",
    quantization: str | None = None,
    device: str | None = None,
) -> PairTable | None:
    """Create training pairs for a student: sequence-level knowledge distillation (Kim and Rush 2016).

    The text can be larger than the memory. After an interruption, the same call resumes and writes the same table.
    Example: `distill(["runs/one", "runs/two"], "train.en", "distilled.tsv", nbest=3).pairs`.

    Args:
        teachers: Checkpoint, or several that form an ensemble.
        source: Text file with one sentence per line.
        output: Table (.tsv) to write: source, translation.
        target: Text file with references. The closest of the n best translations is used (interpolation).
        with_references: Whether to write the pairs of `source` and `target` first.
        nbest: Translations per line. Defaults to 1; with `target`, to one candidate per beam.
        num_beams, length_penalty, max_new_tokens, batch_size, engine, quantization, device: As in `translate`.
        min_score: Drop translations with a lower score: log-probability in nats / length ** length_penalty.
        max_length_ratio: Drop pairs in which one side has more than this many times the tokens of the other.
        keep_copies: Whether to keep translations that equal their source.

    Returns:
        The numbers of pairs and dropped lines. With torchrun: None in all processes except the one that completes the
        table.

    Raises:
        ValueError: If the table exists, or a teacher, text or option cannot be used.
    """
    if with_references and not target:
        raise ValueError("--with-references requires --target.")
    section = TableSection(
        as_names(teachers), Path(source), Path(target) if target else None, closest_to_reference=bool(target),
        nbest=(0 if target else 1) if nbest is None else nbest, num_beams=num_beams, length_penalty=length_penalty,
        max_new_tokens=max_new_tokens, batch_size=batch_size, min_score=min_score, max_length_ratio=max_length_ratio,
        keep_copies=keep_copies, engine=engine, quantization=quantization,
    )  # fmt: skip
    return build_table(output, [section], int(with_references), device)


def diversify(
    forward: Checkpoints,
    backward: Checkpoints,
    source: str | Path,
    target: str | Path,
    output: str | Path,
    *,
    batch_size: int | None = None,
    engine: str = "auto",
    quantization: str | None = None,
    device: str | None = None,
) -> PairTable | None:
    """Add translations of the training pairs in both directions: data diversification (Nguyen et al. 2020).

    Example: `diversify("runs/forward", "runs/backward", "train.en", "train.de", "diverse.tsv").pairs`.

    Args:
        forward: Source-to-target checkpoint, or several that form an ensemble.
        backward: Target-to-source checkpoint or ensemble.
        source: Text file with one source sentence per line.
        target: Text file with the translations of these lines.
        output: Table (.tsv) to write. It contains each pair twice, each source with its two best translations, and
            each target with its three best back-translations.
        batch_size, engine, quantization, device: As in `translate`.

    Returns:
        As `distill`.

    Raises:
        ValueError: As `distill`.
    """
    options: dict[str, Any] = {"keep_copies": True, "batch_size": batch_size}
    options |= {"engine": engine, "quantization": quantization}
    source, target = Path(source), Path(target)
    sections = [
        TableSection(as_names(forward), source, target, nbest=FORWARD_NBEST, **options),
        TableSection(as_names(backward), target, source, nbest=BACKWARD_NBEST, backward=True, **options),
    ]
    return build_table(output, sections, COPIES_PER_PAIR, device)


def build_table(output: str | Path, sections: list[TableSection], copies: int, device: str | None) -> PairTable | None:
    """Validate the languages, then build a table."""
    for section in sections:
        validate_languages(section.teachers, section.source)
    builder = PairTableBuilder(Path(output), sections, copies, device)
    with main_process_reports_first(builder):
        return builder.build()


def validate_languages(teachers: Sequence[str], source: Path) -> None:
    """Raise ValueError if the teachers differ in their languages, or if `source` has the suffix of their target."""
    first: dict[Any, Any] = {}
    for teacher in teachers:
        recipe = read_run_recipe(Path(teacher))
        languages = {key: recipe[key] for key in ("source_lang", "target_lang") if key in recipe}
        if not languages:
            continue
        message = f"{teacher} translates from {languages.get('source_lang')} to {languages.get('target_lang')}"
        if first and languages != first:
            raise ValueError(f"{message}, but {teachers[0]} does not. Use teachers of one language pair.")
        if source.suffix == f".{languages.get('target_lang')}" != f".{languages.get('source_lang')}":
            raise ValueError(f"{message}, but --source is {source}. Use a text in the source language.")
        first = first or languages
