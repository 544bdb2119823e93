"""Pushes by the real client to a server on loopback that speaks the Hub's protocol, whole and with faults."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hub.push import gather, smoke_test_upload

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
        (folder / "checkpoint-3").mkdir(exist_ok=True)
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
    dry = programs.run("hub.push", folder, name, "--license", "mit", "--dry_run")
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
    environment["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # sums of another number may differ in the last bit
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


FAST = "import hub.push; hub.push.smoke_test_upload = lambda *_: ''"  # it is looked at in other tests
FAULTS = [
    ("create", "500"), ("create", "drop"), ("preupload", "403"), ("preupload", "500"), ("batch", "403"),
    ("put", "403"), ("verify", "403"), ("commit", "500"), ("commit", "drop"), ("commit", "lost"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "how"), FAULTS)
def test_a_push_that_breaks_off_leaves_the_repository_whole(programs, hub, checkpoint, kind, how):
    name = f"user/fault-{kind}-{how}"
    programs.run("hub.push", checkpoint(seed=1), name, before=FAST)
    first = dict(hub.repositories[name].files("main"))
    hub.objects.clear()  # or files that other tests have uploaded would not be sent
    hub.fault(kind, how)
    process = programs.start("hub.push", checkpoint(seed=2), name, before=FAST)
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
    programs.run("hub.push", last, name, before=FAST)
    weights = hub.repositories[name].files("main")["model.safetensors"]
    assert weights == (last / "model.safetensors").read_bytes()
    assert len(hub.repositories[name].branches["main"]) <= 4


def test_private_repositories_and_revisions(programs, hub, checkpoint):
    folder = checkpoint()
    programs.run("hub.push", folder, "user/private", "--private", "--revision", "try", before=FAST)
    repository = hub.repositories["user/private"]
    assert repository.private
    assert repository.files("main") == {}
    assert "model.safetensors" in repository.files("try")


SLOW_CHECK = """
import hub.push, tempfile
tempfile.tempdir = {!r}
hub.push.CHECK = "import time; time.sleep(600)"
"""
SLOW_UPLOAD = f"""{FAST}
from huggingface_hub import HfApi
def slowly(*arguments, preupload=HfApi.preupload_lfs_files, **options):
    import os, time
    print("uploading", flush=True)
    while not os.path.exists({{!r}}):
        time.sleep(0.01)
    return preupload(*arguments, **options)
