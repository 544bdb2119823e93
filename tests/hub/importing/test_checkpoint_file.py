import argparse
import collections
import pathlib
import pickle
import types
import zipfile

import numpy
import pytest
import torch

from hub.importing import unpickling
from hub.importing.checkpoint_file import read_checkpoint

WRAPPERS = ["bare", "hkproj", "state_dict", "lightning", "ddp", "compiled", "jadore", "safetensors"]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_unwraps_state_dicts(make_reference, save_as, tmp_path, wrapper):
    _, state, _, _, _ = make_reference("notebook")
    actual, metadata = read_checkpoint(save_as(wrapper, state, tmp_path))
    assert actual.keys() == state.keys()
    assert all(torch.equal(actual[key], state[key]) for key in state)
    if wrapper == "jadore":
        assert metadata == {"epoch": 1, "n_head": 4, "src_pad_idx": 1}


def test_checks_files_without_limits_of_posix(tmp_path, monkeypatch, capsys):
    """Windows limits only the elapsed time, in the process that starts this one."""
    torch.save({"weight": torch.zeros(2)}, tmp_path / "model.pt")
    monkeypatch.setattr("hub.importing.unpickling.resource", None)
    monkeypatch.setattr("sys.argv", ["unpickling", str(tmp_path / "model.pt"), "1", "1"])
    unpickling.main()
    assert capsys.readouterr().out == "null\n"


class Payload:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("protocol", ["torch", "pickle"])
def test_rejects_code_without_executing_it(tmp_path, protocol):
    victim, path = tmp_path / "victim", tmp_path / "model.pt"
    content = {"model": {"weight": torch.zeros(2)}, "settings": Payload(victim)}
    if protocol == "torch":
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content["settings"]))
    with pytest.raises(ValueError, match="is rejected, because reading it would execute code"):
        read_checkpoint(path)
    assert not victim.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<!DOCTYPE html><html><body>404</body></html>", "is a web page. Download the file itself"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9", "git lfs pull"),
        (b"\x89PNG\r\n\x1a\n" + bytes(50), "is an image"),
        (b"\xff\xd8\xff\xe0" + bytes(50), "is an image"),
        (b"\x1f\x8b\x08" + bytes(50), "is compressed. Unpack it first"),
        (b'{"a": 1}', "is JSON"),
        (b"\x80\x02}q\x00X\x05", "is corrupt"),
    ],
)
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_detects_other_file_types(tmp_path, content, message, suffix):
    """The message contains the file type, and not the advice of torch to execute the file."""
    path = tmp_path / f"model.{suffix}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.") as error:
        read_checkpoint(path)
    if suffix == "pt" or "corrupt" not in message:
        assert message in str(error.value)
    assert "weights_only" not in str(error.value)
    assert "would execute code" not in str(error.value)


def test_rejects_paths_without_file(tmp_path):
    with pytest.raises(ValueError, match="is a directory. Pass the file with the weights"):
        read_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        read_checkpoint(tmp_path / "model.pt")


def recursive_content() -> dict:
    content: dict = {"epoch": 1}
    content["model"] = {"state_dict": content}
    return content


TENSOR = torch.zeros(2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a.weight": TENSOR, "b.version": 3}, "b.version is a int, expected a tensor"),
        ({"model": {"a.weight": TENSOR, "b": None}}, "b is a NoneType, expected a tensor"),
        ({5: TENSOR}, "a tensor whose name is a int, expected a string"),
        ({(1, 2): TENSOR, None: TENSOR}, "a tensor whose name is a tuple"),
        ({("key",) * 3: 1}, "its entries are a tuple"),
        ({}, "its entries are none"),
        ({"a": 1, "b": "c"}, "has no tensors in"),
        ([1, 2], "contains a list, expected a state dict"),
        ({"model": {}}, "its entries are none"),
        (recursive_content(), "contains itself"),
        ({"a": torch.zeros(1).expand(10**6, 10**6)}, "contain tensors of 4,000,000,000,000 bytes"),
        ({"a": torch.eye(3).to_sparse()}, "is sparse, nested, quantized or without data"),
        ({"a": torch.empty(3, device="meta")}, "is sparse, nested, quantized or without data"),
    ],
)
def test_rejects_invalid_state_dicts(tmp_path, content, message):
    path = tmp_path / "model.pt"
    torch.save(content, path)
    with pytest.raises(ValueError, match=message):
        read_checkpoint(path)


def test_rejects_decompression_bombs(tmp_path):
    path = tmp_path / "model.pt"
    torch.save({"a": TENSOR}, path)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/1", bytes(10**8))
    with pytest.raises(ValueError, match="bytes unpack to"):
        read_checkpoint(path)


def test_reads_scalars_and_strings_of_training_files(tmp_path):
    """Numpy scalars, paths, default dictionaries and namespaces are read; other values are ignored."""
    history = collections.defaultdict(list)
    history["loss"].append(numpy.float32(0.5))
    content = {
        "model": {"a.weight": TENSOR},
        "loss": numpy.float64(0.25),
        "step": numpy.int64(7),
        "losses": numpy.ones(3),
        "history": history,
        "path": pathlib.Path("a/b"),
        "windows_path": pathlib.PureWindowsPath("c:/a"),
        "arguments": types.SimpleNamespace(activation="gelu", folder=pathlib.Path("x")),
        "settings": argparse.Namespace(n_head=4, names=["x"]),
        5: 6,
    }
    torch.save(content, tmp_path / "model.pt")
    state, metadata = read_checkpoint(tmp_path / "model.pt")
    assert list(state) == ["a.weight"]
    assert metadata == {
        **{"loss": 0.25, "step": 7, "path": "a/b", "windows_path": "c:\\/a"},
        **{"activation": "gelu", "folder": "x", "n_head": 4},
    }


def test_rejects_user_functions_in_default_dictionaries(tmp_path):
    torch.save({"model": {"a": TENSOR}, "more": collections.defaultdict(read_checkpoint)}, tmp_path / "model.pt")
    with pytest.raises(
        ValueError, match=r"would execute code from the file \(hub.importing.checkpoint_file.read_checkpoint\)"
    ):
        read_checkpoint(tmp_path / "model.pt")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"no pickle", b"}s.", b"t.", b"h\x00.", b"(" * 100, b"\x85"])
def test_rejects_corrupt_files(tmp_path, content):
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.pt is not a valid checkpoint"):
        read_checkpoint(path)
