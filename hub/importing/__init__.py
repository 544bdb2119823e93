"""Import of checkpoints: reading, layout detection, conversion and comparison."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vanilla_transformer.shared.command_line import existing_path, option

TOKEN_ID_HELP = "Token id, if neither the layout nor the tokenizer defines it."


@dataclass(frozen=True, kw_only=True)
class ImportSettings:
    """Options of the command, and of `import_checkpoint`."""

    layout: str | None = option(None, "Layout of the file. Default: detected.")
    num_heads: int | None = option(None, "Number of attention heads, if the file does not specify it.")
    source_tokenizer: str | Path | None = option(
        None, "A tokenizer.json or a text file, one token per line.", type=existing_path
    )
    target_tokenizer: str | Path | None = option(
        None, "The same for the target. Default: the source tokenizer.", type=existing_path
    )
    fairseq_data: str | Path | None = option(None, "Directory with fairseq's dict.*.txt files.", type=existing_path)
    bpe_codes: Sequence[str | Path] = option(
        (), "With fairseq and OpenNMT-py: BPE codes or SentencePiece models, one file for both sides or one per side.",
        nargs="+", type=existing_path, metavar="FILE",
    )  # fmt: skip
    pad_token_id: int | None = option(None, TOKEN_ID_HELP, type=int)
    bos_token_id: int | None = option(None, TOKEN_ID_HELP, type=int)
    eos_token_id: int | None = option(None, TOKEN_ID_HELP, type=int)
    settings: Sequence[str] | None = option(
        None, "Layout settings.", name="--set", nargs="+", action="extend", metavar="KEY=VALUE"
    )
    compare_with: str | None = option(
        None, "Function that builds the original model, to compare its outputs.", metavar="MODULE:CALLABLE"
    )
