"""Small trained fairseq and OpenNMT-py checkpoints are imported, fine-tuned, exported, pushed and loaded."""

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
tokens_per_update: 1024
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
EXTERNAL_USER_SCRIPT = """
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

    return generate(4000, 50, 100)


def count_words(pairs, side: int) -> list[str]:
    return [word for word, _ in collections.Counter(w for pair in pairs for w in pair[side].split()).most_common()]


def fairseq_model(toolkits, pairs, folder: Path):
    """Create a model with a joint dictionary and BPE codes, which the library tokenizers learns."""
    learned = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    learned.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(vocab_size=1000, end_of_word_suffix="</w>", show_progress=False)
    learned.train_from_iterator((line for pair in pairs for line in pair), trainer)
    merges = json.loads(learned.to_str())["model"]["merges"]
    (folder / "code").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges), encoding="utf-8")
    parts = [part[:-4] if part.endswith("</w>") else f"{part}@@" for part in learned.get_vocab()]
    for language in ("de", "en"):
        (folder / f"dict.{language}.txt").write_text("".join(f"{part} 9\n" for part in parts), encoding="utf-8")
    size = len(parts) + 4
    reference = toolkits.make(
        "fairseq t2t",
        **{"d": 64, "ff": 128, "sizes": (size, size), "share_all_embeddings": True, "source_lang": "en"},
        **{"target_lang": "de", "max_source_positions": 256, "max_target_positions": 256},
    )
    return reference, lambda source, mask, target: reference(source, None, target)[0]


def opennmt_model(toolkits, pairs, folder: Path):
    """Create a model of version 2 with word vocabularies. The import adds <s> and </s> to the source."""
    source, target = count_words(pairs, 0)[:600], count_words(pairs, 1)[:600]
    reference = toolkits.make("opennmt 2", d=64, ff=128, sizes=(len(source) + 2, len(target) + 4))
    special = ["<unk>", "<blank>", "<s>", "</s>"]
    reference.tokens = lambda: [special[:2] + source, special + target]
    return reference, lambda source, mask, target: reference(torch.where(source > 3, source - 2, source), mask, target)


def initialize(model):
    """Initialize the weights as before training."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.xavier_uniform_(parameter)
    return model


def train_reference(reference, logits_of, folder: Path, pairs, updates: int = 300) -> None:
    """Train a reference model on ids of its tokenizer."""
    tokenizer, start = AutoTokenizer.from_pretrained(folder), 2
    optimizer = torch.optim.Adam(reference.parameters(), lr=2e-3, betas=(0.9, 0.98))
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1, (update + 1) / 50)
        chosen = [pairs[(64 * update + i) % len(pairs)] for i in range(64)]
        sources, targets = (list(side) for side in zip(*chosen, strict=True))
        batch = tokenizer(sources, text_target=targets, return_tensors="pt", padding=True)
        labels = batch["labels"]
        decoder_input_ids = torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], 1)
        logits = logits_of(batch["input_ids"], batch["attention_mask"], decoder_input_ids)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=tokenizer.pad_token_id)
        loss.backward()
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fairseq", "opennmt"])
def test_round_trip(toolkits, pairs, run_main, start_programs, small_corpus, hub, tmp_path, monkeypatch, kind):
    make = {"fairseq": fairseq_model, "opennmt": opennmt_model}[kind]
    with monkeypatch.context() as patch:
        patch.setattr(toolkits, "randomize", initialize)
        reference, logits_of = make(toolkits, pairs["train"][:2000], tmp_path)
    content = {"fairseq": lambda: reference.content("cfg"), "opennmt": reference.content}[kind]
    run_main(import_main, toolkits.save(content(), tmp_path / "model.pt"), tmp_path / "untrained")
    train_reference(reference, logits_of, tmp_path / "untrained", pairs["train"])
    run_main(import_main, toolkits.save(content(), tmp_path / "model.pt"), tmp_path / "base")
    recipe = tmp_path / "tune.yaml"
    recipe.write_text(RECIPE.format(base=tmp_path / "base", out=tmp_path / "tuned"))
    with start_programs("training.train", "hub.export", "hub.push", **hub.environment) as programs:
        programs.run("training.train", recipe, setup_code=small_corpus)
        text = [source for source, _ in pairs["test"][:20]]
        before, after = (bleu(tmp_path / name, pairs["test"]) for name in ("base", "tuned"))
        print(f"{kind}: BLEU {before:.1f} before, {after:.1f} after")
        assert 1 < before < after - 5  # the imported model translates, and 200 updates improve it
        programs.run("hub.export", tmp_path / "tuned", tmp_path / "ct2", "--to", "ctranslate2")
        assert_same_in_ctranslate2(tmp_path / "tuned", tmp_path / "ct2", text)
        programs.run("hub.push", tmp_path / "tuned", f"user/{kind}", "--license", "mit")
    environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "PATH": "/usr/bin"}
    process = subprocess.run(
        [sys.executable, "-c", EXTERNAL_USER_SCRIPT, f"user/{kind}", *text],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    assert process.stdout.rstrip("\n").split("\n") == translate(tmp_path / "tuned", text)


def translate(folder: Path, text: list[str]) -> list[str]:
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(text, return_tensors="pt", padding=True)
    ids = model.generate(**batch, num_beams=1, max_new_tokens=30)
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


def bleu(folder: Path, test: list[tuple[str, str]]) -> float:
    sources, references = (list(side) for side in zip(*test, strict=True))
    return sacrebleu.corpus_bleu(translate(folder, sources), [references]).score


def assert_same_in_ctranslate2(folder: Path, exported: Path, text: list[str]) -> None:
    import ctranslate2

    folders = sorted(exported.glob("*_tokenizer")) or [exported]  # one per side, or one for both sides
    source, target = (AutoTokenizer.from_pretrained(folders[i]) for i in (0, -1))
    tokens = [source.convert_ids_to_tokens(source(line).input_ids) for line in text]
    translator = ctranslate2.Translator(str(exported), intra_threads=1)
    results = translator.translate_batch(tokens, beam_size=1, max_decoding_length=30)
    ids = [target.convert_tokens_to_ids(each.hypotheses[0]) for each in results]
    translations = target.batch_decode(ids, skip_special_tokens=True)
    assert translations == translate(folder, text)
