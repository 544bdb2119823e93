"""Uploads of random checkpoint directories to random repositories."""

import hashlib
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import CommitOperationAdd
from huggingface_hub.utils import validate_repo_id
from safetensors.torch import save_file

from hub import commits, push
from hub.publishing import upload
from tests.fuzz.contract import call, fingerprint, fuzz
from tests.fuzz.test_cards import OPTIONS, write, write_run_files

TOKEN, PRIVATE_PATH = "hf_" + "a" * 34, "/srv/me/secret"
JSON = '{"a": [1, {"b": "c"}], "d": null}'
TEXTS = (
    *(JSON, "{", "[]", "", "\x00", "x" * 1000, '{"a": "' + "x" * 1000 + '"}', '{"\\ud800": 1}', "[" * 30000, "NaN"),
    *(
        f'{{"a": "{TOKEN}"}}',
        f'{{"a": ["{PRIVATE_PATH}"]}}',
        f'{{"{PRIVATE_PATH}": 1}}',
        '{"a": "\\u002fsrv\\u002fme\\u002fsecret"}',
    ),
    *('{"api_key": "0123456789"}', '{"api_key": ["0123456789"]}', "1" * 5000),
)
NAMES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "x.json"),
    *("modeling_vanilla_transformer.py", "source_tokenizer.json", "model.safetensors.index.json", "README.md"),
    *("training_args.bin", "attention_1.png", "training_curve.png", "attention_.png", "my_vanilla_transformer.py"),
)
MORE = (
    *(
        ("--private",),
        ("--revision", "v2"),
        ("--revision", "a..b"),
        ("--message", ""),
        ("--message", "\n"),
        ("--replace",),
    ),
    *(
        ("--card", "generated"),
        ("--card", "local"),
        ("--card", "keep"),
        ("--card", "x"),
        ("--revision", "-"),
        ("extra",),
    ),
)
REPOSITORIES = ("user/name",) * 9 + (
    "",
    "a/b/c",
    "user/",
    "/x",
    "user/x--y",
    "user/x.git",
    "a b",
    "\ud800",
    "x" * 200,
    ".",
)


def write_checkpoint(rng: random.Random, folder: Path) -> None:
    """Write a directory that can be uploaded, partly broken."""
    write_run_files(rng, folder)
    for name in NAMES:
        needed = name in ("tokenizer_config.json", "modeling_vanilla_transformer.py")
        if rng.random() < (0.97 if needed else 0.3):
            write(rng, folder, name, rng.choice(TEXTS) if rng.random() < 0.1 else JSON)
    weights = folder / "model.safetensors"
    if rng.random() < 0.95:
        save_file({"a": torch.zeros(2, 3)}, weights)
    if rng.random() < 0.1:
        weights.write_bytes(
            rng.choice((b"", b"x", b"\xff" * 9, b"\x02" + b"\0" * 7 + b"{}", b"\x02" + b"\0" * 7 + b"[]"))
        )
    if rng.random() < 0.05:
        (folder / "model-2.safetensors").symlink_to("missing")


@pytest.mark.slow
def test_checkpoints(tmp_path, monkeypatch):
    """No local file changes, and the files to upload contain neither the token nor the private path."""
    uploads = []
    monkeypatch.setattr(upload, "smoke_test_upload", lambda files, source: source)
    monkeypatch.setattr(upload, "commit_files", lambda name, files, *_, **__: uploads.append(files) or "address")
    monkeypatch.setattr(upload.ModelCard, "validate", lambda self: None)
    monkeypatch.setattr(upload, "resolve_repo_id", lambda name: validate_repo_id(name) or name)

    def try_one(rng: random.Random, folder: Path) -> None:
        write_checkpoint(rng, folder)
        before = fingerprint(folder)
        options = [word for _ in range(rng.choice((0, 0, 1, 2))) for word in rng.choice(OPTIONS + MORE)]
        options += ["--dry-run"] if rng.random() < 0.1 else []
        options += ["--card", "generated"] if (folder / "README.md").is_file() and rng.random() < 0.8 else []
        uploads.clear()
        status, _ = call(push.main, "hub.push", [str(folder), rng.choice(REPOSITORIES), *options])
        assert fingerprint(folder) == before
        assert status in (0, 2)
        assert not (uploads and status)
        for files in uploads:
            assert {"config.json", "modeling_vanilla_transformer.py", "README.md"} <= files.keys()
            assert not {"training_args.bin", "x.json", "my_vanilla_transformer.pyc"} & files.keys()
            for name, content in files.items():
                text = content.decode() if isinstance(content, bytes) else ""
                decoded = text + (json.dumps(json.loads(text)) if name.endswith(".json") else "")
                assert TOKEN not in decoded, name
                assert PRIVATE_PATH not in decoded or name in (
                    "tokenizer.json",
                    "source_tokenizer.json",
                    "README.md",
                ), name

    fuzz("checkpoints to push", try_one, tmp_path)


