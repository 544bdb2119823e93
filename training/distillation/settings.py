"""Options of the command `distill`, which are also the keyword arguments of its Python function."""

from dataclasses import dataclass
from pathlib import Path

from vanilla_transformer.shared.command_line import existing_path, option

from ..inference.settings import DecodingSettings


@dataclass(frozen=True, kw_only=True)
class DistillationSettings(DecodingSettings):
    """Options of `distill`."""

    target: str | Path | None = option(
        None, "Text file with reference translations. The most similar of the n best translations is used.",
        type=existing_path,
    )  # fmt: skip
    with_references: bool = option(False, "With --target: write the reference pairs first.")
    nbest: int | None = option(
        None, "Translations per line. Default: 1. With --target: candidates per line, by default one per beam."
    )
    min_score: float | None = option(
        None, "Drop translations with a lower score: log-probability / length ** length_penalty."
    )
    max_length_ratio: float | None = option(
        None, "Maximum ratio of the numbers of tokens of both sides. Other pairs are dropped."
    )
    keep_copies: bool = option(
        False, "Keep translations that are identical to their source. By default they are dropped."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.with_references and not self.target:
            raise ValueError("--with-references requires --target.")
        if self.max_length_ratio is not None and self.max_length_ratio < 1:
            raise ValueError(f"max_length_ratio={self.max_length_ratio} must be at least 1.")
        if self.nbest and self.num_beams and self.nbest > self.num_beams:
            raise ValueError(f"nbest={self.nbest} must be at most num_beams={self.num_beams}.")
