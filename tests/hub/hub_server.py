"""Local server that implements the Hub's HTTP protocol: repositories, uploads, sequential commits and revisions.

`server.fault(kind, how)` makes the next request of a kind fail once.
"""

import base64
import hashlib
import json
import re
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlparse

TOKEN = "hf_test"
LARGE = (".safetensors", ".png")  # uploaded by a different protocol than text files


@dataclass
class Repository:
    private: bool = False
    branches: dict[str, list[dict[str, bytes]]] = field(default_factory=lambda: {"main": [{}]})

    def files(self, revision: str) -> dict[str, bytes] | None:
        """Return the files of the last commit of a branch, or of a commit hash."""
        if revision in self.branches:
            return self.branches[revision][-1]
        commits = [commit for commits in self.branches.values() for commit in commits]
        return next((commit for commit in commits if sha_of(commit) == revision), None)


def sha_of(files: dict[str, bytes]) -> str:
    text = "".join(f"{name}{hashlib.sha256(content).hexdigest()}" for name, content in sorted(files.items()))
    return hashlib.sha1(text.encode()).hexdigest()


def is_large(name: str, files: dict[str, bytes]) -> bool:
    """Return whether a repository with these files stores a file as a large one, by its .gitattributes if it exists."""
    if ".gitattributes" not in files:
        return name.endswith(LARGE)
    rules = [line.split() for line in files[".gitattributes"].decode().splitlines()]
    return any(fnmatch(name, rule[0]) for rule in rules if "filter=lfs" in rule)


def is_ignored(name: str, files: dict[str, bytes]) -> bool:
    return any(fnmatch(name, rule) for rule in files.get(".gitignore", b"").decode().split())


