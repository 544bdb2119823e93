"""Settings that a layout asks for by name: from `--set`, and from what a training file tells."""

import json
from typing import Any

from hub.importing.layout import Kind, Layout
from vanilla_transformer.shared.command_line import closest_match


def settings(texts: list[str], metadata: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """What `--set KEY=VALUE` and, for the layout's own settings, the file say; `--set` goes before.

    Raises:
        ValueError: a key that the layout does not have, or has twice, or a value of another kind.
    """
    kinds: dict[str, Kind] = layout.settings | {"source_begins": bool}
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set {text}: give KEY=VALUE.")
        if key not in kinds:
            near = closest_match(key, kinds)
            hint = f"did you mean {near}?" if near else f"it has {', '.join(kinds)}."
            raise ValueError(f"--set {text}: the layout {layout.name} has no setting {key}; {hint}")
        if key in found:
            raise ValueError(f"--set {key} is given twice: give it once.")
        found[key] = parsed(value)
        if not matches_kind(found[key], kinds[key]):
            raise ValueError(f"--set {text}: {key} is {choices(kinds[key])}.")
    for key, value in metadata.items():
        if key in layout.settings and key not in found:
            if not matches_kind(value, kinds[key]):
                raise ValueError(f"the file's {key} is {str(value)[:80]!r}: say --set {key}= {choices(kinds[key])}.")
            found[key] = value
    return found


def parsed(text: str) -> Any:
    """A number, true or false in JSON's or Python's spelling, or a word."""
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except (ValueError, RecursionError):  # of what is no JSON, or deeply nested
        return text


def matches_kind(value: Any, kind: Kind) -> bool:
    if isinstance(kind, tuple):
        return value in kind
    return type(value) in ((int, float) if kind is float else (kind,))


def choices(kind: Kind) -> str:
    if isinstance(kind, tuple):
        return " or ".join(kind)
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]


def format_setting(value: Any) -> str:
    """A value as `--set` takes it."""
    return value if isinstance(value, str) else json.dumps(value)
