"""hub.import_checkpoint with random files, pickles and arguments."""

import argparse
import collections
import io
import json
import multiprocessing
import pathlib
import pickle
import random
import struct
import sys
import types
import zipfile
from importlib import util
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hub.import_checkpoint import main
from hub.importing.unpickling import try_load

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent


def load(name: str, path: Path):
    """Import a test module by its path (the tests are not a package)."""
    spec = util.spec_from_file_location(name, path)
    module = util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


contract = load("fuzz_contract", HERE / "contract.py")
references = load("fuzz_references", HERE.parent / "hub" / "importing" / "references.py")
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
WORDS = [
    "",
    "x",
    "-1",
    "0",
    "1",
    "4",
    "5",
    "99999999999",
    "1e400",
    "nan",
    "None",
    "a b",
    "\n",
    "é\u2028",
    "--",
    "/",
    ".",
]


@pytest.fixture(autouse=True)
def fork(monkeypatch):
    """Load each file in a fork, which has already imported torch, instead of a new process."""

    def try_load_in_fork(path: Path, size: int) -> str | None:
        context = multiprocessing.get_context("fork")
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=lambda: writer.send(try_load(path)))
        process.start()
        writer.close()
        process.join(5)
        process.kill()
        try:
            return reader.recv()
        except EOFError:
            raise ValueError(f"{path} cannot be read within 5 s.") from None

    monkeypatch.setattr("hub.importing.checkpoint_file.try_load_in_process", try_load_in_fork)


@pytest.fixture(scope="module")
def states() -> dict[str, tuple[dict[str, torch.Tensor], list[str]]]:
    """Return a small state dict and the import arguments of each reference model."""
    cases = {}
    for name, (class_name, arguments, layout, options) in references.CASES.items():
        torch.manual_seed(0)
        model = references.randomize(getattr(references, class_name)(**arguments))
        settings = [word for key, value in options.items() for word in ("--set", f"{key}={value}")]
        heads = [] if name == "aladdin" else ["--num-heads", str(getattr(model, "heads", 4))]
        layout_option = ["--layout", layout] if layout.startswith("build_transformer") else []
        cases[name] = (dict(model.state_dict()), [*heads, *settings, *layout_option])
    return cases


def attempt(folder: Path, arguments: list) -> int:
    """Run an import, and check the contract."""
    before = contract.fingerprint(folder)
    status, _ = contract.call(main, "hub.import_checkpoint", list(map(str, arguments)))
    after = contract.fingerprint(folder)
    created = {name for name in after if name not in before}
    assert {name: after.get(name) for name in before} == before, f"{arguments}: existing files changed"
    if status == 0 and "--help" not in arguments:
        assert any(name.endswith("import_report.json") for name in created), f"{arguments}: no report"
        json.loads((folder / next(name for name in created if name.endswith("import_report.json"))).read_text())
    else:
        assert not created, f"{arguments}: wrote {created}"
        assert not list(folder.glob("*unfinished*")), f"{arguments}: an unfinished directory"
    return status


def other_value(r: random.Random, tensor: torch.Tensor):
    """Return a value that replaces a tensor."""
    shape = list(tensor.shape)
    kind = r.randrange(26)
    if kind == 0:
        return r.choice([None, 3, "text", [tensor], {"a": tensor}, tensor.numpy().tolist(), b"x", {}])
    if kind == 1:
        return tensor * float("nan")
    if kind == 2:
        return torch.full_like(tensor, r.choice([1e38, -1e38, float("inf")]))
    if kind == 3:
        return torch.full(shape, 1e300, dtype=torch.float64)
    if kind == 4:
        return tensor.to(r.choice([torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn]))
    if kind == 5:
        return tensor.to(r.choice([torch.int64, torch.bool, torch.complex64, torch.uint8]))
    if kind == 6:
        return tensor[..., :-1]
    if kind == 7:
        return torch.cat([tensor, tensor])
    if kind == 8:
        return tensor.reshape(-1)
    if kind == 9:
        return torch.zeros([0, *shape[1:]])
    if kind == 10:
        return torch.tensor(1.5)
    if kind == 11:
        return tensor[None].expand(r.choice([2, 1000]), *shape)
    if kind == 12:
        return torch.zeros(1).expand(*r.choice([[10**6, 10**6], [10**9], [3, 10**8], [2**40]]))
    if kind == 13:
        return tensor.T if tensor.ndim == 2 else tensor[None]
    if kind == 14:
        return tensor.to_sparse() if tensor.ndim == 2 else tensor
    if kind == 15:
        return torch.empty(shape, device="meta")
    if kind == 16:
        return torch.nn.Parameter(tensor.clone())
    if kind == 17:
        return torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)
    if kind == 18:
        return torch.randn([r.choice([1, 3, 7, 200]) for _ in range(r.randrange(5))])
    if kind == 19:
        return tensor[:1].expand(*shape)
    return tensor * r.choice([1e3, 1e10, 1e-30, 0])


