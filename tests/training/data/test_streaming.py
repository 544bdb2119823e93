import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from training.data.batch_shapes import choose_shapes
from training.data.corpora import read_corpus
from training.data.streaming import TokenBatchStream, stream_pairs
from training.recipe.arguments import DataArguments


def generate_rows(n):
    rng = np.random.default_rng(0)
    for i in range(n):
        yield {"source": " ".join(["w1"] * rng.integers(1, 9)) + f" w{i % 60}", "target": f"w{i % 60} w{i // 60}"}


def make_stream(tokenizer, n=300, rank=0, world=1, micro_batches=1, exchange=lambda value: [value], **keys):
    pairs = IterableDataset.from_generator(generate_rows, gen_kwargs={"n": n})
    arguments = DataArguments(buffer_size=70, **keys)
    return TokenBatchStream(pairs, tokenizer, arguments, 50 * world, 0, micro_batches, rank, world, exchange)


def run_processes(use, tokenizer, keys_of_processes, **keys):
    """Return the result of `use(stream)` for streams of multiple processes, in threads that exchange their objects."""
    world = len(keys_of_processes)
    barrier, exchanged = threading.Barrier(world), {}

    def run(rank: int):
        rounds = itertools.count()

        def exchange(value):
            key = next(rounds)
            exchanged[key, rank] = value
            barrier.wait(timeout=60)
            return [exchanged[key, other] for other in range(world)]

        own = keys | keys_of_processes[rank]
        return use(make_stream(tokenizer, rank=rank, world=world, exchange=exchange, **own))

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(run, range(world)))


def take(batches, count):
    iterator = iter(batches)
    return [next(iterator) for _ in range(count)]


def test_yields_every_pair_once_within_max_tokens(tokenizer):
    batches, pairs = iter(make_stream(tokenizer)), []
    while len(pairs) < 300:
        batch = next(batches)
        assert len(batch) * max(max(len(p["input_ids"]), len(p["labels"])) for p in batch) <= 50
        pairs += batch
    assert len(pairs) == 300
    assert len({str(pair["labels"]) for pair in pairs}) == 300
    assert len({str(pair["labels"]) for batch in take(batches, 20) for pair in batch}) > 40  # repeats the corpus


@pytest.mark.parametrize("count", [0, 1, 17, 60, 150])
def test_resumes_from_state(tokenizer, count):
    original = make_stream(tokenizer)
    iterator = iter(original)
    for _ in range(count):
        next(iterator)
    ahead = [next(iterator) for _ in range(5)]  # a DataLoader reads ahead
    state = original.state_dict_at(count)
    resumed = make_stream(tokenizer)
    resumed.load_state_dict(state)
    assert take(resumed, 5) == ahead


def test_processes_read_disjoint_rows(tokenizer):
    seen = [
        {str(pair["labels"]) for batch in take(make_stream(tokenizer, rank=rank, world=2), 8) for pair in batch}
        for rank in (0, 1)
    ]
    assert not seen[0] & seen[1]


def test_stream_without_valid_pairs_raises(tokenizer):
    with pytest.raises(ValueError, match="no training pairs are left"):
        take(make_stream(tokenizer, max_length=1), 1)
    with pytest.raises(ValueError, match="no training pairs are left"):
        take(make_stream(tokenizer, n=0), 1)


def test_rejects_or_drops_invalid_pairs(write, arguments):
    write("train.en", b"one\n\nth\xffree\nfour\n")
    write("train.de", "eins\nzwei\ndrei\nvier\n")
    assert [row["source"] for row in stream_pairs(arguments(on_bad_lines="drop"))] == ["one", "four"]
    with pytest.raises(ValueError, match="line 2: blank"):
        list(stream_pairs(arguments()))