HfApi.preupload_lfs_files = slowly
"""
PNG = b"\x89PNG\r\n\x1a\n" + bytes(4) + b"IEND" + bytes(4)
MINE = {
    "notes.md": b"mine", "onnx/config.json": b"{}", "onnx/model.safetensors": b"x", "gguf/tokenizer.json": b"{}",
    "openvino/tokenizer.json": b"{}", "my_vanilla_transformer.py": b"x = 1", "training_curve.png": b"x",
    "adapter/adapter_model.safetensors": b"x",
}  # fmt: skip


def test_what_is_gone_from_the_folder_goes_from_the_repository(programs, hub, checkpoint):
    """And nothing else: neither what others have put there, whatever its name, nor what they have changed."""
    folder = checkpoint()
    (folder / "import_report.json").write_text('{"layout": "hkproj"}')
    programs.run("hub.push", folder, "user/stale", before=FAST)
    there = hub.repositories["user/stale"].branches["main"][-1]
    there |= MINE | {"import_report.json": b'{"layout": "mine"}'}
    (folder / "samples.tsv").unlink()
    (folder / "import_report.json").unlink()
    programs.run("hub.push", folder, "user/stale", before=FAST)
    files = hub.repositories["user/stale"].files("main")
    assert "samples.tsv" not in files
    assert files["import_report.json"] == b'{"layout": "mine"}'
    assert MINE.items() <= files.items()


@pytest.mark.parametrize("name", ["README.md", "config.json", "model.safetensors"])
def test_what_others_have_changed_is_not_overwritten_unasked(programs, hub, checkpoint, name):
    programs.run("hub.push", checkpoint(seed=1), "user/changed", before=FAST)
    hub.repositories["user/changed"].branches["main"][-1][name] = b"somebody's own"
    before = dict(hub.repositories["user/changed"].files("main"))
    process = programs.run("hub.push", checkpoint(seed=2), "user/changed", status=2, before=FAST)
    assert f"user/changed holds {name}" in process.stderr
    assert "--replace" in process.stderr
    assert ("--card keep" in process.stderr) == (name == "README.md")
    assert hub.repositories["user/changed"].files("main") == before
    if name == "README.md":
        programs.run("hub.push", checkpoint(seed=2), "user/changed", "--card", "keep", before=FAST)
        assert hub.repositories["user/changed"].files("main")[name] == b"somebody's own"
    programs.run("hub.push", checkpoint(seed=3), "user/changed", "--replace", before=FAST)
    assert hub.repositories["user/changed"].files("main")[name] != b"somebody's own"
    programs.run("hub.push", checkpoint(seed=4), "user/changed", before=FAST)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"config.json": 3}', b"[" * 100_000])
def test_a_broken_list_makes_nothing_ours(programs, hub, checkpoint, content):
    programs.run("hub.push", checkpoint(seed=1), "user/list", "--replace", before=FAST)
    hub.repositories["user/list"].branches["main"][-1]["pushed_files.json"] = content
    process = programs.run("hub.push", checkpoint(seed=2), "user/list", status=2, before=FAST)
    assert "--replace" in process.stderr


@pytest.mark.parametrize("rule", ["samples.tsv", "*.safetensors", "*.json"])
def test_what_the_repository_ignores_is_not_left_out_in_silence(programs, hub, checkpoint, rule):
    """A commit would go through without those files, and mix this model with the one before."""
    name = f"user/ignores-{len(hub.repositories)}"
    programs.run("hub.push", checkpoint(seed=1), name, before=FAST)
    hub.repositories[name].branches["main"][-1][".gitignore"] = f"# mine\n{rule}\n".encode()
    before = dict(hub.repositories[name].files("main"))
    process = programs.run("hub.push", checkpoint(seed=2), name, status=2, before=FAST)
    assert f"the .gitignore of {name} keeps " in process.stderr
    assert rule.strip("*") in process.stderr
    assert process.stderr.count("hub.push: ") == 1
    assert hub.repositories[name].files("main") == before
    del hub.repositories[name].branches["main"][-1][".gitignore"]
    programs.run("hub.push", checkpoint(seed=2), name, before=FAST)


@pytest.mark.parametrize("attributes", [b"", b"*.json filter=lfs diff=lfs\n*.tsv filter=lfs\n"])
def test_whatever_the_repository_keeps_apart_stays_ours(programs, hub, checkpoint, attributes):
    """Its .gitattributes says which files are stored by their SHA-256, and which in git; it stays itself, too."""
    name = f"user/attributes-{len(attributes)}"
    programs.run("hub.push", checkpoint(seed=1), name, before=FAST)
    hub.repositories[name].branches["main"][-1][".gitattributes"] = attributes
    for seed in (2, 3):
        folder = checkpoint(seed=seed)
        programs.run("hub.push", folder, name, before=FAST)
        files = hub.repositories[name].files("main")
        for path in (folder / "model.safetensors", folder / "config.json", folder / "samples.tsv"):
            assert files[path.name] == path.read_bytes()
    assert files[".gitattributes"] == attributes


def test_a_readme_in_the_folder_is_not_passed_over(programs, hub, checkpoint):
    folder = checkpoint()
    (folder / "README.md").write_text("---\nlicense: mit\n---\n\n# My own words\n")
    process = programs.run("hub.push", folder, "user/readme", status=2, before=FAST)
    assert "--card local takes it as the card, --card generated another" in process.stderr
    assert "user/readme" not in hub.repositories
    programs.run("hub.push", folder, "user/readme", "--card", "local", before=FAST)
    assert b"# My own words" in hub.repositories["user/readme"].files("main")["README.md"]
    programs.run("hub.push", folder, "user/readme", "--card", "generated", before=FAST)
    assert b"12.34" in hub.repositories["user/readme"].files("main")["README.md"]


def test_two_pushes_at_once_do_not_mix(programs, hub, checkpoint, tmp_path):
    """The second finds that the repository is no longer what it has looked at; done again, it is whole."""
    programs.run("hub.push", checkpoint(seed=1), "user/both", before=FAST)
    go_on = tmp_path / "go on"
    slow = programs.start("hub.push", checkpoint(seed=2), "user/both", before=SLOW_UPLOAD.format(str(go_on)))
    fast = checkpoint(seed=3)
    slow.wait_for(lambda: "uploading" in slow.stdout)
    programs.run("hub.push", fast, "user/both", before=FAST)
    go_on.touch()
    assert slow.status == 2
    assert "user/both was changed by somebody else in the meantime" in slow.stderr
    weights = hub.repositories["user/both"].files("main")["model.safetensors"]
    assert weights == (fast / "model.safetensors").read_bytes()


def test_a_public_repository_is_not_taken_for_a_private_one(programs, hub, checkpoint):
    programs.run("hub.push", checkpoint(seed=1), "user/public", before=FAST)
    before = dict(hub.repositories["user/public"].files("main"))
    process = programs.run("hub.push", checkpoint(seed=2), "user/public", "--private", status=2, before=FAST)
    assert "user/public is there already, and public" in process.stderr
    assert hub.repositories["user/public"].files("main") == before


def test_a_bare_name_is_that_of_the_user(programs, hub, checkpoint):
    programs.run("hub.push", checkpoint(), "bare", before=FAST)
    card = hub.repositories["user/bare"].files("main")["README.md"]
    assert b'model="user/bare"' in card
    assert "bare" not in hub.repositories


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a/b/c",), "is no name for a repository"),
        (("user/x--y",), "is no name for a repository"),
        (("user/name.git",), "is no name for a repository"),
        (("user/empty", "--message", " "), "the commit has no message"),
        (("user/empty", "--revision", "a..b"), "give the name of a branch"),
        (("user/empty", "--revision", "../main"), "give the name of a branch"),
        (("user/empty", "--license", "not a thing!"), "is no license"),
        (("user/empty", "--card", "local"), "README.md"),
        (("user/empty", "--card", "local", "--license", "mit"), "go into a made card"),
        (("user/empty", "--card", "keep", "--license", "mit"), "go into a made card"),
    ],
)
def test_a_mistake_on_the_command_line_makes_no_repository(programs, hub, checkpoint, arguments, message):
    count = len(hub.repositories)
    process = programs.run("hub.push", checkpoint(), *arguments, status=2, before=FAST)
    assert message in process.stderr
    assert process.stderr.count("hub.push: ") == 1
    assert len(hub.repositories) == count


def test_without_a_network_there_is_one_line(start_programs, checkpoint):
    away = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": "hf_test", "HF_HUB_OFFLINE": "0"}
    with start_programs("hub.push", "hub.decoding", "hub.space.__main__", **away) as programs:
        folder = checkpoint()
        for verb, *arguments in (
            ("hub.push", folder, "user/name"),
            ("hub.push", folder, "bare"),
            ("hub.decoding", folder / "decoding", "--push", "user/name"),
            ("hub.space.__main__", "user/model", "--push", "user/space"),
        ):
            process = programs.run(verb, *arguments, status=2, before=FAST if verb == "hub.push" else "")
            lines = [line for line in process.stderr.splitlines() if line.startswith("hub.")]
            assert len(lines) == 1
            assert "the Hub cannot be reached" in lines[0]
            assert "Traceback" not in process.stderr


@pytest.mark.parametrize("moment", ["check", "upload"])
def test_ctrl_c_ends_it_quietly(programs, hub, checkpoint, tmp_path, moment):
    name, temporary = f"user/stopped-{moment}", tmp_path / "temporary"
    temporary.mkdir()
    before = SLOW_CHECK.format(str(temporary)) if moment == "check" else SLOW_UPLOAD.format("/never")
    process = programs.start("hub.push", checkpoint(), name, before=before)
    process.wait_for(lambda: "uploading" in process.stdout or list(temporary.rglob("README.md")))
    process.kill(signal.SIGINT)
    assert process.status == 130
    assert "Traceback" not in process.stderr
    assert not list(temporary.iterdir())
    assert name not in hub.repositories or hub.repositories[name].files("main") == {}


def test_a_kill_leaves_no_copy_of_the_weights(programs, checkpoint, tmp_path):
    folder, temporary = checkpoint(), tmp_path / "temporary"
    temporary.mkdir()
    process = programs.start("hub.push", folder, "user/killed", before=SLOW_CHECK.format(str(temporary)))
    process.wait_for(lambda: list(temporary.rglob("README.md")))
    process.kill()
    weights = (folder / "model.safetensors").stat().st_size
    assert not [path for path in temporary.rglob("*") if path.is_file() and path.lstat().st_size == weights]


def add_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | {"mine": torch.zeros(2)}, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "tokenizer_config.json").unlink(), "it has no tokenizer_config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "it has no weights"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x"), "is no safetensors file"),
        (
            lambda folder: save_file({}, folder / "model.safetensors"),
            "does not load without our package: the weights lack",
        ),
        (lambda folder: add_tensor(folder), "does not load without our package: of no use is mine."),
        (lambda folder: save_file({}, folder / "model.safetensors", {"x": "/home/me/x"}), "holds a path of this"),
        (lambda folder: (folder / "attention_1.png").write_bytes(b"/home/me/x"), "attention_1.png is not a PNG image"),
        (lambda folder: (folder / "source.spm").write_bytes(b"\x80pickle"), "source.spm is not a SentencePiece model"),
        (
            lambda folder: (folder / "all_results.json").write_text('{"where": "/home/me/x"}'),
            "holds a path of this machine",
        ),
        (lambda folder: (folder / "all_results.json").write_text('{"t": "hf_' + "a" * 34 + '"}'), "holds a token"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "training_curve.png"), "it has no weights"),
        (lambda folder: (folder / "recipe.yaml").write_text("a: [1"), "recipe.yaml is no YAML"),
        (lambda folder: (folder / "all_results.json").write_text("{"), "all_results.json is no JSON"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is no JSON"),
    ],
)
def test_what_must_not_be_uploaded_is_not(programs, hub, checkpoint, change, message):
    folder = checkpoint()
    change(folder)
    process = programs.run("hub.push", folder, "user/never", status=2, before="" if "load" in message else FAST)
    assert message in process.stderr
    assert "user/never" not in hub.repositories


def test_pictures_and_sentencepiece_models_go_up_without_local_paths(programs, hub, checkpoint, sentencepiece_models):
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    folder, model = checkpoint(), ModelProto.FromString(sentencepiece_models["en"])
    model.trainer_spec.input.append(str(folder / "corpus.en"))
    model.trainer_spec.model_prefix = "/lustre/me/source"
    (folder / "source.spm").write_bytes(model.SerializeToString())
    (folder / "attention_1.png").write_bytes(PNG + b"/home/me/x")
    programs.run("hub.push", folder, "user/stripped", before=FAST)
    files = hub.repositories["user/stripped"].files("main")
    assert files["attention_1.png"] == PNG
    assert b"/lustre" not in files["source.spm"]
    assert str(folder).encode() not in files["source.spm"]
    assert ModelProto.FromString(files["source.spm"]).pieces == model.pieces


def test_a_model_of_few_learned_positions_passes_the_check(tmp_path, make_model, make_tokenizer):
    """Its source and translation have positions, although it never ends."""
    tokenizer, sizes = make_tokenizer(True)
    model = make_model(position_embedding_type="learned", max_position_embeddings=12, **sizes)
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] = -model.lm_head.weight[3]
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "run")
    assert smoke_test_upload(gather(tmp_path / "run"), "the dog") is not None


def test_both_vocabularies_of_a_marian_tokenizer_are_uploaded(checkpoint):
    folder = checkpoint()
    for name in ("vocab.json", "target_vocab.json"):
        (folder / name).write_text("{}")
    assert {"vocab.json", "target_vocab.json"} <= gather(folder).keys()


def test_a_folder_that_is_named_like_a_picture_stays_at_home(checkpoint):
    folder = checkpoint()
    for name in ("attention_1.png", "training_curve.png", "import_report.json", "x.safetensors"):
        (folder / name).mkdir()
    files = gather(folder)
    assert "attention_1.png" not in files
    assert "import_report.json" not in files
    assert files["model.safetensors"] == folder / "model.safetensors"


@pytest.mark.parametrize(
    ("name", "before", "message"),
    [
        ("other/name", "", "you may not write to other/name"),
        ("no name", "", "is no name for a repository"),
        ("user/name", "import os; os.environ['HF_TOKEN'] = 'hf_wrong'", "your token is not valid"),
    ],
)
def test_refusals_are_told_with_their_cure(programs, checkpoint, name, before, message):
    process = programs.run("hub.push", checkpoint(), name, status=2, before=f"{before}\n{FAST}")
    assert message in process.stderr


@pytest.fixture(scope="module")
def programs_with_xet(start_programs, hub):
    with start_programs("hub.push", **(hub.environment | {"HF_HUB_DISABLE_XET": "0"})) as server:
        yield server


def test_large_files_go_through_xet_where_the_hub_has_it(programs_with_xet, hub, checkpoint, tmp_path):
    folder = checkpoint()
    hub.xet = tmp_path / "xet"
    try:
        programs_with_xet.run("hub.push", folder, "user/xet", "--license", "mit", before=FAST)
    finally:
        hub.xet = None
    weights = (folder / "model.safetensors").read_bytes()
    named = hub.repositories["user/xet"].files("main")["model.safetensors"].decode()
    assert named == f"xet {hashlib.sha256(weights).hexdigest()} {len(weights)}"
    assert sum(path.stat().st_size for path in (tmp_path / "xet").rglob("*") if path.is_file()) > len(weights) / 2


def test_a_hub_without_xet_is_told_and_nothing_is_committed(programs_with_xet, programs, hub, checkpoint):
    folder = checkpoint(seed=7)
    process = programs_with_xet.run("hub.push", folder, "user/noxet", "--license", "mit", status=2, before=FAST)
    assert "HF_HUB_DISABLE_XET=1" in process.stderr
    assert hub.repositories["user/noxet"].files("main") == {}
    programs.run("hub.push", folder, "user/noxet", "--license", "mit", before=FAST)
    assert "model.safetensors" in hub.repositories["user/noxet"].files("main")


def test_a_run_of_the_training_program_ends_with_a_push(start_programs, hub, recipe, tmp_path):
    """With our card, and without the pickle that the Trainer would send."""
    with start_programs("training.train", **hub.environment) as programs:
        arguments = ("--push_to_hub", "true", "--hub_model_id", "user/run", "--precision", "fp32")
        process = programs.run("training.train", recipe, *arguments)
        again = programs.run("training.train", recipe, *arguments, status=0)
    assert "user/run/commit" in process.stdout
    assert "contains this run, already finished" in again.stdout
    files = hub.repositories["user/run"].files("main")
    assert not [name for name in files if name.endswith(".bin") or name.startswith("checkpoint")]
    results = json.loads((tmp_path / "out" / "all_results.json").read_text())
    card = files["README.md"].decode()
    assert f"{results['test_chrf']:.2f}" in card
    assert results["train_sha256"] in card
    assert f"{results['parameters']:,}" in card
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
