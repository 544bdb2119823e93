"""Detection of the layout of a file from the names of its tensors."""

from .layout import Layout, State, compile_pattern
from .layouts import LAYOUTS


def find_layout(state: State, name: str | None = None) -> tuple[Layout, str]:
    """Return the layout that has the keys of the file, and the evidence as a readable message.

    Raises ValueError with the closest layouts and the first differing keys if no layout, several layouts or not the
    layout `name` match.
    """
    differences = {layout.name: find_differences(layout, state) for layout in LAYOUTS.values()}
    matches = [layout for layout in LAYOUTS.values() if not any(differences[layout.name])]
    if name is not None:
        if any(differences[name]):
            raise ValueError(f"the file does not have the layout {name}: {describe_difference(differences[name])}")
        matches = [LAYOUTS[name]]
    if len(matches) == 1:
        examples = " and ".join([key for key in matches[0].keys if "{" not in key][:2])
        return matches[0], f"all {len(state)} keys match this layout, such as {examples}"
    if matches:
        choices = "; ".join(f"--layout {layout.name} ({layout.title})" for layout in matches)
        raise ValueError(f"the keys match {len(matches)} layouts. Choose one of them: {choices}.")
    closest = sorted(differences, key=lambda each: sum(map(len, differences[each])))[:2]
    hints = " ".join(f"Closest: {each}: {describe_difference(differences[each])}" for each in closest)
    keys = ", ".join(list(state)[:3])
    raise ValueError(f"no known layout has these keys ({keys}, ...). {hints} To add a layout, see docs/importing.md.")


def find_differences(layout: Layout, state: State) -> tuple[list[str], list[str]]:
    """Return the keys of the file that the layout lacks, and the required keys of the layout that the file lacks."""
    patterns = {key: compile_pattern(key) for key in layout.keys}
    matches = {name: {key for key, regex in patterns.items() if regex.fullmatch(name)} for name in state}
    found = set(layout.optional).union(*matches.values())
    missing = [key for key, rule in layout.rules().items() if not rule.is_recomputed and key not in found]
    return [name for name, keys in matches.items() if not keys], missing


def describe_difference(difference: tuple[list[str], list[str]]) -> str:
    parts = [
        f"the {owner} lacks {', '.join(keys[:3])}" + (", ..." if len(keys) > 3 else "")
        for owner, keys in zip(("layout", "file"), difference, strict=True)
        if keys
    ]
    return " and ".join(parts) + "."
