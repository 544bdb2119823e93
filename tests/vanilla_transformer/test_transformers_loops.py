"""Calls that `beam_search` continues in the loops of transformers return the same ids as `generate()`."""

from itertools import product

import pytest
import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    GenerationMixin,
    LogitsProcessor,
    StoppingCriteria,
)
from transformers.generation import EosTokenCriteria, MaxLengthCriteria
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import ModelOutput

from vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    generation_vanilla_transformer,
    modeling_vanilla_transformer,
)
from vanilla_transformer.generation_vanilla_transformer import CACHE_NAME, beam_search, find_unsupported

CLASSES = (
    *("VanillaTransformerForConditionalGeneration", "VanillaTransformerModel", "Decoder", "DecoderLayer"),
    *("MultiHeadAttention", "PositionWiseFeedForward", "LayerNorm", "Linear", "Embedding", "ReLU"),
)


@pytest.fixture
def loops(monkeypatch):
    """The generation modes of the calls that ignored `beam_search`."""
    modes = []
    prepare = generation_vanilla_transformer.prepare_custom_generate_kwargs

    def record(model, arguments):
        result = prepare(model, arguments)
        if "custom_generate" not in result:
            config = generation_vanilla_transformer.resolve_generation_config(model, arguments)
            modes.append(config.get_generation_mode(arguments.get("assistant_model")).value)
        return result

    monkeypatch.setattr(generation_vanilla_transformer, "prepare_custom_generate_kwargs", record)
    return modes


@pytest.fixture
def assert_equal_ids(source, loops):
    """Return a function that compares the ids of both decoders, greedily and with beams."""

    def compare(model, uses_loops: bool = True, beams=(1, 3), **options) -> None:
        for num_beams in beams:
            loops.clear()
            arguments = source | {"max_new_tokens": 8, "num_beams": num_beams} | options
            torch.manual_seed(0)
            expected = model.generate(**arguments)
            assert not loops
            torch.manual_seed(0)
            assert torch.equal(model.generate(**arguments, custom_generate=beam_search), expected)
            assert len(loops) == uses_loops

    return compare


@pytest.fixture
def model(make_model):
    model = make_model(1, vocab_size=30, tie_word_embeddings=False)
    model.generation_config.pad_token_id = 2  # the value with which generate() fills finished hypotheses
    return model


def modules_of(model) -> dict[str, nn.Module]:
    """Return a module of each class, from the last layer of the decoder."""
    modules = (model, model.model, *model.get_decoder().modules())
    return {type(each).__name__: each for each in modules if type(each).__name__ in CLASSES} | {"head": model.lm_head}


def change(output):
    """Return a different output of a module."""
    if isinstance(output, ModelOutput):
        for name in ("logits", "last_hidden_state"):
            if name in output:
                output[name] = output[name].flip(-1)
        return output
    if isinstance(output, tuple):
        return change(output[0]), *output[1:]
    return output.flip(-1)


def change_inputs(module, args, kwargs):
    """Change the input of a module: other token ids, or other hidden states."""
    name = next((each for each in ("decoder_input_ids", "input_ids") if kwargs.get(each) is not None), None)
    if name is not None:
        return args, kwargs | {name: (kwargs[name] + 1) % 30}
    first = args[0].flip(-1) if args[0].is_floating_point() else (args[0] + 1) % 30
    return (first, *args[1:]), kwargs


def add_hook(module):
    return module.register_forward_hook(lambda module, inputs, output: change(output))


def add_pre_hook(module):
    return module.register_forward_pre_hook(change_inputs, with_kwargs=True)


def replace_forward(module):
    forward = module.forward
    module.forward = lambda *args, **kwargs: change(forward(*args, **kwargs))


def replace_class(module):
    parent = type(module)
    forward = lambda self, *args, **kwargs: change(parent.forward(self, *args, **kwargs))  # noqa: E731
    module.__class__ = type("Changed", (parent,), {"forward": forward})


@pytest.mark.parametrize("modify", [add_hook, add_pre_hook, replace_forward, replace_class])
@pytest.mark.parametrize("name", [*CLASSES, "head"])
def test_modified_modules(model, source, assert_equal_ids, modify, name):
    before = model.generate(**source, max_new_tokens=8)
    modify(modules_of(model)[name])
    assert_equal_ids(model)
    assert not torch.equal(model.generate(**source, max_new_tokens=8), before)


