"""Pushes with the Hub client to a local server with the Hub's protocol, with and without faults."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PhobertTokenizer

from hub.publishing.upload import gather_files, smoke_test_upload
from hub.run_files import count_parameters
from vanilla_transformer.shared.atomic_io import UPLOAD_PENDING

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def programs(start_programs, hub):
    with start_programs("hub.push", **hub.environment) as programs:
        yield programs


@pytest.fixture
def checkpoint(tmp_path, make_model, make_tokenizer):
    """Function that creates the output directory of a run, with files that must not be uploaded."""

    def make(shared: bool = True, seed: int = 0) -> Path:
        folder = tmp_path / f"run{seed}"
        tokenizer, sizes = make_tokenizer(shared)
        model = make_model(seed=seed, **sizes)
        model.generation_config.update(max_new_tokens=12)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "samples.tsv").write_text("source\treference\ttranslation\nthe dog runs\tder Hund rennt\tder Hund\n")
        (folder / "recipe.yaml").write_text(f"output_dir: {folder}\nsource_lang: en\ntarget_lang: de\n")
        (folder / "all_results.json").write_text(json.dumps({"test_bleu": 12.34, "updates": 3} | RESULTS))
        (folder / "training_args.bin").write_bytes(b"pickle")
        (folder / "checkpoint-3").mkdir(exist_ok=True)
        (folder / "checkpoint-3" / "optimizer.pt").write_bytes(b"pickle")
        return folder

    return make


RESULTS = {"train_target_tokens": 1, "train_runtime": 1.0, "device": "x", "processes": 1, "threads": 1, "cpu_cores": 1}
RESULTS |= {"precision": "fp32", "parameters": 1}
EXTERNAL_SCRIPT = """
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
    is_rejected = False
except ValueError:
    is_rejected = True
