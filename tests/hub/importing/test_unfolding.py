"""Small files that torch's unpickler would be busy with for years."""

import argparse
import pickle
import subprocess
import sys
import zipfile
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path

import numpy
import pytest
import torch

from hub.importing.file import read
from hub.importing.unfolding import why_endless

LIMIT = 2**26


def nested(width: int, depth: int) -> bytes:
    """Operations that leave a tuple of the same tuple `width` times, and so on."""
    return b"(" * depth + b")" + (b"q\x00" + b"h\x00" * (width - 1) + b"t") * depth


def archive(path: Path, operations: bytes, name: str = "archive/data.pkl") -> Path:
    """A file such as torch.save writes, with these operations."""
    torch.save({}, path)
    with zipfile.ZipFile(path) as old:
        members = {member.partition("/")[2]: old.read(member) for member in old.namelist()}
    with zipfile.ZipFile(path, "w") as new:
        for member, content in (members | {"data.pkl": b"\x80\x02" + operations + b"."}).items():
            new.writestr(f"archive/{member}" if member != "data.pkl" else name, content)
    return path


ONE = b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"
ONE += b"X\x03\x00\x00\x00cpuK\x01tQK\x00J\x00\x00\x00\x40\x85K\x00\x85\x89ccollections\nOrderedDict\n)RtR"
ENDLESS = {
    "key": b"}" + nested(2, 40) + b"Ns",
    "wide key": b"}" + nested(1000, 4) + b"Ns",
    "in a set": b"cbuiltins\nset\n]" + nested(2, 40) + b"a\x85R",
    "fetched often": b"}" + nested(2, 20) + b"q\x01N" + b"s" + b"h\x01Ns" * 100,
    "deep": b"}" + b")" + b"\x85" * 10**6 + b"Ns",
    "bytes by number": b"ccollections\nCounter\ncbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x10\x85R\x85R",
    "set of a long tensor": b"cbuiltins\nset\n" + ONE + b"\x85R",
    "arguments from a tensor": b"ccollections\nCounter\n" + ONE + b"R",
    "filled from a tensor": b"ccollections\nOrderedDict\n)R" + ONE + b"b",
    "by a stranger's hand": b"ctorch._tensor\n_rebuild_from_type_v2\n(cbuiltins\nset\ncbuiltins\nset\n"
    + ONE
    + b"\x85}tR",
}


@pytest.mark.parametrize("what", ENDLESS)
@pytest.mark.parametrize("how", ["archive", "capitals", "bare", "fourth"])
def test_endless_files_are_refused_at_once(tmp_path, what, how):
    path = tmp_path / "model.pt"
    if how in ("archive", "capitals"):
        archive(path, ENDLESS[what], "archive/data.pkl" if how == "archive" else "archive/DATA.PKL")
    else:
        before = [pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
        path.write_bytes((b"".join(before) if how == "fourth" else b"") + b"\x80\x02" + ENDLESS[what] + b".")
    with pytest.raises(ValueError, match=r"model\.pt is refused: it (holds tuples|makes an? |hands )"):
        read(path)


@pytest.mark.slow
def test_without_the_refusal_they_are_endless(tmp_path):
    """The smallest of them, as torch reads it."""
    path = archive(tmp_path / "model.pt", ENDLESS["key"])
    code = f"import torch; print('loading', flush=True); torch.load({str(path)!r}, weights_only=True)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"loading\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)
        process.kill()


def test_what_training_code_saves_is_not_endless(tmp_path):
    model = torch.nn.Transformer(16, 2, 1, 1, 32)
    model(torch.zeros(2, 1, 16), torch.zeros(2, 1, 16)).sum().backward()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 3])  # holds a Counter
    betas = (0.9, 0.98)
    content = {
        "model": model.state_dict(),
        "parameters": OrderedDict(model.named_parameters()),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "settings": argparse.Namespace(betas=betas, words={"a", "b"}, path=Path("x"), size=torch.Size([3, 4])),
        "counts": Counter("abba"),
        "loss": numpy.float64(3.5),
        "history": defaultdict(list, {"loss": [(i, (i, betas)) for i in range(1000)]}),
        "shared": [betas] * 10_000,
        "vocabulary": tuple(map(str, range(50_000))),
        "generator": torch.get_rng_state(),
        "array": numpy.zeros(1000),
    }
    for zipped in (True, False):
        path = tmp_path / f"{zipped}.pt"
        torch.save(content, path, _use_new_zipfile_serialization=zipped)
        assert why_endless(path, LIMIT) is None
        assert "written out" in why_endless(path, 1000)
    assert read(tmp_path / "True.pt")[0].keys() == model.state_dict().keys()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"no pickle", b"}s.", b"t.", b"h\x00.", b"(" * 100, b"\x85"])
def test_broken_files_are_for_torch_to_tell(tmp_path, content):
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    assert why_endless(path, LIMIT) is None
