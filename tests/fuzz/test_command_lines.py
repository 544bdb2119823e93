"""Command lines of the verbs that work on a checkpoint: wrong options, files that are there or not, odd values."""

import random
from pathlib import Path

import pytest

import training.benchmark
from tests.fuzz.contract import call, fingerprint, fuzz
from training import average, distill, diversify, score, translate
from training.demo import corpus

pytestmark = pytest.mark.slow

NUMBERS = ["0", "1", "2", "3", "-1", "1.5", "nan", "inf", "-inf", "1e9", "9" * 23, "x", "", "0.0", "-0.5", "٣"]
DEVICES = ["cpu", "cuda", "cuda:7", "meta", "x", "", "cpu:0", "cpu:9", "mps"]
NAMES = [
    "",
    "-",
    "--",
    "-x",
    "~",
    "\0",
    "a\0b",
    "ü",
    "x" * 300,
    "nowhere",
    "a/b",
    "user/model",
    "/",
    "..",
    ".",
    "\udcff",
]
METRICS = ["translation", "sequence", "bleu", ""]
# of each verb, with what draws a value: number, source, output, checkpoint, device, metric, line; -: it takes none
OPTIONS = {
    "translate": {
        **{"input": "s", "output": "o", "batch_size": "n", "num_beams": "n", "length_penalty": "n", "nbest": "n"},
        **{"max_new_tokens": "n", "scores": "-", "device": "d", "glossary": "s", "json": "-", "document": "-"},
        **{"source_lang": "l", "rerank": "c", "rerank_weight": "n"},
    },
    "score": {
        **{"source": "s", "reference": "s", "compare": "c", "metric": "m", "target_lang": "l", "samples": "n"},
        **{
            "likelihood": "-",
            "per_line": "o",
            "num_beams": "n",
            "length_penalty": "n",
            "batch_size": "n",
            "output": "o",
        },
        "device": "d",
    },
    "average": {"last": "n", "best": "n"},
    "diversify": {"source": "s", "target": "s", "output": "o"},
    "distill": {
        **{"source": "s", "target": "s", "output": "o", "nbest": "n", "num_beams": "n", "length_penalty": "n"},
        **{"max_new_tokens": "n", "batch_size": "n", "min_score": "n", "max_length_ratio": "n", "keep_copies": "-"},
        **{"device": "d", "with_references": "-"},
    },
    "benchmark": {
        **{"lines": "l", "sizes": "l", "precision": "l", "target_tokens": "n", "rounds": "n", "threads": "n"},
        **{"device": "d", "model": "c", "source": "s", "reference": "s", "sentences": "n", "batch_size": "n"},
        **{"also": "c", "recipe": "s", "data_dir": "c", "output_dir": "o"},
    },
    "corpus": {"seed": "n"},
}
MAINS = {"translate": translate, "score": score, "average": average, "diversify": diversify, "corpus": corpus}
MAINS |= {"distill": distill}
NEEDED = {"score": ("source", "reference"), "diversify": ("source", "target", "output")}
NEEDED |= {"distill": ("source", "output")}


@pytest.fixture
def place(tmp_path, make_model, make_tokenizer) -> Path:
    """A run with a checkpoint, and texts."""
    folder = tmp_path / "given"
    tokenizer, sizes = make_tokenizer(True)
    model = make_model(**sizes)
    model.generation_config.update(max_new_tokens=4, num_beams=2)
    for name in ("run", "run/checkpoint-2", "run/checkpoint-4", "other"):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "empty").mkdir()
    lines = "the dog runs\n\ntwo birds\u2028sing\x85\na cat\tsleeps\n"
    files = {
        "a.en": lines,
        "a.de": lines,
        "refs.tsv": "the dog\tder Hund\ta\ntwo\tzwei\n",
        "nothing": "",
        "train.en": "mine",
        "odd": "x\n\n\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "utf16").write_bytes("the dog\n".encode("utf-16"))
    (folder / "bytes").write_bytes(bytes(range(256)))
    return folder


def test_command_lines(tmp_path, place, monkeypatch):
    monkeypatch.setattr(training.benchmark, "run", lambda arguments: None)  # it takes minutes
    monkeypatch.setattr(corpus, "generate", lambda seed: {"train": [(f"a {seed}", "b")], "test": [("c", "d")]})
    texts = ["a.en", "a.de", "a.en", "a.de", "refs.tsv", "nothing", "odd", "utf16", "bytes", "empty", "nowhere"]
    before = fingerprint(place)

    def try_one(rng: random.Random, folder):
        def draw(kind: str) -> list[str]:
            if rng.random() < 0.08:
                return [rng.choice((*NAMES, *NUMBERS))]
            source = str(place / rng.choice(texts))
            checkpoint = str(
                place / rng.choice(("run", "run", "run", "other", "run/checkpoint-2", "empty", "a.en", "nowhere"))
            )
            output = str(
                rng.choice((folder / "new", folder / "new.tsv", folder / "b" / "new", place / "a.en", place, folder))
            )
            values = {"n": rng.choice(NUMBERS), "s": source, "o": output, "c": checkpoint, "d": rng.choice(DEVICES)}
            values |= {"m": rng.choice(METRICS), "l": rng.choice(("en", "de", "step", "base", "fp32", "xx", "beam"))}
            return [] if kind == "-" else [values[kind]]

        verb = rng.choice(
            ("translate", "translate", "score", "score", "average", "diversify", "distill", "benchmark", "corpus")
        )
        options = OPTIONS[verb]
        arguments = {"average": draw("o") + draw("c"), "corpus": draw("o"), "benchmark": []}.get(verb, draw("c"))
        arguments += draw("c") * (verb == "diversify") + draw("c") * (verb == "average" and rng.random() < 0.5)
        chosen = [name for name in NEEDED.get(verb, ()) if rng.random() < 0.95]
        for name in chosen + [rng.choice(list(options)) for _ in range(rng.choice((0, 1, 1, 2)))]:
            arguments += [f"--{name if rng.random() < 0.97 else name[:-1]}", *draw(options[name])]
        if rng.random() < 0.05:
            arguments.insert(rng.randrange(len(arguments) + 1), rng.choice((*NAMES, "--help", "@x")))
        main = training.benchmark.main if verb == "benchmark" else MAINS[verb].main
        prog = "training.demo.corpus" if verb == "corpus" else f"training.{verb}"
        typed = (place / rng.choice(("a.en", "a.en", "nothing", "utf16", "bytes"))).read_bytes()
        status, _ = call(main, prog, arguments, typed)
        assert fingerprint(place) == before, f"{prog} {arguments}: changed what was there"
        left = [path for path in folder.rglob("*") if status != 0 and path.is_file()]
        assert not left, f"{prog} {arguments}: status {status}, and left {left}"

    monkeypatch.chdir(tmp_path)
    fuzz("command lines", try_one, tmp_path)
