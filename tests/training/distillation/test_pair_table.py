"""Contents of translation tables, and their reproducibility after interruptions and with multiple processes."""

import json
import os
from pathlib import Path

import pytest
from sacrebleu.metrics import BLEU

from training import STARTED
from training.data import files
from training.distillation import candidate_selection, pair_table
from training.distillation.candidate_selection import (
    TableSection,
    closest_to_reference,
    validate_not_copied,
    word_overlap,
)
from training.distillation.pair_table import PairTable, PairTableBuilder, checkpoint_hash
from training.inference.translators import load_translator
from vanilla_transformer.shared.atomic_io import LOCK

LINES = 40


@pytest.fixture
def teacher(make_model, make_tokenizer, tmp_path):
    """Factory of checkpoints whose translations depend on the line: (seed) -> directory."""
    tokenizer, sizes = make_tokenizer(True)

    def make(seed: int = 0) -> str:
        folder = tmp_path / f"teacher{seed}"
        model = make_model(seed=seed, **sizes)
        model.generation_config.update(max_new_tokens=6, num_beams=3)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return str(folder)

    return make


@pytest.fixture
def texts(sentences, tmp_path) -> tuple[Path, Path]:
    paths = tmp_path / "text.en", tmp_path / "text.de"
    for path, language in zip(paths, ("en", "de"), strict=True):
        lines = [" ".join(sentences[language][(i + j * (i // 4)) % 4] for j in range(2)) for i in range(LINES)]
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return paths


@pytest.fixture
def make_table(teacher, texts, tmp_path):
    """Factory of table builders: (file name, settings of the section) -> builder."""

    def make(name: str = "out.tsv", teachers=None, source=None, copies=0, **settings) -> PairTableBuilder:
        options = {"batch_size": 1, "keep_copies": True, "nbest": 1} | settings  # blocks of 16 lines: three
        section = TableSection(teachers or (teacher(),), source or texts[0], **options)
        return PairTableBuilder(tmp_path / name, [section], copies, device="cpu")

    return make


def rows(path: Path) -> list[tuple[str, ...]]:
    return [tuple(line.split("\t")) for line in path.read_text(encoding="utf-8").splitlines()]


def test_table_contains_n_best(make_table, teacher, texts):
    """One teacher or an ensemble: the table equals translating line by line."""
    for teachers in ((teacher(1), teacher(2)), (teacher(1),)):
        builder = make_table(f"{len(teachers)}.tsv", teachers, nbest=2)
        builder.build()
        translator = load_translator(teachers, "cpu")
        expected = []
        for line in texts[0].read_text().splitlines()[: LINES // len(teachers)]:
            (best,) = translator([line], num_beams=3, num_return_sequences=2)
            expected += [(line, text) for each in best if (text := each["translation_text"].strip())]
        assert rows(builder.output)[: len(expected)] == expected
        assert not builder.parts.exists()


def test_resumed_table_is_identical(make_table, monkeypatch):
    complete = make_table("complete.tsv", nbest=2)
    complete.build()
    expected, write_part = complete.output.read_bytes(), PairTableBuilder.write_part
    for end in (0, 2, 4):  # written files before the interruption: job.json and three parts
        remaining = end

        def stop(self, path, content):
            nonlocal remaining
            if not remaining:
                raise KeyboardInterrupt
            remaining -= 1
            write_part(self, path, content)

        monkeypatch.setattr(PairTableBuilder, "write_part", stop)
        interrupted = make_table(f"{end}.tsv", nbest=2)
        if end < 4:
            with pytest.raises(KeyboardInterrupt):
                interrupted.build()
            assert not interrupted.output.exists()
            assert len(list(interrupted.parts.glob("0-*.json"))) == max(0, end - 1)
        monkeypatch.setattr(PairTableBuilder, "write_part", write_part)
        resumed = make_table(f"{end}.tsv", nbest=2)
        if end < 4:
            resumed.build()
        else:
            interrupted.build()
        assert interrupted.output.read_bytes() == expected
        assert not interrupted.parts.exists()


def test_resume_translates_only_missing_blocks(make_table, monkeypatch):
    builder, translated = make_table(), []
    make_pairs = pair_table.make_pairs

    def spy(section, translator, lines):
        lines = list(lines)
        translated.append(len(lines))
        if len(translated) == 2:
            raise OSError("disk is full")
        return make_pairs(section, translator, lines)

    monkeypatch.setattr(pair_table, "make_pairs", spy)
    with pytest.raises(OSError, match="disk is full"):
        builder.build()
    make_table().build()
    assert translated == [16, 16, 16, 8]


def test_cleans_up_after_kill(make_table, monkeypatch):
    builder = make_table()
    monkeypatch.setattr(PairTableBuilder, "remove_parts", lambda self: None)
    builder.build()
    expected = builder.output.read_bytes()
    monkeypatch.undo()
    assert builder.parts.exists()
    resumed = make_table()
    resumed.build()  # the same command only removes the parts
    assert not resumed.parts.exists()
    assert resumed.output.read_bytes() == expected
    with pytest.raises(ValueError, match="already exists"):
        make_table().build()


def test_resumes_after_kill_while_the_first_part_is_written(make_table):
    builder = make_table()
    builder.write_part(builder.parts / "job.json", builder.job)
    (builder.parts / "0-000000.json.unfinished-0").write_text("{")
    assert builder.build().lines == LINES
    assert not builder.parts.exists()
    builder.parts.mkdir()
    (builder.parts / "mine.json.unfinished-0").touch()
    with pytest.raises(ValueError, match=r"contains mine.json.unfinished-0. Move this file"):
        make_table().validate_parts()


def test_rejects_another_command_with_the_same_output(make_table):
    """Two commands would mix the blocks of their tables."""
    builder = make_table()
    with builder.lock_parts(), pytest.raises(ValueError, match=r"another command writes .*out.tsv. Wait until it ends"):
        make_table().build()
    assert not builder.parts.exists()
    builder.parts.mkdir()
    (builder.parts / LOCK).touch()  # of a killed command
    assert builder.build().lines == LINES
    assert not builder.parts.exists()


def test_blocks_are_distributed_over_processes(make_table, monkeypatch):
    """The last process merges the parts, and the table is identical."""
    single = make_table("single.tsv")
    single.build()
    monkeypatch.setenv("WORLD_SIZE", "2")
    for order in ((0, 1), (1, 0)):
        for i, rank in enumerate(order):
            monkeypatch.setenv("RANK", str(rank))
            builder = make_table(f"shared{order[0]}.tsv")
            builder.build()
            assert builder.output.exists() == bool(i)
        assert builder.output.read_bytes() == single.output.read_bytes()
        assert not builder.parts.exists()
    monkeypatch.setenv("RANK", "1")
    make_table("shared1.tsv").build()  # starts after all others have finished


def test_rejects_parts_of_another_table(make_table, teacher, texts, monkeypatch):
    monkeypatch.setattr(PairTableBuilder, "merge_parts", lambda self: None)
    make_table().build()
    monkeypatch.undo()
    with pytest.raises(ValueError, match="parts of another table: nbest was 1, now it is 2"):
        make_table(nbest=2).build()
    with pytest.raises(ValueError, match="parts of another table: the number of copies"):
        make_table(copies=1).build()
    with pytest.raises(ValueError, match="parts of another table: teachers was"):
        make_table(teachers=(teacher(3),)).build()
    texts[0].write_text(texts[0].read_text().replace("dog", "cat"))
    with pytest.raises(ValueError, match="parts of another table: the text differs"):
        make_table().build()


def test_parts_keep_their_keys(make_table, monkeypatch):
    """A command of this version resumes the parts of an earlier one."""
    monkeypatch.setattr(PairTableBuilder, "merge_parts", lambda self: None)
    builder = make_table()
    builder.build()
    (section,) = json.loads((builder.parts / "job.json").read_text())["pieces"]
    assert {"nearest", "weights", "lines", "sha256"} <= section.keys()
    assert json.loads(builder.section_parts(0)[0].read_text()).keys() == {"pairs", "left_out"}


def test_interpolation_takes_closest_to_reference(make_table, texts):
    """All beams are candidates, and each line has one pair."""
    make_table("all.tsv", nbest=None).build()
    builder = make_table("near.tsv", nbest=None, target=texts[1], closest_to_reference=True)
    builder.build()
    pairs = rows(builder.output)
    assert len(pairs) == LINES
    candidates = rows(builder.output.with_name("all.tsv"))
    bleu, references = BLEU(effective_order=True), texts[1].read_text().splitlines()
    for (line, text), reference in zip(pairs, references, strict=True):
        scores = {
            other: bleu.sentence_score(other, [reference]).score for source, other in candidates if source == line
        }
        assert scores[text] == max(scores.values())
    assert closest_to_reference([("der Hund", 0.0), ("die Katze schläft", 0.0)], "eine Katze schläft") == [
        ("die Katze schläft", 0.0)
    ]


def test_references_precede_translations(make_table, texts):
    settings = {"nbest": None, "target": texts[1], "closest_to_reference": True}
    for copies in (0, 1):
        make_table(f"{copies}.tsv", copies=copies, **settings).build()
    translations, both = (rows(texts[0].with_name(f"{copies}.tsv")) for copies in (0, 1))
    references = list(zip(*(path.read_text(encoding="utf-8").splitlines() for path in texts), strict=True))
    assert both == references + translations


def test_reports_dropped_lines(make_table, texts, tmp_path):
    (tmp_path / "odd").write_bytes(texts[0].read_bytes() + b"\n\xff\n")
    builder = make_table("best.tsv", source=tmp_path / "odd", min_score=-100.0)
    table = builder.build()
    assert table == PairTable(builder.output, LINES, LINES + 2, {"lines blank": 1, "lines not UTF-8": 1})
    assert "dropped: 1 lines blank, 1 lines not UTF-8" in table.describe()
    assert len(rows(builder.output)) == LINES
    with pytest.raises(ValueError, match=f"would be empty. Dropped: {LINES} with a score below 0.5"):
        make_table("none.tsv", min_score=0.5).build()
    assert not builder.output.with_name("none.tsv").exists()
    tokenizer = load_translator(builder.sections[0].teachers, "cpu").tokenizer
    lengths = [[len(tokenizer(cell)["input_ids"]) for cell in row] for row in rows(builder.output)]
    ratios = sorted(max(each) / min(each) for each in lengths)
    limit = max(1.0, (ratios[0] + ratios[-1]) / 2)
    kept = sum(ratio <= limit for ratio in ratios)
    table = make_table("ratio.tsv", max_length_ratio=limit).build()
    assert table.dropped == {f"with more than {limit:g} times the tokens on one side": LINES - kept}
    assert len(rows(builder.output.with_name("ratio.tsv"))) == kept


def test_drops_translations_equal_to_source(make_table, monkeypatch):
    monkeypatch.setattr(
        candidate_selection, "translate", lambda section, translator, lines: [[(line, 0.0)] for line in lines]
    )
    monkeypatch.setattr(candidate_selection, "MIN_WORDS_FOR_CHECK", 100)
    with pytest.raises(ValueError, match="of their words in common"):
        make_table(keep_copies=False, batch_size=16).build()
    monkeypatch.setattr(candidate_selection, "MAX_COPY_OVERLAP", 2.0)
    with pytest.raises(ValueError, match=f"would be empty. Dropped: {LINES} equal to their source"):
        make_table(keep_copies=False, batch_size=16).build()
    assert f"{LINES} pairs from {LINES} lines" in make_table(batch_size=16).build().describe()


def test_rejects_reverse_direction_teacher(sentences):
    """The check compares words, so it also works without exact copies. References show the usual overlap."""
    section = TableSection(("t",), Path("text"))
    english, german = sentences["en"] * 60, sentences["de"] * 60
    validate_not_copied(section, [(line,) for line in english], german)
    with pytest.raises(ValueError, match="t: the translations and their sources have"):
        validate_not_copied(
            section, [(line,) for line in english], [" ".join(reversed(line.split())) for line in english]
        )
    validate_not_copied(section, [(line, line) for line in english], english)
    assert word_overlap(*(candidate_selection.Counter(text.split()) for text in ("a a b", "a c"))) == pytest.approx(
        1 / 2
    )


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_rejects_empty_text(make_table, tmp_path, content):
    (tmp_path / "empty").write_text(content)
    with pytest.raises(ValueError, match="has no lines|would be empty. Dropped: 2 lines blank"):
        make_table(source=tmp_path / "empty").build()
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "teacher0", "text.de", "text.en"}


def test_text_is_read_block_by_block(make_table, texts, monkeypatch):
    """At most one block of lines is in memory."""
    builder, limit, seen = make_table(), 0, 0
    _ = builder.texts
    read, make_pairs = files.iter_stripped_lines, pair_table.make_pairs

    def count_lines(path):
        nonlocal seen
        for line in read(path):
            seen += 1
            yield line

    def spy(section, translator, lines):
        nonlocal limit
        limit += 16
        assert seen <= limit
        return make_pairs(section, translator, lines)

    monkeypatch.setattr(files, "iter_stripped_lines", count_lines)
    monkeypatch.setattr(pair_table, "make_pairs", spy)
    builder.build()
    assert seen == LINES


def test_main_process_accepts_table_of_other_ranks(make_table, monkeypatch):
    """A table that existed before the processes started is rejected."""
    make_table().build()
    output = make_table().output
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    os.utime(output, (STARTED + 60, STARTED + 60))
    make_table().build()
    os.utime(output, (STARTED - 60, STARTED - 60))
    with pytest.raises(ValueError, match="already exists"):
        make_table().build()
    monkeypatch.setenv("WORLD_SIZE", "1")
    os.utime(output, (STARTED + 60, STARTED + 60))
    with pytest.raises(ValueError, match="already exists"):
        make_table().build()


def test_hash_of_checkpoint_of_a_run(teacher):
    """It includes the moving average, but not the state of the training."""
    folder = Path(teacher())
    expected = checkpoint_hash(str(folder))
    for name in ("all_results.json", "trainer_state.json", "progress.json", "files.json"):
        (folder / name).write_text("{}")
    assert checkpoint_hash(str(folder)) == expected
    (folder / "ema").mkdir()
    hashes = set()
    for content in (b"1", b"2"):
        (folder / "ema" / "model.safetensors").write_bytes(content)
        hashes.add(checkpoint_hash(str(folder)))
    assert len(hashes | {expected}) == 3