def test_all_processes_have_the_same_shapes_per_update(tokenizer):
    """The processes read different rows, and a filter drops more pairs of the second one."""
    shapes = choose_shapes(np.concatenate([make_stream(tokenizer).first_lengths(), [[20, 20]]]), 50)

    def take_40(stream):
        stream.shapes = shapes
        return take(stream, 40)

    batches = run_processes(take_40, tokenizer, [{"max_length": 20}, {"max_length": 8}], micro_batches=2)
    numbers = [[number for number, _ in process_batches] for process_batches in batches]
    assert numbers[0] == numbers[1]
    assert numbers[0][::2] != numbers[0][1::2]  # two accumulated batches per update, each with one group
    assert len(set(numbers[0])) > 1
    for process_batches in batches:
        for number, pairs in process_batches:
            assert len(pairs) <= shapes[number].rows
            lengths = [[len(source), len(target)] for source, target in pairs]
            assert (np.array(lengths).reshape(-1, 2) <= [shapes[number].source, shapes[number].target]).all()
    rows = [sum(len(pairs) for _, pairs in process_batches) for process_batches in batches]
    assert rows[1] < rows[0]


@pytest.mark.parametrize("count", [0, 17, 60])
def test_stream_with_fixed_shapes_resumes_from_state(tokenizer, count):
    shapes = choose_shapes(np.concatenate([make_stream(tokenizer).first_lengths(), [[256, 256]]]), 300)
    streams = []
    for _ in range(2):
        streams.append(make_stream(tokenizer))
        streams[-1].shapes = shapes
    original, resumed = streams
    iterator = iter(original)
    for _ in range(count):
        next(iterator)
    ahead = [next(iterator) for _ in range(5)]
    resumed.load_state_dict(original.state_dict_at(count))
    assert take(resumed, 5) == ahead


@pytest.mark.parametrize("count", [0, 1, 17, 60, 150])
def test_counts_pairs_independently_of_resuming(tokenizer, count):
    original = make_stream(tokenizer, max_length=8)
    take(original, 3)  # as timing before training does
    original.load_state_dict(original.state_dict_at(0))
    original.first_lengths()
    iterator = iter(original)
    for _ in range(count + 1):
        next(iterator)
    resumed = make_stream(tokenizer, max_length=8)
    resumed.load_state_dict(original.state_dict_at(count))
    take(resumed, 1)
    assert (resumed.pairs_read, resumed.pairs_dropped) == (original.pairs_read, original.pairs_dropped)
    assert original.pairs_read > original.pairs_dropped > 0
    assert original.pairs_read <= 70 * (count + 1)
    finished = make_stream(tokenizer, max_length=8)
    finished.load_state_dict(original.state_dict_at(count + 1))  # no update follows
    assert (finished.pairs_read, finished.pairs_dropped) == (original.pairs_read, original.pairs_dropped)


def write_pairs(folder, kind, pairs):
    """Write training data in one format and return the data arguments for it."""
    data = Dataset.from_list([{"en": source, "de": target} for source, target in pairs])
    if kind == "saved":
        DatasetDict({"train": data}).save_to_disk(folder / "saved")
        return {"dataset_name": str(folder / "saved")}
    if kind == "set":
        data.to_parquet(folder / "set" / "train.parquet")
        return {"dataset_name": str(folder / "set")}
    if kind == "text":
        for side, language in enumerate(("en", "de")):
            (folder / f"train.{language}").write_text("".join(f"{pair[side]}\n" for pair in pairs))
        return {"data_dir": str(folder)}
    path = folder / f"train.{kind}"
    if kind == "tsv":
        path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    else:
        getattr(data, {"jsonl": "to_json", "parquet": "to_parquet"}[kind])(path)
    return {"data_dir": str(folder), "train_file": path.name}