def mutate(r: random.Random, state: dict) -> dict:
    state = dict(state)
    for _ in range(r.choice([0, 1, 1, 1, 2, 5])):
        if not state:
            return state
        key, kind = r.choice(list(state)), r.randrange(10)
        if kind < 5:
            state[key] = other_value(r, state[key]) if isinstance(state[key], torch.Tensor) else None
        elif kind == 5:
            del state[key]
        elif kind == 6:
            state[
                r.choice([key + ".x", "x." + key, key.replace("0", r.choice(["9", "99999999999", "٣", "00", "-1"]))])
            ] = state[key]
        elif kind == 7:
            state[r.choice([5, None, (1, 2), b"key", 1.5, True, "", "\n", "\u2028a", "x" * 10**5])] = r.choice(
                [state[key], 1]
            )
        elif kind == 8:
            state[key] = state[r.choice(list(state))]
        else:
            state = {k: v for k, v in state.items() if r.random() < 0.9}
    return state


def wrap(r: random.Random, state: dict):
    """Return a checkpoint that contains the state dict, in common and in unusual forms."""
    more = {
        "epoch": 3,
        "loss": torch.tensor(0.1).numpy()[()],
        "path": Path("a/b"),
        "history": collections.defaultdict(list),
        "settings": argparse.Namespace(n_head=r.choice([4, 2, "x", None]), src_pad_idx=r.choice([1, -5, 10**9, "a"])),
        "more": types.SimpleNamespace(activation=r.choice(["relu", 5, "tanhh"])),
        "pure": pathlib.PureWindowsPath("c:/x"),
        "losses": torch.ones(3).numpy(),
        "optimizer": {"state": {}},
    }
    kind = r.randrange(12)
    if kind < 4:
        return state
    if kind < 7:
        chosen = {key: more[key] for key in r.sample(list(more), r.randrange(len(more)))}
        return chosen | {r.choice(["model_state_dict", "state_dict", "model", "net"]): state}
    if kind == 7:
        return {f"{r.choice(['module.', '_orig_mod.', 'model.'])}{key}": value for key, value in state.items()}
    if kind == 8:
        loop = {"model": state, "epoch": 1}
        loop[r.choice(["model", "state_dict"])] = loop
        return loop
    if kind == 9:
        return r.choice(
            [[state], (state,), None, 3, "text", torch.zeros(3), {}, {"model": {}}, {"model": {"model": {}}}]
        )
    if kind == 10:
        deep = state
        for _ in range(r.choice([3, 60])):
            deep = {"model": deep}
        return deep
    return collections.OrderedDict(state) | {"epoch": 3}


def broken(r: random.Random, data: bytes) -> bytes:
    kind = r.randrange(9)
    if kind == 0:
        return data[: r.randrange(len(data) + 1)]
    if kind == 1:
        return b""
    if kind == 2:
        return (
            r.choice(
                [
                    b"<!DOCTYPE html><html>",
                    b"version https://git-lfs.github.com/spec/v1\noid",
                    b"\x89PNG\r\n\x1a\n",
                    b"\x1f\x8b\x08",
                    b"PK\x03\x04",
                    b"{}",
                    b"%PDF-1.4",
                    b"\x80",
                    b"\x80\x04.",
                    b"\xff\xd8\xff",
                ]
            )
            + data[: r.randrange(99)]
        )
    if kind == 3:
        return r.randbytes(r.randrange(2000))
    changed = bytearray(data)
    for _ in range(r.choice([1, 3, 30, 300])):
        at = r.randrange(len(changed)) if r.random() < 0.5 else r.randrange(min(len(changed), 3000))
        changed[at] = r.randrange(256)
    return bytes(changed)


