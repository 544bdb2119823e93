"""Which layout a file is of: that whose keys are the file's."""

from hub.importing.layout import Layout, State, compile_pattern
from hub.importing.layouts import LAYOUTS


def find_layout(state: State, name: str | None = None) -> tuple[Layout, str]:
    """The layout whose keys are the file's, with the evidence in words.

    Raises:
        ValueError: none or several fit, or the named one does not; tells the closest and the first keys that differ.
    """
    differences = {layout.name: differing(layout, state) for layout in LAYOUTS.values()}
    fitting = [layout for layout in LAYOUTS.values() if not any(differences[layout.name])]
    if name is not None:
        if any(differences[name]):
            raise ValueError(f"the file is not of layout {name}: {explain(differences[name])}")
        fitting = [LAYOUTS[name]]
    if len(fitting) == 1:
        keys = [key for key in fitting[0].keys if "{" not in key][:2]
        return fitting[0], f"all of its {len(state)} keys are that layout's, such as {' and '.join(keys)}"
    if fitting:
        choices = "; ".join(f"--layout {layout.name} ({layout.title})" for layout in fitting)
        raise ValueError(f"the keys are those of {len(fitting)} layouts, so say which it is: {choices}.")
    closest = sorted(differences, key=lambda each: sum(map(len, differences[each])))[:2]
    hints = " ".join(f"Closest: {each}: {explain(differences[each])}" for each in closest)
    raise ValueError(
        f"no known layout has these keys ({', '.join(list(state)[:3])}, ...). {hints} A new layout is one file in "
        f"hub/importing/layouts: see docs/importing.md."
    )


def differing(layout: Layout, state: State) -> tuple[list[str], list[str]]:
    """The file's keys that the layout does not know, and the layout's that the file does not have."""
    patterns = {key: compile_pattern(key) for key in layout.keys}
    matched, unknown = set(), []
    for name in state:
        found = [key for key, regex in patterns.items() if regex.fullmatch(name)]
        matched.update(found)
        if not found:
            unknown.append(name)
    needed = [key for key, use in layout.uses().items() if not use.computed and key not in layout.optional]
    return unknown, [key for key in needed if key not in matched]


def explain(difference: tuple[list[str], list[str]]) -> str:
    unknown, missing = difference
    parts = []
    if unknown:
        parts.append(f"it does not know {', '.join(unknown[:3])}" + (", ..." if len(unknown) > 3 else ""))
    if missing:
        parts.append(f"the file lacks {', '.join(missing[:3])}" + (", ..." if len(missing) > 3 else ""))
    return " and ".join(parts) + "."