def test_plain_calls_use_no_loop_of_transformers(model, source, assert_equal_ids):
    """After a call that records attention weights, its hooks remain in the model, but have no effect."""
    for options in ({}, {"no_repeat_ngram_size": 2, "min_length": 5}, {"use_cache": False}, {"output_scores": True}):
        assert_equal_ids(model, uses_loops=False, **options)
    model.set_attn_implementation("eager")
    model(**source, decoder_input_ids=torch.ones(5, 3, dtype=torch.long), output_attentions=True)
    assert model.get_decoder().layers[0].self_attn._forward_hooks
    assert_equal_ids(model, uses_loops=False)


def attend_twice(module, query, key, value, attention_mask, scaling=None, **kwargs):
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=2 * scaling, **kwargs)


def test_registered_attention_function(model, assert_equal_ids, monkeypatch):
    monkeypatch.setattr(AttentionInterface, "_global_mapping", dict(AttentionInterface._global_mapping))
    monkeypatch.setattr(AttentionMaskInterface, "_global_mapping", dict(AttentionMaskInterface._global_mapping))
    AttentionInterface.register("twice", attend_twice)
    AttentionMaskInterface.register("twice", sdpa_mask)
    model.set_attn_implementation("twice")
    assert_equal_ids(model)
    model.set_attn_implementation("sdpa")
    assert_equal_ids(model, uses_loops=False)
    for name in ("sdpa", "eager"):
        model.set_attn_implementation(name)
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, name, attend_twice)
        assert_equal_ids(model)


def test_edited_attention_function(model, source, assert_equal_ids, monkeypatch):
    """With "eager", `beam_search` calls `scaled_dot_product_attention`, which users may edit."""
    model.set_attn_implementation("eager")
    before = model.generate(**source, max_new_tokens=8)
    eager = modeling_vanilla_transformer.scaled_dot_product_attention
    edited = lambda module, query, *args, **kwargs: eager(module, 5 * query, *args, **kwargs)  # noqa: E731
    monkeypatch.setattr(modeling_vanilla_transformer, "scaled_dot_product_attention", edited)
    assert_equal_ids(model, uses_loops=False)
    assert not torch.equal(model.generate(**source, max_new_tokens=8), before)


def test_flex_attention(model):
    """On a CPU, `generate()` does not always compile it, so the test only checks which loop decodes."""
    model.set_attn_implementation("flex_attention")
    assert find_unsupported((model,), model.generation_config, {}) == "attn_implementation='flex_attention'"


def test_subclasses(model, assert_equal_ids):
    class WithForward(VanillaTransformerForConditionalGeneration):
        def forward(self, *args, **kwargs):
            return change(super().forward(*args, **kwargs))

    class WithInputs(VanillaTransformerForConditionalGeneration):
        def prepare_inputs_for_generation(self, *args, **kwargs):
            inputs = super().prepare_inputs_for_generation(*args, **kwargs)
            return inputs | {"decoder_input_ids": (inputs["decoder_input_ids"] + 1) % 30}

    class WithoutChange(VanillaTransformerForConditionalGeneration):
        pass

    for kind in (WithForward, WithInputs, WithoutChange):
        other = kind(model.config).eval()
        other.load_state_dict(model.state_dict())
        other.generation_config = model.generation_config
        assert_equal_ids(other, uses_loops=kind is not WithoutChange)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(model, assert_equal_ids, dtype):
    with torch.autocast("cpu", dtype=dtype):
        assert_equal_ids(model)


def test_training_mode(make_model, assert_equal_ids):
    """Dropout uses the same random numbers."""
    assert_equal_ids(make_model(vocab_size=30, dropout=0.3).train(), beams=(1,))


@pytest.mark.filterwarnings("ignore")
def test_peft(model, assert_equal_ids):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig("SEQ_2_SEQ_LM", r=4, target_modules=["q_proj", "fc1", "lm_head"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, lora)
    assert_equal_ids(adapted.eval())
    merged = adapted.merge_and_unload()
    assert_equal_ids(merged, uses_loops=False)
    for kind in (peft.PromptTuningConfig, peft.PrefixTuningConfig):
        tuned = peft.get_peft_model(merged, kind(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=3))
        for parameter in tuned.prompt_encoder.parameters():
            nn.init.normal_(parameter, std=3.0)
        assert_equal_ids(tuned.eval())


@pytest.mark.filterwarnings("ignore")
def test_prefix_tuning_generates_what_forward_predicts(model, source):
    peft = pytest.importorskip("peft")
    base = model.generate(**source, max_new_tokens=6, min_new_tokens=6)
    tuned = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=3)).eval()
    for parameter in tuned.prompt_encoder.parameters():
        nn.init.normal_(parameter, std=3.0)
    ids = base[:, :1]
    with torch.no_grad():
        for _ in range(6):
            logits = tuned(**source, decoder_input_ids=ids, use_cache=False).logits[:, -1]
            logits[:, model.generation_config.eos_token_id] = -torch.inf
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    options = {"max_new_tokens": 6, "min_new_tokens": 6}
    for search in ({}, {"custom_generate": beam_search}):
        assert torch.equal(tuned.generate(**source, **options, **search), ids)
    assert not torch.equal(ids, base)


