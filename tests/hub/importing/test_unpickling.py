"""Small files that the unpickler of torch would load for years."""

import argparse
import pickle
import zipfile
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path

import numpy
import pytest
import torch

from hub.importing.checkpoint_file import read_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def trust_pickles():
    """Override of the fixture that loads files in this process."""


@pytest.fixture
def low_limits(monkeypatch):
    """Set limits that the pickle bombs reach soon."""
    monkeypatch.setattr("hub.importing.unpickling.MAX_CPU_SECONDS", 3)
    monkeypatch.setattr("hub.importing.unpickling.MAX_MEMORY_BYTES", 2**30)


def nested(size: int, depth: int) -> bytes:
    """Return opcodes for a tuple that contains another tuple `size` times, nested `depth` times."""
    return b"(" * depth + b")" + (b"q\x00" + b"h\x00" * (size - 1) + b"t") * depth


def archive(path: Path, operations: bytes, name: str = "archive/data.pkl") -> Path:
    """Write a file as torch.save does, with the given opcodes as its pickle."""
    torch.save({"a": torch.zeros(1)}, path)
    with zipfile.ZipFile(path) as old:
        members = {member.partition("/")[2]: old.read(member) for member in old.namelist()}
    with zipfile.ZipFile(path, "w") as new:
        for member, content in (members | {"data.pkl": b"\x80\x02" + operations + b"."}).items():
            new.writestr(f"archive/{member}" if member != "data.pkl" else name, content)
    return path


ONE = b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"
ONE += b"X\x03\x00\x00\x00cpuK\x01tQK\x00J\x00\x00\x00\x40\x85K\x00\x85\x89ccollections\nOrderedDict\n)RtR"
PICKLE_BOMBS = {
    "key": b"}" + nested(2, 40) + b"Ns",
    "wide key": b"}" + nested(1000, 4) + b"Ns",
    "in a set": b"cbuiltins\nset\n]" + nested(2, 40) + b"a\x85R",
    "deep": b"}" + b")" + b"\x85" * 10**6 + b"Ns",
    "bytes by number": b"ccollections\nCounter\ncbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x10\x85R\x85R",
    "set of a long tensor": b"cbuiltins\nset\n" + ONE + b"\x85R",
    "arguments from a tensor": b"ccollections\nCounter\n" + ONE + b"R",
    "filled from a tensor": b"ccollections\nOrderedDict\n)R" + ONE + b"b",
    "through _rebuild_from_type_v2": b"ctorch._tensor\n_rebuild_from_type_v2\n(cbuiltins\nset\ncbuiltins\nset\n"
    + ONE
    + b"\x85}tR",
}


@pytest.mark.parametrize("name", PICKLE_BOMBS)
def test_rejects_pickle_bombs(tmp_path, low_limits, name):
    path = archive(tmp_path / "model.pt", PICKLE_BOMBS[name])
    with pytest.raises(ValueError, match=r"model\.pt is rejected: reading it takes more than [0-9,]+ (s|bytes) "):
        read_checkpoint(path)


@pytest.mark.parametrize("how", ["capitals", "bare", "fourth"])
def test_rejects_pickle_bombs_in_every_format(tmp_path, low_limits, how):
    path = tmp_path / "model.pt"
    if how == "capitals":
        archive(path, PICKLE_BOMBS["key"], "archive/DATA.PKL")
    else:
        before = [pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
        path.write_bytes((b"".join(before) if how == "fourth" else b"") + b"\x80\x02" + PICKLE_BOMBS["key"] + b".")
    with pytest.raises(ValueError, match=r"model\.pt is rejected: "):
        read_checkpoint(path)


def test_reads_training_files(tmp_path):
    model = torch.nn.Transformer(16, 2, 1, 1, 32)
    model(torch.zeros(2, 1, 16), torch.zeros(2, 1, 16)).sum().backward()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 3])  # contains a Counter
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
        assert read_checkpoint(path)[0].keys() == model.state_dict().keys()


def test_code_is_not_executed(tmp_path):
    victim, path = tmp_path / "victim", tmp_path / "model.pt"

    class Payload:
        def __reduce__(self):
            return open, (str(victim), "w")

    torch.save({"model": {"weight": torch.zeros(2)}, "settings": Payload()}, path)
    with pytest.raises(ValueError, match="is rejected, because reading it would execute code"):
        read_checkpoint(path)
    assert not victim.exists()
