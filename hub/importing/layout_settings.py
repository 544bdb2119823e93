"""Settings of a layout, from `--set` and from the file."""

import json
from typing import Any

from vanilla_transformer.shared.command_line import closest_match

from .layout import Kind, Layout


def resolve_settings(texts: list[str], metadata: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """Merge the values of `--set KEY=VALUE` with those of the file; `--set` has priority."""
    kinds: dict[str, Kind] = layout.settings | {"source_begins": bool, "source_ends": bool}
    settings: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set {text}: the format must be KEY=VALUE.")
        if key not in kinds:
            near = closest_match(key, kinds)
            hint = f"did you mean {near}?" if near else f"choose from {', '.join(kinds)}."
            raise ValueError(f"--set {text}: the layout {layout.name} has no setting {key}; {hint}")
        if key in settings:
            raise ValueError(f"--set {key} is repeated. Set it only once.")
        settings[key] = parse_value(value)
        if not matches_kind(settings[key], kinds[key]):
            raise ValueError(f"--set {text}: {key} must be {describe_kind(kinds[key])}.")
    for key, value in metadata.items():
        if key in layout.settings and key not in settings:
            if not matches_kind(value, kinds[key]):
                required = f"must be {describe_kind(kinds[key])}. Set it with --set {key}=..."
                raise ValueError(f"the file's {key}={str(value)[:80]!r} {required}")
            settings[key] = value
    return settings


def parse_value(text: str) -> Any:
    """Parse a number, true or false in the spelling of JSON or Python, or a string."""
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except (ValueError, RecursionError):  # not JSON, or deeply nested
        return text


def matches_kind(value: Any, kind: Kind) -> bool:
    if isinstance(kind, tuple):
        return value in kind
    return type(value) in ((int, float) if kind is float else (kind,))


def describe_kind(kind: Kind) -> str:
    if isinstance(kind, tuple):
        return " or ".join(kind)
    return {bool: "true or false", int: "an integer", float: "a number", str: "text"}[kind]


def format_setting(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
