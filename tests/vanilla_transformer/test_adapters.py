"""PEFT adapters, hooks and quantization: the chunked loss equals the loss of the logits, and decoding uses them."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from vanilla_transformer import loss_vanilla_transformer
from vanilla_transformer.loss_vanilla_transformer import is_unmodified_linear

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

TINY = {"encoder_layers": 1, "decoder_layers": 1}
ARCHITECTURES = [
    {"share_encoder_decoder_embeddings": shared, "tie_word_embeddings": tied, "lm_head_bias": not tied}
    for shared in (True, False)
    for tied in (True, False)
]
LINEAR = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2", "lm_head")
TARGETS = [*([name] for name in (*LINEAR, "embed_tokens")), ["q_proj", "lm_head"], ["embed_tokens", "lm_head"]]


def lora(targets, **options):
    return peft.LoraConfig("SEQ_2_SEQ_LM", r=4, target_modules=targets, **options)


def peft_configs():
    """Yield PEFT configs by name: LoRA on every module, and other methods on each module that they support."""
    for targets in [*TARGETS, "all-linear"]:
        yield f"LoRA {targets}", lora(targets)
        yield f"DoRA {targets}", lora(targets, use_dora=True)
    for target in TARGETS[:-1]:
        feedforward = [name for name in target if name == "fc2"]
        if target != ["embed_tokens"]:
            yield (
                f"IA3 {target}",
                peft.IA3Config("SEQ_2_SEQ_LM", target_modules=target, feedforward_modules=feedforward),
            )
    for names in (["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]):
        yield f"modules_to_save {names}", lora(["q_proj"], modules_to_save=names)
    yield "trainable_token_indices", lora(["q_proj"], trainable_token_indices=[3, 5])
    yield "trainable_token_indices by name", lora(["q_proj"], trainable_token_indices={"embed_tokens": [3, 5]})
    for name in ("encoder.embed_tokens", "decoder.embed_tokens"):
        config = peft.TrainableTokensConfig(task_type="SEQ_2_SEQ_LM", target_modules=[name], token_indices=[3, 5])
        yield f"trainable tokens {name}", config
    for config in (peft.PromptTuningConfig, peft.PrefixTuningConfig, peft.PromptEncoderConfig):
        yield config.__name__, config(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=3)
    others = {
        "VeraConfig": {}, "LoHaConfig": {}, "LoKrConfig": {}, "OFTConfig": {}, "BOFTConfig": {}, "HRAConfig": {},
        "LNTuningConfig": {}, "RandLoraConfig": {}, "MissConfig": {"r": 4}, "ShiraConfig": {"r": 2},
        "WaveFTConfig": {"n_frequency": 20}, "FourierFTConfig": {"n_frequency": 20}, "C3AConfig": {"block_size": 4},
        "RoadConfig": {"group_size": 4}, "AdaLoraConfig": {"total_step": 9},
    }  # fmt: skip
    for name, options in others.items():
        for target in (["q_proj"], ["lm_head"]):
            yield f"{name} {target}", getattr(peft, name)(target_modules=target, task_type="SEQ_2_SEQ_LM", **options)


@pytest.fixture
def make_adapted(make_model):
    """Factory of a model with an adapter of a PEFT config, whose weights are randomized to have an effect."""

    def make(architecture, config):
        model = peft.get_peft_model(make_model(**TINY, **architecture), config)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in (each for each in model.parameters() if each.requires_grad):
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        return model.eval()

    return make


def compute_gradients(model, batch, labels, **options):
    """Return the loss and the gradient of each trained parameter."""
    model.zero_grad()
    torch.manual_seed(0)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    loss = model(**inputs, labels=labels, **options).loss
    loss.backward()
    return {"loss": loss.detach()} | {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def assert_equal_losses(model, batch, name=""):
    """Compare with and without `smoothing=0.0`, and assert that adapted parameters have gradients."""
    labels = batch["decoder_input_ids"].clone()
    labels[1, 4:] = -100
    expected, actual = compute_gradients(model, batch, labels), compute_gradients(model, batch, labels, smoothing=0.0)
    assert any(gradient.any() for each, gradient in expected.items() if each != "loss"), name
    for key in expected:
        torch.testing.assert_close(
            actual[key], expected[key], rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{name}, {key}: {text}"
        )


@pytest.mark.parametrize(
    "architecture", [ARCHITECTURES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in ARCHITECTURES[1:])]
)
def test_loss_equals_loss_of_logits_for_all_peft_methods(make_adapted, batch, architecture):
    """Gradients are equal, too, and greedy decoding selects the best tokens of the adapted model."""
    for name, config in peft_configs():
        model = make_adapted(architecture, config)
        assert_equal_losses(model, batch, name)
        inputs = {each: batch[each] for each in ("input_ids", "attention_mask")}
        ids = model.generate(**inputs, num_beams=1, max_new_tokens=4, min_new_tokens=4)
        assert ids.shape == (3, 5), name
        if not isinstance(config, peft.PromptLearningConfig):
            with torch.no_grad():
                logits = model(**inputs, decoder_input_ids=ids[:, :-1]).logits
            logits[..., model.config.eos_token_id] = -torch.inf
            assert torch.equal(logits.argmax(-1), ids[:, 1:]), name


def test_trained_source_rows_do_not_change_target_embedding(make_adapted):
    """With two vocabularies, an id is a different token in the target vocabulary."""
    config = lora(["q_proj"], trainable_token_indices=[3, 5])
    model = make_adapted({"share_encoder_decoder_embeddings": False}, config).base_model.model
    ids = torch.tensor([3, 5])
    embedded = [stack.embed_tokens(ids) for stack in (model.get_encoder(), model.get_decoder())]
    assert not embedded[0].isclose(embedded[1]).any()
    assert type(model.get_decoder().embed_tokens) is nn.Embedding


def add_forward_hook(head):
    head.register_forward_hook(lambda module, inputs, output: output * 2)


def add_pre_hook(head):
    head.register_forward_pre_hook(lambda module, inputs: inputs[0] * 2)


def add_backward_hook(head):
    head.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 3,))


def replace_forward(head):
    """Replace `forward`, as Accelerate does for a module on a different device."""
    head.forward = lambda states, forward=head.forward: forward(states) * 2


def parametrize(head):
    nn.utils.parametrizations.weight_norm(head)


def prune_half(head):
    prune.l1_unstructured(head, "weight", 0.5)


CHANGES = (add_forward_hook, add_pre_hook, add_backward_hook, replace_forward, parametrize, prune_half)


@pytest.mark.parametrize("change", CHANGES)
def test_modified_lm_head_is_called(make_model, batch, change):
    model = make_model(tie_word_embeddings=False, lm_head_bias=True)
    assert is_unmodified_linear(model.lm_head)
    change(model.lm_head)
    assert not is_unmodified_linear(model.lm_head)
    assert_equal_losses(model, batch)


def test_quantized_lm_head_is_called(make_model, batch):
    torchao = pytest.importorskip("torchao.quantization")
    model = make_model(d_model=64, tie_word_embeddings=False)
    torchao.quantize_(model.lm_head, torchao.Int8WeightOnlyConfig(version=2))
    assert "Int8" in type(model.lm_head.weight).__name__
    labels = batch["decoder_input_ids"]
    losses = [model(**batch, labels=labels, **options).loss for options in ({}, {"smoothing": 0.0})]
    torch.testing.assert_close(*losses)


def test_adapters_on_other_layers_keep_chunked_loss(make_adapted, batch, monkeypatch):
    """With LoRA on all linear layers except for the LM head, as in training, no logits are kept."""
    model = make_adapted({}, lora("all-linear"))
    assert is_unmodified_linear(model.base_model.model.lm_head)
    monkeypatch.setattr(loss_vanilla_transformer, "CPU_CHUNK_SIZE", 60)
    assert_equal_losses(model, batch)


def test_smoothed_loss_with_adapter(make_adapted, batch):
    model, labels = make_adapted({}, lora(["lm_head"])), batch["decoder_input_ids"].clone()
    labels[0, 3:] = -100
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    logits = model(**inputs, labels=labels).logits
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    torch.testing.assert_close(model(**inputs, labels=labels, smoothing=0.1).loss, expected)


@pytest.mark.parametrize("shared", [True, False])
def test_merged_adapter_is_saved_with_lm_head(make_model, tmp_path, shared):
    sizes = {} if shared else {"decoder_vocab_size": 17}
    model = make_model(**TINY, share_encoder_decoder_embeddings=shared, tie_word_embeddings=True, **sizes)
    config = lora(["q_proj", "v_proj"], init_lora_weights=False)
    merged = peft.get_peft_model(model, config).merge_and_unload().eval()
    merged.save_pretrained(tmp_path)
    loaded = type(merged).from_pretrained(tmp_path)
    batch = {"input_ids": torch.tensor([[3, 4, 5]]), "labels": torch.tensor([[6, 7]])}
    assert float(loaded(**batch).loss.detach()) == pytest.approx(float(merged(**batch).loss.detach()), rel=1e-6)