text = translate("the dog runs", max_new_tokens=12)[0]["translation_text"]
torch.save(logits, sys.argv[2])
print(json.dumps({"is_rejected": is_rejected, "text": text}))
"""


@pytest.mark.parametrize("shared", [True, False])
def test_pushed_checkpoint_loads_without_package(programs, hub, checkpoint, tmp_path, make_model, shared):
    """A process that cannot import the package gets equal logits, and an error without trust_remote_code."""
    name = f"user/demo-{shared}"
    folder = checkpoint(shared)
    data = {"test": {"source": "hub", "dataset": "owner/pairs"}}
    (folder / "all_results.json").write_text(json.dumps({"test_bleu": 12.34, "data": data}))
    dry = programs.run("hub.push", folder, name, "--license", "mit", "--dry-run")
    assert name not in hub.repositories
    programs.run("hub.push", folder, name, "--license", "mit")
    files = hub.repositories[name].files("main")
    for file in files:
        assert f"  {file}\n" in dry.stdout, file
        assert not file.endswith((".bin", ".pt", ".pkl", ".pth"))
    assert str(tmp_path).encode() not in b"".join(files.values())
    assert b"12.34" in files["README.md"]
    assert b"value: 12.34" in files[".eval_results/bleu.yaml"]

    logits = tmp_path / "logits.pt"
    environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "PATH": "/usr/bin"}
    environment["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # the number of threads changes the rounding
    process = subprocess.run(
        [sys.executable, "-c", EXTERNAL_SCRIPT, name, logits],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    batch = tokenizer("the dog runs", text_target="der Hund", return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(torch.load(logits), model(**batch).logits)
    output = json.loads(process.stdout.splitlines()[-1])
    ids = model.generate(**tokenizer("the dog runs", return_tensors="pt"), max_new_tokens=12)
    assert output == {"is_rejected": True, "text": tokenizer.decode(ids[0], skip_special_tokens=True)}


WITHOUT_SMOKE_TEST = "from hub.publishing import upload; upload.smoke_test_upload = lambda *_: ''"


@pytest.fixture
def push(programs):
    """Function that pushes without a test of the files, which takes seconds."""
    return partial(programs.run, "hub.push", setup_code=WITHOUT_SMOKE_TEST)


FAULTS = [
    ("create", "500"), ("create", "request_lost"), ("preupload", "403"), ("preupload", "500"), ("batch", "403"),
    ("put", "403"), ("verify", "403"), ("commit", "500"), ("commit", "request_lost"), ("commit", "response_lost"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "how"), FAULTS)
def test_failed_push_does_not_change_repository(programs, push, hub, checkpoint, kind, how):
    name = f"user/fault-{kind}-{how}"
    push(checkpoint(seed=1), name)
    first = dict(hub.repositories[name].files("main"))
    hub.objects.clear()  # so that all files are uploaded again
    hub.fault(kind, how)
    process = programs.start("hub.push", checkpoint(seed=2), name, setup_code=WITHOUT_SMOKE_TEST)
    status, stderr = process.status, process.stderr
    assert kind not in hub.faults, "The fault was not triggered."
    if status:
        assert status == 2, stderr[-1500:]
        assert stderr.count("hub.push: ") == 1, stderr[-1500:]
        assert "Traceback" not in stderr
    now = hub.repositories[name].files("main")
    if how != "response_lost" and status:
        assert now == first
    last = checkpoint(seed=3)
    push(last, name)
    weights = hub.repositories[name].files("main")["model.safetensors"]
    assert weights == (last / "model.safetensors").read_bytes()
    assert len(hub.repositories[name].branches["main"]) <= 4


def test_creates_private_repository_and_branch(push, hub, checkpoint):
    folder = checkpoint()
    output = push(folder, "user/private", "--private", "--revision", "try").stdout
    assert 'from_pretrained("user/private", revision="try", trust_remote_code=True)' in output
    repository = hub.repositories["user/private"]
    assert repository.private
    assert repository.files("main") == {}
    assert "model.safetensors" in repository.files("try")
    assert repository.files("try")["README.md"].decode().count('"user/private", revision="try", trust_remote_code') == 3


SLOW_CHECK = """
import tempfile
from hub.publishing import upload
tempfile.tempdir = {!r}
upload.SMOKE_TEST_SCRIPT = "import time; time.sleep(600)"
"""
SLOW_UPLOAD = f"""{WITHOUT_SMOKE_TEST}
from huggingface_hub import HfApi
def slowly(*arguments, preupload=HfApi.preupload_lfs_files, **options):
    import os, time
    print("uploading", flush=True)
    while not os.path.exists({{!r}}):
        time.sleep(0.01)
    return preupload(*arguments, **options)
HfApi.preupload_lfs_files = slowly
"""
READ_ONLY_CHECKPOINT = f"""{WITHOUT_SMOKE_TEST}
import pathlib
def fail(path, unlink=pathlib.Path.unlink, **options):
    if path.parent.name == {{!r}}:
        raise OSError(30, "Read-only file system", str(path))
    return unlink(path, **options)