@pytest.mark.parametrize("overlap", ["keep", "drop"])
@pytest.mark.parametrize("kind", ["text", "tsv", "jsonl", "parquet", "set", "saved"])
def test_streamed_and_in_memory_pairs_are_equal(tmp_path, monkeypatch, kind, overlap):
    monkeypatch.chdir(tmp_path)
    pairs = [(f"source {i % 19}", f"target {i}") for i in range(40)]
    pairs[7], pairs[11] = ("", "blank"), (" spaces ", " around ")
    keys = write_pairs(tmp_path, kind, pairs) | {"on_bad_lines": "drop", "on_eval_overlap": overlap}
    held_out = ["source 3", "source 5", "other"]
    if "data_dir" in keys:
        (tmp_path / "val.tsv").write_text("".join(f"{source}\tx\n" for source in held_out))
        keys["validation_file"] = "val.tsv"
    else:
        dataset = Dataset.from_list([{"en": source, "de": "x"} for source in held_out])
        if kind == "set":
            dataset.to_parquet(tmp_path / "set" / "validation.parquet")
        else:
            DatasetDict(
                {"train": Dataset.from_list([{"en": s, "de": t} for s, t in pairs]), "validation": dataset}
            ).save_to_disk(tmp_path / "saved2")
            keys["dataset_name"] = str(tmp_path / "saved2")
    train = read_corpus(DataArguments(**keys))["train"]
    expected = list(zip(train.sources, train.targets, strict=True))
    corpus = read_corpus(DataArguments(**keys, streaming=True))
    assert "train" not in corpus
    sources = {source for text in corpus.values() for source in text.sources} if overlap == "drop" else set()
    streamed = stream_pairs(DataArguments(**keys, streaming=True), sources)
    assert [(row["source"], row["target"]) for row in streamed] == expected
    assert (("source 3", "target 3") in expected) == (overlap == "keep")


@pytest.mark.parametrize(("en", "de"), [("one\ntwo\n", "eins\n"), ("one\n", "eins\nzwei"), ("", "eins\n")])
def test_rejects_different_line_counts_before_the_first_pair(write, arguments, en, de):
    write("train.en", en)
    write("train.de", de)
    with pytest.raises(ValueError, match="line i of one must translate line i of the other"):
        stream_pairs(arguments())


def test_rejects_streamed_table_with_several_targets(write, arguments):
    write("t.tsv", "one\teins\ntwo\tzwei\tzwo\n")
    with pytest.raises(ValueError, match="line 2 has more than two columns"):
        list(stream_pairs(arguments(train_file="t.tsv")))


def labels_of(batches) -> list[str]:
    return [str(pair["labels"]) for batch in batches for pair in batch]


def test_process_without_pairs_has_empty_micro_batches(tokenizer):
    full, empty = run_processes(lambda stream: take(stream, 3), tokenizer, [{"n": 1}] * 2)
    assert empty == [[]] * 3
    assert labels_of(full) == labels_of(full[:1]) * 3


def test_processes_have_the_same_position(tokenizer):
    """Also if a filter drops most pairs of one process."""
    taken = []

    def use(stream):
        taken.append(take(stream, 45))
        return [stream.state_dict_at(update) for update in (20, 45)], stream.pairs_read, stream.pairs_dropped

    first, second = run_processes(use, tokenizer, [{"max_length": 20}, {"max_length": 4}], micro_batches=1)
    assert first == second
    assert any(not batch for batches in taken for batch in batches)
    assert first[1] > first[2] > 0


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("updates", [3, 7, 12])
def test_resumes_with_another_number_of_processes(tokenizer, updates, world):
    """Before the end of the corpus of 300 pairs, at most one buffer of 70 pairs is repeated or skipped."""

    def start(stream):
        return take(stream, updates), stream.state_dict_at(updates)

    results = run_processes(start, tokenizer, [{}] * 2)
    state = results[0][1]
    before = [label for batches, _ in results for label in labels_of(batches)]

    def resume(stream):
        stream.load_state_dict(state)
        return list(itertools.takewhile(lambda batch: stream.pairs_read <= 300, stream))

    after = [label for batches in run_processes(resume, tokenizer, [{}] * world) for label in labels_of(batches)]
    assert len(set(before)) == len(before) > 0
    assert len(set(after)) == len(after)
    assert len(set(before) & set(after)) <= 70
    assert 230 <= len(set(before) | set(after)) <= 300


def test_update_of_two_processes_has_two_groups(tokenizer):
    """Their lengths differ as in an update of one process, which has two micro-batches."""

    def mean_difference(parts):
        longest = [
            [max((len(pair["input_ids"]) for pair in batch), default=np.nan) for batch in part] for part in parts
        ]
        return np.nanmean(np.abs(np.diff(longest, axis=0)))

    both = take(make_stream(tokenizer, micro_batches=2), 80)
    expected = mean_difference([both[::2], both[1::2]])
    found = mean_difference(run_processes(lambda stream: take(stream, 40), tokenizer, [{}, {}]))
    assert found > 0.7 * expected