def test_quantized_weights(make_model, assert_equal_ids):
    """The weights are tensors of another class, which the layers of the model apply."""
    torchao = pytest.importorskip("torchao.quantization")
    model = make_model(1, vocab_size=30, d_model=64, tie_word_embeddings=False)
    model.generation_config.pad_token_id = 2
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig(version=2))
    assert "Int8" in type(model.lm_head.weight).__name__
    assert_equal_ids(model, uses_loops=False)


def test_4d_mask(model, source):
    """`generate()` cannot extend such a mask, and neither can `beam_search`."""
    options = {"decoder_input_ids": torch.tensor([[1, 7, 9]] * 5), "decoder_attention_mask": torch.ones(5, 1, 3, 3)}
    for search in ({}, {"custom_generate": beam_search}):
        with pytest.raises(RuntimeError, match="same number of dimensions"):
            model.generate(**source, **options, **search, max_new_tokens=5)


def test_filled_cache_continues_the_generation(model, source, loops):
    """The cache is extended in place. Without a mask, transformers would decode the cached tokens again."""
    complete = model.generate(**source, max_new_tokens=9, min_new_tokens=9)
    prefix = complete[:, :4]
    for options, name in product(({}, {"custom_generate": beam_search}), ("cache", "past_key_values")):
        with torch.no_grad():
            cache = model(**source, decoder_input_ids=prefix[:, :3], use_cache=True)[CACHE_NAME]
        inputs = source | {"decoder_input_ids": prefix, name: cache}
        assert torch.equal(model.generate(**inputs, max_new_tokens=6, min_new_tokens=6, **options), complete)
        assert cache.get_seq_length() == complete.shape[1] - 1
    assert loops == ["greedy_search"] * 2


@pytest.mark.parametrize("filled", ["cache", "past_key_values"])
def test_filled_cache_counts_if_both_names_are_given(model, source, filled):
    ids = model.generate(**source, max_new_tokens=5, min_new_tokens=5)
    with torch.no_grad():
        expected = model(**source, decoder_input_ids=ids).logits[:, -1]
        for other in (None, DynamicCache()):
            cache = model(**source, decoder_input_ids=ids[:, :-1], use_cache=True)[CACHE_NAME]
            caches = {"cache": other, "past_key_values": other, filled: cache}
            got = model(**source, decoder_input_ids=ids[:, -1:], **caches).logits[:, -1]
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_empty_cache_is_filled(model, source, loops):
    for name in ("cache", "past_key_values"):
        cache = DynamicCache()
        ids = model.generate(**source, **{name: cache}, max_new_tokens=5, custom_generate=beam_search)
        assert torch.equal(ids, model.generate(**source, max_new_tokens=5))
        assert cache.get_seq_length() == ids.shape[1] - 1
    assert loops == ["greedy_search"] * 2


def test_offloaded_weights(make_model, source, loops):
    accelerate = pytest.importorskip("accelerate")
    model = make_model(1, vocab_size=30)
    expected = model.generate(**source, max_new_tokens=5)
    offloaded = accelerate.cpu_offload(model, execution_device="cpu")
    assert torch.equal(offloaded.generate(**source, max_new_tokens=5, custom_generate=beam_search), expected)
    assert loops == ["greedy_search"]


