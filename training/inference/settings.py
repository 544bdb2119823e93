"""Options of the commands that translate, which are also the keyword arguments of their Python functions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from vanilla_transformer.shared import command_line
from vanilla_transformer.shared.command_line import MAX_EXPONENT, checkpoint_name, existing_path, exponent_type, option

CHECKPOINTS: dict[str, Any] = {  # positional argument
    "nargs": "+",
    "type": checkpoint_name,
    "metavar": "checkpoint",
    "help": "Directory with model and tokenizer, or repository on the Hub. Several checkpoints form an ensemble.",
}
NUM_BOOTSTRAP_SAMPLES = 1000


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Batch size and device of a model."""

    batch_size: int | None = option(None, "Sentences per batch. Default: 64; on a GPU, as many as fit into memory.")
    device: str | None = option(None, "Device such as cpu or cuda:1. Default: a GPU, if available.")

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that are infinite, nan, too small or too large, and for unknown choices."""
        for each in fields(self):
            value, options = getattr(self, each.name), command_line.argparse_options(each)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{each.name}={value} must be a finite number.")
            if options.get("type") is command_line.positive_int and value is not None and value < 1:
                raise ValueError(f"{each.name}={value} must be at least 1.")
            if options.get("type") is exponent_type and abs(value or 0) > MAX_EXPONENT:
                raise ValueError(f"{each.name}={value} must be from -{MAX_EXPONENT} to {MAX_EXPONENT}.")
            if "choices" in options and value not in (None, *options["choices"]):
                raise ValueError(f"{each.name}={value!r} must be one of {', '.join(options['choices'])}.")


@dataclass(frozen=True, kw_only=True)
class EngineSettings(ModelSettings):
    """Settings of the engine that decodes."""

    engine: Literal["auto", "transformers", "ctranslate2"] = option(
        "auto", "Engine that decodes. auto: ctranslate2 on a CPU for many sentences, if it supports the options."
    )
    quantization: Literal["int8", "int16", "float16", "bfloat16"] | None = option(
        None,
        "Data type of the weights with --engine ctranslate2. Default: float32. Other types change some translations.",
    )


@dataclass(frozen=True, kw_only=True)
class DecodingSettings(EngineSettings):
    """Generation parameters. The defaults are those of the generation config of the first checkpoint."""

    num_beams: int | None = option(None, "Beam size. Default: as in the generation config.")
    length_penalty: float | None = option(
        None, "Exponent p of the score, log-probability / length ** p. Default: as in the generation config.",
        type=exponent_type,
    )  # fmt: skip
    max_new_tokens: int | None = option(None, "Maximum number of new tokens. Default: as in the generation config.")


@dataclass(frozen=True, kw_only=True)
class TranslationSettings(DecodingSettings):
    """Options of `translate`."""

    nbest: int = option(1, "Translations per line, with scores if more than 1.")
    scores: bool = option(
        False, "Output scores, log-probability in nats / length ** length_penalty. The command prints columns."
    )
    details: bool = option(
        False, "Output scores, tokens, token_scores and alignments. The command prints JSON lines.", name="--json"
    )
    glossary: str | Path | Mapping[str, Any] | None = option(
        None, "Table with one term per line: source, a tab, and one or more tab-separated translations.",
        type=existing_path,
    )  # fmt: skip
    rerank: str | Path | None = option(
        None, "Target-to-source checkpoint that reranks the --num-beams best translations.", type=checkpoint_name
    )
    rerank_weight: float = option(0.5, "Weight of the --rerank checkpoint. Default: %(default)s.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.num_beams or self.nbest) < self.nbest:
            raise ValueError(f"nbest={self.nbest} must be at most num_beams={self.num_beams}.")
        if self.rerank is None and self.rerank_weight != type(self).rerank_weight:
            raise ValueError(f"rerank_weight={self.rerank_weight} requires rerank.")
        if self.rerank and self.num_beams == 1:
            raise ValueError("rerank requires num_beams of at least 2.")


@dataclass(frozen=True, kw_only=True)
class ScoreSettings(DecodingSettings):
    """Options of `score`."""

    compare: str | Path | Sequence[str | Path] | None = option(
        None, "Checkpoint or ensemble to compare with, by paired bootstrap resampling (Koehn 2004).", nargs="+",
        type=checkpoint_name,
    )  # fmt: skip
    metric: Literal["translation", "sequence"] | None = option(None, "Metric. Default: that of the recipe.")
    target_lang: str | None = option(None, "Target language such as de. Default: that of the recipe.")
    num_bootstrap_samples: int = option(NUM_BOOTSTRAP_SAMPLES, "Number of bootstrap resamples. Default: %(default)s.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_bootstrap_samples < 2:
            raise ValueError(f"num_bootstrap_samples={self.num_bootstrap_samples} must be at least 2.")


@dataclass(frozen=True, kw_only=True)
class LikelihoodSettings(ModelSettings):
    """Options of `compute_likelihood`."""

    per_pair_output: str | Path | None = option(
        None, "With --likelihood: file to write the nats and tokens of each pair to.", type=command_line.new_path
    )
