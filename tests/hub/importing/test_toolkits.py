"""Import of fairseq and OpenNMT-py checkpoints: equal outputs, errors, and no execution of code."""

import argparse
import itertools
import os

import pytest
import torch

from hub.importing.checkpoint_file import read_checkpoint
from hub.importing.conversion import convert
from hub.importing.layout_detection import find_layout
from hub.importing.layout_settings import resolve_settings
from hub.importing.toolkits import fairseq, opennmt
from hub.importing.toolkits.subwords import read_toolkit_tokenizers
from vanilla_transformer.generation_vanilla_transformer import beam_search


@pytest.fixture(scope="module")
def toolkits(load_tests_module):
    return load_tests_module("importing/toolkit_references.py")


def import_file(path):
    state, metadata = read_checkpoint(path)
    layout, _ = find_layout(state)
    return convert(state, layout, resolve_settings([], metadata, layout), None, {}), state, metadata


def batch(sizes, first):
    """Return source ids, padded with 1 on the right or left, and target ids."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(4, sizes[0], (4, 9), generator=generator)
    target = torch.randint(4, sizes[1], (4, 7), generator=generator)
    source[1, 7:], source[2, :3], target[:, 0] = 1, 1, first
    return source, target


def special_ids(config) -> tuple[int | None, ...]:
    return config.pad_token_id, config.bos_token_id, config.eos_token_id, config.decoder_start_token_id


NAMES = (
    *("fairseq base", "fairseq iwslt_de_en", "fairseq wmt_en_de", "fairseq vaswani big", "fairseq t2t"),
    *("fairseq embedding LayerNorm", "fairseq learned", "fairseq output dimension"),
    *("fairseq input and output dimensions",),
)
PAD = 1
OPENNMT = ("opennmt 2", "opennmt 2 joint", "opennmt 3", "opennmt 3 biases", "opennmt 3 halves")


@torch.no_grad()
def decode_greedily(logits_of, start: int, steps: int = 8, never_first: int = PAD) -> torch.Tensor:
    """Decode greedily without the pad token. Shape: (4, steps + 1)."""
    ids = torch.full((4, 1), start)
    for i in range(steps):
        logits = logits_of(ids)[:, -1].clone()
        logits[:, [PAD, never_first] if i == 0 else [PAD]] = -torch.inf
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    return ids


def assert_same_until_eos(actual: torch.Tensor, expected: torch.Tensor, eos: int = 2) -> None:
    for actual_ids, expected_ids in zip(actual.tolist(), expected.tolist(), strict=True):
        length = expected_ids.index(eos, 1) + 1 if eos in expected_ids[1:] else len(expected_ids)
        assert actual_ids[:length] == expected_ids[:length]


@pytest.mark.parametrize(("d", "ff"), [(16, 24), (64, 160)])
@pytest.mark.parametrize("name", NAMES)
def test_fairseq(toolkits, tmp_path, name, d, ff):
    reference = toolkits.make(name, d=d, ff=ff)
    imported, state, _ = import_file(toolkits.save(reference.content(), tmp_path / "model.pt"))
    source, target = batch((imported.model.config.vocab_size, imported.model.config.decoder_vocab_size), 2)
    mask = (source != 1).long()
    with torch.no_grad():
        expected = reference(source, None, target)[0]
        actual = imported.model(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
    assert (actual - expected).abs().max() <= 1e-4
    generated = imported.model.generate(
        source, attention_mask=mask, num_beams=1, max_new_tokens=8, suppress_tokens=[PAD]
    )
    assert_same_until_eos(generated, decode_greedily(lambda ids: reference(source, None, ids)[0], 2, never_first=2))
    assert set(imported.used) | set(imported.dropped) == set(state)
    config = imported.model.config
    assert special_ids(config) == (1, 0, 2, 2)
    assert (config.decoder_attention_heads, config.dropout) == (reference.namespace.decoder_attention_heads, 0.3)
    assert config.share_encoder_decoder_embeddings == reference.namespace.share_all_embeddings
    assert not imported.user_notes


@pytest.mark.parametrize(("d", "ff"), [(16, 24), (64, 160)])
@pytest.mark.parametrize("name", OPENNMT)
def test_opennmt(toolkits, tmp_path, name, d, ff):
    reference = toolkits.make(name, d=d, ff=ff)
    imported, _, metadata = import_file(toolkits.save(reference.content(), tmp_path / "model.pt"))
    source, target = batch((31, 37), 2)
    source[2, :3] = source[0, :3]  # OpenNMT-py pads only on the right
    mask = (source != 1).long()
    shift = len(metadata["vocabularies"]["source"]) - reference.sizes[0]  # by the two inserted special tokens
    assert shift == (2 if name == "opennmt 2" else 0)
    source_ids = torch.where(mask == 1, source + shift, 1)
    with torch.no_grad():
        expected = reference(source, mask, target)
        actual = imported.model(input_ids=source_ids, attention_mask=mask, decoder_input_ids=target).logits
    assert (actual - expected).abs().max() <= 1e-4
    generated = imported.model.generate(
        source_ids, attention_mask=mask, num_beams=1, max_new_tokens=8, suppress_tokens=[PAD]
    )
    assert_same_until_eos(generated, decode_greedily(lambda ids: reference(source, mask, ids), start=2), eos=3)
    config = imported.model.config
    assert special_ids(config) == (1, 2, 3, 2)
    generation = imported.model.generation_config
    limits = (5, 0.0, 100) if reference.version == 2 else (5, 1.0, 250)  # defaults of onmt_translate
    assert (generation.num_beams, generation.length_penalty, generation.max_new_tokens) == limits
    assert config.layer_norm_eps == reference.eps
    assert config.tie_word_embeddings == reference.options["share_decoder_embeddings"]


@pytest.mark.parametrize("name", OPENNMT)
def test_rejects_missing_generator_weight(toolkits, name):
    content = toolkits.make(name).content()
    content["generator"] = {key: value for key, value in content["generator"].items() if key.endswith("bias")}
    assert "the file lacks generator.weight" in error_message(content)


@pytest.mark.parametrize("how", ["cfg", "omegaconf"])
def test_reads_fairseq_configurations(toolkits, tmp_path, how):
    reference = toolkits.make("fairseq t2t", heads=2)
    from_args, _, metadata = import_file(toolkits.save(reference.content(), tmp_path / "args.pt"))
    from_config, _, config_metadata = import_file(toolkits.save(reference.content(how), tmp_path / "cfg.pt"))
    assert config_metadata == metadata
    assert from_config.shapes == from_args.shapes
    assert config_metadata["encoder_attention_heads"] == 2


def test_reads_files_before_pytorch_1_6(toolkits, tmp_path):
    reference = toolkits.make("fairseq base")
    with toolkits.importable():
        path = tmp_path / "model.pt"
        torch.save(reference.content("omegaconf"), path, _use_new_zipfile_serialization=False)
    assert import_file(path)[2]["encoder_attention_heads"] == 4


def rename_to_early_version(state):
    """Convert a state dict to the early fairseq format: fused projections, numbered norms, tied LM head."""
    renamed = {}
    for key, value in state.items():
        if ".q_proj." in key:
            parts = [state[key.replace("q_proj", f"{name}_proj")] for name in "qkv"]
            renamed[key.replace("q_proj.", "in_proj_")] = torch.cat(parts)
        elif "k_proj" not in key and "v_proj" not in key and "output_projection" not in key:
            layer = [("self_attn", 0), ("encoder_attn", 1), ("final", 2 if key.startswith("decoder") else 1)]
            for name, number in layer:
                key = key.replace(f".{name}_layer_norm.", f".layer_norms.{number}.")
            renamed[key] = value
    return renamed


def test_imports_early_fairseq_names(toolkits, tmp_path):
    reference = toolkits.make("fairseq iwslt_de_en")
    content = reference.content()
    new, _, _ = import_file(toolkits.save(content, tmp_path / "new.pt"))
    content["model"] = rename_to_early_version(content["model"])
    old, _, _ = import_file(toolkits.save(content, tmp_path / "old.pt"))
    for (name, expected), actual in zip(new.model.state_dict().items(), old.model.state_dict().values(), strict=True):
        assert torch.equal(expected, actual), name


def test_fairseq_before_version_3_has_no_final_layer_norm(toolkits, tmp_path):
    content = toolkits.make("fairseq t2t").content()
    for side in ("encoder", "decoder"):
        content["model"][f"{side}.version"] = torch.tensor([1.0])
        for part in ("weight", "bias"):
            del content["model"][f"{side}.layer_norm.{part}"]
    imported, _, _ = import_file(toolkits.save(content, tmp_path / "model.pt"))
    assert not imported.model.config.final_norm


WEIGHTS = ("weight", "bias")
FAIRSEQ_FEATURES = [
    *[{"arch": name} for name in ("lightconv_iwslt_de_en", "levenshtein_transformer", "transformer_lm_big", "fconv")],
    *[{"arch": name} for name in ("multilingual_transformer", "nonautoregressive_transformer", "cmlm_transformer")],
    *[{"arch": name} for name in ("transformer_monotonic_iwslt_de_en", "insertion_transformer", "lstm", "bart_large")],
    *[{"simul_type": "waitk"}, {"waitk_lagging": 3}, {"max_relative_positions": 16}, {"adaptive_input": True}],
    *[{"adaptive_softmax_cutoff": "10,20"}, {"no_token_positional_embeddings": True}, {"cross_self_attention": True}],
    *[{"no_cross_attention": True}, {"encoder_layers_to_keep": "0,1"}, {"quant_noise_pq": 0.1}, {"char_inputs": True}],
    *[{"activation_fn": "swish"}, {"encoder_attention_heads": "4"}, {"decoder_normalize_before": True}],
    *[{"decoder_embed_dim": 32}, {"decoder_learned_pos": True, "encoder_learned_pos": False}, {"alibi": True}],
    *[{"share_all_embeddings": True}, {"encoder_attention_heads": 3}, {"layernorm_embedding": True}],
]
OPENNMT_FEATURES = [
    *[{"encoder_type": name} for name in ("brnn", "cnn", "ggnn", "mean")],
    *[{"decoder_type": name} for name in ("rnn", "cnn", "transformer_lm")],
    *[{"max_relative_positions": number} for number in (20, -1, -2)],
    *[{"self_attn_type": "average"}, {"copy_attn": True}, {"generator_function": "sparsemax"}, {"layer_norm": "rms"}],
    *[{"position_encoding": False}, {"parallel_residual": True}, {"num_kv": 2}, {"num_experts": 4}],
    *[{"sliding_window": 64}, {"n_src_feats": 1}, {"lora_layers": ["linear_keys"]}, {"quant_layers": ["w_1"]}],
    *[{"pos_ffn_activation_fn": name} for name in ("silu", "gated-gelu")],
    *[{"model_task": "lm"}, {"model_type": "audio"}, {"position_encoding_type": "Other"}, {"heads": 3}],
    *[{"relative_positions_buckets": 32}, {"shared_layer_norm": True}, {"share_embeddings": True}, {"heads": "4"}],
]


def mutations(content, part, options, features):
    """Yield contents with one error each, and names of which the message must contain one."""
    state = content["model"]
    keys = [key for key in state if key.endswith(WEIGHTS)]
    for key in keys:
        yield content | {"model": {k: v for k, v in state.items() if k != key}}, [key]
    for key in keys[::3]:
        yield content | {"model": state | {f"{key}.extra": torch.zeros(2)}}, [f"{key}.extra"]
        if key != "encoder.embed_tokens.weight":  # no other tensor depends on its number of rows
            longer = torch.cat([state[key], state[key][:1]])
            yield content | {"model": state | {key: longer}}, [key.rsplit(".", 1)[0]]
        yield content | {"model": state | {key: state[key][..., None].expand(*state[key].shape, 2)}}, [key]
    for feature in features:
        changed = argparse.Namespace(**(options | feature))
        yield (
            content | {part: changed},
            [*feature, *map(str, feature.values()), "not divisible by", "cannot share one embedding"],
        )


def error_message(content) -> str:
    """Return the error message of importing a content, or an empty string."""
    try:
        state, metadata = fairseq.parse_checkpoint(content) or opennmt.parse_checkpoint(content)
        layout, _ = find_layout(state)
        convert(state, layout, resolve_settings([], metadata, layout), None, {})
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "part", "features"),
    [("fairseq base", "args", FAIRSEQ_FEATURES), ("opennmt 3 biases", "opt", OPENNMT_FEATURES)],
)
def test_error_contains_name(toolkits, name, part, features):
    reference = toolkits.make(name, layers=2)
    settings = reference.arguments if part == "args" else reference.options
    mutated = list(mutations(reference.content(), part, settings, features))
    assert len(mutated) >= 100
    for content, names in mutated:
        message = error_message(content)
        assert message, f"no error for {names}"
        assert "\n" not in message
        assert any(name in message for name in names), (names, message)


class Payload:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("name", ["fairseq base", "opennmt 2"])
def test_does_not_execute_payloads(toolkits, tmp_path, name):
    """System functions are rejected. Names of the toolkits are not imported."""
    victim, content = tmp_path / "victim", toolkits.make(name).content()
    for payload in (Payload(os.mkdir, str(victim)), Payload(open, str(victim), "w"), Payload(eval, "1")):
        with pytest.raises(ValueError, match="is rejected, because reading it would execute code"):
            import_file(toolkits.save(content | {"more": payload}, tmp_path / "model.pt"))
        part = "args" if "args" in content else "opt"
        inner = argparse.Namespace(**(vars(content[part]) | {"heads": payload, "encoder_attention_heads": payload}))
        with pytest.raises(ValueError, match="is rejected, because reading it would execute code"):
            import_file(toolkits.save(content | {part: inner}, tmp_path / "model.pt"))
    assert not victim.exists()

    function = toolkits.PICKLED_CLASSES["AnyNode"]  # pickled by its name, as a function of omegaconf
    with toolkits.importable():
        torch.save(content | {"more": Payload(function, str(victim))}, tmp_path / "model.pt")
    function.__new__ = lambda *arguments: victim.mkdir()
    try:
        with toolkits.importable():
            read_checkpoint(tmp_path / "model.pt")
    finally:
        del function.__new__
    assert not victim.exists()


def test_plain_state_dict_requires_num_heads(toolkits, tmp_path):
    torch.save(toolkits.make("fairseq base").state_dict(), tmp_path / "model.pt")
    with pytest.raises(ValueError, match="Set --num-heads"):
        import_file(tmp_path / "model.pt")


def test_rejects_positions_beyond_the_table(toolkits, tmp_path):
    imported, _, _ = import_file(toolkits.save(toolkits.make("fairseq base").content(), tmp_path / "model.pt"))
    ids = torch.full((1, 41), 5)
    with pytest.raises(ValueError, match="41"):
        imported.model(input_ids=ids, decoder_input_ids=ids)


def test_covers_all_cases(toolkits):
    assert set(toolkits.CASES) == set(itertools.chain(NAMES, OPENNMT))


def test_imports_fairseq_generation_config(toolkits, tmp_path):
    """5 beams with early stopping, no empty translations and no padding, also with `beam_search`."""
    reference = toolkits.make("fairseq base")
    reference.decoder.output_projection.weight.data[2] *= 3  # makes EOS and padding likely
    reference.decoder.output_projection.weight.data[1] *= 3
    imported, _, _ = import_file(toolkits.save(reference.content(), tmp_path / "model.pt"))
    source, _ = batch((31, 37), 2)
    mask = (source != PAD).long()
    options = {"attention_mask": mask, "num_return_sequences": 5, "max_new_tokens": 12}
    actual = imported.model.generate(source, **options)
    assert torch.equal(imported.model.generate(source, **options, custom_generate=beam_search), actual)
    assert (actual[:, 1] != 2).all()
    for row in actual.tolist():
        assert PAD not in row[: row.index(2, 1) if 2 in row[1:] else None]
    unrestricted = {"suppress_tokens": None, "min_new_tokens": None, "early_stopping": None}
    assert not torch.equal(imported.model.generate(source, **options, **unrestricted)[:, :4], actual[:, :4])


@pytest.mark.parametrize(("token", "start"), [("<s>", 2), ("</s>", 3), (None, 2)])
def test_imports_opennmt_start_token(toolkits, tmp_path, token, start):
    content = toolkits.make("opennmt 3").content()
    content["vocab"]["decoder_start_token"] = token
    imported, _, metadata = import_file(toolkits.save(content, tmp_path / "model.pt"))
    tokenizers = read_toolkit_tokenizers("opennmt", tmp_path / "model.pt", metadata, None, [])
    for _ in range(2):  # before and after the tokenizers set their ids
        for settings_ in (imported.model.config, imported.model.generation_config):
            assert (settings_.decoder_start_token_id, settings_.bos_token_id) == (start, 2)
        tokenizers.apply_to(imported)


def test_rejects_other_opennmt_start_tokens(toolkits):
    content = toolkits.make("opennmt 3").content()
    content["vocab"]["decoder_start_token"] = "<blank>"
    assert "decoder_start_token=<blank>, which is not supported" in error_message(content)
