"""Resumable and distributed building of a table of translations.

Each block of lines becomes one file in the directory `<table>.parts` next to the table, written atomically. The process
that finishes last merges them. A block depends only on its lines. The table is therefore the same, byte for byte,
regardless of interruptions and of the number of processes.
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from vanilla_transformer import TranslationPipeline
from vanilla_transformer.pipeline_vanilla_transformer import DEFAULT_BATCH_SIZE
from vanilla_transformer.shared.atomic_io import LOCK, atomic_write, lock, lock_exclusively, remove, wrap_write_errors
from vanilla_transformer.shared.command_line import shows_progress
from vanilla_transformer.shared.text_lines import sanitize_tsv_cell

from .. import STARTED
from ..data.files import read_rows
from ..data.parallel_text import invalid_pair_reason
from ..inference.translators import load_translator, select_engine
from .candidate_selection import TableSection, decoding_options, make_pairs

STATE_FILES = {"all_results.json", "trainer_state.json", "progress.json", "files.json"}  # no effect on translations
PART = re.compile(r"[0-9]+-[0-9]+\.json(\.unfinished-[0-9]+)?")  # section-block, complete or left by a killed process
BATCHES_PER_BLOCK = 16  # maximum work that is lost if the process is killed
DROPPED_KEY = "left_out"  # in the files of parts


@dataclass(frozen=True)
class PairTable:
    """A complete table, the numbers of its pairs and of the lines of its texts, and of dropped lines per reason."""

    output: Path
    pairs: int
    lines: int
    dropped: dict[str, int] | None  # None if an earlier process completed the table

    def describe(self) -> str:
        text = f"{self.output}: {self.pairs:,} pairs from {self.lines:,} lines"
        return f"{text}\ndropped: {format_counts(self.dropped)}" if self.dropped else text


class PairTableBuilder:
    """Builder of a table (.tsv) with the columns source and target.

    Args:
        copies: number of times that each pair of the first section's text is written before the sections.
        device: defaults to one GPU per process of this machine, if available.
    """

    def __init__(self, output: Path, sections: list[TableSection], copies: int, device: str | None):
        self.output, self.sections, self.copies = output, sections, copies
        self.block_size = BATCHES_PER_BLOCK * (sections[0].batch_size or DEFAULT_BATCH_SIZE)  # of all sections
        self.parts = output.with_name(f"{output.name}.parts")
        self.process_index, self.world_size, local = (
            int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
        )  # set by torchrun and accelerate
        self.device = device or (f"cuda:{local % torch.cuda.device_count()}" if torch.cuda.is_available() else None)

    def build(self) -> PairTable | None:
        """Translate the blocks of this process, and merge the parts if all are complete.

        Returns None if another process completes the table. Raises ValueError if the table exists, the directory
        contains parts of another table, or a text has no lines.
        """
        if self.output.exists():
            is_merged_by_other_rank = self.world_size > 1 and self.output.stat().st_mtime > STARTED
            job = self.parts / "job.json"
            if job.exists() and read_json(job) == self.job:  # killed before the parts were removed
                (self.parts / LOCK).unlink(missing_ok=True)
                self.remove_parts()
                with self.output.open("rb") as file:
                    return PairTable(self.output, sum(1 for _ in file), sum(lines for lines, _ in self.texts), None)
            if self.process_index > 0 or is_merged_by_other_rank:
                return None
            raise ValueError(f"--output {self.output} already exists. Choose another name.")
        if self.output.suffix != ".tsv":
            raise ValueError(f"--output {self.output} must end with .tsv.")
        with self.lock_parts():
            self.validate_parts()
            missing = [self.missing_blocks(number) for number in range(len(self.sections))]
            if self.output.exists():  # another process has merged and removed the parts in the meantime
                return None
            teachers = {number: self.load_teachers(number) for number, blocks in enumerate(missing) if blocks}
            try:
                if teachers:
                    self.write_part(self.parts / "job.json", self.job)
                for number, translator in teachers.items():
                    self.translate_blocks(number, translator, missing[number])
                return self.merge_parts()
            finally:
                if self.world_size == 1 and not any(path.exists() for path in self.all_parts()):
                    self.remove_parts()

    @contextmanager
    def lock_parts(self) -> Iterator[None]:
        """Lock the directory of parts against other commands. The processes of one command share it."""
        if self.world_size > 1:
            yield
            return
        path, is_locked = self.parts / LOCK, False
        message = f"another command writes {self.output}. Wait until it ends, or choose another --output."
        created = [each for each in (self.parts, *self.parts.parents) if not each.exists()]
        with wrap_write_errors(self.output):
            self.parts.mkdir(parents=True, exist_ok=True)
            path.touch()
        try:
            with lock_exclusively(path, message):
                is_locked = True
                yield
        finally:
            if is_locked:
                path.unlink(missing_ok=True)
                for folder in dict.fromkeys((self.parts, *created)):
                    if folder.exists() and not any(folder.iterdir()):
                        folder.rmdir()

    def load_teachers(self, number: int) -> TranslationPipeline:
        """Load the translator of a section, with the engine for the length of its text."""
        section = self.sections[number]
        translator = load_translator(section.teachers, self.device)
        options = decoding_options(section, translator)
        return select_engine(translator, section.engine, self.texts[number][0], options, section.quantization)

    @cached_property
    def job(self) -> dict[str, Any]:
        """Everything that determines the table. The keys are those of job.json."""
        sections = [json.loads(json.dumps(asdict(section), default=str)) for section in self.sections]
        for described, section, text in zip(sections, self.sections, self.texts, strict=True):
            described["nearest"] = described.pop("closest_to_reference")
            weights = [checkpoint_hash(each) for each in section.teachers]
            described |= {"weights": weights, "lines": text[0], "sha256": text[1]}
            described["batch_size"] = section.batch_size or DEFAULT_BATCH_SIZE
            described["nbest"] = section.nbest or 0
            unused = ["with_references", "device", "engine"]  # without effect on the translations
            for name in [*unused, "quantization"] if section.quantization is None else unused:
                del described[name]
        return {"copies": self.copies, "pieces": sections}

    @cached_property
    def texts(self) -> list[tuple[int, str]]:
        """Number of lines and SHA-256 of the text of each section."""
        texts = []
        for section in self.sections:
            digest, lines = hashlib.sha256(), 0
            for row in read_section(section):
                digest.update("\t".join("\0" if cell is None else cell for cell in row).encode() + b"\n")
                lines += 1
            if not lines:
                raise ValueError(f"{section.source} has no lines. Use a text file with at least one line.")
            texts.append((lines, digest.hexdigest()))
        return texts

    def section_parts(self, number: int) -> list[Path]:
        """Return the paths of the parts of a section, one per block."""
        num_blocks = -(-self.texts[number][0] // self.block_size)
        return [self.parts / f"{number}-{block:06d}.json" for block in range(num_blocks)]

    def all_parts(self) -> list[Path]:
        return [path for number in range(len(self.sections)) for path in self.section_parts(number)]

    def validate_parts(self) -> None:
        """Raise ValueError if the directory of parts contains parts of another table or other files."""
        path = self.parts / "job.json"
        names = [each.name for each in self.parts.iterdir()] if self.parts.exists() else []
        if not any(PART.fullmatch(name) for name in names):
            if others := [name for name in names if not name.startswith(("job.json", LOCK))]:
                raise ValueError(f"{self.parts} contains {others[0]}. Move this file, or choose another --output.")
        elif not path.exists() or (earlier := read_json(path)) != self.job:
            reason = difference(earlier, self.job) if path.exists() else "job.json is missing"
            raise ValueError(
                f"{self.parts} contains parts of another table: {reason}. Run the original command to resume, or "
                f"remove the directory to start again."
            )

    def missing_blocks(self, number: int) -> set[int]:
        parts = self.section_parts(number)
        own = range(self.process_index, len(parts), self.world_size)
        return {block for block in own if not parts[block].exists()}

    def translate_blocks(self, number: int, translator: TranslationPipeline, missing: set[int]) -> None:
        section, parts = self.sections[number], self.section_parts(number)
        rows = iter(read_section(section))
        with tqdm(total=len(missing), unit=" blocks", disable=self.process_index > 0 or not shows_progress()) as bar:
            for block in range(max(missing) + 1):
                lines = list(islice(rows, self.block_size))
                if block in missing:
                    pairs, dropped = make_pairs(section, translator, lines)
                    self.write_part(parts[block], {"pairs": pairs, DROPPED_KEY: dropped})
                    bar.update()

    def write_part(self, path: Path, content: Any) -> None:
        """Write a part atomically, also if multiple processes write it."""
        unfinished = path.with_name(f"{path.name}.unfinished-{self.process_index}")
        with wrap_write_errors(self.output):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                unfinished.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
                unfinished.replace(path)
            finally:
                remove(unfinished)

    def merge_parts(self) -> PairTable | None:
        """Write and return the table, if all parts exist and no other process is merging them."""
        if not all(path.exists() for path in self.all_parts()):
            return None
        try:
            job = (self.parts / "job.json").open("rb")
        except FileNotFoundError:  # another process has removed it with the parts
            return None
        with job:
            lock(job)
            if self.output.exists():
                return None
            pairs, dropped = 0, Counter[str]()
            with atomic_write(self.output) as path, path.open("w", encoding="utf-8") as file:
                for pair in self.all_pairs(dropped):
                    file.write("\t".join(map(sanitize_tsv_cell, pair)) + "\n")
                    pairs += 1
                if not pairs:
                    self.remove_parts()
                    raise ValueError(f"{self.output} would be empty. Dropped: {format_counts(dropped)}.")
            self.remove_parts()
        return PairTable(self.output, pairs, sum(lines for lines, _ in self.texts), dict(dropped))

    def all_pairs(self, dropped: Counter) -> Iterator[tuple[str, str]]:
        """Yield the pairs of the table, and add the number of dropped lines to `dropped`."""
        if self.copies:
            for row in filter(lambda row: invalid_pair_reason(row) is None, read_section(self.sections[0])):
                yield from [row] * self.copies
        for path in self.all_parts():
            part = read_json(path)
            dropped.update(part[DROPPED_KEY])
            yield from part["pairs"]

    def remove_parts(self) -> None:
        """Remove the directory of parts, job.json last: after a kill, it identifies the remaining parts."""
        for path in sorted(self.parts.glob("*"), key=lambda path: path.name == "job.json"):
            if path.name != LOCK or self.world_size > 1:  # one process removes its lock at the end
                path.unlink(missing_ok=True)
        if self.parts.exists() and not any(self.parts.iterdir()):
            self.parts.rmdir()


def read_section(section: TableSection) -> Iterator[tuple]:
    """Yield (line,) or (line, reference) for each line of a section's text. Cells that are not UTF-8 are None."""
    return read_rows(section.source, *([] if section.target is None else [Path(section.target)]))


def checkpoint_hash(checkpoint: str) -> str:
    """Return the SHA-256 of the files of a local checkpoint that affect its translations."""
    files = sorted(
        path
        for pattern in ("*", "ema/*")  # a checkpoint of a run with `ema_decay` contains the average in ema/
        for path in Path(checkpoint).glob(pattern)
        if path.suffix in (".safetensors", ".json", ".bin", ".spm") and path.name not in STATE_FILES
    )
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).hexdigest()


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged. Remove it, and the block is translated again.") from error


def difference(earlier: dict[str, Any], current: dict[str, Any]) -> str:
    if earlier["copies"] != current["copies"]:
        return "the number of copies of the references differs"
    sections = list(zip(earlier["pieces"], current["pieces"], strict=False))
    keys = [key for before, now in sections for key in now if before.get(key) != now[key]]
    if not keys or keys[0] in ("sha256", "lines", "weights"):
        return "the teachers' weights differ" if keys[:1] == ["weights"] else "the text differs"
    before, now = next((before, now) for before, now in sections if before != now)
    return f"{keys[0]} was {before.get(keys[0])}, now it is {now[keys[0]]}"


def format_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items()))