def test_files(states, tmp_path):
    def try_one(r: random.Random, folder: Path):
        state, arguments = states[r.choice(list(states))]
        state = mutate(r, state)
        if r.random() < 0.15:
            path = folder / "model.safetensors"
            tensors = {
                k: v.contiguous().clone()
                for k, v in state.items()
                if isinstance(k, str)
                and type(v) is torch.Tensor
                and v.layout == torch.strided
                and v.device.type == "cpu"
                and not v.is_quantized
                and v.numel() < 10**6
            }
            save_file(tensors, path)
        else:
            path = folder / r.choice(["model.pt", "model.pth", "a b.tar"])
            torch.save(wrap(r, state), path, _use_new_zipfile_serialization=r.random() < 0.8)
        if r.random() < 0.3:
            path.write_bytes(broken(r, path.read_bytes()))
        attempt(folder, [path, folder / "out", *arguments])

    contract.fuzz("import files", try_one, tmp_path)


GLOBALS = [
    "os system",
    "builtins eval",
    "builtins int",
    "builtins dict",
    "collections OrderedDict",
    "collections Counter",
    "collections defaultdict",
    "argparse Namespace",
    "types SimpleNamespace",
    "pathlib PosixPath",
    "numpy dtype",
    "numpy.core.multiarray scalar",
    "numpy._core.multiarray _reconstruct",
    "torch FloatStorage",
    "torch.nn.parameter Parameter",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    "torch._utils _rebuild_sparse_tensor",
    "torch._utils _rebuild_qtensor",
    "torch._utils _rebuild_meta_tensor_no_storage",
    "torch Size",
    "torch Tensor",
    "torch device",
    "torch FloatTensor",
    "torch._tensor _rebuild_from_type_v2",
    "builtins bytearray",
    "builtins set",
    "builtins complex",
    "_codecs encode",
    "torch.serialization _get_layout",
    "torch float32",
    "a\x00b c",
    "mine Model",
]


def opcodes(r: random.Random) -> bytes:
    """Return a pickle of random operations that often match, mostly of protocol 2."""
    parts = [b"\x80" + bytes([r.choice([2, 2, 2, 2, 3, 4, 5, 9])])]
    atoms = [
        b"N",
        b"\x88",
        b"\x89",
        b")",
        b"]",
        b"}",
        b"\x8f",
        b"J\xff\xff\xff\xff",
        b"K\x05",
        b"M\x00\x10",
        b"G" + struct.pack(">d", 1.5),
        b"X\x05\x00\x00\x00model",
        b"X\x01\x00\x00\x00a",
        b"U\x07storage",
        b"X\x03\x00\x00\x00cpu",
        b"\x8a\x08" + b"\xff" * 7 + b"\x7f",
        b"X\xff\xff\xff\xff",
        b"\x8c\x01a",
        b"I5\n",
        b"h\x00",
        b"h\x01",
        b"X\x00\x00\x00\x00",
        b"X\x10\x00\x00\x00model_state_dict",
    ]
    joints = [
        b"(",
        b"t",
        b"\x85",
        b"\x86",
        b"\x87",
        b"R",
        b"\x81",
        b"b",
        b"a",
        b"e",
        b"s",
        b"u",
        b"q\x00",
        b"q\x00h\x00\x86" * 40,
        b"q\x01",
        b"Q",
        b"0",
        b"2",
        b"\x93",
        b"o",
        b"h\x00",
        b"h\x01",
    ]
    for _ in range(r.randrange(40)):
        kind = r.random()
        if kind < 0.2:
            parts.append(b"c" + r.choice(GLOBALS).replace(" ", "\n").encode() + b"\n")
        else:
            parts.append(r.choice(atoms if kind < 0.6 else joints))
    return b"".join(parts) + (b"." if r.random() < 0.9 else b"")


