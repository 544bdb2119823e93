import itertools

import pytest
import torch
from torch import nn

from hub.importing import parity
from hub.importing.conversion import convert
from hub.importing.parity import compare_with_user_model

IDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}


@pytest.fixture
def imported(make_reference):
    """Return a reference model, its state and layout, and the imported model."""
    model, state, layout, metadata, heads = make_reference("notebook")
    return model, state, layout, convert(state, layout, metadata, heads, IDS).model


def register(monkeypatch, build):
    """Make `build` importable and return its `MODULE:CALLABLE`."""
    monkeypatch.setitem(parity.sys.modules, "user_code", type("user_code", (), {"build": staticmethod(build)}))
    return "user_code:build"


def test_rejects_overflowing_weights(make_reference, monkeypatch):
    model, state, layout, metadata, heads = make_reference("notebook")
    state["fc.weight"] = torch.full_like(state["fc.weight"], 1e38)
    imported_model = convert(state, layout, metadata, heads, IDS).model
    with pytest.raises(ValueError, match="not all finite"):
        compare_with_user_model(register(monkeypatch, lambda: model), layout, state, imported_model)


def exits():
    raise SystemExit(0)


def fails():
    raise RuntimeError("one\ntwo")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (exits, "fails: SystemExit: 0"),
        (fails, "fails: RuntimeError: one"),
        (lambda size: None, "Expected MODULE:CALLABLE, where CALLABLE takes no arguments"),
        (lambda: None, "returns a NoneType, expected a torch.nn.Module"),
        (lambda: nn.Linear(2, 2), "does not match the weights in the file"),
    ],
)
def test_rejects_code_without_the_model(imported, monkeypatch, build, message):
    _, state, layout, imported_model = imported
    with pytest.raises(ValueError, match=message):
        compare_with_user_model(register(monkeypatch, build), layout, state, imported_model)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda logits, batch: exits(), "fails: SystemExit"),
        (lambda logits, batch: None, "fails: AttributeError"),
        (lambda logits, batch: torch.zeros(1, 1, 1), r"has the shape \(1, 1, 1\), expected \(4, 7, 37\)"),
        (lambda logits, batch: logits * float("nan"), "not all finite and cannot be compared"),
        (lambda logits, batch: logits * (float("nan") if batch == 1 else 1.0), "not all finite"),
    ],
)
def test_rejects_invalid_outputs(imported, monkeypatch, forward, message):
    """`forward` gets the logits and the number of the batch."""
    model, state, layout, imported_model = imported
    original, numbers = model.forward, itertools.count()
    model.forward = lambda *batch: forward(original(*batch), next(numbers))
    with pytest.raises(ValueError, match=message):
        compare_with_user_model(register(monkeypatch, lambda: model), layout, state, imported_model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("with_table", [True, False])
def test_compares_rounded_files_and_missing_positions(make_reference, monkeypatch, dtype, with_table):
    model, state, layout, metadata, heads = make_reference("notebook")
    state = {key: value.to(dtype) for key, value in state.items() if with_table or not key.endswith(".pe")}
    imported_model = convert(state, layout, metadata, heads, IDS).model
    report = compare_with_user_model(register(monkeypatch, lambda: model), layout, state, imported_model)
    assert report["largest_difference_of_log_probabilities"] <= 1e-4
