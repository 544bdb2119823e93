"""Stub classes for the objects in training files, whose own classes are neither imported nor called.

`PICKLE_STUBS` and an `ObjectStub` for each name of `TOOLKITS` are passed to `torch.serialization.safe_globals`, which
rejects other names.
"""

import argparse
import struct
import types
from typing import Any

SCALAR_TYPES = (str, int, float, bool)
# numpy dtype -> struct format
STRUCT_FORMATS = {"f2": "e", "f4": "f", "f8": "d", "i2": "h", "i4": "i", "i8": "q", "b1": "?"}


class IgnoredStub:
    """Stub of an object whose content is not needed."""

    def __init__(self, *arguments: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class ObjectStub:
    """Stub of an object of a toolkit, with its arguments and its state for `to_plain_data`."""

    arguments: tuple
    state: dict

    def __new__(cls, *arguments: Any):
        record = super().__new__(cls)
        record.arguments, record.state = arguments, {}
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state if isinstance(state, dict) else {}


TOOLKITS = ("fairseq", "omegaconf", "onmt", "torchtext")  # packages whose classes become `ObjectStub`


def to_plain_data(value: Any, depth: int = 12) -> Any:
    """Convert namespaces and OmegaConf stubs to dictionaries, lists and scalars, up to `depth` nested containers."""
    if isinstance(value, ObjectStub):
        content = value.state.get("_content", value.state.get("_val", value.state))
        if not value.state:
            content = value.arguments[0] if value.arguments else None
        return to_plain_data(content, depth - 1) if depth else None
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        value = vars(value)
    if isinstance(value, dict | list | tuple) and not depth:
        return None
    if isinstance(value, dict):
        return {key: to_plain_data(each, depth - 1) for key, each in value.items() if isinstance(key, str)}
    if isinstance(value, list | tuple):
        return [to_plain_data(each, depth - 1) for each in value]
    return value if isinstance(value, SCALAR_TYPES) else None


class Dtype(IgnoredStub):
    """Stub of a little-endian numpy dtype with a code such as f8."""

    def __init__(self, code: Any = "", *rest: Any):
        self.code = code


def unpack_scalar(dtype: Any = None, data: Any = b"", *rest: Any) -> Any:
    """Return a numpy scalar as a Python number, or None for other types."""
    name = STRUCT_FORMATS.get(dtype.code) if isinstance(dtype, Dtype) and isinstance(dtype.code, str) else None
    if name is None or not isinstance(data, bytes) or len(data) != struct.calcsize(name):
        return None
    return struct.unpack(f"<{name}", data)[0]


def join_path(*parts: Any) -> str:
    return "/".join(part for part in parts if isinstance(part, str))


def make_dict(*factory: Any) -> dict:
    return {}


PICKLE_STUBS: list[Any] = [
    argparse.Namespace,
    types.SimpleNamespace,
    (make_dict, "collections.defaultdict"),
    (Dtype, "numpy.dtype"),
    # factories of defaultdict
    *((IgnoredStub, f"builtins.{name}") for name in ("int", "float", "str", "bool", "list", "dict", "tuple")),
    *((IgnoredStub, name) for name in ("builtins.type", "builtins.object", "_operator.getitem", "functools.partial")),
    *((IgnoredStub, f"typing.{name}") for name in ("Any", "Union", "Optional", "Dict", "List")),  # of OmegaConf nodes
    *((IgnoredStub, f"numpy.{name}") for name in ("ndarray", "float64", "float32", "int64")),
]
for module in ("numpy.core.multiarray", "numpy._core.multiarray"):  # before and since numpy 2
    PICKLE_STUBS += [(unpack_scalar, f"{module}.scalar"), (IgnoredStub, f"{module}._reconstruct")]
for module in ("pathlib", "pathlib._local"):  # before and in Python 3.13
    kinds = ("Posix", "Windows", "Pure", "PurePosix", "PureWindows")
    PICKLE_STUBS += [(join_path, f"{module}.{kind}Path") for kind in kinds]


def extract_metadata(entries: dict) -> dict[str, Any]:
    """Return the scalars and strings of a training file, also those in a namespace of settings."""
    values: dict[str, Any] = {}
    for name, value in entries.items():
        values |= vars(value) if isinstance(value, argparse.Namespace | types.SimpleNamespace) else {name: value}
    return {name: value for name, value in values.items() if isinstance(name, str) and isinstance(value, SCALAR_TYPES)}