@pytest.mark.parametrize("sizes", [(30, 40), (40, 30)])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_transition_scores_with_two_vocabularies(make_model, source, sizes, num_beams):
    size, target_size = sizes
    fields = {"share_encoder_decoder_embeddings": False, "vocab_size": size, "decoder_vocab_size": target_size}
    model = make_model(**fields)
    options = {"num_beams": num_beams, "max_new_tokens": 6, "return_dict_in_generate": True, "output_scores": True}
    outputs = model.generate(**source, **options, length_penalty=0.0 if num_beams > 1 else None)
    indices = outputs.get("beam_indices")
    scores = model.compute_transition_scores(
        outputs.sequences, outputs.scores, indices, normalize_logits=num_beams == 1
    )
    if num_beams > 1:
        torch.testing.assert_close(scores.sum(1), outputs.sequences_scores)
    else:
        log_probs = torch.stack(outputs.scores, 1).log_softmax(-1)
        torch.testing.assert_close(scores, log_probs.gather(-1, outputs.sequences[:, 1:, None])[..., 0])
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens=2 requires one vocabulary"):
        model.generate(**{name: each[:1] for name, each in source.items()}, prompt_lookup_num_tokens=2)
    assistant = make_model(**fields | {"decoder_vocab_size": target_size + 1})
    with pytest.raises(ValueError, match="another target vocabulary"):
        model.generate(**{name: each[:1] for name, each in source.items()}, assistant_model=assistant)


def test_assisted_decoding(model, make_model, source, assert_equal_ids, loops):
    first = {name: tensor[:1] for name, tensor in source.items()}
    assistant = make_model(vocab_size=30, encoder_layers=1, decoder_layers=1)
    greedy = model.generate(**first, max_new_tokens=8)
    for options in ({"assistant_model": assistant}, {"assistant_model": model}, {"prompt_lookup_num_tokens": 2}):
        assert_equal_ids(model, beams=(1,), **first, **options)
        assert loops == ["assisted_generation"]
        assert torch.equal(model.generate(**first, max_new_tokens=8, **options), greedy)


def test_sampling_and_row_dependent_processors(model, source, assert_equal_ids):
    class Rows(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores.roll(1, 0)

    class StopsByRow(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return (input_ids.shape[1] + torch.arange(len(input_ids))) % 4 == 0

    assert_equal_ids(model, do_sample=True, temperature=0.7)
    assert_equal_ids(model, encoder_no_repeat_ngram_size=1)
    prompt = torch.tensor([[0, 1, 7]] * 5)
    assert_equal_ids(
        model, repetition_penalty=1.5, decoder_input_ids=prompt, decoder_attention_mask=(prompt != 0).long()
    )
    before = model.generate(**source, max_new_tokens=8)
    for options in (
        {"logits_processor": [Rows()]},
        {"logits_processor": [Rows()], "no_repeat_ngram_size": 2},
        {"stopping_criteria": [StopsByRow()]},
        {"stopping_criteria": [MaxLengthCriteria(6)]},
        {"stopping_criteria": [EosTokenCriteria(torch.arange(5, 30))]},
        {"prefix_allowed_tokens_fn": lambda sentence, ids: [2, 4 + sentence, 10, 11 + len(ids), *range(20, 28)]},
    ):
        assert_equal_ids(model, **options)
        assert not torch.equal(model.generate(**source, max_new_tokens=8, **options), before)


def test_rejects_own_arguments_that_loops_of_transformers_lack(model, make_model, source):
    """The message contains both names."""
    options = {"max_new_tokens": 4, "custom_generate": beam_search, "num_beams": 2}
    with pytest.raises(ValueError, match="alpha with output_scores"):
        model.generate(**source, **options, alpha=0.6, return_dict_in_generate=True, output_scores=True)
    with pytest.raises(ValueError, match="extra_tokens with max_time"):
        model.generate(**source, **options, extra_tokens=3, max_time=9.0)
    with pytest.raises(ValueError, match="alpha with do_sample"):
        model.generate(**source, **options, alpha=0.6, do_sample=True)
    add_hook(model.lm_head)
    with pytest.raises(ValueError, match="extra_tokens with a modified Linear"):
        model.generate(**source, **options, extra_tokens=5)
    with pytest.raises(ValueError, match="an ensemble with a modified Linear"):
        make_model(vocab_size=30).generate(**source, **options, ensemble=[model])


def test_rejects_unsupported_calls_that_bypass_the_model(model, source):
    """`generate()` of the model ignores `beam_search` in such calls. That of `GenerationMixin` cannot."""
    options = {"max_new_tokens": 4, "custom_generate": beam_search}
    with pytest.raises(ValueError, match="beam_search does not support do_sample"):
        GenerationMixin.generate(model, **source, **options, do_sample=True)
    for criterion in (MaxLengthCriteria(3), EosTokenCriteria(5)):
        with pytest.raises(ValueError, match="beam_search does not support stopping_criteria"):
            GenerationMixin.generate(model, **source, **options, stopping_criteria=[criterion])
    GenerationMixin.generate(model, **source, **options, stopping_criteria=[MaxLengthCriteria(5)])