class Hub:
    """A repository in memory that records the files of this package."""

    def __init__(self, rng: random.Random, folder: Path):
        self.rng, self.folder = rng, folder
        self.exists, self.private, self.files, self.commits = False, False, {}, 0
        self.own: dict[str, bytes] = {}  # contents that `commit_files` wrote
        self.race = None  # a change by a third party between `repo_info` and `create_commit`

    def repo_exists(self, *_, **__):
        return self.exists

    def create_repo(self, *_, private=None, **__):
        if not self.exists:
            self.exists, self.private = True, bool(private)

    def repo_info(self, *_, **__):
        def file_info(name, content):
            sha256 = hashlib.sha256(content).hexdigest()
            git = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
            lfs = SimpleNamespace(sha256=sha256) if name.endswith("safetensors") else None
            return SimpleNamespace(rfilename=name, lfs=lfs, blob_id="0" * 40 if lfs else git)

        siblings = [file_info(*each) for each in self.files.items()]
        return SimpleNamespace(sha=str(self.commits), private=self.private, siblings=siblings)

    def hf_hub_download(self, _, name, **__):
        path = self.folder / "downloaded"
        path.write_bytes(self.files[name])
        return str(path)

    def preupload_lfs_files(self, *_, **__):
        pass

    def create_commit(self, *_, operations, parent_commit, **__):
        if self.race:
            self.race()
        if parent_commit != str(self.commits):
            raise ValueError("changed in the meantime")
        for operation in operations:
            if isinstance(operation, CommitOperationAdd):
                with operation.as_file() as file:
                    self.files[operation.path_in_repo] = self.own[operation.path_in_repo] = file.read()
            else:
                del self.files[operation.path_in_repo]
        self.commits += 1
        return SimpleNamespace(oid=str(self.commits), commit_url="address")


REPOSITORY_FILES = (
    "config.json",
    "README.md",
    "model.safetensors",
    "onnx/config.json",
    "samples.tsv",
    "x_vanilla_transformer.py",
)
CONTENTS = tuple(f"content {i}".encode() for i in range(4))
MANIFESTS = (
    b"",
    b"{",
    b"[]",
    b"{}",
    b'{"config.json": 1}',
    b'{"config.json": [null]}',
    b'{"onnx/config.json": []}',
    b"\xff",
)


@pytest.mark.slow
def test_repositories(tmp_path, monkeypatch):
    """Changes by third parties, between and during uploads, are neither replaced nor deleted."""

    def try_one(rng: random.Random, folder: Path) -> None:
        hub = Hub(rng, folder)
        monkeypatch.setattr(commits, "HfApi", lambda: hub)

        def change_by_third_party() -> None:
            name = rng.choice((*REPOSITORY_FILES, commits.MANIFEST_NAME))
            if rng.random() < 0.3:
                hub.files.pop(name, None)
            else:
                hub.files[name] = rng.choice(MANIFESTS if name == commits.MANIFEST_NAME else CONTENTS)
            hub.exists, hub.commits = True, hub.commits + 1

        for _ in range(rng.randrange(1, 6)):
            for _ in range(rng.choice((0, 0, 1, 2))):
                change_by_third_party()
            new = {name: rng.choice(CONTENTS) for name in REPOSITORY_FILES if rng.random() < 0.6}
            replace, private = rng.random() < 0.1, rng.random() < 0.1
            keep = ("README.md",) if rng.random() < 0.3 else ()
            hub.race = change_by_third_party if rng.random() < 0.1 else None
            before, was_public = dict(hub.files), hub.exists and not hub.private
            own = dict(hub.own)
            sources: dict[str, Path | bytes] = dict(new)
            for name in new:
                if rng.random() < 0.3:  # as a local path
                    sources[name] = folder / f"{REPOSITORY_FILES.index(name)}"
                    sources[name].write_bytes(new[name])
            try:
                commits.commit_files("a/b", sources, "x", private=private, replace=replace, keep=keep)
            except ValueError:
                if not hub.race:
                    assert hub.files == before
                continue
            assert not (private and was_public)
            for name, content in before.items():
                is_by_others = name != commits.MANIFEST_NAME and own.get(name) != content
                if is_by_others and not replace:
                    assert hub.files.get(name) == content, f"{name} of a third party was replaced"
                if is_by_others and name not in new:
                    assert hub.files.get(name) == content, f"{name} was deleted"
                if name in keep and name in new:
                    assert hub.files[name] == content
            for name, content in new.items():
                assert hub.files[name] == content or name in keep

    fuzz("repositories to push to", try_one, tmp_path)
