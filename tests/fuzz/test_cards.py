"""Model cards for arbitrary results, recipes, reports and samples."""

import json
import math
import random
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from hub import model_card
from hub.publishing import card as publishing
from tests.fuzz.contract import call, fingerprint, fuzz

WORDS = (
    "",
    "x",
    "en",
    "no",
    "---",
    "```",
    "{{ repo_id }}",
    "{% for %}",
    "a | b",
    "\u2028",
    "\x85",
    "\r\n",
    "\ufeff",
    "\x00",
)
WORDS += (
    "user/pairs",
    "/home/me",
    "D:\\x",
    "hf_" + "a" * 34,
    "<script>",
    "demo",
    "files",
    "hub",
    "\ud800",
    "9" * 30,
)
NUMBERS = (0, 1, -1, 7, 10**30, 10**400, 0.5, -0.0, math.nan, math.inf, 1e300, 2**63, True)
KEYS = (
    *("data", "train", "validation", "test", "source", "files", "dataset", "config", "split", "split_off", "pairs"),
    *("sha256", "references", "streamed", "train_pairs", "train_pairs_dropped", "train_pairs_read", "test_bleu"),
    *(
        "test_bleu_signature",
        "test_exact_match",
        "test_token_error_rate",
        "updates",
        "train_runtime",
        "train_target_tokens",
        "device",
    ),
    *("processes", "threads", "cpu_cores", "precision", "versions", "layout", "parity", "source_lang", "target_lang"),
    *("largest_difference_of_log_probabilities", "base_model", "lora_rank", "num_beams", "max_length", "corpus"),
    *("dataset_name", "dataset_config", "data_dir", "test_bleu_tokenized_lc", "parameters"),
)
CONFIG = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "vocab_size": 60,
    "model_type": "vanilla_transformer",
}
RESULTS = {
    "test_bleu": 41.2, "updates": 9, "train_target_tokens": 9, "train_runtime": 3.0, "device": "x", "processes": 1,
    "threads": 1, "cpu_cores": 1, "precision": "fp32", "versions": {"torch": "2"}, "train_pairs_dropped": {"blank": 9},
    "data": {"train": {"source": "hub", "dataset": "a/b", "split": "train", "pairs": 9}, "test": {"source": "files"}},
}  # fmt: skip
RECIPE = {"source_lang": "en", "target_lang": "de", "num_beams": 5, "max_length": 9, "base_model": None, "lora_rank": 0}
REPORT = {"layout": "hkproj", "parity": {"largest_difference_of_log_probabilities": 1e-6}}
TSV = "source\treference\ttranslation\na\tb\tc\n"


def value(rng: random.Random, depth: int = 0):
    kind = rng.randrange(6 if depth < 3 else 4)
    if kind < 2:
        return rng.choice(WORDS)
    if kind < 4:
        return rng.choice((*NUMBERS, None))
    if kind == 4:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(KEYS + WORDS): value(rng, depth + 1) for _ in range(rng.randrange(4))}


def mutated(rng: random.Random, start):
    """Return a copy in which some values differ, at any depth."""
    if isinstance(start, dict):
        copy = {key: mutated(rng, each) for key, each in start.items() if rng.random() > 0.02}
        if rng.random() < 0.1:
            copy[rng.choice(KEYS)] = value(rng)
        return copy
    return value(rng) if rng.random() < 0.03 else start


def broken(rng: random.Random, content: bytes) -> bytes:
    """Return the content truncated, changed or replaced."""
    kind = rng.randrange(50)
    if kind == 0:
        return content[: rng.randrange(len(content) + 1)]
    if kind == 1 and content:
        i = rng.randrange(len(content))
        return content[:i] + rng.randbytes(rng.randrange(4)) + content[i + 1 :]
    if kind == 2:
        return rng.choice(
            (b"", b"[]", b"3", b"null", b'"x"', b"[" * 20000, b"a: &x [*x]", b"<<: 1", b"? [a]\n: 1", b"\xff\xfe")
        )
    return content


def write(rng: random.Random, folder: Path, name: str, text: str) -> None:
    if rng.random() < 0.02:
        (folder / name).mkdir()
    elif rng.random() > 0.08:
        (folder / name).write_bytes(broken(rng, text.encode("utf-8", "surrogatepass")))


def write_run_files(rng: random.Random, folder: Path) -> None:
    """Write the files of a run, mutated at random."""
    files = {"config.json": CONFIG, "all_results.json": RESULTS, "import_report.json": REPORT}
    for name, start in files.items():
        if name != "import_report.json" or rng.random() < 0.3:
            write(rng, folder, name, json.dumps(mutated(rng, start), ensure_ascii=rng.random() < 0.5))
    write(rng, folder, "recipe.yaml", yaml.safe_dump(mutated(rng, RECIPE), allow_unicode=True, width=20))
    rows = "".join(
        "\t".join(rng.choice(WORDS) for _ in range(rng.choice((3, 3, 3, 2)))) + "\n" for _ in range(rng.randrange(3))
    )
    write(rng, folder, "samples.tsv", TSV + rows)


OPTIONS = (
    *(("--license", "mit"), ("--license", "x y"), ("--license", ""), ("--dataset", "a/b"), ("--dataset", "../x")),
    *(("--base-model", "a/b"), ("--base-model", "/x"), ("--dataset", "\ud800"), ("--nothing",), ("--license",)),
)


@pytest.mark.slow
def test_cards(tmp_path, monkeypatch):
    cards = []
    make_card = publishing.make_card
    monkeypatch.setattr(publishing, "make_card", lambda *a, **b: cards.append(make_card(*a, **b)) or cards[-1])

    def try_one(rng: random.Random, folder: Path) -> None:
        write_run_files(rng, folder)
        before = fingerprint(folder)
        options = [word for _ in range(rng.choice((0, 0, 1, 2))) for word in rng.choice(OPTIONS)]
        name = rng.choice(("user/name", "user/name", "name", ""))
        status, _ = call(model_card.main, "hub.model_card", [str(folder), name, *options])
        assert fingerprint(folder) == before
        assert status in (0, 2)
        if status == 0:
            card = cards.pop().content
            card.encode()
            assert ModelCard(card).data.library_name == "transformers"
            recipe = card.rpartition("## Recipe\n")[2] if "## Recipe\n" in card else ""
            for secret in ("/home/me", "D:\\x", "hf_aaaa"):
                assert secret not in recipe, secret

    fuzz("cards", try_one, tmp_path)
