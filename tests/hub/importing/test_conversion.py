import re

import pytest
import torch

from hub.importing.conversion import convert
from hub.importing.layout import compile_pattern
from hub.importing.layout_detection import find_layout
from hub.importing.parity import max_log_prob_difference

PAD = {"jadore801120": 1, "hyunwoongko": 1, "bentrevett": 1, "bentrevett_2019": 1}


def special_ids_of(layout) -> dict[str, int]:
    return {"pad_token_id": PAD.get(layout.name, 0), "bos_token_id": 2, "eos_token_id": 3}


def test_import_equals_original_model(make_reference, case):
    """Log-probabilities on random batches with padding agree within 1e-4, for two hidden sizes."""
    for d in (16, 64):
        model, state, layout, metadata, heads = make_reference(case, d=d)
        imported = convert(state, layout, dict(metadata), heads, special_ids_of(layout))
        assert max_log_prob_difference(layout.forward, model, imported.model) <= 1e-4
        assert set(imported.used) | set(imported.dropped) == set(state)
        assert all(imported.dropped.values())


def mutations(state):
    """Yield ten files with one error each, and the key that the message must contain."""
    keys = [key for key in state if state[key].ndim > 1 and "pos" not in key and key.split(".")[-1] != "pe"]
    middle, last = keys[len(keys) // 2], keys[-1]
    yield {(k + "x" if k == middle else k): v for k, v in state.items()}, middle + "x"
    yield {(k.replace(".", "_", 1) if k == last else k): v for k, v in state.items()}, last.replace(".", "_", 1)
    for key in (keys[0], middle, last):
        yield {k: v for k, v in state.items() if k != key}, key
    yield state | {"something.else.weight": torch.zeros(2)}, "something.else.weight"
    yield state | {middle + ".extra": torch.zeros(2)}, middle + ".extra"
    for key in (middle, last):
        yield state | {key: torch.cat([state[key], state[key][:1]])}, key
    yield state | {middle: state[middle].flatten()[:-1]}, middle


@pytest.mark.parametrize(
    "name", ["hkproj A", "notebook", "jadore, not shared", "aladdin", "torch tutorial", "bentrevett"]
)
@pytest.mark.parametrize("number", range(10))
def test_error_contains_key(make_reference, name, number):
    _, state, layout, metadata, heads = make_reference(name)
    mutant, key = list(mutations(state))[number]

    def import_mutant():
        detected, _ = find_layout(mutant)
        convert(mutant, detected, dict(metadata), heads, special_ids_of(layout))

    with pytest.raises(ValueError) as error:  # noqa: PT011  # the message is checked below
        import_mutant()
    message = str(error.value)
    assert key in message or any(part in message for part in matching_patterns(key, layout)), message


def matching_patterns(key: str, layout) -> list[str]:
    """Return the patterns of a layout that match a key; messages contain them if all keys are missing."""
    return [each for each in layout.keys if compile_pattern(each).fullmatch(key)]


@pytest.mark.parametrize(
    ("name", "heads", "message"),
    [
        ("notebook", None, "does not specify the number of attention heads. Set --num-heads"),
        ("aladdin, full", None, "does not specify the number of attention heads. Set --num-heads"),
        ("notebook", 5, "the 16 rows of encoder_layers.0.self_attn.W_q.weight are not divisible by 5 heads"),
        ("notebook", 0, "--num-heads 0 must be at least 1"),
        ("notebook", -4, "--num-heads -4 must be at least 1"),
        ("jadore, not shared", 2, "--num-heads 2 is wrong: the model in the file has 4 heads"),
        ("aladdin", 1, "--num-heads 1 is wrong: the model in the file has 4 heads"),
    ],
)
def test_rejects_invalid_num_heads(make_reference, name, heads, message):
    _, state, layout, metadata, _ = make_reference(name)
    with pytest.raises(ValueError, match=message):
        convert(state, layout, metadata | {"n_head": 4}, heads, special_ids_of(layout))


@pytest.mark.parametrize(
    ("name", "key"), [("annotated", "src_embed.1.pe"), ("torch tutorial", "positional_encoding.pos_embedding")]
)
def test_accepts_positions_repeated_per_batch(make_reference, name, key):
    _, state, layout, metadata, heads = make_reference(name)
    shape = list(state[key].shape)
    shape[shape.index(1)] = 8
    for table in (state[key].expand(shape), state[key].expand(shape).contiguous()):
        imported = convert(state | {key: table}, layout, dict(metadata), heads, special_ids_of(layout))
        assert key in imported.dropped


@pytest.mark.parametrize(
    "name", ["hkproj C", "notebook", "annotated", "jadore, not shared", "gordicaleksa", "torch tutorial"]
)
def test_computes_missing_positions(make_reference, name):
    """The report states that the positions are computed."""
    model, state, layout, metadata, heads = make_reference(name)
    tables = [key for key, rule in layout.rules().items() if rule.is_recomputed]
    for key in tables:
        del state[key]
    assert find_layout(state)[0] is layout
    imported = convert(state, layout, dict(metadata), heads, special_ids_of(layout))
    assert f"The file lacks {', '.join(tables)}" in " ".join(imported.user_notes)
    assert max_log_prob_difference(layout.forward, model, imported.model) <= 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_accepts_other_dtypes(make_reference, case, dtype):
    model, state, layout, metadata, heads = make_reference(case)
    state = {key: value.to(dtype) for key, value in state.items()}
    tables = {key for key, rule in layout.rules().items() if rule.is_recomputed}
    imported = convert(state, layout, dict(metadata), heads, special_ids_of(layout))
    model.load_state_dict({key: value for key, value in state.items() if key not in tables}, strict=False)
    assert max_log_prob_difference(layout.forward, model, imported.model) <= 1e-4


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_rejects_missing_layer_0(make_reference, case, side):
    """Some layouts read the number of heads from a tensor of layer 0."""
    _, state, layout, metadata, heads = make_reference(case)
    numbered = [key for key in state if side in key and re.search(r"\.0\.", key)]
    if case == "aladdin":
        heads = None
    for key in numbered:
        del state[key]
    with pytest.raises(ValueError, match="the file lacks|some layers are missing"):
        convert(state, layout, dict(metadata), heads, special_ids_of(layout))


def set_value(key: str, index, value: float):
    """Return a function that sets a value of a tensor, in float64."""

    def change(state):
        state[key] = state[key].double()
        state[key][index] = value

    return change


def rename_layer(number: str):
    def change(state):
        for key in [key for key in state if key.startswith("encoder_layers.1.")]:
            state[key.replace(".1.", f".{number}.", 1)] = state.pop(key)

    return change


TABLE, LINEAR = "positional_encoding.pe", "encoder_layers.0.feed_forward.fc1.weight"
OUTSIDE = "fc.weight contains NaN or values outside the range of float32"
CHANGES = [  # change of a state dict, message
    (lambda state: state.update({TABLE: state[TABLE].roll(1, dims=-1)}), f"{TABLE}.*differs from the sinusoids"),
    (set_value(TABLE, (..., 3, 3), float("nan")), "differs from the sinusoids of section 3.5"),
    *((set_value("fc.weight", (3, 4), value), OUTSIDE) for value in (float("nan"), float("inf"), 1e300)),
    *((rename_layer(number), f"the 2 encoder layers have the numbers 0, {number}: some layers are missing")
      for number in ("5", "99999999999")),
    # would require a model of terabytes if the shapes were checked after the allocation
    (lambda state: state.update({LINEAR: torch.zeros(10**9, 1).expand(-1, 16)[:, :0]}), rf"{LINEAR}.*, expected \("),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_rejects_invalid_tensors(make_reference, change, message):
    _, state, layout, metadata, heads = make_reference("notebook")
    change(state)
    with pytest.raises(ValueError, match=message):
        convert(state, layout, metadata, heads, special_ids_of(layout))


@pytest.mark.parametrize("name", ["torch tutorial", "aladdin, nn.Transformer"])
@pytest.mark.parametrize(("norm_first", "activation"), [(True, "relu"), (False, "gelu"), (True, "gelu")])
def test_nn_transformer_arguments_are_settings(make_reference, name, norm_first, activation):
    """Files do not contain norm_first and activation. The report states the assumed values."""
    model, state, layout, _, heads = make_reference(name)
    for layer in (*model.transformer.encoder.layers, *model.transformer.decoder.layers):
        layer.norm_first, layer.activation = norm_first, getattr(torch.nn.functional, activation)
        layer.activation_relu_or_gelu = 0  # PyTorch's fast path of evaluation
    default = convert(state, layout, {}, heads, special_ids_of(layout))
    line = "The file does not specify norm_first, activation. Assumed: norm_first=false, activation=relu."
    assert any(line in note for note in default.user_notes)
    assert max_log_prob_difference(layout.forward, model, default.model) > 1e-3
    configured = convert(
        state, layout, {"norm_first": norm_first, "activation": activation}, heads, special_ids_of(layout)
    )
    assert not any("does not specify norm_first" in note for note in configured.user_notes)
    assert max_log_prob_difference(layout.forward, model, configured.model) <= 1e-4


def test_joeynmt_with_gelu(make_reference):
    model, state, layout, metadata, heads = make_reference("joeynmt, pre")
    for layer in (*model.encoder.layers, *model.decoder.layers):
        layer.feed_forward.pwff_layer[1] = torch.nn.GELU()
    default = convert(state, layout, metadata, heads, special_ids_of(layout))
    assert any("does not specify activation. Assumed: activation=relu" in note for note in default.user_notes)
    assert max_log_prob_difference(layout.forward, model, default.model) > 1e-3
    configured = convert(state, layout, metadata | {"activation": "gelu"}, heads, special_ids_of(layout))
    assert max_log_prob_difference(layout.forward, model, configured.model) <= 1e-4


def test_separate_heads_with_unscaled_embeddings(make_reference):
    model, state, layout, metadata, heads = make_reference("separate heads")
    model.d = 1  # times sqrt(1)
    configured = convert(state, layout, {"scale": False}, heads, special_ids_of(layout))
    assert max_log_prob_difference(layout.forward, model, configured.model) <= 1e-4


def test_unbiased_norm_is_a_setting(make_reference):
    """Without the setting, the report states the assumed value."""
    model, state, layout, _, heads = make_reference("hyunwoongko, unbiased")
    default = convert(state, layout, {}, heads, special_ids_of(layout))
    assert any("does not specify unbiased_norm. Assumed: unbiased_norm=false" in note for note in default.user_notes)
    assert max_log_prob_difference(layout.forward, model, default.model) > 1e-3


def test_reports_attention_to_source_padding(make_reference):
    """The imported model equals the original without padding. With padding, the original differs."""
    model, state, layout, _, heads = make_reference("aladdin, nn.Transformer")
    imported = convert(state, layout, {}, heads, special_ids_of(layout))
    assert any("attends to source padding" in note for note in imported.user_notes)
    source, target = torch.tensor([[5, 6, 7, 0, 0]]), torch.tensor([[2, 8, 9]])
    with torch.no_grad():
        unpadded, padded = (model(each.T, target.T).transpose(0, 1) for each in (source[:, :3], source))
        actual = imported.model(source, attention_mask=(source != 0).long(), decoder_input_ids=target).logits
    torch.testing.assert_close(actual, unpadded, atol=1e-4, rtol=0)
    assert (actual - padded).abs().max() > 1e-3


def test_reports_older_jadore_code(make_reference):
    """The tensors do not show which version of the code wrote the file."""
    _, state, layout, metadata, heads = make_reference("jadore, not shared")
    imported = convert(state, layout, metadata, heads, {"pad_token_id": 1})
    assert any("before 7 June 2020" in line for line in imported.user_notes)
