"""A little trained checkpoint of fairseq's and of OpenNMT-py's: imported, tuned, exported, pushed, loaded elsewhere."""

import collections
import json
import subprocess
import sys
from pathlib import Path

import pytest
import sacrebleu
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hub.import_checkpoint import main as import_main

RECIPE = """
corpus: demo
output_dir: {out}
base_model: {base}
num_processes: 1
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


def fairseq_model(toolkits, pairs, folder: Path):
    """With a joint dictionary and codes as subword-nmt's; those are learnt here by the library tokenizers."""
    learnt = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    learnt.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(vocab_size=1000, end_of_word_suffix="</w>", show_progress=False)
    learnt.train_from_iterator((line for pair in pairs for line in pair), trainer)
    merges = json.loads(learnt.to_str())["model"]["merges"]
    (folder / "code").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges), encoding="utf-8")
    parts = [part[:-4] if part.endswith("</w>") else f"{part}@@" for part in learnt.get_vocab()]
    for language in ("de", "en"):
        (folder / f"dict.{language}.txt").write_text("".join(f"{part} 9\n" for part in parts), encoding="utf-8")
    size = len(parts) + 4
    theirs = toolkits.make(
        "fairseq t2t",
        **{"d": 64, "ff": 128, "sizes": (size, size), "share_all_embeddings": True, "source_lang": "en"},
        **{"target_lang": "de", "max_source_positions": 256, "max_target_positions": 256},
    )
    return theirs, lambda source, mask, target: theirs(source, None, target)[0]


def opennmt_model(toolkits, pairs, folder: Path):
    """Of version 2, with a vocabulary of words for each side; its sources know no <s> and </s>, which ours put in."""
    source, target = words_of(pairs, 0)[:600], words_of(pairs, 1)[:600]
    theirs = toolkits.make("opennmt 2", d=64, ff=128, sizes=(len(source) + 2, len(target) + 4))
    special = ["<unk>", "<blank>", "<s>", "</s>"]
    theirs.tokens = lambda: [special[:2] + source, special + target]
    return theirs, lambda source, mask, target: theirs(torch.where(source > 3, source - 2, source), mask, target)


def soft(model):
    """Weights as before training."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.xavier_uniform_(parameter)
    return model


def teach(theirs, logits_of, folder: Path, pairs, updates: int = 300) -> None:
    """Trains a reference by its own arithmetic on ids of the tokenizer in `folder`."""
    tokenizer, start = AutoTokenizer.from_pretrained(folder), 2
    optimizer = torch.optim.Adam(theirs.parameters(), lr=2e-3, betas=(0.9, 0.98))
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1, (update + 1) / 50)
        chosen = [pairs[(64 * update + i) % len(pairs)] for i in range(64)]
        sources, targets = (list(side) for side in zip(*chosen, strict=True))
        batch = tokenizer(sources, text_target=targets, return_tensors="pt", padding=True)
        labels = batch["labels"]
        given = torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], 1)
        logits = logits_of(batch["input_ids"], batch["attention_mask"], given)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=tokenizer.pad_token_id)
        loss.backward()
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fairseq", "opennmt"])
def test_all_the_way(toolkits, pairs, run_main, start_programs, hub, tmp_path, monkeypatch, kind):
    make = {"fairseq": fairseq_model, "opennmt": opennmt_model}[kind]
    with monkeypatch.context() as patch:
        patch.setattr(toolkits, "randomize", soft)
        theirs, logits_of = make(toolkits, pairs["train"][:2000], tmp_path)
    content = {"fairseq": lambda: theirs.content("cfg"), "opennmt": theirs.content}[kind]
    run_main(import_main, toolkits.save(content(), tmp_path / "model.pt"), tmp_path / "untaught")
    teach(theirs, logits_of, tmp_path / "untaught", pairs["train"][:4000])
    run_main(import_main, toolkits.save(content(), tmp_path / "model.pt"), tmp_path / "base")
    recipe = tmp_path / "tune.yaml"
    recipe.write_text(RECIPE.format(base=tmp_path / "base", out=tmp_path / "tuned"))
    with start_programs("training.train", "training.score", "hub.export", "hub.push", **hub.environment) as programs:
        programs.run("training.train", recipe)
        text = [source for source, _ in pairs["test"][:20]]
        before, after = (bleu(tmp_path / name, pairs["test"][:100]) for name in ("base", "tuned"))
        print(f"{kind}: BLEU {before:.1f} before, {after:.1f} after")
        assert 1 < before < after - 5  # what came along was of use, and 200 updates add to it
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


def bleu(folder: Path, test: list[tuple[str, str]]) -> float:
    sources, references = (list(side) for side in zip(*test, strict=True))
    return sacrebleu.corpus_bleu(translated(folder, sources), [references]).score


def same_in_ctranslate2(folder: Path, exported: Path, text: list[str]) -> None:
    import ctranslate2

    folders = sorted(exported.glob("*_tokenizer")) or [exported]  # of the source and of the target, or of both
    source, target = (AutoTokenizer.from_pretrained(folders[i]) for i in (0, -1))
    tokens = [source.convert_ids_to_tokens(source(line).input_ids) for line in text]
    translator = ctranslate2.Translator(str(exported), intra_threads=1)
    results = translator.translate_batch(tokens, beam_size=1, max_decoding_length=30)
    ids = [target.convert_tokens_to_ids(each.hypotheses[0]) for each in results]
    found = target.batch_decode(ids, skip_special_tokens=True)
    assert found == translated(folder, text)
