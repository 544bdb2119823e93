"""Pickles that torch's unpickler, which runs nothing, would yet be busy with for years, or until no memory is left.

A tuple may hold another one twice, that one a third twice, and so on: forty of them fit into some hundred bytes, and
Python looks at 2^40 when the outermost becomes a key. Likewise a tensor may repeat one number 2^40 times, and a set be
made of it. Here the operations of a pickle are followed without any object being made.
"""

import pickletools
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

DEEPEST = 100  # tuples within tuples: Python's hash of them calls itself, until its stack is full
PICKLES = 5  # in a file of the format of before PyTorch 1.6; the tensors' numbers are behind them
PLAIN = ("collections.OrderedDict", "collections.Counter", "builtins.set", "builtins.bytearray", "torch.Size")
TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
NUMBERS = ("BININT", "BININT1", "BININT2", "LONG1")
VALUES = (
    *("NONE", "NEWFALSE", "NEWTRUE", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING"),
    *("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"),
)
REPEATED = "it holds tuples within tuples that would be {:,} if each was written out"


@dataclass(frozen=True)
class Item:
    """What an operation leaves; `kind`: "number", another value or a list ("plain"), "tuple", "name", or "object"."""

    kind: str
    name: str = ""
    items: tuple["Item", ...] = ()
    size: int = 1  # with all that a tuple holds, each time that it does
    depth: int = 0


class EndlessError(Exception):
    """Says why."""


def why_endless(path: Path, limit: int) -> str | None:
    """What in a file would take for ever; None: nothing, as far as torch reads it.

    Args:
        limit: how many items may be there once nothing is shared.
    """
    try:
        with path.open("rb") as file:
            is_archive = file.read(4) == b"PK\x03\x04"  # as torch tells them apart
        if is_archive:
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    if name.lower().endswith(".pkl"):
                        with archive.open(name) as member:
                            follow(member, limit)
        else:
            with path.open("rb") as file:
                for _ in range(PICKLES):
                    follow(file, limit)
    except EndlessError as reason:
        return str(reason)
    except (ValueError, IndexError, KeyError, zipfile.BadZipFile, NotImplementedError):
        pass  # broken: torch comes no further, and tells
    return None


def follow(file: IO[bytes], limit: int) -> None:
    """Goes through one pickle, up to its end or the first operation that torch refuses.

    Raises:
        EndlessError: it is.
        ValueError, IndexError, KeyError: it is broken.
    """
    stack: list[Item] = []
    marks: list[int] = []
    memo: dict[Any, Item] = {}
    fetched = 0

    def pop(count: int) -> list[Item]:
        if count > len(stack):
            raise IndexError
        items = stack[len(stack) - count :]
        del stack[len(stack) - count :]
        return items

    for operation, argument, _ in pickletools.genops(file):
        name = operation.name
        if name in VALUES or name in NUMBERS:
            stack.append(Item("number" if name in NUMBERS else "plain"))
        elif name in TUPLES or name == "TUPLE":
            stack.append(tuple_of(pop(TUPLES[name] if name in TUPLES else len(stack) - marks.pop())))
        elif name == "GLOBAL":
            stack.append(Item("name", str(argument).replace(" ", ".")))
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
            fetched += memo[argument].size
            if fetched > limit:
                raise EndlessError(REPEATED.format(fetched))
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("REDUCE", "NEWOBJ", "BUILD"):
            function, given = pop(2)
            check(function, given)
            stack.append(Item("object", function.name))
        elif name == "BINPERSID":
            pop(1)
            stack.append(Item("object"))
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("APPEND", "SETITEM"):
            pop(1 if name == "APPEND" else 2)
        elif name in ("APPENDS", "SETITEMS"):
            pop(len(stack) - marks.pop())
        elif name != "PROTO":
            return


def tuple_of(items: list[Item]) -> Item:
    depth = 1 + max((item.depth for item in items), default=0)
    if depth > DEEPEST:
        raise EndlessError(f"it holds tuples within tuples, more than {DEEPEST} deep")
    return Item("tuple", "", tuple(items), 1 + sum(item.size for item in items), depth)


def check(function: Item, given: Item) -> None:
    """Raises EndlessError where an object is made of, or filled with, what may be larger than it is in the file."""
    names = [item.name for item in given.items if item.kind == "name"]
    if given.kind in ("object", "name"):
        raise EndlessError("it makes an object of what may have any number of items")
    if function.name in PLAIN and any(item.kind in ("object", "name", "number") for item in given.items):
        raise EndlessError(f"it makes a {function.name} of what may have any number of items")
    if function.name.startswith("torch.") and any(name in PLAIN for name in names):
        raise EndlessError(f"it hands {names[0]} to {function.name}")
