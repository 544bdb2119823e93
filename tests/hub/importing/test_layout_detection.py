import pytest

from hub.importing.layout_detection import find_layout


def test_detects_layout_by_keys(make_reference, case):
    _, state, layout, _, _ = make_reference(case)
    if layout.name.startswith("build_transformer"):
        with pytest.raises(ValueError, match="--layout build_transformer .*--layout build_transformer_repaired"):
            find_layout(state)
        assert find_layout(state, layout.name)[0] is layout
    else:
        detected, evidence = find_layout(state)
        assert detected is layout
        assert f"all {len(state)} keys" in evidence
