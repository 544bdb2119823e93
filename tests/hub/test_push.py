"""Pushes by the real client to a server on loopback that speaks the Hub's protocol, whole and with faults."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def programs(start_programs, hub):
    with start_programs("hub.push", **hub.environment) as server:
        yield server


@pytest.fixture
def checkpoint(tmp_path, make_model, make_tokenizer):
    """A folder as a run leaves it, with what must not be uploaded."""

    def make(shared: bool = True, seed: int = 0) -> Path:
        folder = tmp_path / f"run{seed}"
        tokenizer, sizes = make_tokenizer(shared)
        model = make_model(seed=seed, **sizes)
        model.generation_config.update(max_new_tokens=12)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "samples.tsv").write_text("source\treference\ttranslation\nthe dog runs\tder Hund rennt\tder Hund\n")
        (folder / "recipe.yaml").write_text(f"output_dir: {folder}\nsource_lang: en\ntarget_lang: de\n")
        (folder / "all_results.json").write_text(json.dumps({"test_bleu": 12.34, "updates": 3} | FACTS))
        (folder / "training_args.bin").write_bytes(b"pickle")
        (folder / "checkpoint-3").mkdir()
        (folder / "checkpoint-3" / "optimizer.pt").write_bytes(b"pickle")
        return folder

    return make


FACTS = {"train_target_tokens": 1, "train_runtime": 1.0, "device": "x", "processes": 1, "threads": 1, "cpu_cores": 1}
FACTS |= {"precision": "fp32", "parameters": 1}
STRANGER = """
import json, sys
sys.modules["vanilla_transformer"] = None
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline
trust = {"trust_remote_code": True}
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], **trust)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], **trust)
batch = tokenizer("the dog runs", text_target="der Hund", return_tensors="pt")
with torch.no_grad():
    logits = model(**batch).logits
translate = pipeline("translation", model=sys.argv[1], **trust)
try:
    AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], trust_remote_code=False)
    refused = False
except ValueError:
    refused = True
