"""A table of translations that is made block by block: by several processes, and resumed after any end.

Each block of lines becomes one file of the folder `<table>.parts` beside the table, whole or not there; when all are
there, whoever finished last puts them together. What stands in a block depends on its lines alone, so that the table is
the same, byte for byte, however often it was interrupted and whoever did what.
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from training import STARTED
from training.data.files import iter_stripped_lines, read_rows
from training.data.parallel_text import invalid_pair_reason
from training.distillation.candidate_selection import TableSection, make_pairs
from training.translators import load_translator
from vanilla_transformer import TranslationPipeline
from vanilla_transformer.shared.atomic_io import atomic_write, lock, remove, wrap_write_errors
from vanilla_transformer.shared.text_lines import sanitize_tsv_cell

PART = re.compile(r"[0-9]+-[0-9]+\.json")  # of the pieces' numbers and those of their blocks
BATCHES = 16  # of a block: what a kill loses at most


class PairTableBuilder:
    """A table (.tsv) of two columns, source and target, out of pieces.

    Args:
        output: the file to be made.
        pieces: what it is made of, one after the other.
        copies: how often each pair of the first piece's text stands before them.
        device: "cpu", "cuda:1", ...; None: a GPU for each process of this machine where there are such.
    """

    def __init__(self, output: Path, pieces: list[TableSection], copies: int = 0, device: str | None = None):
        self.output, self.pieces, self.copies = output, pieces, copies
        self.parts = output.with_name(f"{output.name}.parts")
        self.process_index, self.world_size, local = (
            int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
        )  # as torchrun and accelerate tell each process
        self.device = device or (f"cuda:{local % torch.cuda.device_count()}" if torch.cuda.is_available() else None)

    def make(self) -> None:
        """This process's share of the blocks, and the whole table where nothing else is missing.

        Raises:
            ValueError: there is such a file, or the folder holds parts of another table; a text holds no line; or a
                teacher cannot be used (see `training.translators` and `make_pairs`).
            OSError: a part or the table cannot be written.
        """
        if self.output.exists():
            others_were_faster = self.world_size > 1 and self.output.stat().st_mtime > STARTED
            if self.clean_up_if_done() or self.process_index > 0 or others_were_faster:
                return
            raise ValueError(f"{self.output} exists already: give the name of a .tsv file that does not.")
        if self.output.suffix != ".tsv":
            raise ValueError(f"--output {self.output}: give the name of a .tsv file.")
        self.refuse_other_parts()
        missing = [self.missing(number) for number in range(len(self.pieces))]
        if self.output.exists():  # another process has just put it together, and cleared up
            return
        chosen = zip(self.pieces, missing, strict=True)
        teachers = [load_translator(piece.teachers, self.device) if blocks else None for piece, blocks in chosen]
        try:
            if any(missing):
                self.write_part(self.parts / "job.json", self.job)
            for number, translator in enumerate(teachers):
                if translator is not None:
                    self.translate_blocks(number, translator, missing[number])
            self.merge_parts()
        finally:
            if self.world_size == 1 and not any(path.exists() for path in self.all_parts()):
                self.remove_parts()

    @cached_property
    def job(self) -> dict[str, Any]:
        """All that the table depends on."""
        pieces = [json.loads(json.dumps(asdict(piece), default=str)) for piece in self.pieces]
        for described, piece, text in zip(pieces, self.pieces, self.texts, strict=True):
            weights = [fingerprint(each) for each in piece.teachers]
            described |= {"weights": weights, "lines": text[0], "sha256": text[1]}
        return {"copies": self.copies, "pieces": pieces}

    @cached_property
    def texts(self) -> list[tuple[int, str]]:
        """Of each piece its number of lines, and their SHA-256."""
        found = []
        for piece in self.pieces:
            digest, lines = hashlib.sha256(), 0
            for row in rows_of(piece):
                digest.update("\t".join("\0" if cell is None else cell for cell in row).encode() + b"\n")
                lines += 1
            if not lines:
                raise ValueError(f"{piece.source} holds no line: give a text to translate.")
            found.append((lines, digest.hexdigest()))
        return found

    def blocks(self, number: int) -> int:
        return -(-self.texts[number][0] // (BATCHES * self.pieces[number].batch_size))

    def part(self, piece: int, block: int) -> Path:
        return self.parts / f"{piece}-{block:06d}.json"

    def all_parts(self) -> list[Path]:
        return [self.part(i, block) for i in range(len(self.pieces)) for block in range(self.blocks(i))]

    def refuse_other_parts(self) -> None:
        """Raises ValueError where the folder holds parts of another table, or something else."""
        path = self.parts / "job.json"
        names = [each.name for each in self.parts.iterdir()] if self.parts.exists() else []
        if not any(PART.fullmatch(name) for name in names):
            if others := [name for name in names if not name.startswith("job.json")]:
                raise ValueError(f"{self.parts} holds {others[0]}: move it, or give another --output.")
        elif not path.exists() or (before := read_json(path)) != self.job:
            told = f"its {difference(before, self.job)}" if path.exists() else "job.json is missing"
            raise ValueError(
                f"{self.parts} holds parts of another table: {told}. Give the same command to go on, or remove the "
                f"folder to begin anew."
            )

    def missing(self, number: int) -> set[int]:
        """The blocks of a piece that are this process's, and are not there."""
        own = range(self.process_index, self.blocks(number), self.world_size)
        return {block for block in own if not self.part(number, block).exists()}

    def translate_blocks(self, number: int, translator: TranslationPipeline, missing: set[int]) -> None:
        """Makes the missing parts of one piece."""
        piece = self.pieces[number]
        size, rows = BATCHES * piece.batch_size, iter(rows_of(piece))
        with tqdm(total=len(missing), unit=" blocks", disable=self.process_index > 0 or None) as bar:
            for block in range(max(missing) + 1):
                lines = list(islice(rows, size))
                if block in missing:
                    pairs, left_out = make_pairs(piece, translator, lines)
                    self.write_part(self.part(number, block), {"pairs": pairs, "left_out": left_out})
                    bar.update()

    def write_part(self, path: Path, content: Any) -> None:
        """A part of the folder, whole or not there, however many processes write it."""
        unfinished = path.with_name(f"{path.name}.unfinished-{self.process_index}")
        with wrap_write_errors(self.output):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                unfinished.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
                unfinished.replace(path)
            finally:
                remove(unfinished)

    def merge_parts(self) -> None:
        """The table, where all parts are there and no other process does it."""
        if not all(path.exists() for path in self.all_parts()):
            return
        try:
            job = (self.parts / "job.json").open("rb")
        except FileNotFoundError:  # another process has just removed it with the parts
            return
        with job:
            lock(job)
            if self.output.exists():
                return
            pairs, left_out = 0, Counter[str]()
            with atomic_write(self.output) as path, path.open("w", encoding="utf-8") as file:
                for part in self.all_rows(left_out):
                    file.write("\t".join(map(sanitize_tsv_cell, part)) + "\n")
                    pairs += 1
                if not pairs:
                    self.remove_parts()
                    raise ValueError(f"{self.output} would be empty: left out are {format_counts(left_out)}.")
            self.remove_parts()
        print(f"{self.output}: {pairs:,} pairs out of {sum(lines for lines, _ in self.texts):,} lines")
        if left_out:
            print(f"left out: {format_counts(left_out)}")

    def all_rows(self, left_out: Counter) -> Iterator[tuple[str, str]]:
        """Every pair of the table; counts what is not in it."""
        if self.copies:
            for row in filter(lambda row: invalid_pair_reason(row) is None, rows_of(self.pieces[0])):
                yield from [row] * self.copies
        for path in self.all_parts():
            part = read_json(path)
            left_out.update(part["left_out"])
            yield from part["pairs"]

    def clean_up_if_done(self) -> bool:
        """Whether the table was made by this very command, which was killed before it had cleared up."""
        job = self.parts / "job.json"
        if not job.exists() or read_json(job) != self.job:
            return False
        self.remove_parts()
        return True

    def remove_parts(self) -> None:
        """Removes the folder of parts; what says whose they are goes last, since a kill may come before."""
        for path in sorted(self.parts.glob("*"), key=lambda path: path.name == "job.json"):
            path.unlink(missing_ok=True)
        if self.parts.exists():
            self.parts.rmdir()


