"""Tables of translations: what stands in them, and that it is the same however they were made."""

import os
from pathlib import Path

import pytest
from sacrebleu.metrics import BLEU

from training import STARTED
from training.data import files
from training.distillation import candidate_selection, pair_table
from training.distillation.candidate_selection import TableSection, closest_to_reference, likeness, validate_not_copied
from training.distillation.pair_table import PairTableBuilder
from training.translators import load_translator

LINES = 40


@pytest.fixture
def teacher(make_model, make_tokenizer, tmp_path):
    """(seed) -> a checkpoint whose translations differ from line to line."""
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
    """(name of the file, settings of its piece) -> a table, not made yet."""

    def make(name: str = "out.tsv", teachers=None, source=None, copies=0, **settings) -> PairTableBuilder:
        options = {"batch_size": 1, "keep_copies": True} | settings  # blocks of 16 lines: three
        piece = TableSection(teachers or (teacher(),), source or texts[0], **options)
        return PairTableBuilder(tmp_path / name, [piece], copies, device="cpu")

    return make


def rows(path: Path) -> list[tuple[str, ...]]:
    return [tuple(line.split("\t")) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_line_comes_with_its_n_best(make_table, teacher, texts):
    """Of one teacher, and of two together; as the translator gives them one by one."""
    for teachers in ((teacher(1), teacher(2)), (teacher(1),)):
        made = make_table(f"{len(teachers)}.tsv", teachers, nbest=2)
        made.make()
        translator = load_translator(teachers, "cpu")
        expected = []
        for line in texts[0].read_text().splitlines()[: LINES // len(teachers)]:
            (best,) = translator([line], num_beams=3, num_return_sequences=2)
            expected += [(line, text) for each in best if (text := each["translation_text"].strip())]
        assert rows(made.output)[: len(expected)] == expected
        assert not made.parts.exists()


def test_interrupted_anywhere_and_resumed_it_is_the_same(make_table, monkeypatch):
    whole = make_table("whole.tsv", nbest=2)
    whole.make()
    expected, write_part = whole.output.read_bytes(), PairTableBuilder.write_part
    for end in (0, 2, 4):  # of job.json and three parts
        left = end

        def stop(self, path, content):
            nonlocal left
            if not left:
                raise KeyboardInterrupt
            left -= 1
            write_part(self, path, content)

        monkeypatch.setattr(PairTableBuilder, "write_part", stop)
        broken = make_table(f"{end}.tsv", nbest=2)
        if end < 4:
            with pytest.raises(KeyboardInterrupt):
                broken.make()
            assert not broken.output.exists()
            assert len(list(broken.parts.glob("0-*.json"))) == max(0, end - 1)
        monkeypatch.setattr(PairTableBuilder, "write_part", write_part)
        again = make_table(f"{end}.tsv", nbest=2)
        if end < 4:
            again.make()
        else:
            broken.make()
        assert broken.output.read_bytes() == expected
        assert not broken.parts.exists()


def test_resuming_translates_only_what_is_missing(make_table, monkeypatch):
    made, translated = make_table(), []
    make_pairs = pair_table.make_pairs

    def spy(piece, translator, lines):
        lines = list(lines)
        translated.append(len(lines))
        if len(translated) == 2:
            raise OSError("no room")
        return make_pairs(piece, translator, lines)

    monkeypatch.setattr(pair_table, "make_pairs", spy)
    with pytest.raises(OSError, match="no room"):
        made.make()
    make_table().make()
    assert translated == [16, 16, 16, 8]


def test_a_kill_between_the_table_and_its_clearing_up(make_table, monkeypatch):
    made = make_table()
    monkeypatch.setattr(PairTableBuilder, "remove_parts", lambda self: None)
    made.make()
    expected = made.output.read_bytes()
    monkeypatch.undo()
    assert made.parts.exists()
    again = make_table()
    again.make()  # the same command: nothing but clearing up is left
    assert not again.parts.exists()
    assert again.output.read_bytes() == expected
    with pytest.raises(ValueError, match="exists already"):
        make_table().make()


def test_processes_share_the_blocks(make_table, monkeypatch):
    """Whoever is last puts the table together, and it is the same."""
    alone = make_table("alone.tsv")
    alone.make()
    monkeypatch.setenv("WORLD_SIZE", "2")
    for order in ((0, 1), (1, 0)):
        for i, rank in enumerate(order):
            monkeypatch.setenv("RANK", str(rank))
            made = make_table(f"shared{order[0]}.tsv")
            made.make()
            assert made.output.exists() == bool(i)
        assert made.output.read_bytes() == alone.output.read_bytes()
        assert not made.parts.exists()
    monkeypatch.setenv("RANK", "1")
    make_table("shared1.tsv").make()  # one that starts when all is done


def test_parts_of_another_table_are_refused(make_table, teacher, texts, monkeypatch):
    monkeypatch.setattr(PairTableBuilder, "merge_parts", lambda self: None)
    make_table().make()
    monkeypatch.undo()
    with pytest.raises(ValueError, match="parts of another table: its nbest is 1, here it is 2"):
        make_table(nbest=2).make()
    with pytest.raises(ValueError, match="parts of another table: its references are written otherwise"):
        make_table(copies=1).make()
    with pytest.raises(ValueError, match="parts of another table: its teachers"):
        make_table(teachers=(teacher(3),)).make()
    texts[0].write_text(texts[0].read_text().replace("dog", "cat"))
    with pytest.raises(ValueError, match="parts of another table: its text is another"):
        make_table().make()


def test_interpolation_takes_what_is_nearest_to_the_reference(make_table, texts):
    """All beams are candidates; one pair comes out for each line."""
    make_table("all.tsv", nbest=0).make()
    made = make_table("near.tsv", nbest=0, target=texts[1], closest_to_reference=True)
    made.make()
    found = rows(made.output)
    assert len(found) == LINES
    several = rows(made.output.with_name("all.tsv"))
    bleu, references = BLEU(effective_order=True), texts[1].read_text().splitlines()
    for (line, text), reference in zip(found, references, strict=True):
        scores = {other: bleu.sentence_score(other, [reference]).score for source, other in several if source == line}
        assert scores[text] == max(scores.values())
    assert closest_to_reference([("der Hund", 0.0), ("die Katze schläft", 0.0)], "eine Katze schläft") == [
        ("die Katze schläft", 0.0)
    ]


def test_references_stand_before_the_translations(make_table, texts):
    settings = {"nbest": 0, "target": texts[1], "closest_to_reference": True}
    for copies in (0, 1):
        make_table(f"{copies}.tsv", copies=copies, **settings).make()
    alone, both = (rows(texts[0].with_name(f"{copies}.tsv")) for copies in (0, 1))
    references = list(zip(*(path.read_text(encoding="utf-8").splitlines() for path in texts), strict=True))
    assert both == references + alone


def test_what_is_left_out_is_told(make_table, texts, capsys, tmp_path):
    (tmp_path / "odd").write_bytes(texts[0].read_bytes() + b"\n\xff\n")
    made = make_table("best.tsv", source=tmp_path / "odd", min_score=-100.0)
    made.make()
    assert "left out: 1 lines blank, 1 lines not UTF-8" in capsys.readouterr().out
    assert len(rows(made.output)) == LINES
    with pytest.raises(ValueError, match=f"would be empty: left out are {LINES} of a score below 0.5"):
        make_table("none.tsv", min_score=0.5).make()
    assert not made.output.with_name("none.tsv").exists()
    tokenizer = load_translator(made.pieces[0].teachers, "cpu").tokenizer
    lengths = [[len(tokenizer(cell)["input_ids"]) for cell in row] for row in rows(made.output)]
    ratios = sorted(max(each) / min(each) for each in lengths)
    limit = max(1.0, (ratios[0] + ratios[-1]) / 2)
    kept = sum(ratio <= limit for ratio in ratios)
    make_table("ratio.tsv", max_length_ratio=limit).make()
    assert f"left out: {LINES - kept} with more than {limit:g} times the tokens on one side" in capsys.readouterr().out
    assert len(rows(made.output.with_name("ratio.tsv"))) == kept


def test_translations_that_are_their_source_are_left_out(make_table, monkeypatch, capsys):
    monkeypatch.setattr(
        candidate_selection, "translate", lambda piece, translator, lines: [[(line, 0.0)] for line in lines]
    )
    monkeypatch.setattr(candidate_selection, "MIN_WORDS_FOR_CHECK", 100)
    with pytest.raises(ValueError, match="look like their sources"):
        make_table(keep_copies=False, batch_size=16).make()
    monkeypatch.setattr(candidate_selection, "MAX_COPY_OVERLAP", 2.0)
    with pytest.raises(ValueError, match=f"would be empty: left out are {LINES} that are their source"):
        make_table(keep_copies=False, batch_size=16).make()
    make_table(batch_size=16).make()
    assert f"{LINES} pairs out of {LINES} lines" in capsys.readouterr().out


def test_a_teacher_of_the_other_direction_is_noticed(sentences):
    """Also where it copies nothing: its words are those of the sources' language. References tell what is usual."""
    piece = TableSection(("t",), Path("text"))
    english, german = sentences["en"] * 60, sentences["de"] * 60
    validate_not_copied(piece, [(line,) for line in english], german)
    with pytest.raises(ValueError, match="t: its translations look like their sources"):
        validate_not_copied(
            piece, [(line,) for line in english], [" ".join(reversed(line.split())) for line in english]
        )
    validate_not_copied(piece, [(line, line) for line in english], english)
    assert likeness(*(candidate_selection.Counter(text.split()) for text in ("a a b", "a c"))) == pytest.approx(1 / 2)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_text_without_lines_makes_no_table(make_table, tmp_path, content):
    (tmp_path / "empty").write_text(content)
    with pytest.raises(ValueError, match="holds no line|would be empty: left out are 2 lines blank"):
        make_table(source=tmp_path / "empty").make()
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "teacher0", "text.de", "text.en"}


def test_a_large_text_is_read_as_it_goes(make_table, texts, monkeypatch):
    """Never more lines are in memory than a block has."""
    made, ahead, seen = make_table(), 0, 0
    _ = made.texts
    read, make_pairs = files.iter_stripped_lines, pair_table.make_pairs

    def counted(path):
        nonlocal seen
        for line in read(path):
            seen += 1
            yield line

    def spy(piece, translator, lines):
        nonlocal ahead
        ahead += 16
        assert seen <= ahead
        return make_pairs(piece, translator, lines)

    monkeypatch.setattr(pair_table, "iter_stripped_lines", counted)
    monkeypatch.setattr(pair_table, "make_pairs", spy)
    made.make()
    assert seen == LINES


def test_a_first_process_that_starts_when_the_others_have_finished_is_done(make_table, monkeypatch):
    """A table that was there before the processes started is another one."""
    make_table().make()
    output = make_table().output
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    os.utime(output, (STARTED + 60, STARTED + 60))
    make_table().make()
    os.utime(output, (STARTED - 60, STARTED - 60))
    with pytest.raises(ValueError, match="exists already"):
        make_table().make()
    monkeypatch.setenv("WORLD_SIZE", "1")
    os.utime(output, (STARTED + 60, STARTED + 60))
    with pytest.raises(ValueError, match="exists already"):
        make_table().make()