text = translate("the dog runs", max_new_tokens=12)[0]["translation_text"]
torch.save(logits, sys.argv[2])
print(json.dumps({"refused": refused, "text": text}))
"""


@pytest.mark.parametrize("shared", [True, False])
def test_strangers_load_what_was_pushed(programs, hub, checkpoint, tmp_path, make_model, shared):
    """The same logits bit for bit, in a process where our package cannot be imported; without trust a refusal."""
    name = f"user/demo-{shared}"
    folder = checkpoint(shared)
    dry = programs.run("hub.push", folder, name, "--license", "mit", "--dry-run")
    assert name not in hub.repositories
    programs.run("hub.push", folder, name, "--license", "mit")
    files = hub.repositories[name].files("main")
    for file in files:
        assert f"  {file}\n" in dry.stdout, file
        assert not file.endswith((".bin", ".pt", ".pkl", ".pth"))
    assert str(tmp_path).encode() not in b"".join(files.values())
    assert b"12.34" in files["README.md"]

    logits = tmp_path / "logits.pt"
    environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "PATH": "/usr/bin"}
    process = subprocess.run(
        [sys.executable, "-c", STRANGER, name, logits],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    batch = tokenizer("the dog runs", text_target="der Hund", return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(torch.load(logits), model(**batch).logits)
    told = json.loads(process.stdout.splitlines()[-1])
    ids = model.generate(**tokenizer("the dog runs", return_tensors="pt"), max_new_tokens=12)
    assert told == {"refused": True, "text": tokenizer.decode(ids[0], skip_special_tokens=True)}


FAULTS = [
    ("create", "500"), ("create", "drop"), ("preupload", "403"), ("preupload", "500"), ("batch", "403"),
    ("put", "403"), ("verify", "403"), ("commit", "500"), ("commit", "drop"), ("commit", "lost"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "how"), FAULTS)
def test_a_push_that_breaks_off_leaves_the_repository_whole(programs, hub, checkpoint, kind, how):
    name = f"user/fault-{kind}-{how}"
    programs.run("hub.push", checkpoint(seed=1), name)
    first = dict(hub.repositories[name].files("main"))
    hub.objects.clear()  # or files that other tests have uploaded would not be sent
    hub.fault(kind, how)
    process = programs.start("hub.push", checkpoint(seed=2), name)
    status, told = process.status, process.stderr
    assert kind not in hub.faults, "the fault was not met"
    if status:
        assert status == 2, told[-1500:]
        assert told.count("hub.push: ") == 1, told[-1500:]
        assert "Traceback" not in told
    now = hub.repositories[name].files("main")
    if how != "lost" and status:
        assert now == first
    last = checkpoint(seed=3)
    programs.run("hub.push", last, name)
    weights = hub.repositories[name].files("main")["model.safetensors"]
    assert weights == (last / "model.safetensors").read_bytes()
    assert len(hub.repositories[name].branches["main"]) <= 4


def test_private_repositories_and_revisions(programs, hub, checkpoint):
    folder = checkpoint()
    programs.run("hub.push", folder, "user/private", "--private", "--revision", "try")
    repository = hub.repositories["user/private"]
    assert repository.private
    assert repository.files("main") == {}
    assert "model.safetensors" in repository.files("try")


def test_what_is_gone_from_the_folder_goes_from_the_repository(programs, hub, checkpoint):
    folder = checkpoint()
    programs.run("hub.push", folder, "user/stale")
    hub.repositories["user/stale"].branches["main"][-1]["notes.md"] = b"mine"
    (folder / "samples.tsv").unlink()
    programs.run("hub.push", folder, "user/stale")
    files = hub.repositories["user/stale"].files("main")
    assert "samples.tsv" not in files
    assert files["notes.md"] == b"mine"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "tokenizer_config.json").unlink(), "it has no tokenizer_config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "it has no weights"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x"), "does not load without our package"),
        (
            lambda folder: (folder / "all_results.json").write_text('{"where": "/home/me/x"}'),
            "holds a path of this machine",
        ),
        (lambda folder: (folder / "all_results.json").write_text('{"t": "hf_' + "a" * 34 + '"}'), "holds a token"),
    ],
)
def test_what_must_not_be_uploaded_is_not(programs, hub, checkpoint, change, message):
    folder = checkpoint()
    change(folder)
    process = programs.run("hub.push", folder, "user/never", status=2)
    assert message in process.stderr
    assert "user/never" not in hub.repositories


@pytest.mark.parametrize(
    ("name", "before", "message"),
    [
        ("other/name", "", "you may not write to other/name"),
        ("no name", "", "is no name for a repository"),
        ("user/name", "import os; os.environ['HF_TOKEN'] = 'hf_wrong'", "your token is not valid"),
    ],
)
def test_refusals_are_told_with_their_cure(programs, checkpoint, name, before, message):
    process = programs.run("hub.push", checkpoint(), name, status=2, before=before)
    assert message in process.stderr


# --- Xet, which the client prefers for large files ---


@pytest.fixture(scope="module")
def programs_with_xet(start_programs, hub):
    with start_programs("hub.push", **(hub.environment | {"HF_HUB_DISABLE_XET": "0"})) as server:
        yield server


def test_large_files_go_through_xet_where_the_hub_has_it(programs_with_xet, hub, checkpoint, tmp_path):
    folder = checkpoint()
    hub.xet = tmp_path / "xet"
    try:
        programs_with_xet.run("hub.push", folder, "user/xet", "--license", "mit")
    finally:
        hub.xet = None
    weights = (folder / "model.safetensors").read_bytes()
    named = hub.repositories["user/xet"].files("main")["model.safetensors"].decode()
    assert named == f"xet {hashlib.sha256(weights).hexdigest()} {len(weights)}"
    assert sum(path.stat().st_size for path in (tmp_path / "xet").rglob("*") if path.is_file()) > len(weights) / 2


def test_a_hub_without_xet_is_told_and_nothing_is_committed(programs_with_xet, programs, hub, checkpoint):
    folder = checkpoint(seed=7)
    process = programs_with_xet.run("hub.push", folder, "user/noxet", "--license", "mit", status=2)
    assert "HF_HUB_DISABLE_XET=1" in process.stderr
    assert hub.repositories["user/noxet"].files("main") == {}
    programs.run("hub.push", folder, "user/noxet", "--license", "mit")
    assert "model.safetensors" in hub.repositories["user/noxet"].files("main")


# --- The Trainer's own upload ---


def test_a_run_of_the_training_program_ends_with_a_push(start_programs, hub, recipe, tmp_path):
    """With our card, and without the pickle that the Trainer would send."""
    with start_programs("training.train", **hub.environment) as programs:
        arguments = ("--push_to_hub", "true", "--hub_model_id", "user/run", "--precision", "fp32")
        process = programs.run("training.train", recipe, *arguments)
        again = programs.run("training.train", recipe, *arguments, status=0)
    assert "user/run/commit" in process.stdout
    assert "holds this run, finished" in again.stdout
    files = hub.repositories["user/run"].files("main")
    assert not [name for name in files if name.endswith(".bin") or name.startswith("checkpoint")]
    results = json.loads((tmp_path / "out" / "all_results.json").read_text())
    assert f"{results['test_chrf']:.2f}" in files["README.md"].decode()
    assert len(hub.repositories["user/run"].branches["main"]) == 2  # the empty one, and one commit


def test_a_run_that_may_not_push_ends_before_it_trains(start_programs, hub, recipe, tmp_path):
    with start_programs("training.train", **hub.environment) as programs:
        process = programs.run(
            "training.train", recipe, "--push_to_hub", "true", "--hub_model_id", "other/run", status=2
        )
    assert "You don't have the rights to create a model under this namespace" in process.stderr
    assert not (tmp_path / "out" / "model.safetensors").exists()


STOCK = """
import sys
from datasets import Dataset
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments
import vanilla_transformer
folder, name, out = sys.argv[1:]
model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
pairs = Dataset.from_dict(dict(tokenizer(["the dog runs"] * 8, text_target=["der Hund rennt"] * 8)))
arguments = Seq2SeqTrainingArguments(out, max_steps=2, push_to_hub=True, hub_model_id=name, use_cpu=True)
collator = DataCollatorForSeq2Seq(tokenizer, model=model)
trainer = Seq2SeqTrainer(model, arguments, collator, train_dataset=pairs, processing_class=tokenizer)
trainer.train()
trainer.push_to_hub()
model.push_to_hub(name + "-model")
tokenizer.push_to_hub(name + "-model")
"""


@pytest.mark.parametrize("shared", [True, False])
def test_stock_trainer_model_and_tokenizer_push_as_everywhere(hub, checkpoint, tmp_path, repository, shared):
    name = f"user/stock-{shared}"
    process = subprocess.run(
        [sys.executable, "-c", STOCK, checkpoint(shared), name, tmp_path / "trained"],
        cwd=tmp_path, env=os.environ | hub.environment | {"PYTHONPATH": str(repository)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    for pushed in (name, f"{name}-model"):
        environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "PATH": "/usr/bin"}
        process = subprocess.run(
            [sys.executable, "-c", STRANGER, pushed, tmp_path / "logits.pt"],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert process.returncode == 0, process.stderr[-3000:]
        assert json.loads(process.stdout.splitlines()[-1])["refused"]
