"""Tables of translations to train on: distillation and data diversification."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vanilla_transformer.shared.command_line import accept_settings

from ..inference.settings import EngineSettings
from ..inference.translators import Paths, as_names, read_run_recipe
from ..run.distributed import main_process_reports_first
from .candidate_selection import TableSection
from .pair_table import PairTable, PairTableBuilder
from .settings import DistillationSettings

COPIES_PER_PAIR, FORWARD_NBEST, BACKWARD_NBEST = 2, 2, 3  # of `diversify`


@accept_settings(DistillationSettings)
def distill(teachers: Paths, source: str | Path, output: str | Path, **options: Any) -> PairTable | None:
    """Create training pairs for a student: sequence-level knowledge distillation (Kim and Rush 2016).

    The text can be larger than the memory. After an interruption, the same call resumes and writes the same table.
    Example: `distill(["runs/one", "runs/two"], "train.en", "distilled.tsv", nbest=3).pairs`.

    Args:
        teachers: Checkpoint, or several that form an ensemble.
        source: Text file with one sentence per line.
        output: Table (.tsv) to write: source, translation.
        options: Fields of `DistillationSettings`.

    Returns:
        The numbers of pairs and dropped lines. With torchrun: None in all processes except the one that completes the
        table.

    Raises:
        ValueError: If the table exists, or a teacher, text or option cannot be used.
    """
    settings = DistillationSettings(**options)
    if settings.target:
        options["closest_to_reference"] = True
    elif settings.nbest is None:
        options["nbest"] = 1
    section = TableSection(as_names(teachers), Path(source), **options)
    return build_table(output, [section], int(settings.with_references))


@accept_settings(EngineSettings)
def diversify(
    forward: Paths,
    backward: Paths,
    source: str | Path,
    target: str | Path,
    output: str | Path,
    **options: Any,
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
        options: Fields of `EngineSettings`.

    Returns:
        As `distill`.

    Raises:
        ValueError: As `distill`.
    """
    options = vars(EngineSettings(**options)) | {"keep_copies": True}
    source, target = Path(source), Path(target)
    sections = [
        TableSection(as_names(forward), source, target=target, nbest=FORWARD_NBEST, **options),
        TableSection(as_names(backward), target, target=source, nbest=BACKWARD_NBEST, backward=True, **options),
    ]
    return build_table(output, sections, COPIES_PER_PAIR)


def build_table(output: str | Path, sections: list[TableSection], copies: int) -> PairTable | None:
    for section in sections:
        validate_languages(section.teachers, section.source)
    builder = PairTableBuilder(Path(output), sections, copies, sections[0].device)
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