class Anything:
    """Object that pickles as a call of the given function."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call[0], tuple(self.call[1:])


def value(r: random.Random, depth: int = 0):
    """Return a random structure, which may be large, deep, or a call."""
    kind = r.randrange(12)
    if kind == 0:
        return Anything(
            r.choice(
                [
                    print,
                    len,
                    pathlib.Path,
                    collections.Counter,
                    bytearray,
                    complex,
                    collections.OrderedDict,
                    torch.Size,
                    torch.device,
                    argparse.Namespace,
                    int,
                    eval,
                    set,
                    torch.Tensor,
                ]
            ),
            *[value(r, depth + 1) for _ in range(r.randrange(3))],
        )
    if kind == 1 and depth < 4:
        return {
            r.choice(["model", "state_dict", "a", 5, None, (1,)]): value(r, depth + 1) for _ in range(r.randrange(4))
        }
    if kind == 2 and depth < 4:
        return [value(r, depth + 1) for _ in range(r.randrange(4))]
    if kind == 3:
        laughs = [1]
        for _ in range(40):
            laughs = [laughs, laughs]
        return laughs
    if kind == 4:
        laughs = "lol"
        for _ in range(r.choice([3, 22])):
            laughs = (laughs, laughs)
        return {laughs: 1}
    if kind == 5:
        deep = []
        for _ in range(r.choice([10, 300])):
            deep = [deep]
        return deep
    return r.choice([10**300, "x", b"x", 1.5, None, True, torch.zeros(2), float("nan"), (), "\u2028\n\r"])


def test_pickles(tmp_path):
    def try_one(r: random.Random, folder: Path):
        path = folder / "model.pt"
        kind = r.randrange(5)
        if kind == 0:
            content = value(r)
            try:
                torch.save(content, path)
            except RecursionError:
                return
        else:
            data = opcodes(r) if kind < 4 else pickle.dumps(value(r), protocol=r.randrange(6))
            if kind % 2:
                path.write_bytes(data)
            else:
                buffer = io.BytesIO()
                torch.save({"model": torch.zeros(2)}, buffer)
                with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(path, "w", r.choice([0, 8])) as new:
                    for member in old.namelist():
                        if r.random() < 0.97:
                            new.writestr(member, data if member.endswith("data.pkl") else old.read(member))
                    if r.random() < 0.1:
                        new.writestr("archive/data/9", bytes(10**8), 8)
        attempt(folder, [path, folder / "out", "--num-heads", "4"])

    contract.fuzz("import pickles", try_one, tmp_path)


def tokens(r: random.Random, size: int) -> str:
    vocabulary = [*SPECIAL, *(f"w{i}" for i in range(size - 4))][:size]
    if r.random() < 0.5:
        r.shuffle(vocabulary)
    if r.random() < 0.3:
        vocabulary[r.randrange(len(vocabulary))] = r.choice(["", " ", "w1", "\u2028", "<pad>", "\ufeff", "a b"])
    text = r.choice(["\n", "\n", "\n", "\r\n", "\r"]).join(vocabulary) + r.choice(["", "\n", "\n\n"])
    if r.random() < 0.5:
        return text
    model = r.choice(
        [
            {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(vocabulary)}, "unk_token": "<unk>"},
            {"type": "BPE", "vocab": {word: i for i, word in enumerate(vocabulary)}, "merges": []},
            {"type": "Unigram", "unk_id": 3, "vocab": [[word, -1.0] for word in vocabulary]},
            {"type": "WordLevel", "vocab": {word: 2 * i for i, word in enumerate(vocabulary)}, "unk_token": "<unk>"},
            {
                "type": "WordLevel",
                "vocab": {word: r.randrange(50) for i, word in enumerate(vocabulary)},
                "unk_token": "<unk>",
            },
        ]
    )
    added = [
        {
            "id": r.choice([i, i, i, 77, -1, 10**12]),
            "content": word,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, word in enumerate(vocabulary[: r.randrange(4)])
    ]
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": model,
    }
    for _ in range(r.choice([0, 0, 0, 1, 2])):
        content[r.choice(list(content))] = r.choice(
            [None, 3, "x", [], {}, [None], {"type": "x"}, {"type": "ByteLevel"}]
        )
    text = json.dumps(content)
    return text if r.random() < 0.8 else text[: r.randrange(len(text))]


CODE = {
    "nothing": "def build(): pass",
    "exits": "import sys\ndef build(): sys.exit(0)",
    "exits_at_import": "raise SystemExit(0)",
    "parameter": "def build(size): pass",
    "fails": "def build(): 1 / 0",
    "broken": "def build(:",
    "other": "import torch\ndef build(): return torch.nn.Linear(2, 2)",
    "nan": "import torch\nclass M(torch.nn.Module):\n"
    "    def load_state_dict(self, *a, **k): return torch.nn.Module().load_state_dict({})\n"
    "    def forward(self, *a): return torch.full((4, 7, 37), float('nan'))\ndef build(): return M()",
    "lines": "def build(): raise RuntimeError('one\\ntwo\\u2028three')",
}


SETTINGS = ["activation", "norm_first", "source_begins", "proj_share_weight", "scale_embedding", "n_head", "x", ""]
SEPARATORS = ["=", "=", "=", "", "=="]
SETTING_VALUES = ["true", "False", "gelu", "4", "[[", "[" * 9999]


def test_arguments(states, tmp_path, monkeypatch):
    modules = tmp_path / "modules"
    modules.mkdir()
    for name, code in CODE.items():
        (modules / f"fuzzed_{name}.py").write_text(code)
    monkeypatch.chdir(modules)

    def try_one(r: random.Random, folder: Path):
        state, options = states[r.choice(list(states))]
        path = folder / "model.pt"
        torch.save(state, path)
        arguments = [
            path,
            folder / r.choice(["out", "out", "out", "deep/er/out", "o t", ".", "model.pt", "model.pt/out", "x" * 300]),
            *options,
        ]
        if r.random() < 0.5:
            for side, size in (("source", 31), ("target", 37)):
                if r.random() < 0.8:
                    file = folder / f"{side}.json"
                    file.write_text(
                        tokens(r, size + r.choice([0, 0, 0, 0, 5, -3])),
                        encoding=r.choice(["utf-8"] * 9 + ["utf-16"]),
                        newline="",
                    )
                    arguments += [f"--{side}_tokenizer", file]
        for _ in range(r.choice([0, 0, 1, 1, 2])):
            arguments += r.choice(
                [
                    ["--num-heads", r.choice([*WORDS, "3", "16"])],
                    [f"--{r.choice(['pad', 'bos', 'eos'])}_token_id", r.choice([*WORDS, "36", "30"])],
                    ["--layout", r.choice(["hkproj", "joeynmt", "x", ""])],
                    [
                        "--set",
                        r.choice(SETTINGS) + r.choice(SEPARATORS) + r.choice([*SETTING_VALUES, *WORDS]),
                    ],
                    [
                        "--compare-with",
                        r.choice(
                            [f"fuzzed_{name}:build" for name in CODE]
                            + ["", ":", "x:y", "os:getcwd", "json", "builtins:exit", "a:b:c"]
                        ),
                    ],
                    ["--source-tokenizer", r.choice([folder, folder / "none", path, "/dev/null", ""])],
                    ["--set"],
                    ["--help"],
                    ["--x"],
                    [r.choice(WORDS)],
                ]
            )
        if r.random() < 0.1:
            del arguments[r.randrange(len(arguments))]
        if r.random() < 0.1:
            arguments[0] = r.choice(
                [folder, folder / "none", "/dev/null", "/dev/zero", "", "a\x00b", "x" * 5000, "\udcff"]
            )
        if arguments[1:2] and not str(arguments[1]).startswith(str(folder)):
            arguments.insert(1, folder / "out")
        attempt(folder, arguments)

    contract.fuzz("import arguments", try_one, tmp_path)
