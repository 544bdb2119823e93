"""A checkpoint of fairseq's and one of OpenNMT-py's: imported, tuned, exported, pushed and loaded elsewhere."""

import collections
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hub.import_checkpoint import main as import_main

RECIPE = """
corpus: demo
output_dir: {out}
base_model: {base}
processes: 1
max_tokens: 1024
max_steps: 200
learning_rate: 0.002
warmup_steps: 40
adam_beta2: 0.98
eval_strategy: "no"
save_strategy: "no"
precision: fp32
dropout: 0.0
num_beams: 1
max_new_tokens: 30
disable_tqdm: true
"""
STRANGER = """
import sys
sys.modules["vanilla_transformer"] = None
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
model, tokenizer = (
    each.from_pretrained(sys.argv[1], trust_remote_code=True) for each in (AutoModelForSeq2SeqLM, AutoTokenizer)
)
batch = tokenizer(sys.argv[2:], return_tensors="pt", padding=True)
ids = model.generate(**batch, num_beams=1, max_new_tokens=30)
print(*tokenizer.batch_decode(ids, skip_special_tokens=True), sep="\\n")
"""


@pytest.fixture(scope="module")
def toolkits(load_tests_module):
    return load_tests_module("importing/toolkit_references.py")


@pytest.fixture(scope="module")
def pairs():
    from training.demo.corpus import generate

    return generate()


def words_of(pairs, side: int) -> list[str]:
    return [word for word, _ in collections.Counter(w for pair in pairs for w in pair[side].split()).most_common()]


def fairseq_file(toolkits, pairs, folder: Path) -> Path:
    """With a joint dictionary of words and letters, and codes that build the words; it lacks what lies between."""
    words = [*words_of(pairs, 0)[:300], *words_of(pairs, 1)[:300]]
    codes: dict[str, None] = {}
    for word in words:
        letters = [*word[:-1], word[-1] + "</w>"]
        codes |= dict.fromkeys(f"{''.join(letters[:i])} {letters[i]}" for i in range(1, len(letters)))
    (folder / "code").write_text("#version: 0.2\n" + "".join(f"{code}\n" for code in codes), encoding="utf-8")
    letters = sorted({letter for pair in pairs for line in pair for letter in line if letter != " "})
    parts = list(dict.fromkeys([*words, *letters, *(f"{letter}@@" for letter in letters)]))
    for language in ("de", "en"):
        (folder / f"dict.{language}.txt").write_text("".join(f"{part} 9\n" for part in parts), encoding="utf-8")
    size = len(parts) + 4
    theirs = toolkits.make(
        "fairseq t2t",
        **{"d": 64, "ff": 128, "sizes": (size, size), "share_all_embeddings": True, "source_lang": "en"},
        **{"target_lang": "de", "max_source_positions": 256, "max_target_positions": 256},
    )
    return toolkits.save(theirs.content("cfg"), folder / "model.pt")


def opennmt_file(toolkits, pairs, folder: Path) -> Path:
    """Of version 2, with a vocabulary of words for each side."""
    source, target = words_of(pairs, 0)[:600], words_of(pairs, 1)[:600]
    theirs = toolkits.make("opennmt 2", d=64, ff=128, sizes=(len(source) + 2, len(target) + 4))
    special = ["<unk>", "<blank>", "<s>", "</s>"]
    theirs.tokens = lambda: [special[:2] + source, special + target]
    return toolkits.save(theirs.content(), folder / "model.pt")


def soft(model):
    """Weights as before training, so that 200 updates teach something."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.xavier_uniform_(parameter)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fairseq", "opennmt"])
def test_all_the_way(toolkits, pairs, run_main, start_programs, hub, tmp_path, monkeypatch, kind):
    make = {"fairseq": fairseq_file, "opennmt": opennmt_file}[kind]
    with monkeypatch.context() as patch:
        patch.setattr(toolkits, "randomize", soft)
        file = make(toolkits, pairs["train"][:2000], tmp_path)
    run_main(import_main, file, tmp_path / "base")
    recipe = tmp_path / "tune.yaml"
    recipe.write_text(RECIPE.format(base=tmp_path / "base", out=tmp_path / "tuned"))
    with start_programs("training.train", "training.score", "hub.export", "hub.push", **hub.environment) as programs:
        programs.run("training.train", recipe)
        text = [source for source, _ in pairs["test"][:20]]
        before, after = (loss(tmp_path / name, pairs["test"][:100]) for name in ("base", "tuned"))
        print(f"{kind}: {before:.2f} nats a token before, {after:.2f} after")
        assert after < before - 1
        programs.run("hub.export", tmp_path / "tuned", tmp_path / "ct2", "--to", "ctranslate2")
        same_in_ctranslate2(tmp_path / "tuned", tmp_path / "ct2", text)
        programs.run("hub.push", tmp_path / "tuned", f"user/{kind}", "--license", "mit")
    environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "PATH": "/usr/bin"}
    process = subprocess.run(
        [sys.executable, "-c", STRANGER, f"user/{kind}", *text],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    assert process.stdout.rstrip("\n").split("\n") == translated(tmp_path / "tuned", text)


def translated(folder: Path, text: list[str]) -> list[str]:
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(text, return_tensors="pt", padding=True)
    ids = model.generate(**batch, num_beams=1, max_new_tokens=30)
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


@torch.no_grad()
def loss(folder: Path, test: list[tuple[str, str]]) -> float:
    """Of a target token, in nats."""
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    sources, targets = (list(side) for side in zip(*test, strict=True))
    batch = tokenizer(sources, text_target=targets, return_tensors="pt", padding=True)
    labels = batch["labels"].masked_fill(batch["labels"] == tokenizer.pad_token_id, -100)
    return float(model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss)


def same_in_ctranslate2(folder: Path, exported: Path, text: list[str]) -> None:
    import ctranslate2

    source, target = (AutoTokenizer.from_pretrained(exported / f"{side}_tokenizer") for side in ("source", "target"))
    tokens = [source.convert_ids_to_tokens(source(line).input_ids) for line in text]
    translator = ctranslate2.Translator(str(exported), intra_threads=1)
    results = translator.translate_batch(tokens, beam_size=1, max_decoding_length=30)
    ids = [target.convert_tokens_to_ids(each.hypotheses[0]) for each in results]
    found = target.batch_decode(ids, skip_special_tokens=True)
    assert found == translated(folder, text)
