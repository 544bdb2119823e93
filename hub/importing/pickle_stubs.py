"""What a training file holds besides tensors, as stand-ins: of all that it names, nothing is imported or called.

`PICKLE_STUBS` and `records(names)` are for `torch.serialization.safe_globals`. Whatever else a file names is refused.
"""

import argparse
import struct
import types
from collections.abc import Iterable
from typing import Any

SIMPLE = (str, int, float, bool)
FORMATS = {"f2": "e", "f4": "f", "f8": "d", "i2": "h", "i4": "i", "i8": "q", "b1": "?"}  # numpy's -> struct's


class IgnoredStub:
    """Takes whatever it is made of, and keeps nothing."""

    def __init__(self, *arguments: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class ObjectStub:
    """Stands for an object of a toolkit's class: what it was made of and its state, which `plain` reads."""

    arguments: tuple
    state: dict

    def __new__(cls, *arguments: Any):
        record = super().__new__(cls)
        record.arguments, record.state = arguments, {}
        return record

    def __init__(self, *arguments: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state if isinstance(state, dict) else {}


TOOLKITS = ("fairseq", "omegaconf", "onmt", "torchtext")  # packages whose classes are read as records


def records(names: Iterable[str]) -> list[Any]:
    """Stand-ins for those of a pickle's names that are of the toolkits: of them, too, nothing is imported."""
    return [(ObjectStub, name) for name in set(names) if name.split(".")[0] in TOOLKITS]


def plain(value: Any, depth: int = 12) -> Any:
    """Settings as dictionaries, lists and simple values: of namespaces, OmegaConf's nodes, enumerations and fields.

    Args:
        depth: how deep containers are followed; what lies below is None.
    """
    if isinstance(value, ObjectStub):
        content = value.state.get("_content", value.state.get("_val", value.state))
        if not value.state:
            content = value.arguments[0] if value.arguments else None
        return plain(content, depth - 1) if depth else None
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        value = vars(value)
    if isinstance(value, dict):
        return {key: plain(each, depth - 1) for key, each in value.items() if isinstance(key, str)} if depth else None
    if isinstance(value, list | tuple):
        return [plain(each, depth - 1) for each in value] if depth else None
    return value if isinstance(value, SIMPLE) else None


class Dtype(IgnoredStub):
    """numpy's dtype by its code, such as f8; little endian, as on every machine that trains."""

    def __init__(self, code: Any = "", *rest: Any):
        self.code = code


def number(dtype: Any = None, data: Any = b"", *rest: Any) -> Any:
    """A numpy number as Python's; None of any other kind."""
    name = FORMATS.get(dtype.code) if isinstance(dtype, Dtype) and isinstance(dtype.code, str) else None
    if name is None or not isinstance(data, bytes) or len(data) != struct.calcsize(name):
        return None
    return struct.unpack(f"<{name}", data)[0]


def path(*parts: Any) -> str:
    return "/".join(part for part in parts if isinstance(part, str))


def dictionary(*factory: Any) -> dict:
    return {}


PICKLE_STUBS: list[Any] = [
    argparse.Namespace,
    types.SimpleNamespace,
    (dictionary, "collections.defaultdict"),
    (Dtype, "numpy.dtype"),
    *(
        (IgnoredStub, f"builtins.{name}") for name in ("int", "float", "str", "bool", "list", "dict", "tuple")
    ),  # factories
    *((IgnoredStub, name) for name in ("builtins.type", "builtins.object", "_operator.getitem", "functools.partial")),
    *((IgnoredStub, f"typing.{name}") for name in ("Any", "Union", "Optional", "Dict", "List")),  # of OmegaConf's nodes
    *((IgnoredStub, f"numpy.{name}") for name in ("ndarray", "float64", "float32", "int64")),
]
for module in ("numpy.core.multiarray", "numpy._core.multiarray"):  # before and since numpy 2
    PICKLE_STUBS += [(number, f"{module}.scalar"), (IgnoredStub, f"{module}._reconstruct")]
for module in ("pathlib", "pathlib._local"):  # before and in Python 3.13
    PICKLE_STUBS += [
        (path, f"{module}.{kind}Path") for kind in ("Posix", "Windows", "Pure", "PurePosix", "PureWindows")
    ]


def told(entries: dict) -> dict[str, Any]:
    """What a file's entries tell by name: numbers and words, and those of a namespace of settings."""
    found: dict[str, Any] = {}
    for name, value in entries.items():
        if isinstance(value, argparse.Namespace | types.SimpleNamespace):
            found |= vars(value)
        else:
            found[name] = value
    return {name: value for name, value in found.items() if isinstance(name, str) and isinstance(value, SIMPLE)}
