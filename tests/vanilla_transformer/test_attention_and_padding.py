"""Padding and other sentences of a batch have no effect, and all attention implementations agree."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

ATTENTIONS = ["eager", "sdpa", "flex_attention"]
VARIANTS = [
    {},
    {"norm_position": "pre"},
    {"position_embedding_type": "learned"},
    {"key_head_dim": 5, "value_head_dim": 11},
    {"embedding_norm": True, "final_norm": True, "activation_function": "gelu", "scale_embedding": False},
    {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 61, "lm_head_bias": True},
    {"tie_word_embeddings": False, "decoder_layers": 3, "decoder_attention_heads": 2},
]


@torch.no_grad()
def logits_of(model, **inputs):
    return model(**inputs, use_cache=False).logits


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: ",".join(variant) or "paper")
def test_attention_implementations_agree(make_model, batch, variant):
    model = make_model(**variant)
    model.set_attn_implementation("eager")
    expected = logits_of(model, **batch)
    for attention in ATTENTIONS[1:] if not variant else ["sdpa"]:  # FlexAttention recompiles for each shape
        model.set_attn_implementation(attention)
        torch.testing.assert_close(logits_of(model, **batch), expected, atol=1e-5, rtol=0)


def test_attention_implementation_is_set_at_construction(make_config):
    from vanilla_transformer import VanillaTransformerForConditionalGeneration

    model = VanillaTransformerForConditionalGeneration._from_config(make_config(), attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    assert VanillaTransformerForConditionalGeneration._supports_flash_attn


@pytest.mark.parametrize(
    ("attention", "variant"),
    [("eager", {}), ("sdpa", {}), ("flex_attention", {}), ("sdpa", VARIANTS[1]), ("sdpa", VARIANTS[2])],
)
def test_left_and_right_padding_give_the_same_logits(make_model, batch, attention, variant):
    model = make_model(**variant)
    model.set_attn_implementation(attention)
    expected = logits_of(model, **batch)
    for extra in (0, 4):
        ids, mask = torch.zeros(3, 7 + extra, dtype=torch.long), torch.zeros(3, 7 + extra, dtype=torch.long)
        for row, length in enumerate((7, 5, 3)):
            ids[row, 7 + extra - length :] = batch["input_ids"][row, :length]
            mask[row, 7 + extra - length :] = 1
        left = logits_of(model, input_ids=ids, attention_mask=mask, decoder_input_ids=batch["decoder_input_ids"])
        torch.testing.assert_close(left, expected, atol=1e-5, rtol=0)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_logits_do_not_depend_on_batch(module_model, data):
    """Lengths, rows in the batch and padding on either side are random."""
    model = module_model
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    padded_length = max(lengths) + data.draw(st.integers(0, 4))
    target_length = data.draw(st.integers(1, 7))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    ids = torch.zeros(len(lengths), padded_length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    targets = torch.randint(3, 60, (len(lengths), target_length), generator=generator)
    sources = [torch.randint(3, 60, (length,), generator=generator) for length in lengths]
    for row, source in enumerate(sources):
        start = data.draw(st.integers(0, padded_length - len(source)))
        ids[row, start : start + len(source)] = source
        mask[row, start : start + len(source)] = 1
    batched = logits_of(model, input_ids=ids, attention_mask=mask, decoder_input_ids=targets)
    for row, source in enumerate(sources):
        single = logits_of(model, input_ids=source[None], decoder_input_ids=targets[row : row + 1])
        torch.testing.assert_close(batched[row : row + 1], single, atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def module_model():
    from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration

    torch.manual_seed(0)
    size = {"d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 60}
    config = VanillaTransformerConfig(
        encoder_layers=2, decoder_layers=2, encoder_ffn_dim=48, decoder_ffn_dim=48, **size
    )
    return VanillaTransformerForConditionalGeneration(config).eval()


def test_attention_mask_is_applied(make_model, batch):
    """Ids at padding positions have no effect, ids at other positions have one."""
    model = make_model()
    expected = logits_of(model, **batch)
    changed = batch | {"input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 17)}
    torch.testing.assert_close(logits_of(model, **changed), expected)
    unmasked = logits_of(model, **(batch | {"attention_mask": torch.ones_like(batch["attention_mask"])}))
    assert (unmasked - expected)[1:].abs().max() > 1e-2


def test_left_padded_labels_are_rejected(make_model, batch):
    labels = batch["decoder_input_ids"].clone()
    labels[0, :2] = -100
    with pytest.raises(ValueError, match="Pad them on the right"):
        make_model()(input_ids=batch["input_ids"], labels=labels)


def test_left_padded_prompts_are_finite_in_half_precision(make_model, batch):
    model = make_model().to(torch.float16)
    model.set_attn_implementation("eager")
    prompt = torch.cat([torch.zeros(3, 2, dtype=torch.long), batch["decoder_input_ids"]], dim=1)
    logits = logits_of(model, **batch | {"decoder_input_ids": prompt, "decoder_attention_mask": (prompt != 0).long()})
    assert logits.isfinite().all()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_boolean_masks_equal_additive_ones(make_model, batch, attention):
    model = make_model()
    model.set_attn_implementation(attention)
    length = batch["decoder_input_ids"].shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril().expand(len(batch["input_ids"]), 1, -1, -1)
    additive = torch.zeros(causal.shape).masked_fill(~causal, torch.finfo(torch.float32).min)
    expected = logits_of(model, **batch)
    for mask in (causal, additive):
        torch.testing.assert_close(logits_of(model, **batch | {"decoder_attention_mask": mask}), expected)


def test_left_padded_targets(make_model, batch):
    model = make_model()
    expected = logits_of(model, **batch)
    padding = torch.zeros(3, 2, dtype=torch.long)
    left = logits_of(
        model,
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        decoder_input_ids=torch.cat([padding, batch["decoder_input_ids"]], dim=1),
        decoder_attention_mask=torch.cat([padding, torch.ones_like(batch["decoder_input_ids"])], dim=1),
    )
    torch.testing.assert_close(left[:, 2:], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_decoder_attention_is_causal(make_model, batch, attention):
    """Gradients show that logits at position t depend on the embeddings of all positions <= t, and on no others."""
    model = make_model()
    model.set_attn_implementation(attention)
    embeddings = model.model.decoder.embed_tokens(batch["decoder_input_ids"]).detach().requires_grad_()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    logits = model(**inputs, decoder_inputs_embeds=embeddings).logits
    for position in range(logits.shape[1]):
        (gradient,) = torch.autograd.grad(logits[0, position].pow(2).sum(), embeddings, retain_graph=True)
        assert (gradient[0, position + 1 :] == 0).all()
        assert (gradient[0, : position + 1].abs().amax(-1) > 0).all()
        assert (gradient[1:] == 0).all()  # no other sentence of the batch


@pytest.mark.parametrize(
    ("attention", "dtype"),
    [(name, dtype) for name in ATTENTIONS[:2] for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    + [("flex_attention", torch.float32)],
)
def test_fully_masked_rows_are_finite(make_model, batch, attention, dtype):
    """These are padded target positions and empty sources, which are not rejected on a GPU or in compiled code."""
    model = make_model().to(dtype)
    model.set_attn_implementation(attention)
    mask = torch.ones_like(batch["decoder_input_ids"])
    mask[:, :3] = 0
    assert logits_of(model, **batch, decoder_attention_mask=mask).isfinite().all()
    states = torch.randn(3, 7, 32, dtype=dtype)
    empty = torch.zeros(3, 7, dtype=torch.long)
    outputs = logits_of(
        model, encoder_outputs=(states,), attention_mask=empty, decoder_input_ids=batch["decoder_input_ids"]
    )
    assert outputs.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_to_single(make_model, batch, dtype):
    model = make_model()
    expected = functional.log_softmax(logits_of(model, **batch), dim=-1)
    actual = functional.log_softmax(logits_of(model.to(dtype), **batch).float(), dim=-1)
    assert actual.isfinite().all()
    assert (actual - expected).abs().mean() < 0.05


@pytest.mark.parametrize("norm_position", ["post", "pre"])
def test_half_precision_is_finite_with_large_weights(make_model, batch, norm_position):
    model = make_model(norm_position=norm_position).half()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    assert logits_of(model, **batch).isfinite().all()


def test_sinusoidal_positions_are_unlimited(make_model):
    model = make_model(max_position_embeddings=8)
    ids = torch.randint(3, 60, (1, 40))
    assert logits_of(model, input_ids=ids, decoder_input_ids=ids).isfinite().all()
    assert model.generate(ids, max_new_tokens=30, min_new_tokens=30).shape[1] == 31


def test_rejects_sequences_longer_than_learned_positions(make_model):
    model = make_model(position_embedding_type="learned", max_position_embeddings=8)
    ids = torch.randint(3, 60, (1, 9))
    with pytest.raises(ValueError, match="9 tokens is longer than the 8 learned positions"):
        model(input_ids=ids, decoder_input_ids=ids[:, :3])
    with pytest.raises(ValueError, match="9 tokens is longer than the 8 learned positions"):
        model.generate(ids[:, :3], max_new_tokens=20, min_new_tokens=20)


def test_padding_does_not_count_as_learned_position(make_model):
    model = make_model(position_embedding_type="learned", max_position_embeddings=8)
    ids, target = torch.randint(3, 60, (1, 5)), torch.randint(3, 60, (1, 4))
    padded = functional.pad(ids, (6, 0))
    mask = functional.pad(torch.ones_like(ids), (6, 0))
    actual = logits_of(model, input_ids=padded, attention_mask=mask, decoder_input_ids=target)
    torch.testing.assert_close(actual, logits_of(model, input_ids=ids, decoder_input_ids=target), atol=1e-5, rtol=0)


@pytest.mark.parametrize("side", ["input_ids", "decoder_input_ids"])
@pytest.mark.parametrize("bad", [60, -3])
def test_rejects_ids_outside_vocabulary(make_model, batch, side, bad):
    ids = batch[side].clone()
    ids[1, 2] = bad
    with pytest.raises(ValueError, match=rf"{side} contains the id {bad}, outside the vocabulary of 60 tokens"):
        make_model()(**(batch | {side: ids}))


def test_rejects_empty_sources(make_model, batch):
    mask = batch["attention_mask"].clone()
    mask[1] = 0
    with pytest.raises(ValueError, match="Source 1 of the batch is empty"):
        make_model()(**(batch | {"attention_mask": mask}))
    with pytest.raises(ValueError, match="length 0"):
        make_model()(input_ids=torch.zeros(2, 0, dtype=torch.long), decoder_input_ids=batch["decoder_input_ids"][:2])


def test_requires_exactly_one_of_ids_and_embeddings(make_model, batch):
    model = make_model()
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(decoder_input_ids=batch["decoder_input_ids"])
    with pytest.raises(ValueError, match="exactly one of decoder_input_ids and decoder_inputs_embeds"):
        model(input_ids=batch["input_ids"])
