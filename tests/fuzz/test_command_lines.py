"""Random command lines of the commands that read a checkpoint: wrong options, missing files, unusual values."""

import random
from pathlib import Path

import pytest

from tests.fuzz.contract import call, fingerprint, fuzz
from training import average, benchmark, distill, diversify, score, translate
from training.benchmarks import runner
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
    "missing",
    "a/b",
    "user/model",
    "/",
    "..",
    ".",
    "\udcff",
]
METRICS = ["translation", "sequence", "bleu", ""]
# Options of each command, with the kind of their values: number, source, output, checkpoint, device, metric, label,
# or - for flags
OPTIONS = {
    "translate": {
        **{"input": "s", "output": "o", "batch_size": "n", "num_beams": "n", "length_penalty": "n", "nbest": "n"},
        **{"max_new_tokens": "n", "scores": "-", "device": "d", "glossary": "s", "json": "-", "document": "-"},
        **{"source_lang": "l", "rerank": "c", "rerank_weight": "n"},
    },
    "score": {
        **{
            "source": "s",
            "reference": "s",
            "compare": "c",
            "metric": "m",
            "target_lang": "l",
            "num_bootstrap_samples": "n",
        },
        **{
            "nll": "-",
            "per_pair_output": "o",
            "num_beams": "n",
            "length_penalty": "n",
            "batch_size": "n",
            "output": "o",
        },
        **{"device": "d", "json": "-", "quiet": "-", "max_new_tokens": "n"},
    },
    "average": {"last": "n", "best": "n", "output": "o", "json": "-"},
    "diversify": {"source": "s", "target": "s", "output": "o", "device": "d", "batch_size": "n", "json": "-"},
    "distill": {
        **{"source": "s", "target": "s", "output": "o", "nbest": "n", "num_beams": "n", "length_penalty": "n"},
        **{"max_new_tokens": "n", "batch_size": "n", "min_score": "n", "max_length_ratio": "n", "keep_copies": "-"},
        **{"device": "d", "with_references": "-", "quiet": "-"},
    },
    "benchmark": {
        **{"benchmarks": "l", "sizes": "l", "precision": "l", "target_tokens": "n", "rounds": "n", "threads": "n"},
        **{"device": "d", "model": "c", "source": "s", "reference": "s", "sentences": "n", "batch_size": "n"},
        **{"recipe": "s", "data_dir": "c", "output_dir": "o"},
    },
    "corpus": {"seed": "n"},
}
MAINS = {"translate": translate, "score": score, "average": average, "diversify": diversify, "corpus": corpus}
MAINS |= {"distill": distill, "benchmark": benchmark}
REQUIRED = {"score": ("source", "reference"), "diversify": ("source", "target", "output")}
REQUIRED |= {"distill": ("source", "output"), "average": ("output",)}


@pytest.fixture
def inputs(tmp_path, make_model, make_tokenizer) -> Path:
    """Directory with a run, its checkpoints, and texts."""
    folder = tmp_path / "inputs"
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


def test_command_lines(tmp_path, inputs, monkeypatch):
    monkeypatch.setattr(runner, "run_benchmarks", lambda arguments, show: {})  # the real one takes minutes
    monkeypatch.setattr(corpus, "generate", lambda seed: {"train": [(f"a {seed}", "b")], "test": [("c", "d")]})
    texts = ["a.en", "a.de", "a.en", "a.de", "refs.tsv", "nothing", "odd", "utf16", "bytes", "empty", "missing"]
    before = fingerprint(inputs)

    def try_one(rng: random.Random, folder):
        def sample_value(kind: str) -> list[str]:
            if rng.random() < 0.08:
                return [rng.choice((*NAMES, *NUMBERS))]
            source = str(inputs / rng.choice(texts))
            checkpoint = str(
                inputs / rng.choice(("run", "run", "run", "other", "run/checkpoint-2", "empty", "a.en", "missing"))
            )
            output = str(
                rng.choice((folder / "new", folder / "new.tsv", folder / "b" / "new", inputs / "a.en", inputs, folder))
            )
            values = {"n": rng.choice(NUMBERS), "s": source, "o": output, "c": checkpoint, "d": rng.choice(DEVICES)}
            values |= {"m": rng.choice(METRICS), "l": rng.choice(("en", "de", "step", "base", "fp32", "xx", "beam"))}
            return [] if kind == "-" else [values[kind]]

        name = rng.choice(
            ("translate", "translate", "score", "score", "average", "diversify", "distill", "benchmark", "corpus")
        )
        options = OPTIONS[name]
        arguments = {
            "corpus": sample_value("o"),
            "benchmark": [],
        }.get(name, sample_value("c"))
        arguments += sample_value("c") * (name == "diversify") + sample_value("c") * (
            name == "average" and rng.random() < 0.5
        )
        chosen = [option for option in REQUIRED.get(name, ()) if rng.random() < 0.95]
        for option in chosen + [rng.choice(list(options)) for _ in range(rng.choice((0, 1, 1, 2)))]:
            arguments += [f"--{option if rng.random() < 0.97 else option[:-1]}", *sample_value(options[option])]
        if rng.random() < 0.05:
            arguments.insert(rng.randrange(len(arguments) + 1), rng.choice((*NAMES, "--help", "@x")))
        prog = "training.demo.corpus" if name == "corpus" else f"training.{name}"
        stdin = (inputs / rng.choice(("a.en", "a.en", "nothing", "utf16", "bytes"))).read_bytes()
        status, _ = call(MAINS[name].main, prog, arguments, stdin)
        assert fingerprint(inputs) == before, f"{prog} {arguments}: changed an existing file"
        outputs = [path for path in folder.rglob("*") if status != 0 and path.is_file()]
        assert not outputs, f"{prog} {arguments}: status {status}, but wrote {outputs}"

    monkeypatch.chdir(tmp_path)
    fuzz("command lines", try_one, tmp_path)