pathlib.Path.unlink = fail
"""
USER_FILES = {
    "notes.md": b"text", "onnx/config.json": b"{}", "onnx/model.safetensors": b"x", "gguf/tokenizer.json": b"{}",
    "openvino/tokenizer.json": b"{}", "my_vanilla_transformer.py": b"x = 1", "training_curve.png": b"x",
    "adapter/adapter_model.safetensors": b"x",
}  # fmt: skip


def test_deletes_own_stale_files_only(push, hub, checkpoint):
    """Files that others have added or changed are kept."""
    folder = checkpoint()
    (folder / "import_report.json").write_text('{"layout": "hkproj"}')
    push(folder, "user/stale")
    remote = hub.repositories["user/stale"].branches["main"][-1]
    remote |= USER_FILES | {"import_report.json": b'{"layout": "other"}'}
    (folder / "samples.tsv").unlink()
    (folder / "import_report.json").unlink()
    push(folder, "user/stale")
    files = hub.repositories["user/stale"].files("main")
    assert "samples.tsv" not in files
    assert files["import_report.json"] == b'{"layout": "other"}'
    assert USER_FILES.items() <= files.items()


@pytest.mark.parametrize("name", ["README.md", "config.json", "model.safetensors"])
def test_overwrites_changes_by_others_only_with_replace(push, hub, checkpoint, name):
    push(checkpoint(seed=1), "user/changed")
    hub.repositories["user/changed"].branches["main"][-1][name] = b"changed by others"
    files_before = dict(hub.repositories["user/changed"].files("main"))
    process = push(checkpoint(seed=2), "user/changed", status=2)
    assert f"user/changed contains {name}" in process.stderr
    assert "--replace" in process.stderr
    assert ("--card keep" in process.stderr) == (name == "README.md")
    assert hub.repositories["user/changed"].files("main") == files_before
    if name == "README.md":
        push(checkpoint(seed=2), "user/changed", "--card", "keep")
        assert hub.repositories["user/changed"].files("main")[name] == b"changed by others"
    push(checkpoint(seed=3), "user/changed", "--replace")
    assert hub.repositories["user/changed"].files("main")[name] != b"changed by others"
    push(checkpoint(seed=4), "user/changed")


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"config.json": 3}', b"[" * 100_000])
def test_ignores_malformed_manifest(push, hub, checkpoint, content):
    push(checkpoint(seed=1), "user/list", "--replace")
    hub.repositories["user/list"].branches["main"][-1]["pushed_files.json"] = content
    process = push(checkpoint(seed=2), "user/list", status=2)
    assert "--replace" in process.stderr


@pytest.mark.parametrize("rule", ["samples.tsv", "*.safetensors", "*.json"])
def test_rejects_files_in_gitignore(push, hub, checkpoint, rule):
    """`create_commit` skips ignored files, so the repository would mix the files of two models."""
    name = f"user/ignores-{len(hub.repositories)}"
    push(checkpoint(seed=1), name)
    hub.repositories[name].branches["main"][-1][".gitignore"] = f"# rules\n{rule}\n".encode()
    files_before = dict(hub.repositories[name].files("main"))
    process = push(checkpoint(seed=2), name, status=2)
    assert f"The .gitignore of {name} excludes " in process.stderr
    assert rule.strip("*") in process.stderr
    assert process.stderr.count("hub.push: ") == 1
    assert hub.repositories[name].files("main") == files_before
    del hub.repositories[name].branches["main"][-1][".gitignore"]
    push(checkpoint(seed=2), name)


@pytest.mark.parametrize("attributes", [b"", b"*.json filter=lfs diff=lfs\n*.tsv filter=lfs\n"])
def test_recognizes_own_files_with_gitattributes(push, hub, checkpoint, attributes):
    """The .gitattributes file defines which files are stored with LFS. A push keeps it."""
    name = f"user/attributes-{len(attributes)}"
    push(checkpoint(seed=1), name)
    hub.repositories[name].branches["main"][-1][".gitattributes"] = attributes
    for seed in (2, 3):
        folder = checkpoint(seed=seed)
        push(folder, name)
        files = hub.repositories[name].files("main")
        for path in (folder / "model.safetensors", folder / "config.json", folder / "samples.tsv"):
            assert files[path.name] == path.read_bytes()
    assert files[".gitattributes"] == attributes


def test_requires_card_option_for_local_readme(push, hub, checkpoint):
    folder = checkpoint()
    (folder / "README.md").write_text("---\nlicense: mit\n---\n\n# My card\n")
    process = push(folder, "user/readme", status=2)
    assert "Use --card local to upload it, or --card generated to replace it" in process.stderr
    assert "user/readme" not in hub.repositories
    for text in ("# My card\n", "---\nlicense: mit # or another\nmodel-index:\n- name: mine\n---\n# My card\n"):
        (folder / "README.md").write_text(text, encoding="utf-8-sig")  # the Hub would not read metadata after a BOM
        push(folder, "user/readme", "--card", "local")
        assert hub.repositories["user/readme"].files("main")["README.md"] == text.encode()
    (folder / UPLOAD_PENDING).touch()
    push(folder, "user/readme", "--card", "generated", "--dry-run")
    assert (folder / UPLOAD_PENDING).exists()
    push(folder, "user/readme", "--card", "generated")
    assert not (folder / UPLOAD_PENDING).exists()
    assert b"12.34" in hub.repositories["user/readme"].files("main")["README.md"]


def test_pushes_from_read_only_disk(programs, hub, checkpoint):
    folder = checkpoint()
    process = programs.run("hub.push", folder, "user/disk", setup_code=READ_ONLY_CHECKPOINT.format(folder.name))
    assert "user/disk" in process.stdout
    assert "model.safetensors" in hub.repositories["user/disk"].files("main")


def test_concurrent_pushes_do_not_mix(programs, push, hub, checkpoint, tmp_path):
    """The slower push fails, because the repository has changed since it was read."""
    push(checkpoint(seed=1), "user/both")
    resume_file = tmp_path / "resume"
    slow_push = programs.start(
        "hub.push", checkpoint(seed=2), "user/both", setup_code=SLOW_UPLOAD.format(str(resume_file))
    )
    other = checkpoint(seed=3)
    slow_push.wait_for(lambda: "uploading" in slow_push.stdout)
    push(other, "user/both")
    resume_file.touch()
    assert slow_push.status == 2
    assert "user/both was changed by another user in the meantime" in slow_push.stderr
    weights = hub.repositories["user/both"].files("main")["model.safetensors"]
    assert weights == (other / "model.safetensors").read_bytes()


def test_private_push_rejects_public_repository(push, hub, checkpoint):
    push(checkpoint(seed=1), "user/public")
    files_before = dict(hub.repositories["user/public"].files("main"))
    process = push(checkpoint(seed=2), "user/public", "--private", status=2)
    assert "user/public exists and is public" in process.stderr
    assert hub.repositories["user/public"].files("main") == files_before


def test_bare_name_uses_logged_in_user(push, hub, checkpoint):
    push(checkpoint(), "bare")
    card = hub.repositories["user/bare"].files("main")["README.md"]
    assert b'model="user/bare"' in card
    assert "bare" not in hub.repositories


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a/b/c",), "is not a valid repository name"),
        (("user/x--y",), "is not a valid repository name"),
        (("user/name.git",), "is not a valid repository name"),
        (("user/empty", "--message", " "), "The commit message is empty"),
        (("user/empty", "--revision", "a..b"), "is not a valid branch name"),
        (("user/empty", "--revision", "../main"), "is not a valid branch name"),
        (("user/empty", "--license", "not a thing!"), "is not a license"),
        (("user/empty", "--card", "local"), "README.md"),
        (("user/empty", "--card", "local", "--license", "mit"), "require --card generated"),
        (("user/empty", "--card", "keep", "--license", "mit"), "require --card generated"),
    ],
)
def test_invalid_arguments_do_not_create_repository(push, hub, checkpoint, arguments, message):
    count = len(hub.repositories)
    process = push(checkpoint(), *arguments, status=2)
    assert message in process.stderr
    assert process.stderr.count("hub.push: ") == 1
    assert len(hub.repositories) == count


def test_reports_network_error_in_one_line(start_programs, checkpoint):
    unreachable = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": "hf_test", "HF_HUB_OFFLINE": "0"}
    with start_programs("hub.push", "hub.space.__main__", **unreachable) as programs:
        folder = checkpoint()
        for command, *arguments in (
            ("hub.push", folder, "user/name"),
            ("hub.push", folder, "bare"),
            ("hub.space.__main__", "user/model", "--push", "user/space"),
        ):
            process = programs.run(
                command, *arguments, status=2, setup_code=WITHOUT_SMOKE_TEST if command == "hub.push" else ""
            )
            lines = [line for line in process.stderr.splitlines() if line.startswith("hub.")]
            assert len(lines) == 1
            assert "The Hub cannot be reached" in lines[0]
            assert "Traceback" not in process.stderr


@pytest.mark.parametrize("moment", ["check", "upload"])
def test_ctrl_c_exits_without_traceback(programs, hub, checkpoint, tmp_path, moment):
    name, temporary = f"user/stopped-{moment}", tmp_path / "temporary"
    temporary.mkdir()
    setup_code = SLOW_CHECK.format(str(temporary)) if moment == "check" else SLOW_UPLOAD.format("/never")
    process = programs.start("hub.push", checkpoint(), name, setup_code=setup_code)
    process.wait_for(lambda: "uploading" in process.stdout or list(temporary.rglob("README.md")))
    process.kill(signal.SIGINT)
    assert process.status == 130
    assert "Traceback" not in process.stderr
    assert not list(temporary.iterdir())
    assert name not in hub.repositories or hub.repositories[name].files("main") == {}


def test_kill_leaves_no_copy_of_weights(programs, checkpoint, tmp_path):
    folder, temporary = checkpoint(), tmp_path / "temporary"
    temporary.mkdir()
    process = programs.start("hub.push", folder, "user/killed", setup_code=SLOW_CHECK.format(str(temporary)))
    process.wait_for(lambda: list(temporary.rglob("README.md")))
    process.kill()
    weights = (folder / "model.safetensors").stat().st_size
    assert not [path for path in temporary.rglob("*") if path.is_file() and path.lstat().st_size == weights]


def save_weights(folder: Path, state: dict) -> None:
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def rename_cache(folder: Path) -> None:
    path = folder / "modeling_vanilla_transformer.py"
    path.write_text(path.read_text().replace("cache: Cache | None = None", "past_key_values: Cache | None = None"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "tokenizer_config.json").unlink(), "it has no tokenizer_config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "it has no weights"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x"), "is not a valid safetensors file"),
        (lambda folder: save_weights(folder, {}), "without the vanilla_transformer package: missing weights"),
        (
            lambda folder: save_weights(folder, load_file(folder / "model.safetensors") | {"extra": torch.zeros(2)}),
            "without the vanilla_transformer package: unexpected weights: extra.",
        ),
        (lambda folder: (folder / "attention_1.png").write_bytes(b"/home/me/x"), "attention_1.png is not a PNG image"),
        (lambda folder: (folder / "source.spm").write_bytes(b"\x80pickle"), "source.spm is not a SentencePiece model"),
        (
            lambda folder: (folder / "all_results.json").write_text('{"path": "/home/me/x"}'),
            "contains a local path",
        ),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not valid JSON"),
        (rename_cache, "without the vanilla_transformer package: its code is for transformers before 5.24."),
    ],
)
def test_rejects_invalid_and_sensitive_files(programs, hub, checkpoint, change, message):
    folder = checkpoint()
    change(folder)
    process = programs.run(
        "hub.push", folder, "user/never", status=2, setup_code="" if "package" in message else WITHOUT_SMOKE_TEST
    )
    assert message in process.stderr
    assert "user/never" not in hub.repositories


def test_removes_local_paths_from_sentencepiece_models(push, hub, checkpoint, sentencepiece_models):
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    folder, model = checkpoint(), ModelProto.FromString(sentencepiece_models["en"])
    model.trainer_spec.input.append(str(folder / "corpus.en"))
    model.trainer_spec.model_prefix = "/lustre/me/source"
    (folder / "source.spm").write_bytes(model.SerializeToString())
    push(folder, "user/stripped")
    files = hub.repositories["user/stripped"].files("main")
    assert b"/lustre" not in files["source.spm"]
    assert str(folder).encode() not in files["source.spm"]
    assert ModelProto.FromString(files["source.spm"]).pieces == model.pieces


def test_smoke_test_accepts_few_learned_positions(tmp_path, make_model, make_tokenizer):
    """The test limits source and translation to `max_position_embeddings`, even if the model never generates EOS.

    The generation config may request other output, and have strings that end a translation.
    """
    tokenizer, sizes = make_tokenizer(True)
    model = make_model(position_embedding_type="learned", max_position_embeddings=12, **sizes)
    model.generation_config.update(return_dict_in_generate=True, stop_strings=["never"])
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] = -model.lm_head.weight[3]
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "run")
    assert smoke_test_upload(gather_files(tmp_path / "run")[0], "the dog " * 20) is not None


def test_uploads_both_vocabularies_of_marian_tokenizer(checkpoint):
    folder = checkpoint()
    for name in ("vocab.json", "target_vocab.json"):
        (folder / name).write_text("{}")
    assert {"vocab.json", "target_vocab.json"} <= gather_files(folder)[0].keys()


def test_uploads_tokenizers_of_imported_models(checkpoint):
    folder = checkpoint()
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("the 5\nd@@ 4\nog 3\n/root/my 2\n")
    (folder / "bpe.codes").write_text("o g</w> 4\nt h 5\nth e</w> 4\n")
    (folder / "dict.txt").write_text("the 5\n")  # of other tokenizers
    PhobertTokenizer(str(folder / "vocab.txt"), str(folder / "bpe.codes")).save_pretrained(folder)
    files, _ = gather_files(folder)
    assert {"vocab.txt", "bpe.codes", "dict.txt"} <= files.keys()
    assert smoke_test_upload(files, "the dog") is not None


def test_uploads_only_weights_of_the_model(checkpoint):
    folder = checkpoint()
    parameters = count_parameters(folder)
    for name in ("optimizer.safetensors", "private.safetensors"):
        save_file({"x": torch.zeros(100)}, folder / name)
    index = {"weight_map": {"x": "private.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))  # of an earlier save
    assert {name for name in gather_files(folder)[0] if "safetensors" in name} == {"model.safetensors"}
    assert count_parameters(folder) == parameters
    (folder / "model.safetensors").unlink()
    files, _ = gather_files(folder)
    assert {name for name in files if "safetensors" in name} == {"private.safetensors", "model.safetensors.index.json"}
    for name in ("../model.safetensors", "missing.safetensors", "config.json", "x" * 400 + ".safetensors"):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
        with pytest.raises(ValueError, match=f"it has no weights .{name}"):
            gather_files(folder)
        assert count_parameters(folder) is None


def test_does_not_upload_directories_named_like_files(checkpoint):
    folder = checkpoint()
    for name in ("attention_1.png", "training_curve.png", "import_report.json", "x.safetensors"):
        (folder / name).mkdir()
    files, _ = gather_files(folder)
    assert "attention_1.png" not in files
    assert "import_report.json" not in files
    assert files["model.safetensors"] == folder / "model.safetensors"


@pytest.mark.parametrize(
    ("name", "setup_code", "message"),
    [
        ("other/name", "", "You have no write access to other/name"),
        ("no name", "", "is not a valid repository name"),
        ("user/name", "import os; os.environ['HF_TOKEN'] = 'hf_wrong'", "Your token is not valid"),
    ],
)
def test_reports_hub_errors(programs, checkpoint, name, setup_code, message):
    process = programs.run("hub.push", checkpoint(), name, status=2, setup_code=f"{setup_code}\n{WITHOUT_SMOKE_TEST}")
    assert message in process.stderr


@pytest.fixture(scope="module")
def programs_with_xet(start_programs, hub):
    with start_programs("hub.push", **(hub.environment | {"HF_HUB_DISABLE_XET": "0"})) as programs:
        yield programs


def test_uploads_large_files_with_xet(programs_with_xet, hub, checkpoint, tmp_path):
    folder = checkpoint()
    hub.xet = tmp_path / "xet"
    try:
        programs_with_xet.run("hub.push", folder, "user/xet", "--license", "mit", setup_code=WITHOUT_SMOKE_TEST)
    finally:
        hub.xet = None
    weights = (folder / "model.safetensors").read_bytes()
    pointer = hub.repositories["user/xet"].files("main")["model.safetensors"].decode()
    assert pointer == f"xet {hashlib.sha256(weights).hexdigest()} {len(weights)}"
    assert sum(path.stat().st_size for path in (tmp_path / "xet").rglob("*") if path.is_file()) > len(weights) / 2


def test_reports_hub_without_xet(programs_with_xet, push, hub, checkpoint):
    folder = checkpoint(seed=7)
    process = programs_with_xet.run(
        "hub.push", folder, "user/noxet", "--license", "mit", status=2, setup_code=WITHOUT_SMOKE_TEST
    )
    assert "HF_HUB_DISABLE_XET=1" in process.stderr
    assert hub.repositories["user/noxet"].files("main") == {}
    push(folder, "user/noxet", "--license", "mit")
    assert "model.safetensors" in hub.repositories["user/noxet"].files("main")


def test_training_pushes_at_end(start_programs, hub, recipe, tmp_path):
    """Upload the generated card, but not the pickle that the Trainer would upload.

    After a failed upload, the same command uploads the model of the finished run.
    """
    with start_programs("training.train", **hub.environment) as programs:
        arguments = ("--push-to-hub", "true", "--hub-model-id", "user/run", "--precision", "fp32")
        hub.fault("commit", "500")
        failed = programs.run("training.train", recipe, *arguments, status=2)
        assert (tmp_path / "out" / UPLOAD_PENDING).exists()
        process = programs.run("training.train", recipe, *arguments)
        again = programs.run("training.train", recipe, *arguments, status=0)
    assert f"Repeat the command, or run: vanilla-transformer push {tmp_path / 'out'} user/run" in failed.stderr
    assert "user/run/commit" in process.stderr
    assert "contains the finished run" in again.stderr
    files = hub.repositories["user/run"].files("main")
    assert not [name for name in files if name.endswith(".bin") or name.startswith("checkpoint")]
    results = json.loads((tmp_path / "out" / "all_results.json").read_text())
    card = files["README.md"].decode()
    assert f"{results['test_chrf']:.2f}" in card
    assert results["train_sha256"] in card
    assert f"{results['parameters']:,}" in card
    assert (
        len(hub.repositories["user/run"].branches["main"]) == 2
    )  # the initial, empty commit and the commit of the push


def test_training_without_write_permission_fails_at_start(start_programs, hub, recipe, tmp_path):
    with start_programs("training.train", **hub.environment) as programs:
        process = programs.run(
            "training.train", recipe, "--push-to-hub", "true", "--hub-model-id", "other/run", status=2
        )
    assert "You don't have the rights to create a model under this namespace" in process.stderr
    assert not (tmp_path / "out" / "model.safetensors").exists()


TRAINER_SCRIPT = """
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
def test_native_trainer_pushes_model_and_tokenizer(hub, checkpoint, tmp_path, repository, shared):
    name = f"user/trainer-{shared}"
    process = subprocess.run(
        [sys.executable, "-c", TRAINER_SCRIPT, checkpoint(shared), name, tmp_path / "trained"],
        cwd=tmp_path, env=os.environ | hub.environment | {"PYTHONPATH": str(repository)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    for pushed in (name, f"{name}-model"):
        environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "PATH": "/usr/bin"}
        process = subprocess.run(
            [sys.executable, "-c", EXTERNAL_SCRIPT, pushed, tmp_path / "logits.pt"],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert process.returncode == 0, process.stderr[-3000:]
        assert json.loads(process.stdout.splitlines()[-1])["is_rejected"]


def test_rejects_peft_adapter(checkpoint):
    folder = checkpoint()
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="merge_and_unload"):
        gather_files(folder)