def hashes(content: bytes, large: bool) -> dict:
    """Return the hash of a file as the Hub reports it: that of git, or the SHA-256 of a large file."""
    if large:
        named = content.split()  # stored by Xet: "xet <its hash> <its size>"
        oid = named[1].decode() if named[:1] == [b"xet"] else hashlib.sha256(content).hexdigest()
        return {"blobId": "0" * 40, "lfs": {"size": len(content), "sha256": oid, "pointerSize": 100}}
    return {"blobId": hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()}


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.faults: dict[str, str] = {}
        self.committing = threading.Lock()
        self.requests: list[str] = []
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.environment = {"HF_ENDPOINT": self.endpoint, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}  # of its clients
        self.environment |= {"HF_HUB_DISABLE_XET": "1"}
        self.xet: Path | None = None  # directory of its storage, if any
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def fault(self, kind: str, how: str) -> None:
        """Make the next request of a kind fail.

        Args:
            kind: create, validate, preupload, batch, put, verify or commit.
            how: A status code, "request_lost" (the connection closes before the request has an effect), or
                "response_lost" (it closes after the request has succeeded).
        """
        self.faults[kind] = how


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args) -> None:
        pass

    def body(self) -> bytes:
        if not hasattr(self, "_body"):
            self._body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return self._body

    def answer(self, content=None, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content if content is not None else {}).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def fails(self, kind: str) -> bool:
        """Return whether the request fails before it has an effect. Handles all faults except "response_lost"."""
        how = self.server.faults.get(kind)
        if how is None or how == "response_lost":
            return False
        del self.server.faults[kind]
        if how == "request_lost":
            self.close_connection = True
            self.connection.close()
        else:
            self.answer({"error": f"fault {how}"}, int(how))
        return True

    def loses_response(self, kind: str) -> bool:
        if self.server.faults.get(kind) != "response_lost":
            return False
        del self.server.faults[kind]
        self.close_connection = True
        self.connection.close()
        return True

    def allowed(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self.answer({"error": "Invalid credentials"}, 401)
        return False

    def handle_any(self) -> None:
        self.__dict__.pop("_body", None)
        url = urlparse(self.path)
        path, query = unquote(url.path).replace("/api/spaces/", "/api/models/spaces/"), parse_qs(url.query)
        self.body()
        self.server.requests.append(f"{self.command} {path}")
        for method, regex, function in ROUTES:
            match = re.fullmatch(regex, path)
            if match and (method == self.command or (method == "GET" and self.command == "HEAD")):
                function(self, *match.groups(), query=query)
                return
        self.answer({"error": f"no route for {self.command} {path}"}, 404)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any  # noqa: N815

    def create(self, query) -> None:
        if not self.allowed() or self.fails("create"):
            return
        arguments = json.loads(self.body())
        name = f"{arguments.get('organization') or 'user'}/{arguments['name']}"
        if not name.startswith("user/"):
            self.answer({"error": "You don't have the rights to create a model under this namespace"}, 403)
            return
        if arguments.get("type") == "space":
            name = f"spaces/{name}"
        exists = name in self.server.repositories
        if not exists:
            self.server.repositories[name] = Repository(
                private=bool(arguments.get("private")) or arguments.get("visibility") == "private"
            )
            if arguments.get("type") == "space":  # a new Space contains a README
                self.server.repositories[name].branches["main"] = [{"README.md": b"---\nsdk: gradio\n---\n"}]
        self.answer({"url": f"{self.server.endpoint}/{name}", "name": name}, 409 if exists else 200)

    def whoami(self, query=None) -> None:
        if self.allowed():
            self.answer({"type": "user", "name": "user"})

    def repository(self, name: str) -> Repository | None:
        repository = self.server.repositories.get(name)
        visible = repository and (not repository.private or self.headers.get("Authorization") == f"Bearer {TOKEN}")
        if not visible:
            self.answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            return None
        return repository

    def info(self, name: str, revision: str | None = None, query=None) -> None:
        if (repository := self.repository(name)) is None:
            return
        files = repository.files(revision or "main")
        if files is None:
            self.answer({"error": "Revision not found"}, 404, {"X-Error-Code": "RevisionNotFound"})
            return
        config: dict = {}
        siblings = [
            {"rfilename": file} | (hashes(files[file], is_large(file, files)) if query.get("blobs") else {})
            for file in sorted(files)
        ]
        with suppress(ValueError, KeyError):  # not a config of transformers
            config = {"model_type": json.loads(files["config.json"])["model_type"]}
        self.answer({"id": name, "modelId": name, "sha": sha_of(files), "private": repository.private,
                     "siblings": siblings, "tags": [], "downloads": 0, "likes": 0, "config": config})  # fmt: skip

    def commits(self, name: str, branch: str, query=None) -> None:
        if (repository := self.repository(name)) is not None:
            keys = {"authors": [], "message": "", "date": "2026-01-01T00:00:00.000Z"}
            rows = [
                keys | {"id": sha_of(files), "title": "commit" if number else "initial commit"}
                for number, files in enumerate(repository.branches[branch])
            ]
            self.answer(rows[::-1])

    def tree(self, name: str, revision: str, query=None) -> None:
        if (repository := self.repository(name)) is None:
            return
        files = repository.files(revision)
        if files is None:
            self.answer({"error": "Revision not found"}, 404, {"X-Error-Code": "RevisionNotFound"})
            return
        rows = [{"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for file, content in sorted(files.items())]  # fmt: skip
        self.answer(rows)

    def branch(self, name: str, branch: str, query=None) -> None:
        if not self.allowed() or (repository := self.repository(name)) is None:
            return
        exists = branch in repository.branches
        repository.branches.setdefault(branch, [dict(repository.branches["main"][-1])])
        self.answer({}, 409 if exists else 200)

    def validate(self, query=None) -> None:
        if not self.fails("validate"):
            self.answer({"errors": [], "warnings": []})

    def preupload(self, name: str, revision: str, query=None) -> None:
        if not self.allowed() or self.fails("preupload") or (repository := self.repository(name)) is None:
            return
        files = repository.files(revision) or {}
        paths = [file["path"] for file in json.loads(self.body())["files"]]
        modes = [{"path": path, "uploadMode": "lfs" if is_large(path, files) else "regular",
                  "shouldIgnore": is_ignored(path, files)} for path in paths]  # fmt: skip
        self.answer({"files": modes})

    def xet_token(self, name: str, revision: str, query=None) -> None:
        """Return the storage of large files: a directory, which the Xet library uses like a server."""
        if self.server.xet is None:
            self.answer({"error": "not found"}, 404)
        elif self.allowed():
            headers = {"X-Xet-Cas-Url": f"local://{self.server.xet}", "X-Xet-Access-Token": "xet"}
            headers["X-Xet-Token-Expiration"] = str(int(time.time()) + 3600)
            content = {"casUrl": f"local://{self.server.xet}", "accessToken": "xet", "exp": int(time.time()) + 3600}
            self.answer(content, headers=headers)

    def batch(self, name: str, query=None) -> None:
        if not self.allowed() or self.fails("batch"):
            return
        objects = []
        for each in json.loads(self.body())["objects"]:
            entry = {"oid": each["oid"], "size": each["size"]}
            if each["oid"] not in self.server.objects:
                href = f"{self.server.endpoint}/upload/{each['oid']}"
                entry["actions"] = {"upload": {"href": href}, "verify": {"href": f"{self.server.endpoint}/verify"}}
            objects.append(entry)
        self.answer({"transfer": "basic", "objects": objects})

    def put(self, oid: str, query=None) -> None:
        if self.fails("put"):
            return
        if hashlib.sha256(self.body()).hexdigest() != oid:
            self.answer({"error": "wrong content"}, 400)
            return
        self.server.objects[oid] = self.body()
        if not self.loses_response("put"):
            self.answer()

    def verify(self, query=None) -> None:
        if not self.fails("verify"):
            self.answer()

    def changed(self, repository: Repository, revision: str) -> dict[str, bytes] | None:
        """Return the files after the commit, or None after a response with an error."""
        files = dict(repository.branches[revision][-1])
        head = sha_of(files)
        for line in self.body().splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header" and value.get("parentCommit", head) != head:
                self.answer({"error": "A commit has happened since. Please refresh and try again."}, 412)
                return None
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                if self.server.xet is not None:  # Xet stores the content in chunks
                    self.server.objects[value["oid"]] = f"xet {value['oid']} {value['size']}".encode()
                if value["oid"] not in self.server.objects:
                    self.answer({"error": f"{value['path']} was not uploaded"}, 400)
                    return None
                files[value["path"]] = self.server.objects[value["oid"]]
            elif entry["key"] == "deletedFile":
                files.pop(value["path"], None)
        return files

    def commit(self, name: str, revision: str, query=None) -> None:
        if not self.allowed() or self.fails("commit") or (repository := self.repository(name)) is None:
            return
        with self.server.committing:
            files = self.changed(repository, revision)
            if files is None:
                return
            if files != repository.branches[revision][-1]:
                repository.branches[revision].append(files)
        if self.loses_response("commit"):
            return
        oid = sha_of(files)
        url = f"{self.server.endpoint}/{name}/commit/{oid}"
        self.answer({"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""})

    def resolve(self, name: str, revision: str, file: str, query=None) -> None:
        if (repository := self.repository(name)) is None:
            return
        files = repository.files(revision)
        if files is None or file not in files:
            code = "RevisionNotFound" if files is None else "EntryNotFound"
            self.answer({"error": "not found"}, 404, {"X-Error-Code": code})
            return
        content = files[file]
        etag = f'"{hashlib.sha1(content).hexdigest()}"'
        self.answer(content, headers={"ETag": etag, "X-Repo-Commit": sha_of(files)})


NAME, REVISION = r"((?:spaces/)?[\w-]+/[\w.-]+)", r"([\w.-]+)"
ROUTES = (
    ("POST", "/api/repos/create", Handler.create),
    ("GET", "/api/whoami-v2", Handler.whoami),
    ("POST", "/api/validate-yaml", Handler.validate),
    ("GET", f"/api/models/{NAME}", Handler.info),
    ("GET", f"/api/models/{NAME}/revision/{REVISION}", Handler.info),
    ("GET", f"/api/models/{NAME}/commits/{REVISION}", Handler.commits),
    ("GET", f"/api/models/{NAME}/tree/{REVISION}", Handler.tree),
    ("POST", f"/api/models/{NAME}/branch/{REVISION}", Handler.branch),
    ("POST", f"/api/models/{NAME}/preupload/{REVISION}", Handler.preupload),
    ("GET", f"/api/models/{NAME}/xet-write-token/{REVISION}", Handler.xet_token),
    ("POST", f"/{NAME}\\.git/info/lfs/objects/batch", Handler.batch),
    ("PUT", r"/upload/(\w+)", Handler.put),
    ("POST", "/verify", Handler.verify),
    ("POST", f"/api/models/{NAME}/commit/{REVISION}", Handler.commit),
    ("GET", f"/{NAME}/resolve/{REVISION}/(.+)", Handler.resolve),
)
