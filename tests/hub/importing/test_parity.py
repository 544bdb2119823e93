import pytest
import torch
from torch import nn

from hub.importing import parity
from hub.importing.conversion import convert
from hub.importing.parity import compare_with_user_model

IDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}


@pytest.fixture
def imported(make_reference):
    """A reference, its state and layout, and our model of it."""
    model, state, layout, metadata, heads = make_reference("notebook")
    return model, state, layout, convert(state, layout, metadata, heads, IDS).model


def built_by(monkeypatch, build):
    monkeypatch.setitem(parity.sys.modules, "theirs", type("theirs", (), {"build": staticmethod(build)}))
    return "theirs:build"


def test_a_model_of_nan_proves_nothing(imported, monkeypatch):
    model, state, layout, ours = imported
    forward = model.forward
    model.forward = lambda *batch: forward(*batch) * float("nan")
    with pytest.raises(ValueError, match="not all finite and cannot be compared"):
        compare_with_user_model(built_by(monkeypatch, lambda: model), layout, state, ours)


def test_one_nan_among_numbers_proves_nothing(imported, monkeypatch):
    model, state, layout, ours = imported
    forward, calls = model.forward, []

    def once(*batch):
        calls.append(1)
        return forward(*batch) * (float("nan") if len(calls) == 2 else 1.0)

    model.forward = once
    with pytest.raises(ValueError, match="not all finite"):
        compare_with_user_model(built_by(monkeypatch, lambda: model), layout, state, ours)


def test_weights_that_overflow_prove_nothing(make_reference, monkeypatch):
    model, state, layout, metadata, heads = make_reference("notebook")
    state["fc.weight"] = torch.full_like(state["fc.weight"], 1e38)
    ours = convert(state, layout, metadata, heads, IDS).model
    with pytest.raises(ValueError, match="not all finite"):
        compare_with_user_model(built_by(monkeypatch, lambda: model), layout, state, ours)


def ends():
    raise SystemExit(0)


def fails():
    raise RuntimeError("one\ntwo")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (ends, "fails: SystemExit: 0"),
        (fails, "fails: RuntimeError: one"),
        (lambda size: None, "Expected MODULE:CALLABLE, where CALLABLE takes no arguments"),
        (lambda: None, "returns a NoneType, expected a torch.nn.Module"),
        (lambda: nn.Linear(2, 2), "does not match the weights in the file"),
    ],
)
def test_code_that_does_not_build_the_model(imported, monkeypatch, build, message):
    _, state, layout, ours = imported
    with pytest.raises(ValueError, match=message):
        compare_with_user_model(built_by(monkeypatch, build), layout, state, ours)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda *batch: ends(), "fails: SystemExit"),
        (lambda *batch: None, "fails: AttributeError"),
        (lambda *batch: torch.zeros(1, 1, 1), r"has the shape \(1, 1, 1\), expected \(4, 7, 37\)"),
    ],
)
def test_a_model_that_does_not_answer(imported, monkeypatch, forward, message):
    model, state, layout, ours = imported
    model.forward = forward
    with pytest.raises(ValueError, match=message):
        compare_with_user_model(built_by(monkeypatch, lambda: model), layout, state, ours)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("with_table", [True, False])
def test_rounded_files_and_those_without_positions_are_compared(make_reference, monkeypatch, dtype, with_table):
    model, state, layout, metadata, heads = make_reference("notebook")
    state = {key: value.to(dtype) for key, value in state.items() if with_table or not key.endswith(".pe")}
    ours = convert(state, layout, metadata, heads, IDS).model
    found = compare_with_user_model(built_by(monkeypatch, lambda: model), layout, state, ours)
    assert found["largest_difference_of_log_probabilities"] <= 1e-4