def rows_of(piece: TableSection) -> Iterator[tuple]:
    """Of each line of a piece's text the line, and the one of its target; None for what is not UTF-8.

    Raises:
        ValueError: one of two files has more lines, or a file cannot be read.
    """
    if piece.target is None:
        return ((line,) for line in iter_stripped_lines(piece.source))
    return read_rows(piece.source, piece.target)


def fingerprint(checkpoint: str) -> str:
    """SHA-256 of a checkpoint's files that say what it translates to what; of one on the Hub its name."""
    files = sorted(
        path for path in Path(checkpoint).glob("*") if path.suffix in (".safetensors", ".json", ".bin", ".spm")
    )
    files = [path for path in files if path.name != "all_results.json"]
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).hexdigest()


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: remove it, and its part is made anew.") from error


def difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    """The first setting that differs, in words."""
    if one["copies"] != other["copies"]:
        return "references are written otherwise"
    pairs = zip(one["pieces"], other["pieces"], strict=False)
    found = [key for before, now in pairs for key in now if before.get(key) != now[key]]
    if not found or found[0] in ("sha256", "lines", "weights"):
        return {"weights": "teachers' weights are others"}.get(found[0] if found else "", "text is another")
    before, now = next(
        (b[found[0]], n[found[0]]) for b, n in zip(one["pieces"], other["pieces"], strict=False) if b != n
    )
    return f"{found[0]} is {before}, here it is {now}"


def format_counts(left_out: Counter) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(left_out.items()))
